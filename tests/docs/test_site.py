"""The documentation site: every page is in its navigation, every link leads somewhere.

Every public name is explained, and the types and names that it refers to have a place on a page.
"""

import dataclasses
import importlib.util
import json
import re
from types import ModuleType
from typing import Any

import pytest
import yaml

from mesh_transformer.config import Config
from tests.test_structure import ROOT

DOCS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", *DOCS)


def module(name: str) -> ModuleType:
    """Import a module of docs/site, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/site/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def prose(text: str) -> str:
    """Return a Markdown text without its code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub and the site give to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    slugs = []
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        slugs.append(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
    return set(slugs)


def link_errors(page: str, text: str) -> list[str]:
    """Find the relative links of a page that lead to no file, or to no heading of it."""
    errors = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            errors.append(f"{page}: link {target}: no such file")
        elif anchor and anchor not in anchors(text if not path else file.read_text("utf-8")):
            errors.append(f"{page}: link {target}: the page has no such heading")
    return errors


def entries(nav: Any) -> list[str]:
    """Return the pages in the navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in entries(part)]


def test_every_page_is_in_the_navigation_once():
    nav = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    moved = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
    places = [moved.get(page, page.removeprefix("docs/")) for page in PAGES]
    missing = sorted(set(places) - set(nav))
    assert not missing, f"mkdocs.yml: add {', '.join(missing)} to nav"
    assert sorted(nav) == sorted(places)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    errors = link_errors(page, (ROOT / page).read_text("utf-8"))
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("[a](records.md), [b](../README.md#start), [c](https://example.com)", 0),
        ("[a](record.md)", 1),
        ("[a](../README.md#begin)", 1),
        ("# One: `two_three`, 4\n[a](#one-two_three-4)", 0),
        ("# One\n[a](#two)", 1),
        ("`[a](b)`\n\n```\n[a](b)\n```\n", 0),
    ],
)
def test_a_link_is_checked(text, errors):
    assert len(link_errors("docs/pods.md", text)) == errors


def test_the_table_of_config_keys_has_every_key_with_its_default():
    rows = re.findall(
        r"^\| `(\w+)` \| .+? \| (.+?) \| \S.* \|$", module("config_keys").table(), re.M
    )
    expected = []
    for field in dataclasses.fields(Config):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        is_required = default is dataclasses.MISSING
        expected.append((field.name, "required" if is_required else f"`{json.dumps(default)}`"))
    assert rows == expected


@pytest.mark.slow
def test_every_public_name_is_explained(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/site")  # its modules import each other
    assert list(module("names").problems()) == []


def test_a_config_key_without_a_comment_is_an_error():
    source = "class Config:\n    # Model.\n    layers: int  # layers\n    seq: int = 2\n"
    with pytest.raises(ValueError, match=r"key seq has no comment"):
        module("config_keys").table(source)
