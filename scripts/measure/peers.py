"""Compare with MaxText, EasyDeL, torch and llama.cpp on this machine's CPU, on the same shapes.

Each library runs from its published package, in an environment of its own under --folder, which is
installed if it is missing.  Only torch runs in this one.  They train a Llama and a GPT-J of 32M
and 34M parameters in float32, or decode greedily, in alternating processes.  A library that cannot
be installed, or fails, is named and left out.  The script prints a table in Markdown, and writes
all times to FOLDER/peers.json.  Its exit status is 1 if a library that has our weights computes
another loss or other tokens.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.cli.arguments import positive
from mesh_transformer.cli.benchmark import processor
from mesh_transformer.util import InputError, run_script

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "peers"
COMMON: dict[str, Any] = {"layers": 8, "d_model": 512, "n_heads": 8, "n_vocab": 8192, "seq": 512}
COMMON |= {"per_replica_batch": 2, "dtype": "float32", "remat": "none"}
COMMON["z_loss"] = 0.0  # the other libraries add no z-loss
LLAMA = COMMON | {"block": "llama", "key_heads": 4, "ff_size": 1408}
GPTJ = COMMON | {"pe_rotary_dims": 32}
PROMPT, NEW = 128, 96  # tokens
TOLERANCE = 1e-5  # of the first loss, relative: sums of float32 in another order
SECONDS = 1800  # time limit of a process
TIMES = ("wall", "cpu")


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
      name: its program is peers/with_<name>.py, and its packages are those of peers/<name>.txt.
      title: its name in the table.
      python: version of Python that its packages need.  None: it runs in this environment.
      alone: requirement to install without its dependencies, which its package does not declare.
      needs: packages that it needs in this environment.
      weights: form of our exported weights that it begins with.  None: it has its own.
    """

    name: str
    title: str
    python: str | None = None
    alone: str | None = None
    needs: tuple[str, ...] = ()
    weights: str | None = None


OURS = Peer("ours", "this library")
PEERS = {
    "torch": Peer("torch", "transformers", needs=("torch", "transformers"), weights="hf"),
    "maxtext": Peer("maxtext", "MaxText", "3.12", alone="maxtext==0.2.5"),
    "easydel": Peer("easydel", "EasyDeL", "3.11"),
    "llama_cpp": Peer("llama_cpp", "llama.cpp", "3.11", weights="gguf"),
}
# What is measured: {title: (job, config, peers)}.
WORK = {
    "Llama, train step": ("train", LLAMA, ("torch", "maxtext", "easydel")),
    "GPT-J, train step": ("train", GPTJ, ("easydel",)),
    f"Llama, {PROMPT} + {NEW} tokens": ("decode", LLAMA, ("llama_cpp",)),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--folder", type=Path, required=True, help="folder of the environments")
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=list(PEERS), help="libraries (default all)"
    )
    parser.add_argument("--rounds", type=positive, default=4, help="rounds (default 4)")
    parser.add_argument("--steps", type=positive, default=7, help="per process (default 7)")
    return parser.parse_args()


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1].strip()


def call(command: list[Any], **variables: str) -> str:
    """Run a command without this environment's packages; return what it prints.

    Raises:
      InputError: if it fails or takes too long, with the last line of its messages.
    """
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        result = subprocess.run(
            [*map(str, command)],
            env=inherited | variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{Path(command[0]).name} ran longer than {SECONDS} s") from None
    if result.returncode != 0:
        raise InputError(last_line(result.stderr)[:200])
    return result.stdout


def interpreter(peer: Peer, folder: Path) -> Path:
    """Return the Python that runs a peer's program, after installing its environment if missing.

    Raises:
      InputError: if it cannot be installed.
    """
    if peer.python is None:
        if missing := [name for name in peer.needs if importlib.util.find_spec(name) is None]:
            raise InputError(f"{missing[0]} is not installed")
        return Path(sys.executable)
    environment = folder / peer.name
    python, done = environment / "bin" / "python", environment / "complete"
    if done.exists():
        return python
    found = shutil.which(f"python{peer.python}")
    if found is None:
        raise InputError(f"it needs Python {peer.python}, and python{peer.python} is not in PATH")
    call([found, "-m", "venv", "--clear", environment])
    pip = [python, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]
    call([*pip, "-r", PROGRAMS / f"{peer.name}.txt"])
    if peer.alone is not None:
        call([*pip, "--no-deps", peer.alone])
    done.touch()
    return python


def export(folder: Path, kinds: set[str]) -> None:
    """Write our initial weights of the Llama to `folder`: native, and in the given formats."""
    task = {"job": "export", "config": LLAMA, "folder": str(folder)}
    call([sys.executable, PROGRAMS / "with_ours.py", json.dumps(task)], PYTHONPATH=str(ROOT))
    for kind in kinds:
        source, target = folder / "native", folder / ("model.gguf" if kind == "gguf" else kind)
        convert = [sys.executable, "-m", "mesh_transformer", "convert", "--from", "native", source]
        call([*convert, "--to", kind, target], PYTHONPATH=str(ROOT))


def measure(
    peer: Peer, python: Path, title: str, args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Run one process of a peer; return what its program reports (see peers/clock.py)."""
    job, config, _ = WORK[title]
    with tempfile.TemporaryDirectory() as scratch:
        task = {"job": job, "config": config, "folder": str(folder), "scratch": scratch}
        task |= {"tokens": str(folder / "tokens.npy"), "prompt": PROMPT, "new": NEW}
        task |= {"steps": args.steps, "began": time.monotonic()}
        command = [python, PROGRAMS / f"with_{peer.name}.py", json.dumps(task)]
        variables = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "COMPILE_FUNC_DIR": scratch}
        variables |= {"PYTHONPATH": str(ROOT)} if peer is OURS else {}
        return json.loads(last_line(call(command, **variables)))


def rounds(
    pythons: dict[str, Path], args: argparse.Namespace, folder: Path, left_out: dict[str, str]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Run all processes of all rounds; return {title: {name: reports by round}}.

    The libraries run in turn, in every other round in the opposite order.  A library that fails is
    added to `left_out` with the reason, and has no results.
    """
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        title: {name: [] for name in ("ours", *names) if name in pythons}
        for title, (_, _, names) in WORK.items()
    }
    turns = [
        (title, name)
        for number in range(args.rounds)
        for title, names in results.items()
        for name in list(names)[:: -1 if number % 2 else 1]
        if len(names) > 1
    ]
    for title, name in tqdm(turns, desc="processes"):
        if name in left_out:
            continue
        peer = PEERS.get(name, OURS)
        try:
            results[title][name].append(measure(peer, pythons[name], title, args, folder))
        except InputError as error:
            if peer is OURS:
                raise
            left_out[name] = f"{title}: {error}"
    return {
        title: {name: runs for name, runs in names.items() if name not in left_out}
        for title, names in results.items()
        if len(names.keys() - left_out.keys()) > 1
    }


def ratio(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], key: str) -> str:
    """Return the median and the range of their times over ours in the same round."""
    ratios = [
        statistics.median(their[key]) / statistics.median(our[key])
        for their, our in zip(theirs, ours, strict=True)
    ]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def same(peer: Peer, theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[bool, str]:
    """Compare the first loss, or the tokens, with ours: whether they may differ so, and a note."""
    if "tokens" in ours:
        equal = sum(a == b for a, b in zip(theirs["tokens"], ours["tokens"], strict=True))
        count = len(ours["tokens"])
        return equal == count, f"our weights: {equal} of {count} tokens are ours"
    losses = f"first loss {theirs['loss']:.6f}, ours {ours['loss']:.6f}"
    if peer.weights is None:
        return True, f"initial weights of its own: {losses}"
    equal = abs(theirs["loss"] - ours["loss"]) <= TOLERANCE * abs(ours["loss"])
    return equal, f"our weights: {losses}"


COLUMNS = [
    *("work", "library", "wall (s)", "CPU (s)", "wall time over ours", "CPU time over ours"),
    *("peak memory (GiB)", "start to end of the first (s)", "compared with ours"),
]


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> tuple[str, bool]:
    """Return the results as a table in Markdown, and whether all agree that should."""
    rows, agree = [COLUMNS, ["---"] * len(COLUMNS)], True
    for title, names in results.items():
        ours = names["ours"]
        for name, runs in names.items():
            versions = ", ".join(f"{key} {value}" for key, value in runs[0]["versions"].items())
            row = [title, f"{PEERS.get(name, OURS).title} ({versions})"]
            for key in TIMES:
                row.append(f"{statistics.median(statistics.median(run[key]) for run in runs):.3f}")
            row += ["1" if runs is ours else ratio(runs, ours, key) for key in TIMES]
            row.append(f"{statistics.median(run['peak'] for run in runs) / 2**30:.2f}")
            row.append(f"{statistics.median(run['first'] for run in runs):.1f}")
            good, note = same(PEERS[name], runs[0], ours[0]) if name in PEERS else (True, "")
            rows.append([*row, note])
            agree &= good
    return "\n".join(f"| {' | '.join(row)} |" for row in rows), agree


def main() -> int:
    args = parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    pythons, left_out = {"ours": Path(sys.executable)}, {}
    for name in tqdm(args.peers, desc="installing"):
        try:
            pythons[name] = interpreter(PEERS[name], args.folder.resolve())
        except InputError as error:
            left_out[name] = str(error)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape = (LLAMA["per_replica_batch"], LLAMA["seq"] + 1)
        np.save(
            folder / "tokens.npy", np.random.default_rng(0).integers(0, LLAMA["n_vocab"], shape)
        )
        export(folder, {kind for name in pythons if (kind := PEERS.get(name, OURS).weights)})
        results = rounds(pythons, args, folder, left_out)
    text, agree = table(results)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(f"{date}, {processor()}, {args.rounds} rounds of {args.steps} per process\n\n{text}")
    for name, reason in left_out.items():
        print(f"{PEERS[name].title} left out: {reason}")
    everything = {"date": date, "machine": processor(), "left_out": left_out, "results": results}
    (args.folder / "peers.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")
    return int(not agree)


if __name__ == "__main__":
    run_script(main)
