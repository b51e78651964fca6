"""Measure all that fits this machine, the most valuable cases first: `bench --suite`.

Each case is another `bench` command in a process of its own, so that a crash or a case that takes
too long costs only itself.  Its result is appended to `results.jsonl` as soon as it is there.  At
the end, `report.md` has all results in tables, and `roofline.png` shows them beside the limits of
the hardware.
"""

import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mesh_transformer.cli.benchmark import processor
from mesh_transformer.mesh.accelerators import GIB
from mesh_transformer.performance import pictures, report
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

REPOSITORY = Path(__file__).parents[2]
RESULTS, REPORT, PICTURE = "results.jsonl", "report.md", "roofline.png"
REPORT_SECONDS = 10.0  # reserved for the report
FIND_SECONDS = 120
LEAST_SECONDS = 15.0  # no case is begun with less time
# Prints what `Machine` describes.  The devices are free again when this process has ended.
FIND = """
import json, os, jax
devices = jax.local_devices()
stats = devices[0].memory_stats() or {}
host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
size = stats.get("bytes_limit", 0) * len(devices) or host
print(json.dumps([devices[0].platform, devices[0].device_kind, len(devices), size]))
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of this host.

    Attributes:
      platform: of JAX, such as "gpu".
      count: number of devices; 1 for a CPU.
      memory: bytes of all devices together.
    """

    platform: str
    device: str
    count: int
    memory: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      name: identifies it in the results.
      words: flags of `bench`.
      gib: memory that it needs, of all devices together.
      seconds: after this time, it is ended.
      whole: whether the model is split over all devices, rather than on one.
    """

    name: str
    words: str
    gib: float
    seconds: float = 240.0
    whole: bool = True

    def arguments(self, machine: Machine, profile: str) -> list[str]:
        """Return the arguments of its `bench` command.

        Args:
          profile: folder for a profiler trace, if the case can have one.
        """
        words = shlex.split(self.words)
        mesh = ["--mp", str(machine.count)] if self.whole else []
        fixed = {"--verify", "--checkpoint", "--loader"} & set(words)
        return [*words, *([] if fixed else [*mesh, "--profile", profile])]


_TRAIN, _DECODE = "--steps 5 --warmup 1", "--decode --prompt 128 --tokens 64"
_6B, _8B = "--model gpt-j-6b --accumulate 1", "--model llama3-8b --accumulate 1"
_PAGES = f"{_DECODE} --pages"
_LORA = "--set lora_rank=16"
# Decoding takes the weights in bf16, and one of the matrices of all layers in f32 when they are
# made.  Training in full takes 16 bytes per parameter: f32 weights, gradients and moments.
ACCELERATOR = (
    Case("verify", "--verify --minutes 3", 1, 300, whole=False),
    Case("6B, decode, 1 row", f"{_6B} {_DECODE} --batch 1 --seq 2048", 24),
    Case("6B, LoRA", f"{_6B} {_LORA} {_TRAIN} --batch 1 --seq 2048", 24),
    Case("6B, decode, 64 rows", f"{_6B} {_DECODE} --batch 64 --seq 1024", 56),
    Case("6B, train", f"{_6B} {_TRAIN} --batch 1 --seq 2048", 112),
    Case("6B, decode, 1 row, int8", f"{_6B} {_DECODE} --batch 1 --set weight_bits=8", 24),
    Case("105M, train", f"--model 105M {_TRAIN} --dtype bfloat16", 6, 120, whole=False),
    Case("8B, decode, 1 row", f"{_8B} {_DECODE} --batch 1 --seq 2048", 28),
    Case("8B, LoRA", f"{_8B} {_LORA} {_TRAIN} --batch 1 --seq 2048", 30),
    Case("6B, decode, 8 rows", f"{_6B} {_DECODE} --batch 8 --seq 2048", 36),
    Case("6B, LoRA, 8,192 tokens", f"{_6B} {_LORA} {_TRAIN} --batch 1 --seq 8192", 40),
    Case("6B, LoRA, plain attention", f"{_6B} {_LORA} {_TRAIN} --seq 2048 --set attention=xla", 30),
    Case("6B, prefill", f"{_6B} --decode --batch 4 --seq 2048 --prompt 1536 --tokens 32", 30),
    Case("1.4B, train", f"--model pythia-1.4b {_TRAIN} --batch 4", 30),
    Case("8B, decode, 64 rows", f"{_8B} {_DECODE} --batch 64 --seq 1024", 40),
    Case("6B, decode, 8 rows, pages", f"{_6B} {_PAGES} --batch 8 --seq 2048", 36),
    Case("8B, decode, 64 rows, pages", f"{_8B} {_PAGES} --batch 64 --seq 1024", 40),
    Case("checkpoint", "--model 105M --checkpoint --rounds 3", 6, 120, whole=False),
    Case("loader", "--loader --rounds 3", 1, 120, whole=False),
)
_KERNEL = "--set paged_attention=pallas"
TPU = (
    Case("6B, decode, 8 rows, kernel", f"{_6B} {_PAGES} --batch 8 --seq 2048 {_KERNEL}", 36),
    Case("8B, decode, 64 rows, kernel", f"{_8B} {_PAGES} --batch 64 --seq 1024 {_KERNEL}", 40),
)
CPU = (
    Case("verify", "--verify --minutes 3", 1, 300, whole=False),
    Case("105M, decode, 1 row", f"--model 105M {_DECODE} --batch 1", 2, 120, whole=False),
    Case("105M, train", "--model 105M --steps 3 --warmup 1", 5, whole=False),
    Case("13M, train", f"--model 13M {_TRAIN}", 2, 120, whole=False),
    Case("SmolLM2, decode, 1 row", _DECODE + " --model smollm2-135m --batch 1 --seq 512", 3),
    Case("SmolLM2, decode, 8 rows", _DECODE + " --model smollm2-135m --batch 8 --seq 512", 3),
    Case("13M, train on 2 x 4", f"--model 13M --dp 2 --mp 4 {_TRAIN}", 3, 120, whole=False),
    Case("105M, decode, int8", f"--model 105M {_DECODE} --batch 1 --set weight_bits=8", 2),
    Case("105M, decode, 64 rows", f"--model 105M {_DECODE} --batch 64", 4, whole=False),
    Case("105M, decode, 8 rows, pages", f"--model 105M {_PAGES} --batch 8", 3),
    Case("105M, prefill", "--model 105M --decode --batch 4 --prompt 896 --tokens 32", 3),
    Case("checkpoint", "--model 13M --checkpoint --rounds 3", 2, 120, whole=False),
    Case("loader", "--loader --rounds 3 --records 20000", 1, 120, whole=False),
)


def machine() -> Machine:
    """Find out, in another process, what devices there are."""
    command = [sys.executable, "-c", FIND]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=FIND_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(f"--suite: JAX finds no devices in {FIND_SECONDS} s") from None
    if process.returncode:
        reason = process.stderr.strip() or f"exit status {process.returncode}"
        raise InputError(f"--suite: JAX finds no devices: {reason.splitlines()[-1]}")
    platform, device, count, memory = json.loads(process.stdout.splitlines()[-1])
    if platform == "cpu":
        return Machine(platform, processor(), 1, memory)
    return Machine(platform, device, count, memory)


def results(path: Path) -> list[dict[str, Any]]:
    """Read the results that a suite has written, without a line that it did not finish."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def append(path: Path, record: dict[str, Any]) -> None:
    """Append a result, after the last line that is complete."""
    records = [*results(path), record]
    files.write_text(str(path), "".join(json.dumps(own) + "\n" for own in records))


def measured(case: Case, own: Machine, seconds: float) -> dict[str, Any]:
    """Run a case for at most so many seconds, and return its record."""
    with tempfile.TemporaryDirectory() as profile:
        return _measured(case, case.arguments(own, profile), profile, seconds)


def _measured(case: Case, arguments: list[str], profile: str, seconds: float) -> dict[str, Any]:
    began, status = time.monotonic(), "done"
    command = [sys.executable, "-m", "mesh_transformer", "bench", *arguments, "--json"]
    if setpriv := shutil.which("setpriv"):  # on Linux: no case outlives a suite that was killed
        command = [setpriv, "--pdeathsig", "KILL", *command]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        status, output, errors = "out of time", "", ""
    finally:  # also when this process is interrupted
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    shown = ["bench", *(word for word in arguments if word not in ("--profile", profile))]
    record: dict[str, Any] = {"case": case.name, "command": shlex.join(shown)}
    lines = output.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        record["result"] = json.loads(lines[-1])
    if status == "done" and (process.returncode or "result" not in record):
        status, record["error"] = "failed", (errors.strip() or "no output").splitlines()[-1]
    return record | {"status": status, "seconds": round(time.monotonic() - began, 1)}


def run(folder: Path, minutes: float, *, resume: bool) -> int:
    """Run the suite; return 1 if a case has failed, else 0.

    Args:
      minutes: time after which no case runs any more; those that are left are named.
      resume: whether to measure only what an earlier suite has not, or where it failed.
    """
    end = time.monotonic() + 60 * minutes - REPORT_SECONDS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the present case ends, too
    path = folder / RESULTS
    if path.exists() and not resume:
        raise InputError(f"{path} has the results of a suite; add --resume or change --folder")
    folder.mkdir(parents=True, exist_ok=True)
    own = machine()
    known = {record["case"] for record in results(path) if record["status"] != "failed"}
    table = {"cpu": CPU, "tpu": ACCELERATOR + TPU}.get(own.platform, ACCELERATOR)
    fitting = [case for case in table if case.gib * GIB <= own.memory]
    left = [case for case in fitting if case.name not in known]
    print(f"{own.count} x {own.device}, {own.memory / GIB:.0f} GiB: {len(left)} cases to measure")
    with tqdm(left, unit="case") as bar:
        for case in bar:
            seconds = min(case.seconds, end - time.monotonic())
            if seconds < LEAST_SECONDS:
                break
            bar.set_description(case.name)
            record = measured(case, own, seconds)
            if record["status"] == "out of time" and seconds < case.seconds:
                break  # --resume measures it
            append(path, record)
    done = list({record["case"]: record for record in results(path)}.values())
    names = {record["case"] for record in done}
    if late := [case.name for case in fitting if case.name not in names]:
        print(f"not measured for lack of time; continue with --resume: {'; '.join(late)}")
    if large := [case.name for case in table if case not in fitting]:
        print(f"not measured for lack of memory: {'; '.join(large)}")
    write_report(folder, own, done)
    print(f"{len(done)} results in {folder / REPORT}")
    return int(any(record["status"] != "done" for record in done))


def write_report(folder: Path, own: Machine, done: list[dict[str, Any]]) -> None:
    """Write the tables and the picture of some results."""
    parts = [f"# {own.count} x {own.device}", *_tables(done), *_longest(done), anchors()]
    files.write_text(str(folder / REPORT), "\n\n".join(parts) + "\n")
    points = [point for record in done if (point := _point(record))]
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture, as matplotlib is not installed")
    elif points:
        picture(folder / PICTURE, points)


def _tables(done: list[dict[str, Any]]) -> Iterable[str]:
    """Return Markdown of the results: a table per kind of case, and the cases without a result."""
    columns = {"train": report.TRAINING, "decode": report.DECODING}
    for mode, own in columns.items():
        records = [record for record in done if record.get("result", {}).get("mode") == mode]
        if records:
            rows = [f"| {r['case']} {report.row(r['result'], own)}" for r in records]
            title, rule = report.header(records[0]["result"], own).splitlines()
            yield "\n".join([f"## {mode}", "", f"| case {title}", f"| --- {rule}", *rows])
    for record in done:
        if checks := record.get("result", {}).get("checks"):
            head = ["| check | difference | tolerance | | |", "| --- | --- | --- | --- | --- |"]
            rows = [f"| {' | '.join(_check(check))} |" for check in checks]
            yield "\n".join([f"## {record['case']}", "", *head, *rows])
    others = [r for r in done if r.get("result", {}).get("mode") not in columns]
    if others:
        lines = [f"- {r['case']}: {r['status']}, {r['seconds']} s {_detail(r)}" for r in others]
        yield "\n".join(["## other cases", "", *lines])


def _check(check: dict[str, Any]) -> list[str]:
    """Return the cells of a check of `bench --verify`; a difference that is not finite is None."""
    value = "" if check["difference"] is None else f"{check['difference']:.2g}"
    return [check["name"], value, f"{check['tolerance']:.2g}", check["status"], check["note"] or ""]


def _detail(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"({record['error']})"
    return f"(`{record['command']}`)"


def _longest(done: list[dict[str, Any]]) -> Iterable[str]:
    """Return Markdown of the longest operations of each case that was profiled."""
    for record in done:
        if profile := record.get("result", {}).get("profile"):
            lines = [
                f"| {one['share']:.1%} | {one['seconds'] * 1e3:.2f} | {one['runs']} "
                f"| `{one['name'][:80]}` |"
                for one in profile
            ]
            head = ["| share of time | ms | runs | operation |", "| --- | --- | --- | --- |"]
            yield "\n".join([f"## {record['case']}: longest operations", "", *head, *lines])


def anchors() -> str:
    """Return the table of what others have published, from docs/benchmarks.md."""
    text = (REPOSITORY / "docs/benchmarks.md").read_text(encoding="utf-8")
    return "## Anchors" + text.partition("## Anchors")[2].partition("\n## ")[0].rstrip()


@dataclasses.dataclass(frozen=True)
class Point:
    """A result in the roofline picture: FLOPs per byte, and FLOP/s per device."""

    name: str
    intensity: float
    flops: float
    peak: float
    bandwidth: float


def _point(record: dict[str, Any]) -> Point | None:
    result = record.get("result", {})
    limits, per_token = result.get("limits"), result.get("flops_per_token")
    if not limits:
        return None
    devices = result["dp"] * result["mp"]
    if result["mode"] == "train":
        moved = result["bytes_moved"] * devices
        work, rate = per_token * result["tokens_per_step"], result["speed"]["tokens_per_second"]
    elif result["mode"] == "decode":  # a forward pass has a third of the FLOPs
        per_token /= 3
        moved = (result["weight_bytes"] + result["cache_bytes"]) * devices
        work, rate = per_token * result["rows"], result["tokens_per_second"]
    else:
        return None
    peak = result.get("peak_flops") or limits["flops"]
    per_device = (per_token * rate, peak, limits["bandwidth"])
    return Point(record["case"], work / moved, *(value / devices for value in per_device))


def picture(path: Path, points: list[Point]) -> None:
    """Draw results beside the limits of the hardware (Williams et al. 2009)."""
    figure, axes = pictures.pyplot().subplots(figsize=(9, 6))
    ends = [min(p.intensity for p in points) / 3, max(p.intensity for p in points) * 3]
    peak, bandwidth = max(p.peak for p in points), max(p.bandwidth for p in points)
    knee = peak / bandwidth
    roof = sorted({*ends, knee})
    axes.loglog(roof, [min(peak, bandwidth * x) / 1e12 for x in roof], "k-", label="limit")
    for point in points:
        axes.loglog(point.intensity, point.flops / 1e12, "o")
        axes.annotate(point.name, (point.intensity, point.flops / 1e12), fontsize=7)
    axes.set_xlabel("FLOPs per byte of memory traffic")
    axes.set_ylabel("TFLOP/s per device")
    axes.legend()
    figure.tight_layout()
    pictures.save(figure, str(path))
