"""The mesh-transformer command: its list of commands, exit statuses, and flags shared by all."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mesh_transformer
from mesh_transformer.__main__ import main
from mesh_transformer.cli import keys
from mesh_transformer.cli.arguments import Parser, model_arguments, model_parser, run_parser
from mesh_transformer.cli.main import COMMANDS
from mesh_transformer.config import Config
from mesh_transformer.util import InputError

ROOT = Path(__file__).resolve().parents[2]


def call(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["mesh-transformer", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_help_lists_every_command_in_one_line(monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys)
    assert status == 0
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)
    assert call(monkeypatch, capsys, "--help")[1] == out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_names_the_command(monkeypatch, capsys, name):
    status, out, _ = call(monkeypatch, capsys, name, "--help")
    assert status == 0
    assert out.startswith(f"usage: mesh-transformer {name} ")


def test_version_is_printed(monkeypatch, capsys):
    version = f"mesh-transformer {mesh_transformer.__version__}\n"
    assert call(monkeypatch, capsys, "--version")[:2] == (0, version)


def test_unknown_command_is_refused(monkeypatch, capsys):
    status, _, err = call(monkeypatch, capsys, "smaple")
    line = "error: mesh-transformer smaple: no such command; did you mean sample?\n"
    assert (status, err) == (2, line)


def test_module_runs_the_command():
    command = [sys.executable, "-m", "mesh_transformer", "--version"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == f"mesh-transformer {mesh_transformer.__version__}\n"


def test_flags_may_be_written_with_underscores():
    parser = run_parser("")
    args = parser.parse_args(["--config", "c", "--max_steps", "3", "--model_dir=a_b"])
    assert (args.max_steps, args.model_dir) == (3, "a_b")


def test_words_after_a_double_hyphen_are_kept():
    parser = Parser()
    parser.add_argument("words", nargs="*")
    assert parser.parse_args(["--", "--a_b"]).words == ["--a_b"]


@pytest.mark.slow
def test_set_overrides_the_config_file(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--config", "tiny", "--set", "layers=2", "--set", "name=3", "--set", "bucket=b"]
    _, config = model_arguments(model_parser("").parse_args(words))
    values = json.loads((ROOT / "configs/tiny.json").read_text())
    assert config == Config(**values | {"layers": 2, "name": "3", "bucket": "b"})


@pytest.mark.parametrize("path", ["tiny", "tiny.json", "configs/tiny.json"])
def test_shipped_configs_are_found_by_name_in_any_folder(monkeypatch, tmp_path, path):
    monkeypatch.chdir(tmp_path)
    assert Config.load(path) == Config.load(str(ROOT / "configs/tiny.json"))


def test_own_config_precedes_a_shipped_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    values = json.loads((ROOT / "configs/tiny.json").read_text()) | {"layers": 7}
    (tmp_path / "tiny.json").write_text(json.dumps(values))
    assert Config.load("tiny.json").layers == 7


def test_name_finds_the_config_in_configs_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    values = json.loads((ROOT / "configs/tiny.json").read_text()) | {"layers": 7}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/tiny.json").write_text(json.dumps(values))
    assert Config.load("tiny").layers == 7


def test_keys_lists_every_config_key_with_its_type_default_and_meaning(capsys):
    keys.main([])
    out = capsys.readouterr().out
    found = re.findall(r"^  (\w+): \S.*; (?:required|default .+)\n      \S", out, re.MULTILINE)
    assert found == [field.name for field in dataclasses.fields(Config)]
    assert '  norm: "layernorm", ' in out  # the values, not the name of their type


def test_keys_finds_words_in_names_and_meanings(capsys):
    keys.main(["ZeRO", "replicas"])
    out = capsys.readouterr().out
    assert re.findall(r"^  (\w+):", out, re.MULTILINE) == ["zero", "early_collect"]
    assert "      ZeRO stage. null: 0 in version 1; in version 2, 1 if early_collect is\n" in out
    with pytest.raises(InputError, match=r"^no config key has quux in its name or meaning$"):
        keys.main(["quux"])
