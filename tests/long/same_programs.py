"""Compares the functions that the compiler makes for a virtual mesh, between real meshes.

`python -m tests.long.same_programs v5e` compiles the train step for a virtual 1x8 mesh on 8, 4 and
1 TPU chips, without a TPU; `cpu` compiles it for CPU devices.  If the functions between collectives
are the same programs on every mesh, so are the bits.
"""

import argparse
import collections
import functools
import hashlib
import os
import re
import sys

import jax

from mesh_transformer.config import Config
from mesh_transformer.performance import hlo, plan
from mesh_transformer.performance.topology import slice_named
from mesh_transformer.training import step

SMALL = {
    "layers": 3,
    "d_model": 1024,
    "n_heads": 8,
    "n_vocab": 2048,
    "seq": 256,
    "dtype": "bfloat16",
    "gradient_accumulation_steps": 2,
    "per_replica_batch": 2,
    "virtual_mesh": [1, 8],
}
# Notes of the compiler on an operation, which do not change what it computes.
NOTES = re.compile(
    r", (metadata|backend_config|frontend_attributes|sharding|origin)="
    r'(\{(?:[^{}"]|"[^"]*"|\{(?:[^{}"]|"[^"]*"|\{[^{}]*\})*\})*\}|\S+)'
)
OPERATION = re.compile(r"(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)$")
# A call on CPUs.  On TPUs a conditional, whose smaller branch returns zeros and never runs.
KEPT_APART = re.compile(
    r" call\(.*to_apply=(%[^\s,]+).*inlineable=\"false\"|"
    r" conditional\(.*branch_computations=\{([^}]*)\}"
)
CALLED = re.compile(r"(calls|to_apply|body|condition)=%([^\s,)}]+)")


def kept_apart(text: str) -> dict[str, collections.Counter[str]]:
    """Return the functions of a compiled program that are called and not inlined.

    Returns:
      A dict from a hash of what a function computes, in which order and layout, to how often each
      of its operations occurs.
    """
    computations = hlo.computations(text)

    @functools.cache
    def computation(name: str) -> tuple[str, str]:
        """Return a hash of the result of a computation, and all of its operations."""
        hashes: dict[str, str] = {}
        root, names = "", []
        for line in computations[name]:
            match = OPERATION.match(NOTES.sub("", line.strip()))
            if match is None:
                continue
            is_root, own, kind, operation, rest = match.groups()
            kind = re.sub(r"S\(\d\)", "", kind)  # in which memory the array is
            names.append(f"{operation} {kind}")
            for called in CALLED.findall(rest):
                inner, more = computation(called[1])
                rest = rest.replace(f"{called[0]}=%{called[1]}", inner)
                names.append(more)
            rest = re.sub(r"%([\w.-]+)", lambda x: hashes[x[1]], rest)
            rest = re.sub(r"S\(\d\)", "", rest)
            hashes[own] = hashlib.sha256(f"{kind} {operation} {rest}".encode()).hexdigest()
            if is_root:
                root = hashes[own]
        return root, "\n".join(names)

    functions = {}
    for lines in computations.values():
        for line in lines:
            call = KEPT_APART.search(line)
            if call:
                names = re.findall(r"%([^\s,}]+)", call[1] or call[2])
                result, operations = max(map(computation, names), key=lambda pair: len(pair[1]))
                functions[result] = collections.Counter(operations.splitlines())
    return functions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("platform", choices=["v5e", "cpu"])
    parser.add_argument("--show", type=int, default=0, help="number of differences to print")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", 8)
    expected: dict[str, collections.Counter[str]] = {}
    differences = 0
    for mp in (8, 4, 1):
        slice_ = slice_named(f"{args.platform}-{mp}")
        mesh = slice_.mesh(mp)
        config = Config(**SMALL, cores_per_replica=mp, tpu_size=mp)
        layout = step.StateLayout(config, mesh)
        arguments = layout.abstract, plan.abstract_batch(layout)
        text = step.compile_train(layout).trace(*arguments).lower().compile().as_text()
        functions = kept_apart(text)
        assert functions
        expected = expected or functions
        missing = expected.keys() - functions.keys()
        print(f"1x{mp}: {len(functions)} functions, {len(missing)} of 1x8 missing", flush=True)
        differences += len(missing)
        others = [own for result, own in functions.items() if result not in expected]
        for own in [expected[result] for result in missing][: args.show]:
            nearest = min(others, key=lambda o: ((own - o) + (o - own)).total())
            print(f"  on 1x8: {dict(own - nearest)}; here: {dict(nearest - own)}")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
