"""Splits text and creates records on Ray clusters of this machine, while processes are killed.

`python -m tests.long.corpus_on_ray 30` runs 30 rounds.  Each round creates a set of records, and
splits the text, on a cluster with 1, 2 or 4 CPUs on one to three nodes.  At random moments, it
kills worker processes, a whole node that is not the command's, and the command itself, which is
then run again.  The files must have the bytes of those that are created without Ray.

`python -m tests.long.corpus_on_ray --rates 5` measures tokens per second: 5 runs each without Ray,
and with 1 and 2 CPUs on Ray, in turn.
"""

import contextlib
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.long.killed_tokenizing import WORDS, contents, write_text
from tests.support.ray_cluster import add_node, ray_cluster

ROOT = Path(__file__).resolve().parents[2]
# The commands with parts of other sizes; the arguments are this size and those of the command.
COMMAND = """
import sys
from mesh_transformer.cli import main
from mesh_transformer.data import split, text_parts
from mesh_transformer.util import run_script

text_parts.PART_BYTES = split.PART_BYTES = int(sys.argv.pop(1))
split.FRAME_BYTES = text_parts.PART_BYTES // 4
run_script(main.main)
"""
# The arguments of each command after its input, besides the output folder, which is last.
COMMANDS = {
    "records": ("set", "--seq", "256", "--output-dir"),
    "split": ("--validation", "0.2"),
}
LAYOUTS = ((1,), (2,), (1, 1), (4,), (2, 2), (1, 2, 1))  # CPUs of the nodes
PART = 1 << 17  # bytes; a large file has some dozens of parts
WORKERS = 5  # killed per round; new ones take some seconds to start
SECONDS = 900.0  # longer than a round takes on a busy machine


def write_large_files(folder: Path, size: int) -> None:
    """Write a text and JSON Lines of about `size` characters each."""
    generator = random.Random(size)
    texts, left = [], size
    while left > 0:
        texts.append(" ".join(generator.choices(WORDS, k=generator.randrange(1, 800))))
        left -= len(texts[-1])
    folder.mkdir(exist_ok=True)
    (folder / "large.txt").write_text("<|endoftext|>".join(texts), encoding="utf-8")
    lines = [json.dumps({"text": text}) for text in reversed(texts)]
    (folder / "large.jsonl").write_text("\n".join(lines), encoding="utf-8")


def command(kind: str, folder: str, part: int, name: str, *options: str) -> list[str]:
    arguments = [kind, f"{folder}/in", *COMMANDS[kind], f"{folder}/{name}"]
    return [sys.executable, "-c", COMMAND, str(part), *arguments, *options]


def start(arguments: list[str], log: Path) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with open(log, "ab") as file:
        # Records in a bucket keep their progress in the current folder.
        return subprocess.Popen(
            arguments, cwd=log.parent, stderr=file, stdout=file, env=environment
        )


def ray_processes(pattern: str) -> list[int]:
    """Return the ids of the descendants of this process whose command line has a pattern."""
    names, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(path.name)] = (path / "cmdline").read_bytes().decode(errors="replace")

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [pid for pid, name in names.items() if re.search(pattern, name) and is_ours(pid)]


def kill_at_random(
    cluster: Any, others: list[Any], process: Any, killed: list[str], generator: random.Random
) -> None:
    """Kill processes until the command ends, and add what was killed to `killed`."""
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(generator.uniform(0.2, 4.0))
            break
        choice = generator.random()
        if choice < 0.8 and killed.count("worker") < WORKERS:
            # Workers that compute a part are named after the function.
            if workers := ray_processes(r"^ray::finish"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(generator.choice(workers), signal.SIGKILL)
                    killed.append("worker")
        elif 0.8 <= choice < 0.9 and others:
            cluster.remove_node(others.pop(), allow_graceful=False)
            killed.append("node")
        elif choice >= 0.9 and "command" not in killed:
            process.kill()
            process.wait()
            killed.append("command")


def run_round(
    kind: str,
    folder: str,
    number: int,
    cluster: Any,
    others: list[Any],
    generator: random.Random,
    log: Path,
    is_equal: Callable[[str], bool],
) -> list[str]:
    """Run a command under kills, compare its files, and return what was killed.

    Args:
      kind: the command.
      folder: a local folder or one in a bucket; the text is in its folder `in`.
      log: the file for the output of the command.
      is_equal: whether the files in a folder with this name are right.
    """
    name, killed = f"{kind}_{number}", []
    deadline, status = time.monotonic() + SECONDS, None
    while status != 0:
        process = start(command(kind, folder, PART, name, "--ray", cluster.address), log)
        kill_at_random(cluster, others, process, killed, generator)
        status = process.wait()
        assert status in (0, -signal.SIGKILL), log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
    assert is_equal(name), name
    counts = ", ".join(f"{killed.count(kind)} {kind}s" for kind in sorted(set(killed)))
    print(f"round {number}, {kind}: killed {counts or 'nothing'}: equal bytes", flush=True)
    return killed


def kills(folder: Path, rounds: int) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    generator = random.Random(seed)
    write_text(folder / "in")
    write_large_files(folder / "in", 3 << 20)
    for kind in COMMANDS:
        assert start(command(kind, str(folder), PART, kind), folder / "log").wait() == 0
    killed = []

    def is_equal(name: str) -> bool:
        left = [*(folder / name).glob("*.partial")]
        return contents(folder / name) == contents(folder / name.partition("_")[0]) and not left

    for place, cpus in enumerate(LAYOUTS):
        with ray_cluster(cpus[0]) as cluster:
            print(f"nodes with {', '.join(map(str, cpus))} CPUs", flush=True)
            others: list[Any] = []
            for number in range(place, rounds, len(LAYOUTS)):
                others += [add_node(cluster, count) for count in cpus[1 + len(others) :]]
                for kind in COMMANDS:
                    log = folder / f"{kind}_{number}.log"
                    arguments = (kind, str(folder), number, cluster, others, generator, log)
                    killed += run_round(*arguments, is_equal)
    totals = {kind: killed.count(kind) for kind in sorted(set(killed))}
    print(f"{rounds} rounds equal to one process; killed: {totals}", flush=True)


def measured(folder: Path, *options: str) -> tuple[float, float]:
    """Create a set, and return the tokens per second of the first phase, and the CPU seconds."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = command("records", str(folder), 1 << 22, "set", "--new", *options)
    assert start(arguments, log).wait() == 0, log.read_text()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The last state of the bar has the time that this phase took.
    times = re.findall(r"tokenizing: 100%.*?\[(\d+):(\d+)<", log.read_text(errors="replace"))
    minutes, seconds = map(int, times[-1])
    manifest = json.loads((folder / "set" / "set.manifest.json").read_text("utf-8"))
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return manifest["tokens"] / (60 * minutes + seconds), own


def rates(folder: Path, repeats: int) -> None:
    write_large_files(folder / "in", 50 << 20)
    results: dict[str, list[float]] = {"without Ray": [], "1 CPU": [], "2 CPUs": []}
    with ray_cluster(1) as one:
        for _ in range(repeats):
            results["without Ray"].append(measured(folder)[0])
            results["1 CPU"].append(measured(folder, "--ray", one.address)[0])
            second = add_node(one, 1)
            results["2 CPUs"].append(measured(folder, "--ray", one.address)[0])
            one.remove_node(second)
    for name, values in results.items():
        print(f"{name}: {statistics.median(values):,.0f} tokens/s, of {sorted(map(int, values))}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        if sys.argv[1] == "--rates":
            rates(Path(place), int(sys.argv[2]))
        else:
            kills(Path(place), int(sys.argv[1]))
