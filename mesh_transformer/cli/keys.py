"""Print the keys of config files, with their types, defaults and meaning."""

import argparse
import ast
import io
import json
import re
import shutil
import textwrap
import tokenize
from dataclasses import dataclass
from pathlib import Path

# The docs' site imports this module without jax, so it imports the rest of the library in `main`.
LIBRARY = Path(__file__).parents[1]
SOURCES = ("config_model.py", "config.py")


@dataclass(frozen=True)
class Key:
    """A config key.

    Attributes:
      name: the key.
      types: the types and values that it may have, as JSON.
      default: its default as JSON, or "required".
      meaning: what it sets.
    """

    name: str
    types: list[str]
    default: str
    meaning: str


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    from mesh_transformer.cli.arguments import Parser

    parser = Parser(description=__doc__)
    parser.add_argument(
        "words", nargs="*", metavar="word", help="print only keys whose name or meaning has a word"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    from mesh_transformer.util import InputError

    words = [word.casefold() for word in parse_arguments(arguments).words]
    blocks = []
    for title, keys in groups().items():
        shown = [k for k in keys if not words or any(w in described(k).casefold() for w in words)]
        if shown:
            blocks.append("\n".join([_wrapped(title), *map(described, shown)]))
    if not blocks:
        raise InputError(f"no config key has {' or '.join(words)} in its name or meaning")
    print("\n\n".join(blocks))


def described(key: Key) -> str:
    """Return a key's lines in the terminal."""
    default = key.default if key.default == "required" else f"default {key.default}"
    line = f"  {key.name}: {alternatives(key.types)}; {default}"
    return f"{line}\n{_wrapped(key.meaning, indent=6)}"


def _wrapped(text: str, indent: int = 0) -> str:
    margin, width = " " * indent, min(shutil.get_terminal_size().columns, 100)
    return textwrap.fill(
        text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )


def alternatives(words: list[str]) -> str:
    """Join words to "a, b or c"."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def groups(source: str | None = None) -> dict[str, list[Key]]:
    """Return the config keys by the title of their group.

    Args:
      source: the text of a module with the keys; None for `SOURCES`.

    Raises:
      ValueError: if a key has no comment; the message names the key.
    """
    if source is None:
        source = "\n".join(_text(name) for name in SOURCES)
    lines, comments = source.splitlines(), field_comments(source)
    module = ast.parse(source).body
    imported = ast.parse(_text("families.py")).body
    assigned = [node for node in (*imported, *module) if isinstance(node, ast.Assign)]
    aliases = {ast.unparse(node.targets[0]): node.value for node in assigned}
    body = [field for n in module if isinstance(n, ast.ClassDef) for field in n.body]
    result: dict[str, list[Key]] = {}
    title = ""
    for field in body:
        if not isinstance(field, ast.AnnAssign):
            continue
        above = field.lineno - 2
        while lines[above].strip().startswith("#"):
            above -= 1
        if not lines[above].strip():
            title = " ".join(line.strip("# ") for line in lines[above + 1 : field.lineno - 1])
        name = ast.unparse(field.target)
        if field.lineno not in comments:
            raise ValueError(f"config.py: key {name} has no comment; say what it does")
        meaning = re.sub(r"\bNone\b", "null", comments[field.lineno]).replace(".  ", ". ")
        key = Key(name, _types(field.annotation, aliases), _default(field.value), meaning)
        result.setdefault(title, []).append(key)
    return result


def _text(name: str) -> str:
    return (LIBRARY / name).read_text(encoding="utf-8")


def field_comments(source: str) -> dict[int, str]:
    """Return the comments of a class's fields, by the line on which the field's statement begins.

    A field's comment follows it on its line, or stands on the lines before it.  A block of comment
    lines after a blank line is the title of a group of fields, so it belongs to no field.  The same
    holds for the variables of a module, except that they have no groups.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    lines = source.splitlines()
    result = {}
    for number, line in enumerate(lines, 1):
        if not re.match(r"\s*[\w.]+(: | = )", line):
            continue
        above = []
        while lines[number - 2 - len(above)].strip().startswith("#"):
            above.append(comments[number - 1 - len(above)])
        is_title = line[0] == " " and above and not lines[number - 2 - len(above)].strip()
        parts = [*([] if is_title else reversed(above)), comments.get(number, "")]
        if text := " ".join(filter(None, parts)):
            result[number] = text
    return result


def _types(annotation: ast.expr, aliases: dict[str, ast.expr]) -> list[str]:
    """Return the JSON types and values that a type allows.

    Args:
      aliases: {name: type} of the names for types in these modules and families.py.
    """
    if isinstance(annotation, ast.BinOp):
        return [*_types(annotation.left, aliases), *_types(annotation.right, aliases)]
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        return [json.dumps(value) for value in ast.literal_eval(annotation.slice)]
    name = ast.unparse(annotation)
    return _types(aliases[name], aliases) if name in aliases else [name.replace("None", "null")]


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    if isinstance(value, ast.Call):  # field(default=..., hash=False)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
        factories = {"list": [], "dict": {}}
        return json.dumps(factories.get(keywords.get("default_factory", "")))
    return json.dumps(ast.literal_eval(value))
