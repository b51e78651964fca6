"""The config.json files and tensor names of Hugging Face's models, and their counterparts here."""

import functools
import hashlib
import importlib.metadata
import math
import os
import sys
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer.checkpoint import hf_files
from mesh_transformer.checkpoint.hf_files import write_json
from mesh_transformer.checkpoint.stored_tensors import DTYPES, have_equal_values, read_json
from mesh_transformer.config import Config
from mesh_transformer.data.same_tokenizer import is_gpt2
from mesh_transformer.storage import files
from mesh_transformer.storage.access import local_path
from mesh_transformer.util import InputError

Leaf = tuple[str, str]  # (module, leaf) of one of our parameters in a layer
Layer = dict[str, tuple[Leaf, ...]]

_SIZES = {
    "n_layer": "layers",
    "n_embd": "d_model",
    "n_head": "n_heads",
    "vocab_size": "n_vocab",
    "n_positions": "seq",
}
_NEOX_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "vocab_size": "n_vocab",
    "max_position_embeddings": "seq",
}
# Hugging Face's activations -> ours.  The first name of each is written.
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ROTARY_BASE = 10000
# The SHA-256 of GPT-2's tokens in the order of their ids, one per line.
_GPT2_DIGEST = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"
_Q, _K, _V = (("layer/q", "w"), ("layer/k", "w"), ("layer/v", "w"))
_QKV_BIAS = (("layer/q", "b"), ("layer/k", "b"), ("layer/v", "b"))


def _norm(name: str, module: str) -> Layer:
    return {f"{name}.weight": ((module, "scale"),), f"{name}.bias": ((module, "offset"),)}


def _linear(name: str, weight: Leaf, bias: Leaf | None = None) -> Layer:
    return {f"{name}.weight": (weight,)} | ({} if bias is None else {f"{name}.bias": (bias,)})


_FC, _O, _OUT = ("layer/fc", "w"), ("layer", "o"), ("layer", "out")
_FC_BIAS, _O_BIAS, _OUT_BIAS = ("layer/fc", "b"), ("layer", "o_b"), ("layer", "out_b")
_GPTJ_MLP = _linear("mlp.fc_in", _FC, _FC_BIAS) | _linear("mlp.fc_out", _OUT, ("layer", "b"))


class Family(NamedTuple):
    """One of Hugging Face's model types: the keys of its config.json, and its tensors.

    Attributes:
      title: the name for error messages.
      architecture: the class that loads the model.
      block: our block that computes the model.  A GPT-NeoX without `use_parallel_residual` is
        computed by the block gpt2.
      pe: our position embedding.
      sizes: {key of config.json: our config key}.
      defaults: the values of sizes that config.json may lack.
      fixed: {key of config.json: the only value that our model supports}.  A missing key means that
        value.
      activation: the key of the activation, and its default.
      inner: the key of the feed-forward's width.
      tied: the default of `tie_word_embeddings`.
      written: further keys to write, with their values.
      prefix: the part of the names of all tensors but the output head's.
      embedding: the name of the token embedding, without the prefix.
      positions: the name of the position embedding, without the prefix; None if there is none.
      layers: the name of the list of layers, without the prefix.
      layer: {name in a layer: the leaves that the tensor holds}.
      norm: the name of the last norm, without the prefix.
      head: the name of the output head.
      rotary_pairs: which entries of a head are rotated together; see the config key.
      out_axis: the axis of matrices that indexes outputs: 0 for torch's Linear, which is the
        default, 1 for GPT-2's Conv1D.
      groups: the number of groups that the outputs of a tensor with several leaves are divided
        into, each with a part of every leaf; None: one group per head.
    """

    title: str
    architecture: str
    block: str
    pe: str
    sizes: dict[str, str]
    defaults: dict[str, int]
    fixed: dict[str, Any]
    activation: tuple[str, str]
    inner: str
    tied: bool
    written: dict[str, Any]
    prefix: str
    embedding: str
    positions: str | None
    layers: str
    layer: Layer
    norm: str
    head: str
    rotary_pairs: str = "neighbours"
    out_axis: int = 0
    groups: int | None = None

    @property
    def embedding_weight(self) -> str:
        """The name of the token embedding's matrix."""
        return f"{self.prefix}{self.embedding}.weight"

    @property
    def head_weights(self) -> tuple[str, ...]:
        """The names that the output head's matrix has in files; the first is written.

        transformers 5 calls all heads lm_head.
        """
        return tuple(dict.fromkeys((f"{self.head}.weight", "lm_head.weight")))


_GPTJ = Family(
    title="GPT-J",
    architecture="GPTJForCausalLM",
    block="gptj",
    pe="rotary",
    sizes=_SIZES | {"rotary_dim": "pe_rotary_dims"},
    defaults={"n_positions": 2048, "rotary_dim": 64},
    fixed={"layer_norm_epsilon": 1e-5},
    activation=("activation_function", "gelu_new"),
    inner="n_inner",
    tied=False,
    written={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    prefix="transformer.",
    embedding="wte",
    positions=None,
    layers="h",
    layer=_norm("ln_1", "layer/norm")
    | _linear("attn.q_proj", _Q)
    | _linear("attn.k_proj", _K)
    | _linear("attn.v_proj", _V)
    | _linear("attn.out_proj", _O)
    | _GPTJ_MLP,
    norm="ln_f",
    head="lm_head",
)
FAMILIES = {
    "gptj": _GPTJ,
    "codegen": _GPTJ._replace(
        title="CodeGen",
        architecture="CodeGenForCausalLM",
        layer=_norm("ln_1", "layer/norm")
        | {"attn.qkv_proj.weight": (_Q, _V, _K)}
        | _linear("attn.out_proj", _O)
        | _GPTJ_MLP,
        groups=4,  # for four TPU cores
    ),
    "gpt2": _GPTJ._replace(
        title="GPT-2",
        architecture="GPT2LMHeadModel",
        block="gpt2",
        pe="fixed",
        sizes=_SIZES,
        defaults={"n_positions": 1024},
        fixed=_GPTJ.fixed
        | {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        tied=True,
        positions="wpe",
        layer=_norm("ln_1", "layer/norm")
        | {"attn.c_attn.weight": (_Q, _K, _V), "attn.c_attn.bias": _QKV_BIAS}
        | _linear("attn.c_proj", _O, _O_BIAS)
        | _norm("ln_2", "layer/ff_norm")
        | _linear("mlp.c_fc", _FC, _FC_BIAS)
        | _linear("mlp.c_proj", _OUT, _OUT_BIAS),
        out_axis=1,
        groups=1,
    ),
    "gpt_neox": Family(
        title="GPT-NeoX",
        architecture="GPTNeoXForCausalLM",
        block="neox",
        pe="rotary",
        sizes=_NEOX_SIZES,
        defaults={"max_position_embeddings": 2048},
        fixed={"layer_norm_eps": 1e-5, "attention_bias": True},
        activation=("hidden_act", "gelu"),
        inner="intermediate_size",
        tied=False,
        written={"attention_dropout": 0.0, "hidden_dropout": 0.0, "rotary_emb_base": 10000},
        prefix="gpt_neox.",
        embedding="embed_in",
        positions=None,
        layers="layers",
        layer=_norm("input_layernorm", "layer/norm")
        | _norm("post_attention_layernorm", "layer/ff_norm")
        | {
            "attention.query_key_value.weight": (_Q, _K, _V),
            "attention.query_key_value.bias": _QKV_BIAS,
        }
        | _linear("attention.dense", _O, _O_BIAS)
        | _linear("mlp.dense_h_to_4h", _FC, _FC_BIAS)
        | _linear("mlp.dense_4h_to_h", _OUT, _OUT_BIAS),
        norm="final_layer_norm",
        head="embed_out",
        rotary_pairs="halves",
    ),
}


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
    expected = {
        "norm": "layernorm",
        "pe": family.pe,
        "head_size": config.d_model // config.n_heads,
        "attention_window": config.seq,
    }
    if family.pe == "rotary":
        expected["rotary_pairs"] = family.rotary_pairs
    for key, value in expected.items():
        if getattr(config, key) != value:
            raise InputError(
                f"config: {key} is {getattr(config, key)!r}, but Hugging Face's {family.title} "
                f"supports only {value!r}; keep this model in native or original format"
            )
    groups = family.groups or config.n_heads
    if config.n_heads % groups:
        raise InputError(
            f"config: n_heads is {config.n_heads}, but Hugging Face's {family.title} requires a "
            f"multiple of {groups}; keep this model in native format"
        )
    return family


def read_config(folder: str) -> Config:
    """Return the config of the model that a folder's config.json describes.

    Keys of `Config` without a counterpart in config.json keep their defaults.  The exception is
    `tokenizer`, which is set to the folder if the folder holds a tokenizer other than GPT-2's.  As
    in transformers 5, the output head is not tied if the weights hold one that differs from the
    embedding, whatever config.json says.

    Raises:
      InputError: if the model is of another type, or is a variant that our model does not support.
    """
    path = os.path.join(folder, "config.json")
    values = read_json(path)
    model_type = values.get("model_type")
    if model_type not in FAMILIES:
        raise InputError(
            f"{path}: model_type is {model_type!r}, expected one of {', '.join(FAMILIES)}; give a "
            "folder with one of these models"
        )
    family = FAMILIES[model_type]
    for key, expected in family.fixed.items():
        if values.get(key, expected) != expected:
            raise InputError(
                f"{path}: {key} is {values[key]!r}; only {expected!r} is supported; give "
                f"another {family.title} folder"
            )
    ours: dict[str, Any] = {"block": family.block, "hf_type": model_type, "pe": family.pe}
    ours["rotary_pairs"] = family.rotary_pairs
    for key, name in family.sizes.items():
        size = values.get(key, family.defaults.get(key))
        if type(size) is not int or size < 1:
            raise InputError(
                f"{path}: {key} is {size!r}, expected a whole number above 0; copy the file again"
            )
        ours[name] = size
    inner = values.get(family.inner)
    if inner not in (None, 4 * ours["d_model"]):
        raise InputError(
            f"{path}: {family.inner} is {inner!r}; only 4 times the model's width and null are "
            f"supported; give another {family.title} folder"
        )
    key, default = family.activation
    activation = values.get(key, default)
    if activation not in _ACTIVATIONS:
        raise InputError(
            f"{path}: {key} is {activation!r}; only {', '.join(_ACTIVATIONS)} are supported; give "
            f"another {family.title} folder"
        )
    ours["activation"] = _ACTIVATIONS[activation]
    ours["tie_head"] = _flag(path, values, "tie_word_embeddings", family.tied)
    if ours["tie_head"] and _has_own_head(folder, family):
        _report_own_head(path)
        ours["tie_head"] = False
    if model_type == "gpt_neox":
        ours["pe_rotary_dims"] = _neox_rotary_dims(path, values, ours)
        if not _flag(path, values, "use_parallel_residual", True):
            ours["block"] = "gpt2"
    ours["tokenizer"] = _tokenizer_in(folder)
    ours["end_tokens"] = _end_tokens(folder, values, ours["n_vocab"])
    return Config.from_dict(ours, path)


def _flag(path: str, values: dict[str, Any], key: str, default: bool) -> bool:
    """Return a value of config.json that is true or false; `path` is its path, for the error."""
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{path}: {key} is {value!r}, expected true or false; copy the file again")
    return value


def _has_own_head(folder: str, family: Family) -> bool:
    """Return whether a folder's weights hold an output head other than the embedding's matrix.

    False if the weights cannot be read, which is reported when they are loaded.
    """
    bare = family.embedding_weight.removeprefix(family.prefix)
    try:
        stored = hf_files.find(folder, optional=family.head_weights)
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
      path: the config.json, for error messages.
      values: its content.
      ours: the sizes in it, by our names.
    """
    # transformers 5 writes rope_parameters, earlier releases the other two keys.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", values.get("rotary_pct", 0.25))
    base = rope.get("rope_theta", values.get("rotary_emb_base", _ROTARY_BASE))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if base != _ROTARY_BASE or kind != "default" or not isinstance(share, int | float):
        raise InputError(
            f"{path}: its rotary embedding has type {kind!r}, base {base!r} and share {share!r}; "
            f"only type 'default' and base {_ROTARY_BASE} are supported; give another GPT-NeoX "
            "folder"
        )
    return int(ours["d_model"] // ours["n_heads"] * share)


def _neox_keys(config: Config) -> dict[str, Any]:
    """Return the keys of config.json that only a GPT-NeoX has: rotary embedding and residual."""
    share = config.d_rotary / config.d_head
    if int(config.d_head * share) < config.d_rotary:  # rounding
        share = math.nextafter(share, 1)
    rope = {"rope_type": "default", "rope_theta": _ROTARY_BASE, "partial_rotary_factor": share}
    return {
        "rotary_pct": share,
        "rotary_emb_base": _ROTARY_BASE,
        "rope_parameters": rope,
        "use_parallel_residual": config.layer_kind.arrangement == "parallel",
    }


def _end_tokens(folder: str, values: dict[str, Any], n_vocab: int) -> list[int] | None:
    """Return the ids of the tokens that end an answer, or None if the folder names none.

    As for transformers, those in generation_config.json replace those in config.json.  Ids outside
    the vocabulary, such as a default of transformers that a small model has kept, are left out.

    Args:
      values: the content of config.json.
    """
    path, name = os.path.join(folder, "config.json"), "eos_token_id"
    generation = os.path.join(folder, "generation_config.json")
    if files.is_file(generation):
        settings = read_json(generation)
        if settings.get(name) is not None:
            path, values = generation, settings
    ids = values.get(name)
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if any(type(number) is not int for number in ids):
        raise InputError(
            f"{path}: {name} is {values[name]!r}, expected a token id or a list of ids; copy the "
            "file again"
        )
    return [number for number in ids if 0 <= number < n_vocab] or None


def _tokenizer_in(folder: str) -> str:
    """Return the value of the config key `tokenizer` for a folder: its path, or "gpt2".

    The result is "gpt2" if the folder holds no tokenizer, or one that does exactly what GPT-2's
    does, as GPT-J's released one: the tokens that it adds only pad the vocabulary.
    """
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


def write_configs(folder: str, config: Config, rows: int, dtype: np.dtype, tokenizer: Any) -> None:
    """Write config.json and generation_config.json, with all keys that Hugging Face writes.

    Args:
      folder: the folder to write the two files to.
      rows: the size of the vocabulary in the folder's tensors.
      dtype: the dtype of the tensors.
      tokenizer: the tokenizer that is saved with the model, or None.
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
    activation = next(name for name, ours in _ACTIVATIONS.items() if ours == config.activation)
    values |= {
        "vocab_size": rows,
        family.inner: None if family.inner == "n_inner" else config.d_ff,
        family.activation[0]: activation,
        "tie_word_embeddings": config.tie_head,
        **family.written,
        **(_neox_keys(config) if config.hf_type == "gpt_neox" else {}),
    }
    values |= {"architectures": [family.architecture], "model_type": config.hf_type}
    # transformers 5 reads dtype, transformers 4 reads torch_dtype.
    values |= {"dtype": dtype.name, "torch_dtype": dtype.name, "pad_token_id": None}
    values |= {"initializer_range": 0.02, "use_cache": True}
    write_json(os.path.join(folder, "config.json"), values | family.fixed | tokens)
    generation = {"_from_model_config": True} | tokens
    write_json(os.path.join(folder, "generation_config.json"), generation)
