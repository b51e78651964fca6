"""Tasks for lm-eval with made-up sentences, and a tokenizer that knows only their words."""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[1] / "data/eval_tasks"
NAMES = ["made_choice", "made_generation", "made_rolling"]
END = "<|endoftext|>"


def documents(kind: str) -> list[dict[str, Any]]:
    """Return the questions in the file of one task."""
    return [json.loads(line) for line in (FOLDER / f"{kind}.jsonl").read_text().splitlines()]


def save_tokenizer(folder: Path) -> str:
    """Save a tokenizer with 64 tokens in the Hugging Face format; returns its folder.

    As in GPT-2's tokenizer, a word and the space before it are one token.
    """
    text = "".join((FOLDER / f"{kind}.jsonl").read_text() for kind in ("choice", "rolling"))
    words = sorted(set(re.findall("[a-z]+", text.lower())) - {"question", "choices", "answer"})
    known = [END, "?", " ", *words, *(f" {word}" for word in words)]
    known += [f" x{letter}" for letter in "abcdefghijklm"[: 64 - len(known)]]
    assert len(known) == 64
    tokenizer = Tokenizer(
        models.WordLevel({token: number for number, token in enumerate(known)}, unk_token="?")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[a-z]+| "), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return str(folder)
