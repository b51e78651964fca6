"""The table of config keys, generated from the source of `Config`."""

import ast
import io
import json
import re
import tokenize


def field_comments(source: str) -> dict[int, str]:
    """Return the comments of a class's fields, by the line on which the field's statement begins.

    A field's comment follows it on its line, or stands on the lines before it.  A block of comment
    lines after a blank line is the title of a group of fields, so it belongs to no field.  The same
    holds for the variables of a module, except that they have no groups.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    lines = source.splitlines()
    found = {}
    for number, line in enumerate(lines, 1):
        if not re.match(r"\s*[\w.]+(: | = )", line):
            continue
        above = []
        while lines[number - 2 - len(above)].strip().startswith("#"):
            above.append(comments[number - 1 - len(above)])
        is_title = line[0] == " " and above and not lines[number - 2 - len(above)].strip()
        parts = [*([] if is_title else reversed(above)), comments.get(number, "")]
        if text := " ".join(filter(None, parts)):
            found[number] = text
    return found


def groups(source: str) -> dict[str, list[ast.AnnAssign]]:
    """Return the fields of the class `Config`, by the title of their group."""
    lines = source.splitlines()
    body = next(n.body for n in ast.parse(source).body if getattr(n, "name", "") == "Config")
    found: dict[str, list[ast.AnnAssign]] = {}
    title = ""
    for field in body:
        if not isinstance(field, ast.AnnAssign):
            continue
        above = field.lineno - 2
        while lines[above].strip().startswith("#"):
            above -= 1
        if not lines[above].strip():
            title = " ".join(line.strip("# ") for line in lines[above + 1 : field.lineno - 1])
        found.setdefault(title, []).append(field)
    return found


def table(source: str) -> str:
    """Return Markdown with one table per group of keys.

    Args:
      source: the text of config.py.

    Raises:
      ValueError: if a key has no comment; the message names the key.
    """
    comments = field_comments(source)
    text = ""
    for title, fields in groups(source).items():
        heading = re.split(r"[:(]|\.$", title)[0].strip()
        text += f"### {heading}\n\n"
        if title != f"{heading}.":
            text += f"{linked(title)}\n\n"
        text += "| key | type | default | |\n|---|---|---|---|\n"
        for field in fields:
            key = ast.unparse(field.target)
            if field.lineno not in comments:
                raise ValueError(f"config.py: key {key} has no comment; say what it does")
            cells = [f"`{key}`", _type(field.annotation), _default(field.value)]
            cells.append(linked(comments[field.lineno]))
            text += "| " + " | ".join(cells) + " |\n"
        text += "\n"
    return text


def linked(comment: str) -> str:
    """Link the pages that a comment names, such as docs/attention.md, from a page in docs/api."""
    comment = re.sub(r"\bNone\b", "`null`", comment)
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", comment)


def _type(annotation: ast.expr) -> str:
    """Format a type by the JSON values that it allows."""
    if isinstance(annotation, ast.BinOp):
        return f"{_type(annotation.left)} or {_type(annotation.right)}"
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        options = ast.literal_eval(annotation.slice)
        *most, last = (f"`{json.dumps(value)}`" for value in options)
        return f"{', '.join(most)} or {last}"
    return f"`{ast.unparse(annotation).replace('None', 'null')}`"


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    if isinstance(value, ast.Call):  # field(default=..., hash=False)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
        factories = {"list": [], "dict": {}}
        default = factories.get(keywords.get("default_factory", ""))
    else:
        default = ast.literal_eval(value)
    return f"`{json.dumps(default)}`"
