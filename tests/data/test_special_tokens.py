"""Prompts and records are tokenised alike: prompts are beginnings of documents."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mesh_transformer.cli import completion_records, text_records
from mesh_transformer.config import Config
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.data.special_tokens import prompt_tokens
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.evaluation.network_lm import DryRunLM
from mesh_transformer.serving.repl import Repl, Settings
from mesh_transformer.training.loop import train
from mesh_transformer.transformer_shard import CausalTransformer
from tests.conftest import SMALL
from tests.support.live_server import Live

UNKNOWN, BEGIN, END = 0, 1, 2
WORDS = [f"n{number}" for number in range(29)]  # as tokens 3 and up
AROUND = {"none": "$A", "begin": "[B] $A", "end": "$A [E]", "both": "[B] $A [E]"}


@pytest.fixture(params=AROUND)
def tokenizer(request, tmp_path) -> Any:
    """A tokenizer of words, which adds special tokens to a text before it, after it, or both."""
    names = ["[U]", "[B]", "[E]", *WORDS]
    words = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[U]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        AROUND[request.param], special_tokens=[("[B]", BEGIN), ("[E]", END)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[U]", bos_token="[B]", eos_token="[E]"
    ).save_pretrained(tmp_path / "tokenizer")
    loaded: Any = load_tokenizer(tmp_path / "tokenizer")
    loaded.first = [BEGIN] if "[B]" in AROUND[request.param] else []
    return loaded


def ids(words: list[str]) -> list[int]:
    return [3 + WORDS.index(word) for word in words]


def tokens_of(folder: Path, name: str, seq: int) -> np.ndarray:
    changes = {"n_vocab": 32, "seq": seq, "tpu_size": 1, "cores_per_replica": 1}
    changes |= {"tokenizer": str(folder / "tokenizer"), "train_set": str(folder / f"{name}.index")}
    config = Config.of(SMALL | changes | {"gradient_accumulation_steps": 1})
    batches = open_train_set(config, 1)
    batch = batches.get_samples()
    batches.close()
    return np.concatenate([batch["obs"][0, 0], batch["target"][0, 0, -1:]])


def test_prompts_are_the_beginnings_of_documents(tokenizer, tmp_path):
    rng = np.random.default_rng(0)
    documents = [list(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(8)]
    lines = [json.dumps({"text": " ".join(words)}) for words in documents]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    expected = [[*tokenizer.first, *ids(words), END] for words in documents]
    seq = sum(map(len, expected)) - 1
    common = ["--output-dir", str(tmp_path), "--tokenizer", str(tmp_path / "tokenizer")]
    flags = [*common, "--seq", str(seq), "--preserve-data-order"]
    text_records.main([str(tmp_path / "a.jsonl"), "a", *flags])
    assert tokens_of(tmp_path, "a", seq).tolist() == list(chain(*expected))
    for words, document in zip(documents, expected, strict=True):
        cut = int(rng.integers(1, len(words) + 1))
        prompt, start = " ".join(words[:cut]), document[: len(tokenizer.first) + cut]
        assert prompt_tokens(tokenizer, prompt) == start
        assert prompt_tokens(tokenizer, "[B] " + prompt)[-1 - cut :] == [BEGIN, *ids(words[:cut])]
        model = DryRunLM(Config.of(SMALL | {"n_vocab": 32}), tokenizer)
        assert model.tok_encode(prompt) == start
        assert model._encode_pair(prompt, " " + words[0]) == (start, ids(words[:1]))
    # After a token that is in front of every document, or ends the one before, a text begins.
    assert prompt_tokens(tokenizer, "") == [BEGIN]
    pairs = [{"prompt": " ".join(words[:1]), "completion": words[1]} for words in documents]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    completion_records.main([str(tmp_path / "p.jsonl"), "p", *common, "--seq", "6"])
    start = [*tokenizer.first, *ids(documents[0][:2]), END]
    assert tokens_of(tmp_path, "p", 6).tolist()[: len(start)] == start


@pytest.mark.slow
def test_a_memorised_text_is_continued_from_any_prefix(tokenizer, tmp_path):
    rng = np.random.default_rng(1)
    words = [*rng.permutation(WORDS), *rng.permutation(WORDS[:4])]
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": " ".join(words)}) + "\n") * 60)
    flags = ["--output-dir", str(tmp_path), "--tokenizer", str(tmp_path / "tokenizer")]
    text_records.main([str(tmp_path / "a.jsonl"), "a", *flags, "--seq", "36"])
    changes = {"layers": 2, "d_model": 64, "n_heads": 2, "pe_rotary_dims": 16, "n_vocab": 32}
    changes |= {"seq": 36, "tpu_size": 1, "cores_per_replica": 1, "per_replica_batch": 1}
    changes |= {"gradient_accumulation_steps": 1, "warmup_steps": 5, "anneal_steps": 120}
    changes |= {"total_steps": 120, "lr": 1e-2, "end_lr": 1e-3, "weight_decay": 0.0}
    changes |= {"tokenizer": str(tmp_path / "tokenizer"), "train_set": str(tmp_path / "a.index")}
    changes |= {"dtype": "float32", "ckpt_every": 1000, "val_set": {}}
    network: Any = CausalTransformer(SMALL | changes, init=False)
    train(network, tmp_path / "run", validate=False)
    repl = Repl(network, tokenizer, Settings(temp=0, length=34))
    live = Live(network, tokenizer, None)
    try:
        for cut in (1, 2, 17, 32):
            prompt, rest = " ".join(words[:cut]), " ".join(words[cut:])
            assert "".join(piece for piece, _ in repl.answer(prompt)).strip() == rest
            (choice,) = live.ask(prompt=prompt, max_tokens=34, temperature=0)["choices"]
            assert (choice["text"].strip(), choice["finish_reason"]) == (rest, "stop")
    finally:
        live.close()
