"""The table of config keys, as Markdown."""

import re

from mesh_transformer.cli.keys import alternatives, groups


def table(source: str | None = None) -> str:
    """Return Markdown with one table per group of keys; see `groups` for the argument."""
    text = ""
    for title, keys in groups(source).items():
        heading = re.split(r"[:(]|\.$", title)[0].strip()
        text += f"### {heading}\n\n"
        if title != f"{heading}.":
            text += f"{linked(title)}\n\n"
        text += "| key | type | default | |\n|---|---|---|---|\n"
        for key in keys:
            types = alternatives([f"`{word}`" for word in key.types])
            default = key.default if key.default == "required" else f"`{key.default}`"
            meaning = re.sub(r"\bnull\b", "`null`", linked(key.meaning))
            text += f"| `{key.name}` | {types} | {default} | {meaning} |\n"
        text += "\n"
    return text


def linked(comment: str) -> str:
    """Link the pages that a comment names, such as docs/attention.md, from a page in docs/api."""
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", comment)
