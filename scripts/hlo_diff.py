"""Show what a change of this library, or another JAX, does to compiled programs.

    scripts/hlo_diff.py write before.json      # in one checkout or environment
    scripts/hlo_diff.py write after.json       # in the other one
    scripts/hlo_diff.py compare before.json after.json

`write` compiles the train step and the decode step of six configs, most of them for TPUs, which
need not be present (see docs/plan.md).  `compare` shows the differences, and exits with status 1
if there are any: a change that leaves the programs alone shows none.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

import mesh_transformer
from mesh_transformer.config import Config
from mesh_transformer.storage import files
from mesh_transformer.util import InputError, run_script

SEQ = {"seq": 2048}
# For each config: the topology, the preset or file, and the keys that are changed.
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "6B on v3-8": ("v3-8", "gpt-j-6b", {"cores_per_replica": 8}),
    "6B on v5e-8, jit": ("v5e-8", "gpt-j-6b", {"cores_per_replica": 8, "partitioning": "jit"}),
    "llama3-3b on v6e-8": ("v6e-8", "llama3-3b", SEQ | {"cores_per_replica": 4, "zero": 3}),
    "gemma3-1b on v5e-4": ("v5e-4", "gemma3-1b", SEQ | {"cores_per_replica": 4}),
    "410M on 8 CPUs": ("cpu-8", "pythia-410m", {"cores_per_replica": 4, "seq": 256}),
    "70M on 8 CPUs, jit": ("cpu-8", "pythia-70m", {"cores_per_replica": 2, "partitioning": "jit"}),
}
LEAST_SHARE = 0.01  # operations with at least this share of the cycles are compared


def normalised(text: str) -> str:
    """Return HLO text without what does not change the program: source lines and numbers of names.

    Names are numbered in the order in which they occur.
    """
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = re.sub(r"(?<=[(, ])[\w.\-]+: ", "", text)  # names of parameters in headers
    lines = [line for line in text.splitlines() if re.match(r"\s*(ROOT )?%|ENTRY|\}", line)]
    numbers: dict[str, str] = {}
    return re.sub(
        r"%[\w.\-]+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), "\n".join(lines)
    )


def summary(memory: Any) -> dict[str, Any]:
    """Return what is compared of a compiled program (a `plan.Memory`)."""
    from mesh_transformer.performance.hlo import Program, parse

    if memory.text is None:
        return {"peak": memory.peak, "text": "does not fit"}
    collectives: Counter[str] = Counter()
    for one, times in parse(memory.text).runs():
        if not one.is_alone:
            size = max(map(len, one.groups), default=0) or "all"
            shape = ",".join(map(str, one.shape))
            collectives[f"{one.kind} {one.dtype}[{shape}] over {size}"] += times
    program = Program(memory.text)
    cycles = program.cycles()
    total = sum(cycles.values())
    return {
        "text": hashlib.sha256(normalised(memory.text).encode()).hexdigest(),
        "peak": memory.peak,
        "moved": program.moved(),
        "cycles": total,
        "collectives": dict(sorted(collectives.items())),
        "operations": {key: own for key, own in cycles.items() if own >= LEAST_SHARE * total},
    }


def write(path: Path, only: str | None) -> None:
    """Compile the programs, and write their summaries."""
    import jax

    from mesh_transformer.generation.weights import weight_layout
    from mesh_transformer.mesh.program import Layout
    from mesh_transformer.performance import device_arrays, plan
    from mesh_transformer.performance.compilation import compiled
    from mesh_transformer.performance.topology import mesh_of, slice_named
    from mesh_transformer.training import step

    chosen = {name: value for name, value in CONFIGS.items() if only in (None, name)}
    if not chosen:
        raise InputError(f"--only is {only!r}, expected one of {', '.join(map(repr, CONFIGS))}")
    result: dict[str, Any] = {"jax": jax.__version__, "programs": {}}
    for name, (topology, model, changes) in tqdm(chosen.items(), unit="config"):
        own = slice_named(topology)
        config = Config.load(None, model=model).replace(
            tpu_size=own.devices, per_replica_batch=1, gradient_accumulation_steps=2, **changes
        )
        mesh = mesh_of(config, own)
        layout, weights = step.StateLayout(config, mesh), weight_layout(Layout(config, mesh))
        rows = device_arrays.abstract_rows(weights, 8 * mesh.shape["dp"])
        batch = plan.abstract_batch(layout)
        result["programs"] |= {
            f"{name}, train": summary(
                compiled(topology, step.compile_train(layout), layout.abstract, batch)
            ),
            f"{name}, decode": summary(
                compiled(
                    topology,
                    *plan.decode_program(weights, device_arrays.abstract_weights(weights), rows),
                )
            ),
        }
    files.write_text(str(path), json.dumps(result, indent=1) + "\n")
    # Of another checkout than that of the script, if the environment has that one installed.
    print(f"{path}: programs of {Path(mesh_transformer.__file__).parent}, JAX {jax.__version__}")


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return lines that say what is different in two summaries of a program."""
    lines = []
    for key in ("peak", "moved", "cycles"):
        if (old := before.get(key, 0)) != (new := after.get(key, 0)):
            ratio = f" ({new / old:.3f})" if old else ""
            lines.append(f"{key}: {old:,} -> {new:,}{ratio}")
    for key in ("collectives", "operations"):
        old, new = before.get(key, {}), after.get(key, {})
        for name in sorted({*old, *new}):
            if old.get(name, 0) != new.get(name, 0):
                lines.append(f"{key}: {name}: {old.get(name, 0):,} -> {new.get(name, 0):,}")
    if not lines and before["text"] != after["text"]:
        lines.append("the text differs, but nothing that is counted")
    return lines


def compare(paths: list[Path]) -> int:
    """Print the differences between two files; return 1 if there are any, else 0."""
    for path in paths:
        if not path.is_file():
            raise InputError(
                f"{path} does not exist; write it with: scripts/hlo_diff.py write {path}"
            )
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    if before["jax"] != after["jax"]:
        print(f"JAX {before['jax']} -> {after['jax']}")
    old, new = before["programs"], after["programs"]
    differs = False
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            lines = [f"only in {paths[name in new]}"]
        else:
            lines = differences(old[name], new[name])
        differs = differs or bool(lines)
        print(f"{name}: {'nothing' if not lines else ''}".rstrip())
        print("".join(f"  {line}\n" for line in lines), end="")
    return int(differs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write", help="compile, and write a file")
    writer.add_argument("path", type=Path)
    writer.add_argument("--only", metavar="CONFIG", help=f"one of {', '.join(CONFIGS)}")
    commands.add_parser("compare", help="compare two files").add_argument(
        "paths", type=Path, nargs=2
    )
    args = parser.parse_args()
    if args.command == "write":
        write(args.path, args.only)
    else:
        sys.exit(compare(args.paths))


if __name__ == "__main__":
    run_script(main)
