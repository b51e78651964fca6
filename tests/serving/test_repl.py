"""The REPL with a small model: its answers, its commands and its start."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh_transformer.data.reasoning import Reasoning
from mesh_transformer.serving.repl import COMMANDS, Repl, Settings
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import SMALL

ROOT = Path(__file__).resolve().parents[2]
QUIET = Settings(seed=5, length=9)


class Letters:
    """A tokenizer whose tokens are ASCII; 0 ends a text."""

    eos_token_id = 0
    added_tokens_decoder, all_special_ids, all_special_tokens = {}, (0,), ("\0",)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("ascii"))}

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("ascii")


@pytest.fixture(scope="module")
def network() -> CausalTransformer:
    return CausalTransformer(SMALL | {"seq": 32, "tpu_size": 2})


@pytest.fixture
def repl(network, monkeypatch) -> Any:
    """A function that runs a conversation with the typed lines and returns its `Repl`."""

    def typed(*lines: str, settings: Settings = QUIET) -> Repl:
        waiting = iter(lines)

        def read(prompt: str) -> str:
            try:
                return next(waiting)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)
        conversation = Repl(network, Letters(), settings)
        conversation.run()
        return conversation

    return typed


def text_of(network: CausalTransformer, prompt: str, settings: Settings) -> str:
    tokens = np.array([list(prompt.encode())])
    generated = network.generate(tokens, [len(prompt)], settings.length, settings.options())
    return Letters().decode(generated[0].tolist()).partition("\0")[0]


@pytest.mark.slow
def test_answers_match_generate(network, repl, capsys):
    repl("hello", "/seed 7", "/temp 1.5", "hello", "", "never read")
    out, err = capsys.readouterr()
    other = Settings(seed=7, temp=1.5, length=9)
    expected = [text_of(network, "hello", settings) for settings in (QUIET, other)]
    assert out == "".join(f"{text}\n" for text in expected)
    assert expected[0] != expected[1]
    assert err.count("[9 tokens, ") == 2


@pytest.mark.slow
def test_long_prompt_is_cut_from_the_left_with_a_message(network, repl, capsys):
    repl("x" * 20 + "y" * 32)
    out, err = capsys.readouterr()
    assert "the prompt has 52 tokens; only the last 32 (the model's window) are used" in err
    assert out == text_of(network, "y" * 32, QUIET) + "\n"


def test_stop_sequence_ends_an_answer(network, repl, capsys):
    text = text_of(network, "hello", QUIET)
    repl(f"/stop {text[3:5]}", "hello", "/stop none", "hello")
    out = capsys.readouterr().out
    assert out == f"{text[: text.index(text[3:5])]}\n{text}\n"


def test_end_of_text_token_ends_an_answer(network):
    text = text_of(network, "hello", QUIET)
    letters = Letters()
    letters.eos_token_id = ord(text[4])
    pieces = [piece for piece, _ in Repl(network, letters, QUIET).answer("hello")]
    assert "".join(pieces) == text[: text.index(text[4])]


class Turns:
    """A chat template that joins the messages, and marks an answer by <."""

    def __init__(self) -> None:
        self.rendered: list[list[str]] = []

    def reasoning(self, prompt: str) -> Reasoning | None:
        assert prompt.endswith("<")
        return None

    def prompt(self, messages: list[dict[str, str]]) -> str:
        self.rendered.append([message["content"] for message in messages])
        return "".join(f"{message['role'][0]}{message['content']}" for message in messages) + "<"


def test_a_chat_has_turns(network, capsys, monkeypatch):
    """Each message is answered with those before it in mind, until /new."""
    lines = iter(["hi", "yo", "/new", "yo", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    template: Any = Turns()
    Repl(network, Letters(), QUIET, template).run()
    out, err = capsys.readouterr()
    first = text_of(network, "uhi<", QUIET)
    second = text_of(network, f"uhia{first}uyo<"[-32:], QUIET)
    alone = text_of(network, "uyo<", QUIET)
    assert out == f"{first}\n{second}\n{alone}\n"
    assert template.rendered == [["hi"], ["hi", first, "yo"], ["yo"]]
    assert "/new forgets the conversation" in err


def test_reasoning_is_printed_apart_and_forgotten(network, capsys, monkeypatch):
    text = f"<think>\n{'x' * 9}\n</think>\n\nyes"
    monkeypatch.setattr(Repl, "_generate", lambda *_: ([ord(letter)] for letter in text))
    lines = iter(["hi", "yo", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    template: Any = Turns()
    template.reasoning = lambda _: Reasoning()
    Repl(network, Letters(), QUIET, template).run()
    out, err = capsys.readouterr()
    assert out == "yes\nyes\n"
    assert f"\n{'x' * 9}\n[" in err
    assert template.rendered == [["hi"], ["hi", "yes", "yo"]]


def test_commands_change_one_setting():
    cases = {
        "/temp 0.5": {"temp": 0.5},
        "/top-p 0.3": {"top_p": 0.3},
        "/top_k 7": {"top_k": 7},
        "/min_p 0.1": {"min_p": 0.1},
        "/typical_p 0.7": {"typical_p": 0.7},
        "/repetition_penalty 1.2": {"repetition_penalty": 1.2},
        "/presence_penalty 1": {"presence_penalty": 1.0},
        "/frequency-penalty -0.5": {"frequency_penalty": -0.5},
        "/seed none": {"seed": None},
        "/length 3": {"length": 3},
        "/stop \\n\\nQ:": {"stop": "\n\nQ:"},
        "/stop none": {"stop": None},
    }
    assert {command.split()[0].strip("/").replace("-", "_") for command in cases} == set(COMMANDS)
    for command, changes in cases.items():
        assert QUIET.changed(command) == Settings(**({"seed": 5, "length": 9} | changes))
    assert len(str(QUIET).splitlines()) == len(COMMANDS)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/heat 1", "/heat: no such setting; /help lists the settings"),
        ("/temp", "/temp : expected a number"),
        ("/temp warm", "/temp warm: expected a number"),
        ("/top_k 1.5", "/top_k 1.5: expected a whole number"),
        ("/top_p -1", "generate: top_p is -1.0, expected a number of at least 0"),
        ("/temp nan", "generate: temp is nan, expected a number of at least 0"),
        ("/length 0", "generate: gen_length is 0, expected at least 1"),
        (
            "/repetition_penalty 0",
            "generate: repetition_penalty is 0.0, expected a number from 0.01 to 100.0",
        ),
    ],
)
def test_bad_command_prints_one_line_and_changes_nothing(repl, capsys, command, message):
    assert repl(command, "/help").settings == QUIET
    err = capsys.readouterr().err.splitlines()
    assert err[1] == f"error: {message}"
    assert err[2].startswith("/temp 0.8")


def test_interrupted_answer_does_not_affect_the_next(network, repl, monkeypatch, capsys):
    text = text_of(network, "hello", QUIET)
    calls = []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return decode(self, *arguments)

    from mesh_transformer.generation.batch import Batch

    decode = Batch.decode
    monkeypatch.setattr(Batch, "decode", interrupted)
    repl("hello", "hello")
    assert capsys.readouterr().out == f"{text[0]}\n{text}\n"


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    program = f"""
import jax, numpy as np
from mesh_transformer.mesh.program import use_compilation_cache
from mesh_transformer.transformer_shard import CausalTransformer
use_compilation_cache()
misses = []
jax.monitoring.register_event_listener(
    lambda event, **_: misses.append(event) if event.endswith("/cache_misses") else None
)
network = CausalTransformer({SMALL | {"seq": 32, "tpu_size": 2}})
network.generate(np.ones((2, 5), int), [5, 3], 7)
print(len(misses))
"""

    def misses() -> int:
        environment = {"MESH_TRANSFORMER_CACHE": str(tmp_path / "made"), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return int(done.stdout)

    assert misses() > 3
    assert misses() == 0
