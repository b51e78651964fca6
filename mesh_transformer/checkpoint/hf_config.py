"""What a Hugging Face folder of GPT-J says beside its weights: its config and its tokenizer."""

import hashlib
import importlib.metadata
import os
import re
import shutil
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.checkpoint.hf_files import read_json, write_json
from mesh_transformer.config import Config
from mesh_transformer.data.storage import local_path
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.util import InputError

# Their config's key -> ours.
_SIZES = {
    "n_layer": "layers",
    "n_embd": "d_model",
    "n_head": "n_heads",
    "vocab_size": "n_vocab",
    "n_positions": "seq",
    "rotary_dim": "pe_rotary_dims",
}
_DEFAULTS = {"n_positions": 2048, "rotary_dim": 64}
# What GPT-J's config may say otherwise, but our model does not: the one value that it computes
# with, which is also what a missing key means there.
_FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
# The sha256 of GPT-2's words in the order of their numbers, a line each.
_GPT2_WORDS = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"
_FILLER = re.compile(r"<\|extratoken_\d+\|>")


def read_config(folder: str) -> Config:
    """The model that a folder's config.json describes; our other keys have their defaults.

    `tokenizer` is the folder itself where it holds one other than GPT-2's.  Raises InputError for
    what is no GPT-J, or computes otherwise than ours.
    """
    path = os.path.join(folder, "config.json")
    values = read_json(path)
    if values.get("model_type") != "gptj":
        raise InputError(f"{path}: model_type is {values.get('model_type')!r}, expected 'gptj'")
    for key, expected in _FIXED.items():
        if values.get(key, expected) != expected:
            raise InputError(f"{path}: {key} is {values[key]!r}; this model has {expected!r} alone")
    ours = {}
    for key, name in _SIZES.items():
        size = values.get(key, _DEFAULTS.get(key))
        if type(size) is not int or size < 1:
            raise InputError(f"{path}: {key} is {size!r}, expected a whole number above 0")
        ours[name] = size
    inner = values.get("n_inner")
    if inner not in (None, 4 * ours["d_model"]):
        raise InputError(f"{path}: n_inner is {inner!r}; this model has 4 * n_embd or null alone")
    ours["tokenizer"] = _tokenizer_in(folder)
    return Config.from_dict(ours, path)


def _tokenizer_in(folder: str) -> str:
    """The folder where it holds a tokenizer of its own, else "gpt2", which needs no folder.

    GPT-J's released one is GPT-2's with words added that only fill its vocabulary up.
    """
    whole, vocabulary, merges, more = (
        os.path.join(folder, name)
        for name in ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
    )
    if os.path.isfile(whole):
        words, added = _words_in(whole)
    elif os.path.isfile(vocabulary) and os.path.isfile(merges):
        words = read_json(vocabulary)
        added = set(read_json(more)) if os.path.isfile(more) else set()
    else:
        return "gpt2"
    if isinstance(words, dict) and all(type(number) is int for number in words.values()):
        text = "\n".join(sorted(words, key=words.__getitem__))
        fillers = all(word in words or _FILLER.fullmatch(word) for word in added)
        if fillers and hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() == _GPT2_WORDS:
            return "gpt2"
    return local_path(folder)


def _words_in(path: str) -> tuple[Any, set[str]]:
    """The vocabulary of a tokenizer.json, which only some kinds have as a dict; what is added."""
    values = read_json(path)
    try:
        added = {str(entry["content"]) for entry in values.get("added_tokens", [])}
        return values["model"].get("vocab"), added
    except (AttributeError, KeyError, TypeError):
        raise InputError(
            f"{path}: no tokenizer as Hugging Face has them, with a mapping `model` and a list "
            "`added_tokens`; copy the folder anew"
        ) from None


def check_expressible(config: Config) -> None:
    """InputError where Hugging Face's GPT-J has no such model."""
    wanted = {
        "block": "gptj",
        "norm": "layernorm",
        "pe": "rotary",
        "head_size": config.d_model // config.n_heads,
        "attention_window": config.seq,
    }
    for key, value in wanted.items():
        if getattr(config, key) != value:
            raise InputError(
                f"config: {key} is {getattr(config, key)!r}, but Hugging Face's GPT-J has "
                f"{value!r} alone; keep this model in the native or the original's format"
            )


def write_configs(
    folder: str, config: Config, rows: int, dtype: np.dtype, end_of_text: int | None
) -> None:
    """config.json and generation_config.json, with the keys that transformers writes.

    `end_of_text` is the token at which generation stops.
    """
    tokens = {
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "transformers_version": importlib.metadata.version("transformers"),
    }
    values = {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    values |= {
        "vocab_size": rows,
        "n_inner": None,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    values |= {"architectures": ["GPTJForCausalLM"], "model_type": "gptj"}
    # transformers 5 reads dtype, 4 torch_dtype.
    values |= {"dtype": dtype.name, "torch_dtype": dtype.name, "pad_token_id": None}
    values |= {"initializer_range": 0.02, "use_cache": True}
    write_json(os.path.join(folder, "config.json"), values | _FIXED | tokens)
    generation = {"_from_model_config": True} | tokens
    write_json(os.path.join(folder, "generation_config.json"), generation)


class Tokenizer(NamedTuple):
    """The tokenizer that goes with the weights; `fits` where the model's vocabulary holds it."""

    source: str
    loaded: Any  # of a class of transformers, which tokenizer.py alone imports
    fits: bool

    @classmethod
    def of(cls, given: str | None, config: Config, must_fit: bool) -> "Tokenizer":
        """The given one, which must fit, or the config's."""
        source = given or config.tokenizer
        try:
            loaded = load_tokenizer(source)
        except InputError as error:
            if given:
                raise
            raise InputError(
                f"{error}; where the model's own has gone, name another: --tokenizer, or the "
                "config's key"
            ) from None
        fits = len(loaded) <= config.n_vocab
        if not fits and (given or must_fit):
            raise InputError(
                f"tokenizer {source}: has {len(loaded)} tokens, more than n_vocab "
                f"{config.n_vocab}; give the model's own"
            )
        return cls(source, loaded, fits)

    def save(self, folder: str) -> None:
        """Copies its files, or writes them where it is no Hugging Face folder; none if too big."""
        if not self.fits:
            print(
                f"tokenizer {self.source}: left out, as its {len(self.loaded)} tokens are more "
                "than the model has; give the model's own (--tokenizer)"
            )
            return
        paths = [os.path.join(self.source, name) for name in _TOKENIZER_FILES]
        found = [path for path in paths if self.source != "gpt2" and os.path.isfile(path)]
        for path in found:
            shutil.copy(path, folder)
        if not found:
            self.loaded.save_pretrained(folder)
