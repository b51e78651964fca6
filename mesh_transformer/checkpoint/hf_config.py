"""The config.json of Hugging Face's models, the files beside it, and the corresponding configs."""

import functools
import hashlib
import importlib.metadata
import math
import os
import re
import sys
from typing import Any

import numpy as np

from mesh_transformer.checkpoint import gguf_files, hf_files, hf_layers
from mesh_transformer.checkpoint.hf_families import FAMILIES, OTHER_MODEL, SMALL_MODEL, Family
from mesh_transformer.checkpoint.hf_files import write_json
from mesh_transformer.checkpoint.state_tree import differing_keys
from mesh_transformer.checkpoint.stored_tensors import (
    DTYPES,
    StoredTensor,
    have_equal_values,
    read_json,
)
from mesh_transformer.config import Config
from mesh_transformer.data.gguf_header import GgufHeader, is_gguf, read_header
from mesh_transformer.data.gguf_tokenizer import has_tokenizer
from mesh_transformer.data.same_tokenizer import is_gpt2
from mesh_transformer.data.tokenizer import TEMPLATE
from mesh_transformer.families import SAMPLING
from mesh_transformer.model.layer_values import BY_LAYER, have_same_layers
from mesh_transformer.storage import files
from mesh_transformer.storage.access import local_path
from mesh_transformer.util import InputError

# Hugging Face's activations -> ours.  The first name of each is written.
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "relu2": "relu2",
}
_ROTARY_BASE = 10000
_GENERATION = "generation_config.json"
# The SHA-256 of GPT-2's tokens in the order of their ids, one per line.
_GPT2_DIGEST = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"
# Sampling settings: Hugging Face's names -> ours.
_OF_GREEDY = {"repetition_penalty"}  # settings that count at a temperature of 0
_SAMPLING = {"temperature" if name == "temp" else name: name for name in SAMPLING}


def family_of(config: Config) -> Family:
    """Return the model type that a model is exported as.

    Raises:
      InputError: if Hugging Face has no model type that represents the model.
    """
    if config.hf_type is None:
        supported = ", ".join(sorted({family.block for family in FAMILIES.values()}))
        raise InputError(
            f"config: block is {config.block!r}, but Hugging Face has models only for the blocks "
            f"{supported}; keep this model in native format"
        )
    family = FAMILIES[config.hf_type]
    _check_expressible(config, family)
    groups = family.groups or config.n_heads
    if config.n_heads % groups:
        raise InputError(
            f"config: n_heads is {config.n_heads}, but Hugging Face's {family.title} requires a "
            f"multiple of {groups}; keep this model in native format"
        )
    return family


def _check_expressible(config: Config, family: Family) -> None:
    """Raise InputError if reading what `write_configs` writes would give another model."""
    known = {"layers", "d_model", "n_heads", "n_vocab", "seq", "hf_type", "activation", "tie_head"}
    known |= {*family.sizes.values(), *(number.ours for number in family.numbers.values())}
    if family.biases:
        known.add("biases")
    if family.rope is not None:
        known |= hf_layers.our_keys(family)
    if config.hf_type == "gpt_neox":
        known |= {"block", "pe_rotary_dims"}
    ours = {key: getattr(config, key) for key in known}
    implied = _implied(family, ours)
    usual = Config(**(implied | ours))
    if family.pe != "rotary":
        known |= {"pe_rotary_dims", "rotary_pairs", "rotary_base"}

    def refuse(key: str, supported: object) -> None:
        raise InputError(
            f"config: {key} is {getattr(config, key)!r}, but Hugging Face's {family.title} "
            f"supports only {supported}; keep this model in native or original format"
        )

    for key in differing_keys(config, usual, known):
        refuse(key, repr(getattr(usual, key)))
    if family.biases:
        groups = [list(own) for own in family.biases.values()]
        expected = set(implied.get("biases", ()))
        for own in groups:
            expected |= set(own if all(map(config.has_bias, own)) else ())
        if set(config.biases or ()) != expected:
            refuse("biases", f"all or none of {' and of '.join(map(str, groups))}")
    if config.activation not in _ACTIVATIONS.values():  # a function of the user's
        refuse("activation", " and ".join(sorted(map(repr, set(_ACTIVATIONS.values())))))
    if family.legacy_gelu and config.activation == "gelu":
        refuse("activation", "other activations, such as 'gelu_tanh'")
    for key, number in family.numbers.items():
        value, written = getattr(config, number.ours), number.written(config)
        is_close = written == value or (written and math.isclose(written**number.power, value))
        if not is_close:
            refuse(number.ours, f"{key} ** {number.power} with a whole number as {key}")


def _implied(family: Family, ours: dict[str, Any]) -> dict[str, Any]:
    """Return the config keys that all models of a type share, some by a function of `ours`."""
    same = {"block": family.block, "pe": family.pe, "rotary_pairs": family.rotary_pairs}
    implied = family.implied.items()
    return same | {key: value(ours) if callable(value) else value for key, value in implied}


def read_config(folder: str, *, text_only: bool = False) -> Config:
    """Return the config of the model that a folder's config.json, or a GGUF file, describes.

    Keys of `Config` without a counterpart in config.json keep their defaults.  The exception is
    `tokenizer`, which is set to the folder if the folder holds a tokenizer other than GPT-2's.  As
    in transformers 5, the output head is not tied if the weights hold one that differs from the
    embedding, whatever config.json says.

    Args:
      text_only: whether the folder holds a multi-modal model, whose text part is described.

    Raises:
      InputError: if the model is of another type, or is a variant that our model does not support.
    """
    if is_gguf(folder):
        path, values = folder, gguf_files.read_config(folder)
    else:
        path = os.path.join(folder, "config.json")
        values = _text_part(path, read_json(path), text_only)
    ours = _model_keys(path, values)
    family = FAMILIES[ours["hf_type"]]
    if ours["tie_head"] and _has_own_head(folder, family, text_only):
        _report_own_head(path)
        ours["tie_head"] = False
    ours["tokenizer"] = _tokenizer_in(folder)
    beside = os.path.join(folder, _GENERATION)
    generation = read_json(beside) if files.is_file(beside) else {}
    ours["end_tokens"] = _end_tokens(folder, values, generation, ours["n_vocab"])
    ours["chat_template"] = _template_in(folder)
    ours["sampling"] = _sampling(folder, generation)
    return Config.from_dict(ours, path)


def _model_keys(path: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the config keys of a model, given its config.json and, for errors, the path of it."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(
            f"{path}: model_type is {model_type!r}, expected one of {', '.join(FAMILIES)}; "
            f"{OTHER_MODEL}"
        )
    family = FAMILIES[model_type]
    if (quantization := values.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise InputError(
            f"{path}: quantization_config says that the weights are quantized ({method}), which is "
            f"not supported; give a folder with unquantized weights, or {SMALL_MODEL}"
        )
    for key, expected in family.fixed.items():
        if values.get(key) not in (None, expected):
            raise InputError(
                f"{path}: {key} is {values[key]!r}; only {expected!r} is supported; {OTHER_MODEL}"
            )
    ours: dict[str, Any] = {"hf_type": model_type}
    for key, name in family.sizes.items():
        size = values.get(key, family.defaults.get(key))
        if size is None and key in family.optional:
            continue
        ours[name] = hf_layers.check_whole(path, key, size)
    ours = _implied(family, ours) | ours
    for key, number in family.numbers.items():
        value = values.get(key, number.default)
        if value is not None or not number.may_lack:
            value = float(hf_layers.positive(path, key, value)) ** number.power
        ours[number.ours] = value
    for key, matrices in family.biases.items():
        ours.setdefault("biases", [])
        ours["biases"] += matrices if hf_layers.flag(path, values, key, False) else ()
    if family.rope is not None:
        ours |= hf_layers.read(path, values, family, ours)
    inner = None if family.inner is None else values.get(family.inner)
    if inner not in (None, 4 * ours["d_model"]):
        raise InputError(
            f"{path}: {family.inner} is {inner!r}; only 4 times the model's width and null are "
            f"supported; {OTHER_MODEL}"
        )
    key, default = family.activation
    activation = values.get(key) or default
    if family.legacy_gelu:
        own = values.get("hidden_activation")
        # The released files say "gelu", but the authors' code computes the tanh approximation.
        activation = own or (default if activation == "gelu" else activation)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise InputError(
            f"{path}: {key} is {activation!r}; only {', '.join(_ACTIVATIONS)} are supported; "
            f"{OTHER_MODEL}"
        )
    ours["activation"] = _ACTIVATIONS[activation]
    ours["tie_head"] = hf_layers.flag(path, values, "tie_word_embeddings", family.tied)
    if model_type == "gpt_neox":
        ours["pe_rotary_dims"] = _neox_rotary_dims(path, values, ours)
        if not hf_layers.flag(path, values, "use_parallel_residual", True):
            ours["block"] = "gpt2"
    return ours


def check_gguf(header: GgufHeader, divisors_R: np.ndarray | None, config: Config) -> None:
    """Raise InputError if llama.cpp would compute another model than that of `config`.

    Args:
      header, divisors_R: what `gguf_files.header_of` returned.
    """
    values = gguf_files.config_of(header, divisors_R)
    stored = Config.from_dict(_model_keys(header.path, values), header.path)
    free = {"hf_type"} | (BY_LAYER if have_same_layers(config, stored) else set())
    for key in differing_keys(config, stored, free):
        raise InputError(
            f"{header.path}: {key} is {getattr(config, key)!r}, but in a GGUF file for llama.cpp "
            f"it would be {getattr(stored, key)!r}; use another format, such as hf"
        )


def _text_part(path: str, values: dict[str, Any], text_only: bool) -> dict[str, Any]:
    """Return what a config.json says about a model's text part; `values` if that is all of it."""
    text = values.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if not isinstance(text, dict) or not isinstance(kind, str) or kind not in FAMILIES:
        if text_only:
            raise InputError(f"{path}: the model has no text part of its own; remove --text-only")
        return values
    if not text_only:
        raise InputError(
            f"{path}: model_type is {values.get('model_type')!r}, a multi-modal model; only its "
            "text part is supported, which mesh-transformer convert --text-only extracts; or "
            f"{OTHER_MODEL}"
        )
    # transformers ties the heads of these models by default, whatever the text part says.
    whole = {"tie_word_embeddings": True} | values
    keys = ("tie_word_embeddings", "eos_token_id", "quantization_config")
    return text | {key: whole[key] for key in keys if key in whole}


def text_tensors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a multi-modal model's text part, by their names in a model of text."""
    names = {name: re.sub(r"^(model\.)?(language|text)_model\.", r"\1", name) for name in stored}
    return {
        new: stored[name]
        for name, new in names.items()
        if new != name or name.startswith("lm_head.")
    }


def _has_own_head(folder: str, family: Family, text_only: bool) -> bool:
    """Return whether a folder's weights hold an output head other than the embedding's matrix.

    False if the weights cannot be read, which is reported when they are loaded.
    """
    bare = family.embedding_weight.removeprefix(family.prefix)
    try:
        stored = hf_files.find(folder, optional=family.head_weights)
        stored = text_tensors(stored) if text_only else stored
        tensors = {name: x for name, x in stored.items() if x.dtype in DTYPES}
        head, embedding = (
            next((tensors[name] for name in names if name in tensors), None)
            for names in (family.head_weights, (family.embedding_weight, bare))
        )
        if head is None or embedding is None:
            return False
        return not have_equal_values(head, embedding)
    except InputError:
        return False


@functools.cache
def _report_own_head(path: str) -> None:
    """Print, once per process, that the output head is not tied, although config.json says so."""
    print(
        f"{path}: tie_word_embeddings is true, but the weights hold an output head that differs "
        "from the embedding; the two are not tied, as in transformers 5 (set it to false to "
        "silence this line)",
        file=sys.stderr,
        flush=True,
    )


def _neox_rotary_dims(path: str, values: dict[str, Any], ours: dict[str, Any]) -> int:
    """Return the number of rotated entries per head of a GPT-NeoX.

    Args:
      ours: the sizes in it, by our names.
    """
    # transformers 5 writes rope_parameters, earlier releases the other two keys.
    rope, _ = hf_layers.rope_parameters(path, values)
    share = rope.get("partial_rotary_factor", values.get("rotary_pct", 0.25))
    base = rope.get("rope_theta", values.get("rotary_emb_base", _ROTARY_BASE))
    kind = rope.get("rope_type", "default")
    if base != _ROTARY_BASE or kind != "default" or not isinstance(share, int | float):
        raise InputError(
            f"{path}: its rotary embedding has type {kind!r}, base {base!r} and share {share!r}; "
            f"only type 'default' and base {_ROTARY_BASE} are supported; "
            f"{OTHER_MODEL}"
        )
    return int(ours["d_model"] // ours["n_heads"] * share)


def _neox_keys(config: Config) -> dict[str, Any]:
    """Return the keys of config.json that only a GPT-NeoX has: rotary embedding and residual."""
    share = hf_layers.rotary_share(config)
    rope = {"rope_type": "default", "rope_theta": _ROTARY_BASE, "partial_rotary_factor": share}
    return {
        "rotary_pct": share,
        "rope_parameters": rope,
        "use_parallel_residual": config.layer_kind.arrangement == "parallel",
    }


def _tokenizer_in(folder: str) -> str:
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


def _template_in(folder: str) -> str | None:
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


def _end_tokens(
    folder: str, values: dict[str, Any], generation: dict[str, Any], n_vocab: int
) -> list[int] | None:
    """Return the ids of the tokens that end an answer, or None if the folder names none.

    As for transformers, those in generation_config.json replace those in config.json.  Ids outside
    the vocabulary, such as a default of transformers that a small model has kept, are left out.

    Args:
      values: the content of config.json.
    """
    path, name = os.path.join(folder, "config.json"), "eos_token_id"
    if generation.get(name) is not None:
        path, values = os.path.join(folder, _GENERATION), generation
    ids = values.get(name)
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if any(type(number) is not int for number in ids):
        raise InputError(
            f"{path}: {name} is {values[name]!r}, expected a token id or a list of ids; copy the "
            "file again"
        )
    return [number for number in ids if 0 <= number < n_vocab] or None


def _sampling(folder: str, generation: dict[str, Any]) -> dict[str, float]:
    """Return the sampling settings of a folder or GGUF file, by our names; often none.

    Their ranges are not checked: a model may be trained or converted without them.

    Raises:
      InputError: if a setting is not a number.
    """
    gguf = is_gguf(folder)
    values = gguf_files.read_sampling(folder) if gguf else generation
    own = {ours: x for name, ours in _SAMPLING.items() if (x := values.get(name)) is not None}
    for name, x in own.items():
        if type(x) not in (int, float):
            where = folder if gguf else os.path.join(folder, _GENERATION)
            raise InputError(f"{where}: {name} is {x!r}, expected a number; correct the file")
    if gguf:
        return own
    if (samples := values.get("do_sample")) is True:
        return {"temp": 1.0} | own
    if samples is False or own.keys() - _OF_GREEDY:  # transformers is greedy
        return {name: x for name, x in own.items() if name in _OF_GREEDY} | {"temp": 0.0}
    return own


def write_configs(folder: str, config: Config, rows: int, dtype: np.dtype, tokenizer: Any) -> None:
    """Write config.json and generation_config.json, with all keys that Hugging Face writes.

    Args:
      rows: the size of the vocabulary in the folder's tensors.
      tokenizer: the tokenizer that is saved with the model, or None.
    """
    values, tokens = config_values(config, rows, tokenizer)
    # transformers 5 reads dtype, transformers 4 reads torch_dtype.
    values |= {"dtype": dtype.name, "torch_dtype": dtype.name}
    write_json(os.path.join(folder, "config.json"), values | tokens)
    sampling, generation = config.sampling, {}
    if is_greedy := sampling.get("temp") == 0:
        sampling = {name: x for name, x in sampling.items() if name in _OF_GREEDY}
    if is_greedy or sampling.keys() - _OF_GREEDY:
        generation["do_sample"] = not is_greedy
    generation |= {name: sampling[ours] for name, ours in _SAMPLING.items() if ours in sampling}
    # With this key, transformers takes the file for a copy of config.json.
    generation = generation or {"_from_model_config": True}
    write_json(os.path.join(folder, _GENERATION), generation | tokens)


def config_values(
    config: Config, rows: int, tokenizer: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and, in the second dict, also generation_config.json hold.

    Args:
      rows, tokenizer: as for `write_configs`.
    """
    family = family_of(config)
    first, last = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
    ends = [last] if config.end_tokens is None else config.end_tokens
    ends = [number for number in ends if number is not None and number < rows]
    tokens = {
        "bos_token_id": first,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "transformers_version": importlib.metadata.version("transformers"),
    }
    values = {theirs: getattr(config, ours) for theirs, ours in family.sizes.items()}
    names = (family.activation[1], *_ACTIVATIONS)
    activation = next(name for name in names if _ACTIVATIONS[name] == config.activation)
    values |= {
        "vocab_size": rows,
        **{key: number.written(config) for key, number in family.numbers.items()},
        **{key: all(map(config.has_bias, own)) for key, own in family.biases.items()},
        **({} if family.rope is None else hf_layers.keys(config, family)),
        family.activation[0]: activation,
        "tie_word_embeddings": config.tie_head,
        **family.written,
        **(_neox_keys(config) if config.hf_type == "gpt_neox" else {}),
    }
    values |= {"architectures": [family.architecture], "model_type": config.hf_type}
    values |= {"pad_token_id": None, "initializer_range": 0.02, "use_cache": True}
    if family.inner is not None:
        values[family.inner] = None if family.inner == "n_inner" else config.d_ff
    return values | family.fixed, tokens
