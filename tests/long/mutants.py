"""Changes one line of the library at a time; checks that the closest tests fail.

`python -m tests.long.mutants --seed 0` draws mutants over the syntax trees of the files of each
subject and tests each in a copy of the tree.  It takes hours.  The test suite does not run it.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mesh_transformer"
SECONDS = 1500  # for the tests of one mutant; a mutant that makes them hang counts as caught

# Subject: its modules, and the test files that are closest to them, the fastest first.
SUBJECTS = {
    "sampling": (
        ["generation/sampling", "generation/sampling_settings", "generation/decode"],
        ["generation/test_sampling", "generation/test_decode", "serving/test_engine"],
    ),
    "step": (
        ["training/step", "evaluation/validation"],
        [
            "evaluation/test_validation",
            "model/test_loss_mask",
            "model/test_lora",
            "training/test_step",
        ],
    ),
    "optimizer": (["training/optimizer"], ["training/test_optimizer", "training/test_step"]),
    "rules": (["training/update_rules"], ["training/test_update_rules"]),
    "schedule": (["training/schedule"], ["training/test_schedule", "training/test_ramp"]),
    "best": (["training/best", "training/saver"], ["training/test_best", "training/test_loop"]),
    "parallel": (
        ["mesh/parallel", "mesh/devices"],
        ["model/test_layers", "mesh/test_parallel", "training/test_step"],
    ),
    "checkpoint": (
        ["checkpoint/native", "checkpoint/integrity", "storage/access"],
        ["checkpoint/test_native", "model/test_lora", "training/test_loop", "pod/test_multihost"],
    ),
    "serving": (
        [
            f"serving/{name}"
            for name in ("app", "answer", "engine", "requests", "server", "service")
        ],
        [
            "serving/test_serving",
            "serving/test_refusals",
            "serving/test_engine",
            "serving/test_device_serve",
        ],
    ),
    "loader": (
        ["data/loader", "data/record_set", "data/tfrecords", "data/prefetch"],
        ["data/test_loader", "data/test_record_set", "data/test_bad_inputs", "training/test_loop"],
    ),
    "pod": (
        ["pod/cluster", "pod/restarts", "pod/launch", "pod/tpu/vm", "pod/tpu/spec"],
        [
            "pod/test_restarting_cluster",
            "pod/test_launch",
            "pod/test_tpu_vm",
            "pod/test_cluster",
            "cli/test_train",
        ],
    ),
}

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


# Messages, annotations and imports, which are not mutated.
UNCHANGED = (ast.JoinedStr, ast.Raise, ast.AnnAssign, ast.Import, ast.ImportFrom)


class Mutant(NamedTuple):
    """A line of a file, whose path is relative to the package, and its replacement."""

    subject: str
    file: str
    line: int
    old: str
    new: str

    def __str__(self) -> str:
        return (
            f"{self.subject}: {self.file}:{self.line}: {self.old.strip()}  ->  {self.new.strip()}"
        )


def changed(node: ast.AST) -> ast.AST | None:
    """Return the node with a different meaning, or None for kinds of nodes that are not mutated."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        return ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        operator = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        return ast.BoolOp(operator, node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        return ast.Pass()
    if isinstance(node, ast.Return) and node.value is not None:
        return ast.Return(ast.Constant(None))
    return None


def candidates(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes to mutate: no annotations, messages, module-level constants or imports."""
    stack: list[ast.AST] = [node for node in tree.body if not isinstance(node, ast.Assign)]
    while stack:
        node = stack.pop()
        if isinstance(node, UNCHANGED):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node):
                node.body = node.body[1:]
            defaults = (*node.args.defaults, *node.args.kw_defaults)
            stack += [*filter(None, defaults), *node.body]
            continue
        yield node
        stack += ast.iter_child_nodes(node)


def mutants_of(subject: str, module: str) -> list[Mutant]:
    """Return all mutants of a module that change a single line."""
    path = PACKAGE / f"{module}.py"
    lines = path.read_text().splitlines()
    mutants = []
    for node in candidates(ast.parse(path.read_text())):
        if (new := changed(node)) is None:
            continue
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        if first != last:
            continue
        line = lines[first - 1].encode()
        begin, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
        text = ast.unparse(ast.fix_missing_locations(new))
        if not isinstance(new, ast.stmt):
            text = f"({text})"
        mutated = (line[:begin] + text.encode() + line[end:]).decode()
        mutants.append(Mutant(subject, f"{module}.py", first, lines[first - 1], mutated))
    return mutants


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draw the same number of mutants for each subject, at most one per line."""
    rng = random.Random(seed)
    plan = []
    for subject, (modules, _) in SUBJECTS.items():
        all_mutants = [mutant for module in modules for mutant in mutants_of(subject, module)]
        rng.shuffle(all_mutants)
        by_line = {(mutant.file, mutant.line): mutant for mutant in all_mutants}
        plan += rng.sample(sorted(by_line.values()), count // len(SUBJECTS))
    return plan


def judged(mutant: Mutant, tree: Path) -> str:
    """Test a mutant in a copy of the tree; returns the failing test or "SURVIVES"."""
    path = tree / "mesh_transformer" / mutant.file
    content = path.read_text()
    lines = content.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.new + "\n"
    path.write_text("".join(lines))
    try:
        tests = [f"tests/{name}.py" for name in SUBJECTS[mutant.subject][1]]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "hangs the tests"
        if process.returncode == 0:
            return "SURVIVES"
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else output[-200:]
    finally:
        path.write_text(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="of mutants (40)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree (2)")
    parser.add_argument("--only", help="of these subjects, joined with commas")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    args = parser.parse_args()
    plan = drawn(args.count, args.seed)
    if args.only:
        plan = [mutant for mutant in plan if mutant.subject in args.only.split(",")]
    if args.list:
        print(*plan, sep="\n")
        return
    with tempfile.TemporaryDirectory() as name:
        trees: Queue[Path] = Queue()
        for number in range(args.jobs):
            tree = Path(name) / f"{number}"
            ignored = shutil.ignore_patterns(".venv*", ".git", "runs", "build", "__pycache__")
            shutil.copytree(ROOT, tree, ignore=ignored)
            (tree / ".venv").symlink_to(ROOT / ".venv")
            trees.put(tree)

        def judge(mutant: Mutant) -> bool:
            tree, began = trees.get(), time.monotonic()
            try:
                verdict = judged(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{mutant}\n    {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
            return verdict != "SURVIVES"

        with ThreadPoolExecutor(args.jobs) as pool:
            caught = sum(pool.map(judge, plan))
    print(f"{caught} of {len(plan)} mutants caught (seed {args.seed})")


if __name__ == "__main__":
    main()
