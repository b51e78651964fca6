"""A teacher's probabilities in records: which of a server's tokens are which of a text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh_transformer.cli import completion_records
from mesh_transformer.config import Config
from mesh_transformer.data.inputs import BadInputError
from mesh_transformer.data.loader import TFRecordNewInputs
from mesh_transformer.data.teacher import TeacherTokens
from mesh_transformer.data.tokenizer import load_tokenizer, token_bytes
from mesh_transformer.util import InputError

CRAB = "🦀"  # several tokens, each a part of the character


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer()


def sent(tokenizer: Any, tokens: list[int], *, chat: bool) -> dict[str, Any]:
    """Return the logprobs of a server: of the n-th token -n, and of another one -n - 10."""
    texts, other = token_bytes(tokenizer), " other"
    if chat:

        def one(number: int, logprob: float) -> dict[str, Any]:
            return {"token": "?", "bytes": list(texts[number]), "logprob": logprob}

        (second,) = tokenizer(other)["input_ids"]
        content = [
            one(token, -n) | {"top_logprobs": [one(second, -n - 10)]}
            for n, token in enumerate(tokens)
        ]
        return {"content": content}
    words = []
    for token in tokens:
        try:
            words.append(texts[token].decode())
        except UnicodeDecodeError:
            words.append("bytes:" + "".join(f"\\x{byte:02x}" for byte in texts[token]))
    logprobs = [-n for n in range(len(tokens))]
    return {
        "tokens": words,
        "token_logprobs": logprobs,
        "top_logprobs": [{other: x - 10} for x in logprobs],
    }


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("before", "after"), [("", ""), (" ", ""), ("\n", " ")])
def test_tokens_at_the_same_place_are_known(
    tokenizer: Any, chat: bool, before: str, after: str
) -> None:
    """Also if the template strips or adds white space, or tokenises differently."""
    prompt = tokenizer("Say it.")["input_ids"]
    answer = tokenizer(f"Well, {CRAB} yes.")["input_ids"]
    text = tokenizer(f"{before}Well, {CRAB} yes.{after}")["input_ids"]
    end = tokenizer.eos_token_id
    tokens = [*prompt, *text, end]
    has_loss = [False] * len(prompt) + [True] * (len(text) + 1)
    teacher = TeacherTokens(tokenizer, 2)
    ids, logprobs = teacher.alternatives(
        tokens, has_loss, sent(tokenizer, answer, chat=chat), "row 1"
    )
    (other,) = tokenizer(" other")["input_ids"]
    known = 0
    for at, number in enumerate(tokens):
        if at < len(prompt) or number not in answer:
            assert np.isinf(logprobs[at]).all()
            continue
        known += 1
        n = answer.index(number)
        assert list(ids[at]) == [number, other]
        assert list(logprobs[at]) == [-n, -n - 10]
    assert known >= len(answer) - 1
    assert (teacher.known, teacher.counted) == (known, len(text) + 1)


def test_the_end_is_known_if_the_server_sends_it(tokenizer: Any) -> None:
    answer = [*tokenizer("Well")["input_ids"], tokenizer.eos_token_id]
    for numbers, expected in ((answer, 2), ([*answer[:-1], answer[0]], 1)):
        teacher = TeacherTokens(tokenizer, 1)
        teacher.alternatives(
            [0, *answer], [False, True, True], sent(tokenizer, numbers, chat=True), ""
        )
        assert teacher.known == expected


def test_another_answer_is_not_known(tokenizer: Any) -> None:
    tokens = tokenizer("Well, yes.")["input_ids"]
    others = sent(tokenizer, tokenizer("Well, not so.")["input_ids"], chat=True)
    teacher = TeacherTokens(tokenizer, 1)
    teacher.alternatives(tokens, [True] * len(tokens), others, "row 1")
    assert teacher.known == 0
    for wrong in (None, {}, {"tokens": ["a"]}, {"content": [{}]}, {"content": None}):
        with pytest.raises(BadInputError, match="row 1: expected `logprobs`"):
            teacher.alternatives(tokens, [True] * len(tokens), wrong, "row 1")


COMPLETIONS = " one two three", f" {CRAB}"


def write(folder: Path, tokenizer: Any, *flags: str) -> str:
    rows = []
    for completion in COMPLETIONS:
        logprobs = sent(tokenizer, tokenizer(completion)["input_ids"], chat=False)
        rows.append({"prompt": "Count:", "completion": completion, "logprobs": logprobs})
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(path), "set", "--output-dir", str(folder), "--seq", "16", *flags]
    completion_records.main(words)
    return str(folder / "set.index")


@pytest.mark.parametrize("flags", [(), ("--pack",)])
def test_batches_have_what_records_hold(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    index = write(tmp_path, tokenizer, "--teacher-tokens", "3", *flags)
    sizes = [len(tokenizer(text)["input_ids"]) for text in COMPLETIONS]
    share = f"{sum(sizes)} of {sum(sizes) + 2} tokens"  # not the end tokens
    assert f"probabilities are known for {share} of answers" in capsys.readouterr().out
    count = 1 if flags else 2
    batch = TFRecordNewInputs(index, count, 16, teacher=True).get_samples()
    shape = (count, 16, 3)
    ids, logprobs = (batch[f"teacher_{name}"].reshape(shape) for name in ("ids", "logprobs"))
    assert (ids.dtype, logprobs.dtype) == (np.uint32, np.float32)
    known = np.isfinite(logprobs[..., 0])
    np.testing.assert_array_equal(ids[..., 0][known], batch["target"][known])
    np.testing.assert_array_equal(np.isfinite(logprobs).sum(axis=-1), 2 * known)
    assert sorted(-logprobs[..., 0][known]) == sorted(n for size in sizes for n in range(size))
    assert (batch["loss_mask"][known] == 1).all()
    assert "teacher_ids" not in TFRecordNewInputs(index, 1, 16).get_samples()


def test_records_without_a_teacher_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    index = write(tmp_path, tokenizer)
    with pytest.raises(InputError, match=r"no probabilities of a teacher.*--teacher-tokens"):
        TFRecordNewInputs(index, 1, 16, teacher=True)
    flags = ("--teacher-tokens", "2", "--preferences", "labels")
    with pytest.raises(InputError, match="--teacher-tokens excludes --preferences"):
        write(tmp_path, tokenizer, *flags)
    sizes = {"layers": 1, "d_model": 8, "n_heads": 1, "n_vocab": 8}
    for change in ({"distill_kl": "reverse"}, {"distill_temperature": 2.0}):
        with pytest.raises(InputError, match="only forward and 1 are possible"):
            Config(**sizes, teacher="records", **change)
