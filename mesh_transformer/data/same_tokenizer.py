"""Whether two tokenizers are the same: whether they encode, decode and render alike."""

import functools
import hashlib
import json
import os
import re
from typing import Any

from mesh_transformer.data.special_tokens import beginning, special_tokens
from mesh_transformer.data.tokenizer import BUILT_IN, TOKENIZER_FILES, load_tokenizer
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

# Tokens without a use, which pad the vocabulary of GPT-J's tokenizer.
FILLER = re.compile(r"<\|extratoken_\d+\|>")
_ENCODING = ("normalizer", "pre_tokenizer", "model", "added_tokens")


def encoding(tokenizer: Any) -> str:
    """Return a SHA-256 hash of what determines the token ids of a document in records."""
    whole = _definition(tokenizer)
    values = [{key: whole.get(key) for key in _ENCODING}, whole.get("vocabulary")]
    values += [beginning(tokenizer), tokenizer.eos_token_id]
    return _hash(values)


def is_gpt2(folder: str) -> bool:
    """Return whether the tokenizer in a folder does all that GPT-2's does, and nothing else."""
    contents = hashlib.sha256()
    for name in sorted({*TOKENIZER_FILES} & set(files.names(folder))):
        with files.open_file(f"{folder.rstrip('/')}/{name}") as file:
            contents.update(f"{name}\0".encode() + file.read())
    return _is_gpt2(folder, contents.hexdigest())


@functools.cache  # a config is read several times per process, and loading takes seconds
def _is_gpt2(folder: str, contents: str) -> bool:
    definition, behaviour = _gpt2()
    path = os.path.join(folder, "tokenizer.json")
    try:
        if files.is_file(path):  # some classes of transformers replace parts of it
            from tokenizers import Tokenizer

            with files.open_file(path) as file:
                stored = Tokenizer.from_str(file.read().decode())
            if _hash(_canonical(stored.to_str())) != definition:
                return False
        loaded = load_tokenizer(folder)
    except Exception:  # the Rust library raises plain Exception on a damaged file
        return False
    return (_hash(_definition(loaded)), _hash(_behaviour(loaded))) == (definition, behaviour)


@functools.cache
def _gpt2() -> tuple[str, str]:
    gpt2 = load_tokenizer("gpt2")
    return _hash(_definition(gpt2)), _hash(_behaviour(gpt2))


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _behaviour(tokenizer: Any) -> list[Any]:
    """Return what, besides `_definition`, determines how a tokenizer encodes and renders."""
    special = special_tokens(tokenizer).items()
    return [
        sorted((number, name) for number, name in special if not FILLER.fullmatch(name)),
        {
            key: str(value)
            for key, value in tokenizer.special_tokens_map.items()
            if key != "pad_token"  # which has no effect on ids or text
        },
        tokenizer.chat_template,
        tokenizer("a")["input_ids"],
        tokenizer.decode(tokenizer("a , b .", add_special_tokens=False)["input_ids"]),
    ]


def _definition(tokenizer: Any) -> dict[str, Any]:
    """Return the definition of a tokenizer, or its vocabulary if it is implemented in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"vocabulary": tokenizer.get_vocab()}
    return _canonical(backend.to_str())


def _canonical(text: str) -> dict[str, Any]:
    """Return the definition in a tokenizer.json, without what has no effect on ids or text."""
    values = json.loads(text)
    kept = {
        key: _without_defaults(values.get(key)) for key in (*_ENCODING, "post_processor", "decoder")
    }
    last = kept["post_processor"] or {}
    if last.get("type") in ("ByteLevel", "TemplateProcessing") and not last.get("special_tokens"):
        kept["post_processor"] = None  # it adds no tokens
    same = {"normalized"} if kept["normalizer"] is None else set()
    kept["added_tokens"] = [
        {key: value for key, value in token.items() if key not in same}
        for token in kept["added_tokens"] or []
        if not FILLER.fullmatch(token["content"])
    ]
    return kept


def _without_defaults(value: Any) -> Any:
    """Leave out what releases of the package tokenizers write or leave out if it is not set."""
    if isinstance(value, list):
        return [_without_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_defaults(item) for key, item in value.items() if key != "trim_offsets"}
    return {key: x for key, x in kept.items() if x is not None and x is not False and x != ""}


@functools.cache
def check_encoding(recorded: str | None, digest: str | None, name: str, where: str) -> None:
    """Raise InputError if records or a model are not of the tokenizer `name`.

    Tokenizers that cannot be loaded are not compared.

    Args:
      recorded: the name of the tokenizer of the records or the model; None if it is unknown.
      digest: the `encoding` of this tokenizer; None if it is not stored.
      name: the name of the tokenizer to use.
      where: what has the tokenizer `recorded`, for the error message.
    """
    if recorded is None or (recorded == name and (digest is None or name in BUILT_IN)):
        return
    try:
        if (digest or encoding(load_tokenizer(recorded))) == encoding(load_tokenizer(name)):
            return
    except InputError:
        return
    other = name if recorded != name else "the one of that name now"
    raise InputError(
        f"{where} was created with the tokenizer {recorded}, which gives other tokens than "
        f"{other}; use one tokenizer for the model and all of its records (records --tokenizer, "
        "config key tokenizer)"
    )
