"""The tokenizer that is stored with a model in a Hugging Face folder or a GGUF file."""

import hashlib
import os
from typing import Any

from mesh_transformer.checkpoint.stored_tensors import read_json
from mesh_transformer.data.gguf_header import is_gguf, read_header
from mesh_transformer.data.gguf_tokenizer import has_tokenizer
from mesh_transformer.data.same_tokenizer import is_gpt2
from mesh_transformer.data.tokenizer import TEMPLATE
from mesh_transformer.storage import files
from mesh_transformer.storage.access import local_path
from mesh_transformer.util import InputError

# The SHA-256 of GPT-2's tokens in the order of their ids, one per line.
_GPT2_DIGEST = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"


def tokenizer_in(folder: str) -> str:
    """Return the value of the config key `tokenizer` for a folder or file: its path, or "gpt2".

    The result is "gpt2" if the folder holds no tokenizer, or one that does exactly what GPT-2's
    does, as GPT-J's released one: the tokens that it adds only pad the vocabulary.
    """
    if is_gguf(folder):
        return folder if has_tokenizer(read_header(folder)) else "gpt2"
    names = set(files.names(folder))
    if "tokenizer.json" in names:
        vocabulary = _read_vocabulary(os.path.join(folder, "tokenizer.json"))
    elif {"vocab.json", "merges.txt"} <= names:
        vocabulary = read_json(os.path.join(folder, "vocab.json"))
    else:
        other = names & {"tokenizer_config.json", "tokenizer.model"}
        return local_path(folder) if other else "gpt2"
    if isinstance(vocabulary, dict) and all(type(id_) is int for id_ in vocabulary.values()):
        text = "\n".join(sorted(vocabulary, key=vocabulary.__getitem__))
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        if digest == _GPT2_DIGEST and is_gpt2(folder):  # the second check takes seconds
            return "gpt2"
    return local_path(folder)


def template_in(folder: str) -> str | None:
    """Return the chat template in a folder or GGUF file, of several the default one, or None."""
    if is_gguf(folder):
        return read_header(folder).get("tokenizer.chat_template", str, "") or None
    jinja, config = (os.path.join(folder, name) for name in (TEMPLATE, "tokenizer_config.json"))
    if files.is_file(jinja):
        with files.open_file(jinja) as file:
            return file.read().decode("utf-8", "replace")
    values = read_json(config) if files.is_file(config) else {}
    template = values.get("chat_template")
    return template if isinstance(template, str) else None


def _read_vocabulary(path: str) -> Any:
    """Return the vocabulary in a tokenizer.json, which is a dict for some kinds of tokenizer."""
    values = read_json(path)
    try:
        [entry["content"] for entry in values.get("added_tokens", [])]
        return values["model"].get("vocab")
    except (AttributeError, KeyError, TypeError):
        raise InputError(
            f"{path}: not a Hugging Face tokenizer: expected a mapping `model` and a list "
            "`added_tokens`; copy the folder again"
        ) from None
