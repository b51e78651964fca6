"""MkDocs hooks: README.md and CONTRIBUTING.md as pages, and what Markdown on a site needs.

README.md, CONTRIBUTING.md and docs/*.md are written for the repository, where links between them
and to other files are relative.  `site_markdown` rewrites the links for the site.
"""

import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import config_keys
import names

ROOT = Path(__file__).resolve().parents[2]
# Files outside of docs/ that are pages of the site.
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
KEYS_MARKER = "<!-- config keys -->"  # where docs/api/config.md gets the table

# Code, which is left alone; then links and images, with their relative target.
CODE_OR_LINK = re.compile(
    r"^(?P<fence>```+).*?^(?P=fence)\s*$"
    r"|(?P<ticks>`+)(?:(?!\n\n).)+?(?P=ticks)(?!`)"
    r"|(?P<image>!?)\[(?P<text>(?:`[^`\n]*`|[^][`])*)\]\((?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


def site_markdown(text: str, source: str, repo_url: str, warn: Callable[[str], None]) -> str:
    """Rewrite the relative links of a page for the site.

    A link to another page, or to an image in docs/, leads to its place on the site.  A link to any
    other file leads to the published repository or, without `repo_url`, becomes its text.

    Args:
      source: path of the page's file, relative to the repository.
      repo_url: URL of the published repository, or "".
      warn: called with a line of text for each link whose file does not exist.
    """

    def rewrite(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if path in MOVED or path.startswith("docs/"):
            here = posixpath.dirname(_place(source)) or "."
            target = posixpath.relpath(_place(path), here) + hash_ + anchor
            return f"{match['image']}[{match['text']}]({target})"
        if not (ROOT / path).exists():
            warn(f"{source}: link {match['target']}: no such file")
        if repo_url:
            return f"[{match['text']}]({repo_url.rstrip('/')}/blob/main/{path}{hash_}{anchor})"
        return match["text"]

    return CODE_OR_LINK.sub(rewrite, text)


def _place(path: str) -> str:
    """Return the place in the site of a file of the repository, relative to docs/."""
    return MOVED.get(path, path.removeprefix("docs/"))


def link_names(text: str, public: set[str]) -> str:
    """Link code spans that are the full path of a public name, such as `mesh_transformer.load`."""

    def link(match: re.Match[str]) -> str:
        path = match[0].strip("`").partition("(")[0]
        is_public = match["ticks"] == "`" and path in public
        return f"[{match[0]}][{path}]" if is_public else match[0]

    return CODE_OR_LINK.sub(link, text)


def on_config(config: "MkDocsConfig", **_: Any) -> "MkDocsConfig":
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors as GitHub makes them
    return config


def on_pre_build(**_: Any) -> None:
    from mkdocs.exceptions import PluginError
    from mkdocs.plugins import get_plugin_logger

    try:
        for line in names.problems():
            get_plugin_logger("site").warning(line)
        config_keys.table()
    except (LookupError, ValueError) as error:
        raise PluginError(str(error)) from None


def on_files(files: "Files", config: "MkDocsConfig", **_: Any) -> "Files":
    from mkdocs.structure.files import File

    for path, place in MOVED.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", **_: Any) -> str:
    from mkdocs.plugins import get_plugin_logger

    place = page.file.src_uri
    source = next((path for path, moved in MOVED.items() if moved == place), f"docs/{place}")
    warn = get_plugin_logger("site").warning
    public = names.public(names.package())
    if KEYS_MARKER in markdown:
        item = names.package()["config.Config"]
        markdown = markdown.replace(KEYS_MARKER, names.linked(config_keys.table(), item, public))
    # Comments such as `not run: a TPU` are for the tests.
    markdown = re.sub(r"^<!--.*-->\n", "", markdown, flags=re.MULTILINE)
    return link_names(site_markdown(markdown, source, config.repo_url or "", warn), {*public})
