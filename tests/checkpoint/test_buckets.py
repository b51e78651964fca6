"""Every checkpoint format is read from a bucket and written to one, as in a local folder."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from mesh_transformer.checkpoint.original import write
from mesh_transformer.config import Config
from tests.checkpoint.test_original import random_state
from tests.support.fake_gcs import Answer, gcs_server

ROOT = Path(__file__).parents[2]
CONFIG = Config(
    layers=2, d_model=16, n_heads=2, n_vocab=32, seq=8, pe_rotary_dims=4, cores_per_replica=2
)
# In a process of its own, as TensorFlow and tensorstore read the environment only once.
PROGRAM = """
    import json, sys
    from mesh_transformer.checkpoint import hf_files
    from mesh_transformer.checkpoint.conversion import convert
    from mesh_transformer.config import Config
    from mesh_transformer.util import InputError

    for number, (source, source_kind, target, target_kind) in enumerate(json.load(sys.stdin)):
        config = Config.from_dict(json.loads(sys.argv[1])) if source_kind == "original" else None
        try:
            convert(source, source_kind, target, target_kind, config=config)
        except InputError as error:
            print(json.dumps([number, str(error)]))
"""


def run(folder, environment, conversions):
    """Make these conversions in `folder`; return the error of each, None where it has none."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(CONFIG.as_dict())],
        cwd=folder,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        input=json.dumps(conversions),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    errors = dict(json.loads(line) for line in process.stdout.splitlines() if line[0] == "[")
    return [errors.get(number) for number in range(len(conversions))]


def local_bytes(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def bucket_bytes(gcs, folder):
    bucket, _, prefix = folder.removeprefix("gs://").partition("/")
    return {
        name.removeprefix(f"{prefix}/"): stored.content
        for (where, name), stored in gcs.objects.items()
        if where == bucket and name.startswith(f"{prefix}/")
    }


@pytest.mark.slow
def test_conversions_in_a_bucket_equal_local_ones(tmp_path):
    write(str(tmp_path / "start"), random_state(CONFIG), CONFIG)
    chain = [
        ("start", "original", "native", "native"),
        ("native", "native", "original", "original"),
        ("original", "original", "hf", "hf"),
        ("hf", "hf", "slim", "native"),
        ("slim", "native", "again", "original"),
    ]
    uri = "gs://bucket/models/{}"
    remote = [
        (source if source == "start" else uri.format(source), kind, uri.format(target), target_kind)
        for source, kind, target, target_kind in chain
    ]
    back = [
        (uri.format("original"), "original", "original_back", "original"),
        (uri.format("hf"), "hf", "hf_back", "hf"),
        (uri.format("slim"), "native", "slim_back", "original"),
    ]
    (tmp_path / "gcs").mkdir()
    with gcs_server(tmp_path / "gcs") as (gcs, environment):
        assert run(tmp_path, environment, [*chain, *remote, *back]) == [None] * 13
        for name in ("original", "hf", "again"):
            local = local_bytes(tmp_path / name)
            assert bucket_bytes(gcs, uri.format(name)) == local
            assert any(file.endswith(("npz", "safetensors")) for file in local)
        for name, expected in (("original", "start"), ("hf", "hf"), ("slim", "again")):
            assert local_bytes(tmp_path / f"{name}_back") == local_bytes(tmp_path / expected)

        # The same weights in a file of torch.
        torch = pytest.importorskip("torch")
        load_file = pytest.importorskip("safetensors.torch").load_file
        for path in (tmp_path / "hf").iterdir():
            if path.suffix != ".safetensors":
                gcs._put(("bucket", f"models/bin/{path.name}"), path.read_bytes())
        torch.save(load_file(tmp_path / "hf/model.safetensors"), tmp_path / "model.bin")
        content = (tmp_path / "model.bin").read_bytes()
        gcs._put(("bucket", "models/bin/pytorch_model.bin"), content)
        assert run(tmp_path, environment, [(uri.format("bin"), "hf", "bin", "hf")]) == [None]
        assert local_bytes(tmp_path / "bin") == local_bytes(tmp_path / "hf")

        before = bucket_bytes(gcs, "gs://bucket/models")
        errors = run(
            tmp_path,
            environment,
            [
                ("start", "original", uri.format("hf"), "hf"),  # is there already
                ("start", "original", uri.format("original/step_7"), "original"),
                (uri.format("none"), "hf", "none", "hf"),
                (uri.format("hf"), "original", "none", "original"),
            ],
        )
        for error, part in zip(
            errors,
            (
                "gs://bucket/models/hf already exists",
                "gs://bucket/models/original/step_7 already exists",
                "gs://bucket/models/none/config.json cannot be read (No such file",
                "gs://bucket/models/hf is in hf format, not original; use --from hf",
            ),
            strict=True,
        ):
            assert error is not None
            assert error.startswith(part), error
        assert bucket_bytes(gcs, "gs://bucket/models") == before
        assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_refused_upload_leaves_nothing(tmp_path):
    write(str(tmp_path / "start"), random_state(CONFIG), CONFIG)
    (tmp_path / "gcs").mkdir()
    with gcs_server(tmp_path / "gcs") as (gcs, environment):
        generator = np.random.default_rng(0)
        allowed, put = int(generator.integers(5, 30)), gcs._put
        written = []

        def refuse(key, content):
            written.append(key)
            if len(written) > allowed:
                raise Answer(403, "no access")
            return put(key, content)

        gcs._put = refuse
        [error] = run(
            tmp_path,
            environment,
            [("start", "original", "gs://bucket/models/copy", "original")],
        )
    assert error is not None
    assert error.startswith("gs://bucket/models/copy/")
    assert "cannot be written: " in error
    assert len(written) > allowed
    assert not gcs.objects
