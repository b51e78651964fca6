"""Measure the peak memory and time of converting original -> native -> hf -> original.

The script creates a random model of 1.5B parameters, which is 6 GB in f32; the disk needs room for
five times as much.  It then runs scripts/convert_checkpoint.py in a separate process for each
conversion.  The peak memory of the process is compared with a bound: the size of the weights plus
2 GiB.  Its time is compared with the time to copy the resulting checkpoint on the same disk.
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from mesh_transformer.checkpoint import original
from mesh_transformer.config import Config
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.model import transformer
from mesh_transformer.util import InputError, run_script

CONVERTER = Path(__file__).resolve().parents[1] / "convert_checkpoint.py"
GIB = 2**30
CONVERSIONS = (("original", "native"), ("native", "hf"), ("hf", "again"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path, help="work folder, created and removed")
    parser.add_argument("--layers", type=int, default=26, help="layers of the model (default 26)")
    parser.add_argument(
        "--d-model", type=int, default=2048, help="width of the model (default 2048)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="timed runs per conversion, of which the fastest counts (default 3)",
    )
    return parser.parse_args()


def write_model(folder: Path, config: Config) -> int:
    """Write 8 shards with random weights and no optimizer state; return their size in bytes."""
    rng = np.random.default_rng(0)
    values = 0.02 * rng.standard_normal(1 << 22, np.float32)

    def weights(declaration: Declaration) -> np.ndarray:
        size = int(np.prod(declaration.shape))
        return np.resize(np.roll(values, rng.integers(len(values))), size).reshape(
            declaration.shape
        )

    params = map_declared(weights, transformer.declarations(config))
    state = {"params": params, "step": np.zeros((), np.int32)}
    original.write(str(folder), state, config, shards=8)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(*command: object) -> tuple[float, float]:
    """Run a Python script in a new process; return its seconds and peak resident memory in GiB."""
    os.sync()  # so that the process does not wait for earlier writes
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *map(str, command)])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise InputError(f"{command[0]} failed; see its error above")
    return time.perf_counter() - began, usage.ru_maxrss * 1024 / GIB


def copy(source: Path, target: Path) -> float:
    """Copy a folder and flush the copy to disk; return the seconds.  The copy is deleted."""
    os.sync()
    began = time.perf_counter()
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


def main() -> None:
    args = parse_args()
    if args.folder.exists():
        raise InputError(f"{args.folder}: already exists; choose another name")
    args.folder.mkdir(parents=True)
    try:
        measure(args)
    finally:
        shutil.rmtree(args.folder)


def measure(args: argparse.Namespace) -> None:
    """Measure all conversions and print one line for each."""
    sizes = {"layers": args.layers, "d_model": args.d_model, "n_heads": 16, "n_vocab": 50400}
    config = Config.from_dict(sizes)
    config_path = args.folder / "config.json"
    config_path.write_text(str(sizes).replace("'", '"'))
    # Write the model in a separate process.  The peak memory that is reported for a child process
    # is at least that of its parent, so this process must stay small.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        size = pool.submit(write_model, args.folder / "original", config).result()
    bound = size / GIB + 2
    print(f"{size / 4e9:.2f}B parameters in f32: {size / GIB:.2f} GiB, bound {bound:.2f} GiB")
    for source, target in CONVERSIONS:
        kinds = [name.replace("again", "original") for name in (source, target)]
        options = ["--config", config_path] if "original" in kinds else []
        options += ["--shards", 8] if kinds[1] == "original" else []
        pair = ("--from", kinds[0], args.folder / source, "--to", kinds[1], args.folder / target)
        runs = []
        for _ in range(args.rounds):
            shutil.rmtree(args.folder / target, ignore_errors=True)
            seconds, peak = run(CONVERTER, *pair, *options)
            runs.append((seconds, copy(args.folder / target, args.folder / "copy"), peak))
        # Report the fastest run, because other load and first-time memory allocation only add time.
        seconds, copied = (min(measured[i] for measured in runs) for i in (0, 1))
        peak = max(peak for *_, peak in runs)
        print(
            f"{source} -> {target}: {seconds:.1f} s, copy and fsync {copied:.1f} s, "
            f"ratio {seconds / copied:.2f}; peak {peak:.2f} GiB, {bound - peak:.2f} below the bound"
        )


if __name__ == "__main__":
    run_script(main)
