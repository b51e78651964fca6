"""The quickstart's commands, folder and verdict, with a fake program in place of training."""

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_transformer.cli.arguments import Parser
from mesh_transformer.cli.main import main as mesh_transformer
from mesh_transformer.util import InputError
from scripts import quickstart

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with the only file of a checkout that the quickstart reads, as working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


@pytest.fixture
def fake_programs(monkeypatch):
    """Return a function that replaces all programs by one that writes a run's losses."""

    def fake(first: float, last: float) -> list[list[str]]:
        commands = []

        def run(command, check):
            commands.append(command[1:])
            if "--model-dir" in command:
                model = Path(command[command.index("--model-dir") + 1])
                model.mkdir(exist_ok=True)
                rows = [{"train/loss": first}] * 10 + [{"train/loss": last}] * 10
                (model / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
            return subprocess.CompletedProcess(command, 0)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return fake


class ParsedError(Exception):
    """The arguments of a command are valid; raised to end the command there."""


def check_arguments(words: list[str], monkeypatch) -> None:
    """Check that a command of mesh-transformer accepts its arguments, without running it."""
    parse = Parser.parse_known_args

    def parse_and_end(self, *args):
        _, unknown = parse(self, *args)
        assert unknown == []
        raise ParsedError

    monkeypatch.setattr(sys, "argv", ["mesh-transformer", *words])
    with monkeypatch.context() as patched:
        patched.setattr(Parser, "parse_known_args", parse_and_end)
        with pytest.raises(ParsedError):
            mesh_transformer()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_help_starts_nothing(place, monkeypatch, capsys, fake_programs):
    commands = fake_programs(10, 5)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        quickstart.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: quickstart.py [-h] [--steps STEPS]\n")
    assert commands == []
    assert {path.name for path in place.iterdir()} == {"configs"}


def test_commands_are_printed_as_they_run_and_valid(place, monkeypatch, capsys, fake_programs):
    commands = fake_programs(10, 7.9)
    assert quickstart.main() == 0
    out = capsys.readouterr().out
    printed = [shlex.split(part)[:2] for part in out.split("\n$ ")[1:]]
    for command, words in zip(commands, printed, strict=True):
        if command[0] == "-m":
            assert words == ["mesh-transformer", command[2]]
            check_arguments(command[2:], monkeypatch)
        else:
            assert words == ["python", command[0]]
            assert (ROOT / command[0]).exists()
    end = out.partition("\nNext, ")[2].splitlines()[1:]
    suggested = [line.split("#")[0].split() for line in end if line.startswith("  ")]
    assert [words[:2] for words in suggested] == [
        ["mesh-transformer", "sample"],
        ["mesh-transformer", "serve"],
    ]
    for words in suggested:
        assert Path(words[-1]).is_dir()
        check_arguments(words[1:], monkeypatch)
    assert (ROOT / end[-1].split()[0]).exists()


@pytest.mark.parametrize(
    ("words", "until"), [([], ["80", "120"]), (["--steps", "61"], ["41", "61"])]
)
def test_a_third_of_the_steps_is_on_the_second_mesh(
    place, monkeypatch, fake_programs, words, until
):
    commands = fake_programs(10, 5)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *words])
    assert quickstart.main() == 0
    trained = [command for command in commands if "--max-steps" in command]
    assert [command[command.index("--max-steps") + 1] for command in trained] == until


@pytest.mark.parametrize(("last", "status"), [(7.9, 0), (8.1, 1)])
def test_losses_must_fall_by_2_nats(place, capsys, fake_programs, last, status):
    fake_programs(10, last)
    assert quickstart.main() == status
    assert ("at least 2 nats" in capsys.readouterr().err) == bool(status)


def test_existing_folders_are_left_as_they_are(place, capsys, fake_programs):
    mine = place / "build/quickstart/model"
    mine.mkdir(parents=True)
    (mine / "metrics.jsonl").write_bytes(random.randbytes(100))
    (place / "build/quickstart-2").write_text("a file")
    before = contents(place / "build")
    fake_programs(10, 5)
    for number in (3, 4):
        assert quickstart.main() == 0
        assert capsys.readouterr().out.startswith(f"writing to build/quickstart-{number}\n")
        new = contents(place / "build")
        assert new.items() > before.items()
        assert {name.split("/")[0] for name in new.keys() - before.keys()} == {
            f"quickstart-{number}"
        }
        before = new


def test_another_folder_than_a_checkout_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    with pytest.raises(InputError, match=r"configs/tiny.json is not in this folder; run "):
        quickstart.main()
    assert list(tmp_path.iterdir()) == []
