"""CONTRIBUTING.md names only rooms, paths, make targets and identifiers that exist.

Each rule is a function from the guide's text to a list of errors, so that the tests can also check
that it detects errors.
"""

import functools
import re
from pathlib import Path

import pytest

from tests.test_structure import PACKAGE, ROOMS, ROOT

GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATH = re.compile(
    r"(?<![\w./-])(?:\.?[\w<>*-][\w.<>*-]*/(?:[\w.<>*/-]*[\w>*/])?|[\w-]+\.(?:json|md|py|toml|txt)\b)"
)
# Metrics, and what `make venv` and `make docs` create.
NOT_PATHS = re.compile(r"train/(?:mfu|grad_norm)|(?:\.venv|build)/.*")


def code(text: str) -> list[str]:
    """Return the code blocks and the code spans of a Markdown text."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return blocks + re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def room_errors(text: str) -> list[str]:
    """Compare the table of rooms with `ROOMS`, in order."""
    rooms = re.findall(r"^\| `(\w+)/?` \|", text, re.MULTILINE)
    return [] if rooms == list(ROOMS) else [f"rooms are {rooms}, expected {list(ROOMS)}"]


def path_errors(text: str) -> list[str]:
    """Find paths that exist neither in the repository nor in the package; `<room>` is any name."""
    modules = {name.replace(".", "/") + ".py" for name in re.findall(r"-m ([\w.]+\.\w+)", text)}
    paths = {path for path in PATH.findall(text) if not NOT_PATHS.fullmatch(path)}
    return [
        f"{path} does not exist"
        for path in sorted(paths | modules)
        if not any(any(folder.glob(re.sub("<.*?>", "*", path))) for folder in (ROOT, PACKAGE))
    ]


def target_errors(text: str) -> list[str]:
    """Find targets that the Makefile does not have."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = {name for part in code(text) for name in re.findall(r"\bmake ([\w-]+)", part)}
    return [f"make {name}: no such target" for name in sorted(named - known)]


@functools.cache
def words() -> frozenset[str]:
    """Return every word of the package's and the tests' sources, except those of this file."""
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    text = [path.read_text(encoding="utf-8") for path in sources if path != Path(__file__)]
    return frozenset(re.findall(r"\w+", "\n".join(text)))


def identifier_errors(text: str) -> list[str]:
    """Find identifiers, also dotted ones, that occur nowhere in the package or the tests."""
    dotted = [part for part in code(text) if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", part)]
    names = {name for part in dotted if not PATH.fullmatch(part) for name in part.split(".")}
    return [f"{name} occurs nowhere" for name in sorted(names - words())]


RULES = [room_errors, path_errors, target_errors, identifier_errors]


@pytest.mark.parametrize("rule", RULES)
def test_the_guide_follows_the_rule(rule):
    assert not rule(GUIDE), "\n".join(rule(GUIDE))


def test_the_guide_has_paths_targets_and_code_to_check():
    assert len(PATH.findall(GUIDE)) > 50
    assert len(set(re.findall(r"\bmake ([\w-]+)", "\n".join(code(GUIDE))))) >= 4
    assert len(code(GUIDE)) > 100


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (room_errors, GUIDE.replace("| `mesh/` |", "| `meshes/` |")),
        (room_errors, re.sub(r"^\| `util` .*\n", "", GUIDE, flags=re.MULTILINE)),
        (path_errors, "see `model/layer.py`"),
        (path_errors, "see tests/model/test_layer.py."),
        (path_errors, "`tests/<room>/tests_*.py`"),
        (path_errors, "the folder `meshes/`"),
        (path_errors, "`setups.py`"),
        (path_errors, "```bash\npython -m tests.long.fault bucket\n```"),
        (target_errors, "`make tests`"),
        (target_errors, "```bash\nmake check   # all\n```"),
        (identifier_errors, "`TransformerLayers`"),
        (identifier_errors, "`transformer.declarationz`"),
    ],
)
def test_a_rule_detects_an_error(rule, text):
    assert len(rule(text)) == 1


def test_the_readme_links_the_guide():
    assert "(CONTRIBUTING.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
