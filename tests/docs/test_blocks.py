"""Every command and Python block of README and docs is run by a test, or says what it needs."""

import re
from pathlib import Path

import pytest

from tests.support.pages import LANGUAGES, PAGES, blocks, reader, runnable

TESTS = Path(__file__).parent
# What a block that no test runs may need; a reason outside of this list needs a discussion.
NEEDS = (
    r"needs (an? |the )?(TPU|v\d\w*-\d+|pod|GPU|Slurm|Google|GPT-J|SmolLM2|wandb|Docker|network"
    r"|bucket|Ray cluster)"
    r"|CI runs"
)
COMMAND = r"\s*(\$ )?(mesh-transformer|python|pip|make|curl|wget|gcloud|gsutil|git|docker|\.venv)\b"


def test_every_page_with_code_is_followed_by_a_test():
    sources = "".join(path.read_text(encoding="utf-8") for path in TESTS.glob("test_*.py"))
    followed = set(re.findall(r'(?:follow|runnable)\("(.+?)"\)', sources))
    assert {page for page in PAGES if runnable(page)} - followed == set()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_that_are_not_run_name_what_they_need(page):
    for block in blocks(page):
        assert block.needs is None or re.match(NEEDS, block.needs, re.IGNORECASE), block


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_other_languages_contain_no_commands(page):
    for block in blocks(page):
        if block.language not in LANGUAGES:
            commands = [line for line in block.text.splitlines() if re.match(COMMAND, line)]
            assert not commands, f"{page}:{block.line}: mark the block as bash"


def test_a_failing_command_names_page_and_line(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```bash\ntrue\nfalse  # fails\n```\n")
    (block,) = blocks(str(page))
    assert (block.line, block.commands) == (4, ["true", "false  # fails"])
    (tmp_path / "reader").mkdir()
    with (
        reader(tmp_path / "reader", monkeypatch) as person,
        pytest.raises(AssertionError, match=r"page\.md:4: exit status 1 of false"),
    ):
        person.run(block)


def test_a_block_is_run_as_written(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a TPU -->\n```bash\nexit 3\n```\n"
        "```bash\n# comment\nmkdir a && echo one \\\n  two > a/file\nmesh-transformer --help\n```\n"
        "```python\nfrom pathlib import Path\n```\nthen\n"
        "```python\nprint(Path('a/file').read_text())\n```\n"
    )
    (tmp_path / "reader").mkdir()
    with reader(tmp_path / "reader", monkeypatch) as person:
        person.follow(str(page))
    printed = capsys.readouterr().out
    assert printed.startswith("usage: mesh-transformer COMMAND")
    assert printed.endswith("one two\n\n")
