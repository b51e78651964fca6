"""Splits and tokenises text in a bucket, into the bucket, on Ray while its requests fail.

`python -m tests.long.corpus_faults 10` runs each command 10 times.  Requests fail at random, up to
four in a row, and workers and the command are killed.  The files must have the bytes of those that
are created without Ray from local files.

With `--testbench http://127.0.0.1:9000`, the bucket is one of Google's storage-testbench, which
`python testbench_run.py localhost 9000 10` starts in a virtual environment of its own, and it is
the testbench that makes requests fail.
"""

import argparse
import os
import random
import secrets
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.long.bucket_faults import MOST_FAILING, PASSING
from tests.long.corpus_on_ray import (
    COMMANDS,
    LAYOUTS,
    PART,
    command,
    run_round,
    start,
    write_large_files,
)
from tests.long.killed_tokenizing import contents, write_text
from tests.support.fake_gcs import HOSTS, Answer, FakeGcs, gcs_server
from tests.support.ray_cluster import add_node, ray_cluster

SHARE = 0.05  # of the requests that begin a fault
BUCKET = f"bucket-{secrets.token_hex(4)}"  # a testbench keeps those of earlier runs
# What the testbench can do to a request; the last two only to a download, as it would answer other
# requests without headers that Google always sends.
INSTRUCTIONS = (
    *("return-503", "return-429", "return-reset-connection"),
    *("return-broken-stream", "return-broken-stream-after-4K"),
)
METHODS = ("get", "list", "insert", "delete", "rewrite", "compose", "copy")


class Faults:
    """Draws the faults of requests, at most `MOST_FAILING` in a row.

    Attributes:
      made: the number of faults of each kind.
    """

    def __init__(self, kinds: tuple[Any, ...], generator: random.Random):
        self.made: Counter[str] = Counter()
        self._kinds, self._generator = kinds, generator
        self._left, self._kind = 0, kinds[0]

    def __call__(self) -> Any:
        if not self._left and self._generator.random() < SHARE:
            self._left = self._generator.randint(1, MOST_FAILING)
            self._kind = self._generator.choice(self._kinds)
        if not self._left:
            return None
        self._left -= 1
        self.made[str(self._kind)] += 1
        return self._kind


class Testbench(FakeGcs):
    """Passes requests on to a testbench, and tells it which ones to make fail."""

    def __init__(self, url: str):
        super().__init__()
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self._http.post("/storage/v1/b", json={"name": BUCKET}).raise_for_status()

    def answer(self, method: str, url: str, headers: Any, content: bytes) -> Answer:
        with self.lock:
            self.requests += 1
            instruction = self.fault()
        names = [name for name in headers if name.lower() not in ("connection", "content-length")]
        sent = {name: headers[name] for name in names if name.lower() != "transfer-encoding"}
        if instruction is not None:
            methods = METHODS[:1] if "broken-stream" in instruction else METHODS
            plan = {f"storage.objects.{name}": [instruction] for name in methods}
            created = self._http.post("/retry_test", json={"instructions": plan})
            sent["x-retry-test-id"] = created.raise_for_status().json()["id"]
        try:
            got = self._http.request(method, url, headers=sent, content=content)
        except httpx.TransportError:
            lost = Answer(200)
            lost.fault = "lost"
            return lost
        # TensorFlow knows headers only by these letters.
        kept = ("Location", "Range", "Content-Range", "Content-Type", "X-Goog-Generation")
        answer = Answer(
            got.status_code, b"", **{k: got.headers[k] for k in kept if k in got.headers}
        )
        answer.body = got.content
        if "Location" in answer.headers and headers["Host"].partition(":")[0] in HOSTS:
            answer.headers["Location"] = answer.headers["Location"].replace("http:", "https:", 1)
        return answer


def stored(environment: dict[str, str], prefix: str) -> dict[str, bytes]:
    """Return the files below a prefix of the bucket, without faults."""
    with httpx.Client(base_url=environment["STORAGE_EMULATOR_HOST"], trust_env=False) as http:
        listing = http.get(f"/storage/v1/b/{BUCKET}/o", params={"prefix": prefix}).json()
        names = [item["name"] for item in listing.get("items", [])]
        return {
            name.removeprefix(prefix): http.get(f"/{BUCKET}/{name}").content
            for name in names
            if not name.endswith("/")
        }


def run(folder: Path, rounds: int, gcs: FakeGcs, environment: dict[str, str], kinds: Any) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    generator = random.Random(seed)
    faults = Faults(kinds, generator)
    write_text(folder / "in")
    write_large_files(folder / "in", 1 << 20)
    expected = {}
    for kind in COMMANDS:
        assert start(command(kind, str(folder), PART, kind), folder / "log").wait() == 0
        files = contents(folder / kind)
        expected[kind] = {f"/{name}": content for name, content in files.items()}

    def is_equal(name: str) -> bool:
        gcs.fault = lambda: None
        return stored(environment, name) == expected[name.partition("_")[0]]

    os.environ.update(environment)
    with httpx.Client(base_url=environment["STORAGE_EMULATOR_HOST"], trust_env=False) as http:
        for path in sorted((folder / "in").iterdir()):
            query = {"uploadType": "media", "name": f"in/{path.name}"}
            address = f"/upload/storage/v1/b/{BUCKET}/o"
            http.post(address, params=query, content=path.read_bytes()).raise_for_status()
    for number in range(rounds):
        cpus = LAYOUTS[number % len(LAYOUTS)]
        with ray_cluster(cpus[0]) as cluster:
            others = [add_node(cluster, count) for count in cpus[1:]]
            for kind in COMMANDS:
                log = folder / f"{kind}_{number}.log"
                gcs.fault = faults
                run_round(kind, f"gs://{BUCKET}", number, cluster, others, generator, log, is_equal)
    print(f"{rounds} rounds equal; {gcs.requests} requests, faults: {dict(faults.made)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--testbench", metavar="URL")
    args = parser.parse_args()
    bucket = Testbench(args.testbench) if args.testbench else None
    kinds = INSTRUCTIONS if args.testbench else PASSING
    with tempfile.TemporaryDirectory() as name, gcs_server(Path(name), bucket) as (gcs, variables):
        run(Path(name), args.rounds, gcs, variables, kinds)


if __name__ == "__main__":
    main()
