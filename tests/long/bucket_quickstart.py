"""Runs the quickstart twice, on disk and with every path in a bucket, and compares the results.

`python -m tests.long.bucket_quickstart` needs a checkout as working folder, like the quickstart.
The metrics, the records and the sampled text must be the same, bit for bit.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts import quickstart
from tests.support.fake_gcs import FakeGcs, gcs_server
from tests.support.small_run import assert_same_rows, parse_rows

ROOT = "gs://bucket/quickstart"


def run(folder: Path, environment: dict[str, str], gcs: FakeGcs | None) -> list[str]:
    """Run the quickstart in a folder, or in the bucket if `gcs` is given.

    Returns:
      The output of each command.
    """
    outputs: list[str] = []

    def moved(value: Any) -> Any:
        """Return a path below the folder as one in the bucket; leave all else as it is."""
        text = str(value)
        is_input = text.endswith((".json", ".png")) or gcs is None
        return text if is_input else text.replace(str(folder), ROOT)

    def call(*words: object) -> None:
        program, *arguments = map(str, words)
        is_fetch = program.endswith(".py")
        command = [program] if is_fetch else ["-m", "mesh_transformer"]
        arguments = arguments if is_fetch else [moved(word) for word in arguments]
        ended = subprocess.run(
            [sys.executable, *command, *arguments],
            env=os.environ | ({} if is_fetch else environment),  # it downloads from elsewhere
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        outputs.append(ended.stdout.replace(ROOT, str(folder)))
        if gcs is not None:
            _mirror(folder, gcs)

    def write_config(path: Path, **changes: Any) -> Path:
        changes["val_set"] = {name: moved(place) for name, place in changes["val_set"].items()}
        return original_write(path, **changes | {"train_set": moved(changes["train_set"])})

    original_call, original_write = quickstart.call, quickstart.write_config
    new_folder, argv = quickstart.new_folder, sys.argv
    try:
        quickstart.call, quickstart.write_config = call, write_config
        quickstart.new_folder = lambda: folder
        sys.argv = ["quickstart.py"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert quickstart.main() == 0
    finally:
        quickstart.call, quickstart.write_config = original_call, original_write
        quickstart.new_folder, sys.argv = new_folder, argv
    return outputs


def _mirror(folder: Path, gcs: FakeGcs) -> None:
    """Put the fetched text into the bucket, and copy the metrics from there."""
    prefix = ROOT.removeprefix("gs://bucket/")
    for path in (folder / "text").rglob("*"):
        if path.is_file():
            name = f"{prefix}/{path.relative_to(folder)}"
            gcs._put(("bucket", name), path.read_bytes())
    for (_, name), stored in gcs.objects.items():
        if name.endswith("model/metrics.jsonl"):
            (folder / "model").mkdir(exist_ok=True)
            (folder / "model" / "metrics.jsonl").write_bytes(stored.content)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        local, remote, keys = (Path(name) / part for part in ("local", "remote", "keys"))
        for folder in (local, remote, keys):
            folder.mkdir()
        expected = run(local, {}, None)
        with gcs_server(keys) as (gcs, environment):
            actual = run(remote, environment, gcs)
            rows = [
                parse_rows((folder / "model" / "metrics.jsonl").read_text())
                for folder in (local, remote)
            ]
            records = [
                path for path in (local / "records").iterdir() if "manifest" not in path.name
            ]
            for path in records:
                stored = gcs.objects["bucket", f"quickstart/records/{path.name}"]
                assert stored.content == path.read_bytes(), path.name
            inside = sorted(path.name for path in remote.iterdir())
        assert_same_rows(*rows)
        sample = actual[-1]
        assert sample == expected[-1]
    print(json.dumps(inside))
    print(f"{len(rows[0])} rows and {len(records)} files of records are equal; sampled:\n{sample}")


if __name__ == "__main__":
    main()
