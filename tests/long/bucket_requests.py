"""Counts the requests and bytes of saves to a bucket, and of restores from it.

`python -m tests.long.bucket_requests 2 4` saves and restores one small model with 2 and with 4
hosts, and prints the counts of each.  `--set d_model=512`, for example, makes the model larger.
"""

import argparse
import collections
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mesh_transformer.config import Config
from tests.support.fake_gcs import Answer, FakeGcs, gcs_server
from tests.support.multihost import random_batches, started
from tests.support.small_run import VALUES

KINDS = ("list", "describe", "read", "write", "delete")


def kind_of(method: str, url: str) -> str:
    """Return the kind of a request, one of `KINDS`."""
    path, _, query = url.partition("?")
    if method == "DELETE":
        return "delete"
    if method in ("POST", "PUT"):
        return "write"
    if path.endswith(("/o", "/o/")):
        return "list"
    is_description = path.startswith("/storage/") and "alt=media" not in query
    return "describe" if is_description else "read"


@contextmanager
def counted(gcs: FakeGcs) -> Iterator[collections.Counter[str]]:
    """Count the requests by kind, and the bytes that are read and written."""
    counts: collections.Counter[str] = collections.Counter()
    answer = gcs.answer

    def counting(method: str, url: str, headers: Any, content: bytes) -> Answer:
        answered = answer(method, url, headers, content)
        kind = kind_of(method, url)
        counts[kind] += 1
        counts["bytes read"] += len(answered.body) if kind == "read" else 0
        counts["bytes written"] += len(content)
        return answered

    gcs.answer = counting
    try:
        yield counts
    finally:
        gcs.answer = answer


def measure(
    folder: Path, gcs: FakeGcs, environment: dict[str, str], hosts: int, values: dict[str, Any]
) -> None:
    """Print the counts of one save and one restore by `hosts` hosts of a model."""
    batches = random_batches(Config(**values))
    model = f"gs://bucket/model_{hosts}"
    save = [("init", []), ("save", [model, {}]), ("wait", [])]
    os.environ.update(environment)
    for what, calls in (("save", save), ("restore", [("restore", [model])])):
        with (
            counted(gcs) as counts,
            started(
                folder / f"{what}_{hosts}", values, hosts, batches, calls, environment=environment
            ) as processes,
        ):
            for process in processes:
                assert process.wait(300) == 0
        numbers = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
        total = sum(counts[kind] for kind in KINDS)
        moved = counts["bytes read" if what == "restore" else "bytes written"]
        print(f"{hosts} hosts, {what}: {total} requests ({numbers}), {moved:,} bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hosts", type=int, nargs="+")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    args = parser.parse_args()
    values = VALUES | {
        key: json.loads(value) for key, _, value in (text.partition("=") for text in args.changes)
    }
    with tempfile.TemporaryDirectory() as name, gcs_server(Path(name)) as (gcs, environment):
        for hosts in args.hosts:
            measure(Path(name), gcs, environment, hosts, values)


if __name__ == "__main__":
    main()
