"""The command-line program `mesh-transformer`; each subcommand is a module of this package."""

import ast
import difflib
import importlib
import sys
from pathlib import Path

from mesh_transformer.util import InputError

# The commands and their modules, in the order in which a new user meets them.
COMMANDS = {
    "split": "split",
    "tokenizer": "new_tokenizer",
    "records": "text_records",
    "completion-records": "completion_records",
    "config": "new_config",
    "keys": "keys",
    "train": "train",
    "pod": "pod",
    "plot": "plot",
    "runs": "runs",
    "sample": "sample",
    "serve": "serve",
    "eval": "evaluate",
    "long-context": "long_context",
    "answers": "answers",
    "batch": "batch",
    "score": "score",
    "convert": "convert",
    "plan": "plan",
    "bench": "benchmark",
}


def main() -> int | None:
    """Run the subcommand that the first command-line argument names.

    The remaining arguments are passed to the subcommand.

    Returns:
      The exit status, where None means 0.

    Raises:
      InputError: if there is no subcommand of that name.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        import mesh_transformer

        print(f"mesh-transformer {mesh_transformer.__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(COMMANDS)}"
        raise InputError(f"mesh-transformer {name}: no such command; {hint}")
    sys.argv = [f"mesh-transformer {name}", *sys.argv[2:]]  # argparse prints the first word
    return importlib.import_module(f"mesh_transformer.cli.{COMMANDS[name]}").main()


def usage() -> str:
    """Return the text of `mesh-transformer --help`: every command with its description."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {description(name)}" for name in COMMANDS]
    return "\n".join(
        (
            "usage: mesh-transformer COMMAND ...",
            "",
            "GPT-J in JAX: data, training, generation, serving, evaluation and conversion.",
            "",
            *lines,
            "",
            "mesh-transformer COMMAND --help describes a command; --version prints the version.",
        )
    )


def description(name: str) -> str:
    """Return a subcommand's one-line description: the first line of its module's docstring.

    The module is not imported, because importing all of them takes long.
    """
    source = Path(__file__).with_name(f"{COMMANDS[name]}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].removesuffix(".")
