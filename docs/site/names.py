"""The public names: those that a line `::: NAME` in docs/api lists, with their members.

`PublicNames` is an extension of griffe, the parser of the API reference.  `problems` finds public
names without documentation, and types and cross-references that have no place in docs/api.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import yaml

from mesh_transformer.cli.keys import field_comments

PAGES = Path(__file__).resolve().parents[1] / "api"
PACKAGE = "mesh_transformer"
CONFIG = f"{PACKAGE}.config.Config"  # its fields are documented by the table of config keys
NAME = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?!`)")


def listed() -> dict[str, dict[str, Any]]:
    """Return the names that docs/api lists, with their options for mkdocstrings.

    `members` selects members, and `merge_init_into_class: false` hides a class's constructor.
    """
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    found = re.findall(r"^::: (\S+)\n((?: +.*\n)*)", text, re.MULTILINE)
    return {name: (yaml.safe_load(block) or {}).get("options", {}) for name, block in found}


@functools.cache
def package() -> griffe.Module:
    """Return the package as its source declares it, with `PublicNames` applied."""
    loaded = griffe.load(
        PACKAGE,
        search_paths=[str(PAGES.parents[1])],
        docstring_parser="google",
        docstring_options={"warnings": False},
        extensions=griffe.load_extensions(PublicNames),
    )
    assert isinstance(loaded, griffe.Module)
    return loaded


def public(root: griffe.Module) -> dict[str, griffe.Object]:
    """Return the public names with their members, by each of their full paths.

    Raises:
      LookupError: if docs/api lists a name that does not exist.
    """
    names, classes = {}, {}
    for path, options in listed().items():
        try:
            named = root[path.removeprefix(f"{PACKAGE}.")]
        except KeyError:
            raise LookupError(f"docs/api lists {path}, which does not exist") from None
        target = named.final_target if isinstance(named, griffe.Alias) else named
        chosen = options.get("members")
        for item in (target, *(m for m in members(target) if not chosen or m.name in chosen)):
            names[item.path] = item
            names[path + item.path.removeprefix(target.path)] = item
        if isinstance(target, griffe.Class):
            classes |= {path: target, target.path: target}
    for path, target in classes.items():  # what a class inherits from another public one
        for name, member in target.inherited_members.items():
            if member.target_path in names:
                names.setdefault(f"{path}.{name}", names[member.target_path])
    return names


def members(item: griffe.Object) -> list[griffe.Object]:
    """Return the public members of a class, without those that it inherits."""
    own = item.members.values() if item.is_class else []
    return [m for m in own if not m.name.startswith("_") and isinstance(m, griffe.Object)]


class PublicNames(griffe.Extension):
    """Completes the docstrings of public names.

    A field's comment becomes its docstring.  A method of a Protocol refers to the class that the
    Protocol's docstring names.  Names of public objects in docstrings become links.
    """

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        if pkg.path != PACKAGE:
            return
        names = public(pkg)
        for item in set(names.values()):
            if item.is_attribute:
                _use_comment(item)
            elif _is_protocol(item):
                _refer(item, names)
        for item in set(names.values()):
            if item.docstring:
                item.docstring.value = linked(item.docstring.value, item, names)


def _is_protocol(item: griffe.Object | None) -> bool:
    return isinstance(item, griffe.Class) and "Protocol" in map(str, item.bases)


def _use_comment(field: griffe.Object) -> None:
    parent = field.parent
    if field.docstring or parent is None or parent.path == CONFIG or field.lineno is None:
        return
    if field.name in documented_fields(parent) or not isinstance(field.filepath, Path):
        return
    comments = field_comments(field.filepath.read_text(encoding="utf-8"))
    if comment := comments.get(field.lineno):
        field.docstring = griffe.Docstring(comment, lineno=field.lineno, parent=field)


def _refer(protocol: griffe.Object, names: dict[str, griffe.Object]) -> None:
    text = protocol.docstring.value if protocol.docstring else ""
    paths = [resolve(name, protocol, names) for name in NAME.findall(text)]
    model = next((p for p in paths if p and p != protocol.path and names[p].is_class), None)
    for method in members(protocol):
        if model and not method.docstring and f"{model}.{method.name}" in names:
            method.docstring = griffe.Docstring(f"See `{model}.{method.name}`.", parent=method)


def documented_fields(item: griffe.Object) -> set[str]:
    """Return the names in the `Attributes:` section of a docstring."""
    sections = item.docstring.parse("google", warnings=False) if item.docstring else []
    kind = griffe.DocstringSectionKind.attributes
    return {entry.name for section in sections if section.kind is kind for entry in section.value}


def resolve(name: str, item: griffe.Object, names: dict[str, griffe.Object]) -> str | None:
    """Return the path of the public name that `name` means in the docstring of `item`."""
    first, _, rest = name.partition(".")
    if isinstance(item, griffe.Function) and first in item.parameters:
        return None
    candidates = [name, f"{PACKAGE}.{name}"]
    with contextlib.suppress(griffe.NameResolutionError):
        candidates.append(f"{item.resolve(first)}.{rest}".removesuffix("."))
    ends = {
        other.path: other
        for path, other in names.items()
        if path.endswith(f".{name}") and not _is_protocol(other) and not _is_protocol(other.parent)
    }
    if len(ends) == 1:
        (end,) = ends.values()
        # A bare name such as `step` rarely means the member of another class.
        candidates += ends if "." in name or (end.parent and end.parent.is_module) else []
    return next((names[path].path for path in candidates if path in names), None)


def linked(text: str, item: griffe.Object, names: dict[str, griffe.Object]) -> str:
    """Turn the public names in a docstring into links, except those of the docstring itself."""

    def link(match: re.Match[str]) -> str:
        path = resolve(match[1], item, names)
        if path is None or item.path in (path, *_parents(path)) or not names[path].docstring:
            return match[0]  # a name without a docstring has no place of its own on the page
        label = match[1].removeprefix(f"{PACKAGE}.") if match[1] == path else match[1]
        label = ".".join(label.split(".")[-2:])
        return f"[`{label}`][{path}]"

    return NAME.sub(link, text)


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def problems() -> Iterator[str]:
    """Yield a line for each public name that the API reference does not explain."""
    root = package()
    names = public(root)
    for name in root.exports or ():
        if f"{PACKAGE}.{name}" not in names:
            yield f"{PACKAGE}.{name} is in __all__; add it to a page in docs/api"
    options = listed().items()
    hidden = {names[n].path for n, o in options if o.get("merge_init_into_class") is False}
    for item in dict.fromkeys(names.values()):
        parent = item.parent
        is_key = parent is not None and parent.path == CONFIG and item.is_attribute
        if not item.docstring and not is_key and not _in_docstring_of(parent, item.name):
            yield f"{item.path} has no docstring, comment or entry in `Attributes:`"
        for path in sorted(types(item) if item.path not in hidden else ()):
            if path.startswith(f"{PACKAGE}.") and path not in names and not _needs_no_page(path):
                yield f"{item.path} has the type {path}; add it to a page in docs/api"
        text = item.docstring.value if item.docstring else ""
        for name in re.findall(r"\b[Ss]ee `([\w.]+)`", text):
            if name.rpartition(".")[2] in _all_names() and not resolve(name, item, names):
                yield f"{item.path} refers to `{name}`; add that to a page in docs/api"


def types(item: griffe.Object) -> set[str]:
    """Return the paths of all names in an object's annotations."""
    found = []
    if isinstance(item, griffe.Function):
        found = [item.returns, *(parameter.annotation for parameter in item.parameters)]
    elif isinstance(item, griffe.Attribute):
        found = [item.annotation]
    elif isinstance(item, griffe.Class) and "__init__" in item.members:
        return types(item.members["__init__"])  # pyright: ignore[reportArgumentType]
    expressions = [e for e in found if isinstance(e, griffe.Expr)]
    return {
        n.canonical_path for e in expressions for n in e.iterate() if isinstance(n, griffe.ExprName)
    }


def _in_docstring_of(parent: griffe.Object | None, name: str) -> bool:
    """Return whether a class explains its attribute, or has it as a parameter of its signature."""
    if not isinstance(parent, griffe.Class):
        return False
    is_field = "NamedTuple" in map(str, parent.bases) and name in parent.members
    return is_field or name in parent.parameters or name in documented_fields(parent)


def _needs_no_page(path: str) -> bool:
    """Return whether a name is a type variable, a module or another package's name."""
    named = package()[path.removeprefix(f"{PACKAGE}.")]
    if isinstance(named, griffe.Alias) and not named.target_path.startswith(PACKAGE):
        return True
    is_variable = str(getattr(named, "value", "")).startswith(("TypeVar(", "ParamSpec("))
    return is_variable or named.is_module


@functools.cache
def _all_names() -> set[str]:
    """Return the last component of the path of everything in the package."""
    found, left = set(), [package()]
    while left:
        item = left.pop()
        found.add(item.name)
        left += [m for m in item.members.values() if isinstance(m, griffe.Object)]
    return found
