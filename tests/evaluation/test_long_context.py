"""Questions about long texts: an independent reader answers them, and scores are its answers'."""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mesh_transformer.__main__ import main
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.evaluation import haystack, long_context
from mesh_transformer.evaluation.long_context import Cell
from mesh_transformer.transformer_shard import CausalTransformer, load
from mesh_transformer.util import InputError

TOKENIZERS = {name: load_tokenizer(name) for name in ("gpt2", "bytes")}
WIDEST = {"gpt2": 12, "bytes": 52}  # tokens of a sentence of filler


def read(text: str) -> list[str]:
    """Return the answer to a prompt, by reading it."""
    body, question = text.split("\n\nQuestion: ")
    name = re.findall(r"\w+", question)[-2]
    if "value" in question:
        values = dict(re.findall(r"(X\d+) = (\w+)\.", body))
        while name in values:
            name = values[name]
        return [name]
    if "frequent" in question:
        ((_, _), *_, (_, least), (_, other)) = counts = Counter(body.split()).most_common(4)
        assert least > other  # the answer is unique
        return [word for word, _ in counts[:3]]
    return re.findall(rf"number of {name} is (\d+)\.", body)


def test_prompts_have_one_answer_which_is_at_its_depth_and_fill_their_length() -> None:
    rng = np.random.default_rng(0)
    for at, task in enumerate(list(haystack.TASKS) * 8):
        name = ("gpt2", "bytes")[at % 2]
        length, depth = int(rng.integers(700, 3000)), float(rng.choice([0, 1, rng.random()]))
        made = [
            haystack.prompt(TOKENIZERS[name], task, length, depth, (seed, at)) for seed in (1, 1, 2)
        ]
        assert made[0] == made[1]
        assert made[0].tokens != made[2].tokens
        tokens, expected = made[0]
        text = TOKENIZERS[name].decode(tokens)
        assert sorted(read(text)) == sorted(expected)
        assert 0 <= length - haystack.ANSWER_TOKENS - len(tokens) < WIDEST[name]
        if task in haystack.WITHOUT_DEPTH:
            continue
        sentences = text.split("\n\n")[0].removesuffix(".").split(". ")
        is_filler = [
            sentence.startswith("The") and "number" not in sentence for sentence in sentences
        ]
        places = [
            sum(is_filler[:n]) for n, x in enumerate(sentences)
            if set(expected) & set(re.findall(r"\d+", x)) or (task == "values" and not is_filler[n])
        ]  # fmt: skip
        assert round(depth * sum(is_filler)) in places
        if task != "values":
            assert len(places) == 1


class Reader:
    """A network that answers like `read`, or only the questions whose number `knows` contains."""

    def __init__(self, tokenizer: Any, knows: Any = range(10**6)):
        self.config: Any = SimpleNamespace(end_tokens=None, window=4096)
        self.batch_size, self.asked, self.knows, self.tokenizer = 3, 0, knows, tokenizer

    def generate(self, ctx: Any, sizes: Any, length: int, options: dict[str, Any]) -> Any:
        assert options == {"temp": 0.0}  # greedy
        rows = np.full((len(ctx), length), self.tokenizer.eos_token_id)
        for row, prompt, size in zip(rows, ctx, sizes, strict=True):
            answer = read(self.tokenizer.decode(prompt[len(prompt) - size :]))
            text = f" {', '.join(answer[::-1])}. Not 5" if self.asked in self.knows else " 5, 6"
            tokens = self.tokenizer(text)["input_ids"][:length]
            row[: len(tokens)] = tokens
            self.asked += 1
        return rows


@pytest.mark.parametrize("name", TOKENIZERS)
def test_accuracy_is_the_share_of_right_answers(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    cells = long_context.cells([*haystack.TASKS], [1200, 800, 800], [1.0, 0.25])
    assert len(cells) == 18
    assert cells[0] == Cell("single", 800, 0.25)
    for knows, mean in ((range(999), 1.0), ((), 0.0), (range(0, 999, 2), 0.5)):
        network: Any = Reader(tokenizer, knows)
        rows = long_context.accuracies(network, tokenizer, cells, questions=2)
        assert network.asked == 2 * 18
        assert [(row["task"], row["length"], row["depth"]) for row in rows] == cells
        assert {(row["mean"], row["prompts"]) for row in rows} == {(mean, 2)}
        low, high = rows[0]["interval"]
        assert low <= mean <= high
        assert (low < high) == (mean == 0.5)


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        (" 482.", ["482"], True),
        (" 4821.", ["482"], False),
        (" 48", ["482"], False),
        (" 123, not 482", ["482"], False),
        ("", ["482"], False),
        (" 7, 8\nand 9, and 10", ["9", "8", "7"], True),
        (" 7, 7, 8 and 9", ["9", "8", "7"], False),
        (" the words Amber, lemon", ["lemon", "amber"], True),
    ],
)
def test_answers_are_right_if_their_first_values_are_those_expected(
    answer: str, expected: list[str], right: bool
) -> None:
    assert haystack.is_right(answer, expected) == right


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["mesh-transformer", "long-context", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0  # type: ignore[return-value]


@pytest.fixture
def model(tmp_path: Path, small) -> str:
    config = small(n_vocab=264, seq=512, tokenizer="bytes", per_replica_batch=4)
    network = CausalTransformer(config)
    network.save(tmp_path / "model")
    network.close()
    return str(tmp_path / "model")


@pytest.mark.slow
def test_the_command_writes_results_and_a_picture(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, output, picture = (tmp_path / name for name in ("t.txt", "r.json", "p.svg"))
    text.write_text("to be or not to be, " * 60)
    words = ["--model-path", model, "--perplexity", text, "--output", output, "--picture", picture]
    asked = ["--tasks", "single", "words", "--lengths", 448, 512, "--questions", 2]
    assert call(monkeypatch, *words, *asked) == 0
    results = json.loads(output.read_text())
    assert len(results["accuracy"]) == 2 * (5 + 1)
    assert {row["prompts"] for row in results["accuracy"]} == {2}
    tokens = np.frombuffer(text.read_bytes(), np.uint8)
    windows = np.stack([tokens[start : start + 513] for start in (0, 512)]).astype(np.uint32)
    batch = {"obs": windows[:, :-1], "target": windows[:, 1:]}
    losses = np.asarray(load(model).eval(batch)["all_loss"], np.float64)
    means = {"0-127": losses[:, :128], "128-255": losses[:, 128:256], "256-511": losses[:, 256:]}
    expected = {name: pytest.approx(part.mean(), rel=1e-6) for name, part in means.items()}
    assert results["loss"] == expected  # f32, in batches of different sizes
    printed = capsys.readouterr().out
    assert "  depth 0.25" in printed
    assert f"positions 256-511               {results['loss']['256-511']:9.4f}" in printed
    drawn = picture.read_text()
    assert all(title in drawn for title in ("single", "words", "perplexity", "depth", "512"))

    for words, line in (
        (["--lengths", 512, 1024], "--lengths has 1024, but the model attends to 512 tokens"),
        (["--lengths", 90], "--lengths has 90, but the shortest prompt of single has"),
        (["--depths", 1.5], "argument --depths: 1.5 is not a number from 0 to 1"),
        (["--tasks"], "--tasks names none; add --perplexity"),
        (["--tasks", "none"], "invalid choice: 'none'"),
        (["--picture", "a.pdf"], "--picture a.pdf: expected a name that ends in .png or .svg"),
        (["--output", "no/r.json"], "--output no/r.json: no is no folder to write to; create it"),
        (["--tasks", "--perplexity", tmp_path / "no.txt"], "no.txt cannot be read"),
        (["--tasks", "--perplexity", tmp_path / "no"], "no"),
    ):
        assert call(monkeypatch, "--model-path", model, *words) == 2
        assert line in capsys.readouterr().err


def test_a_length_that_is_too_short_is_an_error() -> None:
    with pytest.raises(InputError, match="--lengths has 32, but the shortest prompt of keys has"):
        haystack.prompt(TOKENIZERS["bytes"], "keys", 32, 0.5, (0,))
