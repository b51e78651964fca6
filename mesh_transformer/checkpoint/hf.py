"""Reading and writing GPT-J as a Hugging Face folder: weights, config.json and tokenizer.

Hugging Face stores Linear weights as [out, in], and a separate tensor for each layer.  This library
stores them as [in, out], stacked over layers.  Both use the same rotary convention (interleaved
pairs).  torch is not needed.
"""

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from mesh_transformer.checkpoint import hf_files
from mesh_transformer.checkpoint.atomic_folder import atomic_folder
from mesh_transformer.checkpoint.hf_files import DTYPES, StoredTensor, Tensor, read_json, write_json
from mesh_transformer.checkpoint.host_arrays import FLOATS, LazyLeaf, cast, in_memory
from mesh_transformer.checkpoint.state_tree import check_same_model, check_state
from mesh_transformer.config import Config
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.model import transformer
from mesh_transformer.storage import files
from mesh_transformer.storage.access import local_path
from mesh_transformer.util import InputError

# Hugging Face's config keys -> our config keys.
_SIZES = {
    "n_layer": "layers",
    "n_embd": "d_model",
    "n_head": "n_heads",
    "vocab_size": "n_vocab",
    "n_positions": "seq",
    "rotary_dim": "pe_rotary_dims",
}
_DEFAULTS = {"n_positions": 2048, "rotary_dim": 64}
# Keys of Hugging Face's GPT-J config that ours does not have, with the only value that our model
# supports.  A missing key means that value.
_FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
# The SHA-256 of GPT-2's tokens in the order of their ids, one per line.
_GPT2_DIGEST = "e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f"
_FILLER = re.compile(r"<\|extratoken_\d+\|>")


def read_config(folder: str) -> Config:
    """Return the config of the model that a folder's config.json describes.

    Keys of `Config` without a counterpart in config.json keep their defaults.  The exception is
    `tokenizer`, which is set to the folder if the folder holds a tokenizer other than GPT-2's.

    Raises:
      InputError: if the model is not GPT-J, or is a variant that our model does not support.
    """
    path = os.path.join(folder, "config.json")
    values = read_json(path)
    if values.get("model_type") != "gptj":
        raise InputError(
            f"{path}: model_type is {values.get('model_type')!r}, expected 'gptj'; "
            "give a GPT-J folder"
        )
    for key, expected in _FIXED.items():
        if values.get(key, expected) != expected:
            raise InputError(
                f"{path}: {key} is {values[key]!r}; only {expected!r} is supported; give "
                "a GPT-J folder"
            )
    ours = {}
    for key, name in _SIZES.items():
        size = values.get(key, _DEFAULTS.get(key))
        if type(size) is not int or size < 1:
            raise InputError(
                f"{path}: {key} is {size!r}, expected a whole number above 0; copy the file again"
            )
        ours[name] = size
    inner = values.get("n_inner")
    if inner not in (None, 4 * ours["d_model"]):
        raise InputError(
            f"{path}: n_inner is {inner!r}; only 4 * n_embd and null are supported; "
            "give a GPT-J folder"
        )
    ours["tokenizer"] = _tokenizer_in(folder)
    return Config.from_dict(ours, path)


def _tokenizer_in(folder: str) -> str:
    """Return the value of the config key `tokenizer` for a folder: its path, or "gpt2".

    The result is "gpt2" if the folder holds GPT-2's tokenizer or none.  GPT-J's released tokenizer
    counts as GPT-2's, because the tokens that it adds only pad the vocabulary.
    """
    tokenizer_path, vocabulary_path, merges_path, added_path = (
        os.path.join(folder, name)
        for name in ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
    )
    if files.is_file(tokenizer_path):
        vocabulary, added = _read_vocabulary(tokenizer_path)
    elif files.is_file(vocabulary_path) and files.is_file(merges_path):
        vocabulary = read_json(vocabulary_path)
        added = set(read_json(added_path)) if files.is_file(added_path) else set()
    else:
        return "gpt2"
    if isinstance(vocabulary, dict) and all(type(id_) is int for id_ in vocabulary.values()):
        text = "\n".join(sorted(vocabulary, key=vocabulary.__getitem__))
        only_fillers = all(token in vocabulary or _FILLER.fullmatch(token) for token in added)
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        if only_fillers and digest == _GPT2_DIGEST:
            return "gpt2"
    return local_path(folder)


def _read_vocabulary(path: str) -> tuple[Any, set[str]]:
    """Return the vocabulary and the added tokens of a tokenizer.json.

    The vocabulary is returned as it is stored, which is a dict only for some kinds of tokenizer.
    """
    values = read_json(path)
    try:
        added = {str(entry["content"]) for entry in values.get("added_tokens", [])}
        return values["model"].get("vocab"), added
    except (AttributeError, KeyError, TypeError):
        raise InputError(
            f"{path}: not a Hugging Face tokenizer: expected a mapping `model` and a list "
            "`added_tokens`; copy the folder again"
        ) from None


def check_expressible(config: Config) -> None:
    """Raise InputError if Hugging Face's GPT-J cannot represent the config's model."""
    supported = {
        "block": "gptj",
        "norm": "layernorm",
        "pe": "rotary",
        "head_size": config.d_model // config.n_heads,
        "attention_window": config.seq,
    }
    for key, value in supported.items():
        if getattr(config, key) != value:
            raise InputError(
                f"config: {key} is {getattr(config, key)!r}, but Hugging Face's GPT-J supports "
                f"only {value!r}; keep this model in native or original format"
            )


def write_configs(
    folder: str, config: Config, rows: int, dtype: np.dtype, end_of_text: int | None
) -> None:
    """Write config.json and generation_config.json, with all keys that Hugging Face writes.

    Args:
      folder: the folder to write the two files to.
      rows: the size of the vocabulary in the folder's tensors.
      dtype: the dtype of the tensors.
      end_of_text: the id of the token that ends generation, if there is one.
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
    # transformers 5 reads dtype, transformers 4 reads torch_dtype.
    values |= {"dtype": dtype.name, "torch_dtype": dtype.name, "pad_token_id": None}
    values |= {"initializer_range": 0.02, "use_cache": True}
    write_json(os.path.join(folder, "config.json"), values | _FIXED | tokens)
    generation = {"_from_model_config": True} | tokens
    write_json(os.path.join(folder, "generation_config.json"), generation)


SHARD_BYTES = 5_000_000_000
# The head's bias for padding tokens: low enough that their probability is 0 in f32, and within the
# range of f16.
PADDING_BIAS = -1e4
_BLOCK = 16  # rows copied at once; transposing blocks that fit the CPU cache is five times as fast

# Hugging Face's name below transformer.h.<i>. -> our (module, leaf) in one layer.
_LAYER = {
    "ln_1.weight": ("layer/norm", "scale"),
    "ln_1.bias": ("layer/norm", "offset"),
    "attn.q_proj.weight": ("layer/q", "w"),
    "attn.k_proj.weight": ("layer/k", "w"),
    "attn.v_proj.weight": ("layer/v", "w"),
    "attn.out_proj.weight": ("layer", "o"),
    "mlp.fc_in.weight": ("layer/fc", "w"),
    "mlp.fc_in.bias": ("layer/fc", "b"),
    "mlp.fc_out.weight": ("layer", "out"),
    "mlp.fc_out.bias": ("layer", "b"),
}
_EMBEDDING = "transformer.wte.weight"
_HEAD_BIAS = "lm_head.bias"
_OUTER = {
    "transformer.ln_f.weight": ("proj", "projection/norm", "scale"),
    "transformer.ln_f.bias": ("proj", "projection/norm", "offset"),
    "lm_head.weight": ("proj", "projection/head", "w"),
    _HEAD_BIAS: ("proj", "projection/head", "b"),
}
# The tensors whose first axis is the vocabulary.
_BY_VOCABULARY = (_EMBEDDING, "lm_head.weight", _HEAD_BIAS)
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attn.embed_positions")  # constants, not weights


class _Place(NamedTuple):
    """The place in our parameters that holds the values of a Hugging Face tensor.

    Attributes:
      part, module, leaf: the keys of our leaf, which is `params[part][module][leaf]`.
      layer: the tensor's index on the leaf's layer axis; None if the leaf has no layer axis.
      transposed: whether our leaf is the transpose of the tensor.
    """

    part: str
    module: str
    leaf: str
    layer: int | None
    transposed: bool

    def find(self, params: transformer.Params) -> Any:
        """Return the leaf of `params` that holds the tensor's values.

        If the leaf is stacked over layers, all of its layers are returned.
        """
        return params[self.part][self.module][self.leaf]

    def shape(self, params: transformer.Params) -> tuple[int, ...]:
        """Return the tensor's shape, with its axes in Hugging Face's order."""
        shape = self.find(params).shape[self.layer is not None :]
        return shape[::-1] if self.transposed else shape

    def values(self, params: transformer.Params) -> np.ndarray:
        """Return the tensor's values, with its axes in Hugging Face's order."""
        leaf = self.find(params)
        values = np.asarray(leaf if self.layer is None else leaf[self.layer])
        return values.T if self.transposed else values


def read(
    folder: str,
    *,
    config: Config | None = None,
    dtype: DTypeLike | None = None,
    lazy: bool = False,
) -> tuple[Config, dict[str, Any]]:
    """Return the config and the state of the model in a Hugging Face folder.

    The state is {"params": nested dicts of numpy arrays, "step": 0}, in the structure of native
    checkpoints.  The embedding's bias, which Hugging Face's GPT-J does not have, is zero.

    Args:
      config: the config to return instead of the folder's own.  It must describe the same model,
        except that its `n_vocab` may be larger.  In that case the vocabulary is padded: embedding
        rows and head columns with zeros, the head's bias with `PADDING_BIAS`.  The added tokens
        then have probability 0 and do not change the loss.
      dtype: the dtype to cast the parameters to (default: the dtype in the files).
      lazy: whether to return `LazyLeaf`s, which are read from disk (and checked for damage) on use.

    Raises:
      InputError: if the folder does not hold a GPT-J model, is damaged or inconsistent, or does not
        fit `config`.
    """
    stored_config = read_config(folder)
    if config is not None:
        _check_same(folder, stored_config, config)
    config = config or stored_config
    places = _places(config)
    stored = _select_weights(folder, hf_files.find(folder), places)
    declared = transformer.declarations(stored_config)
    _check_stored(stored, places, map_declared(lambda d: np.broadcast_to(0, d.shape), declared))
    dtypes = _leaf_dtypes(stored, places, _dtype(dtype))
    params = {
        part: {
            module: {
                leaf: _lazy((part, module, leaf), declaration, dtypes, stored, places)
                for leaf, declaration in leaves.items()
            }
            for module, leaves in modules.items()
        }
        for part, modules in transformer.declarations(config).items()
    }
    state = {"params": params, "step": np.zeros((), np.int32)}
    return config, state if lazy else in_memory(state)


def write(
    folder: str,
    state: dict[str, Any],
    config: Config,
    *,
    dtype: DTypeLike | None = None,
    trim_vocab: bool = False,
    tokenizer: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model's weights to a new folder that Hugging Face's transformers can load.

    The embedding's bias, which Hugging Face's GPT-J does not have, is added to each row of the
    embedding.

    Args:
      folder: the folder to create.
      state: a state in host memory, as `read` returns it.
      dtype: the dtype to cast the parameters to (default: each leaf's own).
      trim_vocab: whether to cut the vocabulary to the tokenizer's size.
      tokenizer: the tokenizer to save with the weights: a folder, or another name that
        `load_tokenizer` accepts.  Default: `config.tokenizer`, which is not saved if it has more
        tokens than the model.
      shard_bytes: the maximum number of bytes of tensors per file; a larger tensor is written to a
        file of its own.

    Raises:
      InputError: if Hugging Face's GPT-J cannot represent the model, `folder` already exists, or
        storage fails.  If storage fails, nothing is left at `folder`.
    """
    check_expressible(config)
    check_state(state, transformer.declarations(config))
    chosen = Tokenizer.of(tokenizer, config, must_fit=trim_vocab)
    rows = len(chosen.loaded) if trim_vocab else config.n_vocab
    tensors = list(_tensors(state["params"], config, rows, _dtype(dtype)))
    total = sum(tensor.n_bytes for tensor in tensors)
    with atomic_folder(folder) as temporary:
        with tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None) as bar:
            hf_files.write(temporary, tensors, shard_bytes, bar)
        end_of_text = chosen.loaded.eos_token_id if chosen.fits else None
        write_configs(temporary, config, rows, tensors[0].dtype, end_of_text)
        chosen.save(temporary)


def _dtype(dtype: DTypeLike | None) -> np.dtype | None:
    if dtype is None:
        return None
    result = np.dtype(dtype)
    if result not in FLOATS.values():
        raise InputError(f"dtype is {result}, expected float32, float16 or bfloat16")
    return result


def _places(config: Config) -> dict[str, _Place]:
    """Return {Hugging Face tensor name: its place in our parameters}, in Hugging Face's order."""
    places = {_EMBEDDING: _Place("embed", "embedding", "w", None, False)}
    for layer in range(config.layers):
        for name, (module, leaf) in _LAYER.items():
            linear = name.endswith(".weight") and not name.startswith("ln")
            place = _Place("layers", module, leaf, layer, linear)
            places[f"transformer.h.{layer}.{name}"] = place
    for name, (part, module, leaf) in _OUTER.items():
        places[name] = _Place(part, module, leaf, None, name == "lm_head.weight")
    return places


def _check_same(folder: str, stored: Config, config: Config) -> None:
    """Raise InputError if `config` does not describe the folder's model, whose config is `stored`.

    `config` may have a larger `n_vocab`.
    """
    where = os.path.join(folder, "config.json")
    for key in ("layers", "d_model"):
        if getattr(stored, key) != getattr(config, key):
            raise InputError(
                f"{where}: {key} is {getattr(stored, key)}, but the config has "
                f"{getattr(config, key)}; use the model's own config"
            )
    check_same_model(config, stored.as_dict(), where)
    if stored.n_vocab > config.n_vocab:
        raise InputError(
            f"{where}: vocab_size is {stored.n_vocab}, but the config's n_vocab is "
            f"{config.n_vocab}; set n_vocab to at least {stored.n_vocab}"
        )


def _select_weights(
    folder: str, stored: dict[str, StoredTensor], places: dict[str, _Place]
) -> dict[str, StoredTensor]:
    """Return those stored tensors that are weights; drop constants such as attention masks.

    Args:
      folder: the folder of the tensors, for error messages.
      stored: all tensors in the folder, by name.
      places: the weights of the model, by name.

    Raises:
      InputError: if a weight is missing, or if a stored tensor is neither a weight nor a known
        constant.
    """
    for name in places:
        if name not in stored:
            raise InputError(
                f"{folder}: tensor {name} is missing; copy the folder again, or check config.json"
            )
    for name, tensor in stored.items():
        if name not in places and not name.endswith(_BUFFERS):
            raise InputError(
                f"{tensor.path}: tensor {name} is not part of the GPT-J that config.json "
                "describes; use the config.json of these weights"
            )
    return {name: tensor for name, tensor in stored.items() if name in places}


def _check_stored(
    stored: dict[str, StoredTensor], places: dict[str, _Place], expected: transformer.Params
) -> None:
    """Raise InputError if a tensor has an unexpected shape, or a dtype that is not in `DTYPES`.

    Args:
      stored: the stored tensors, by name.
      places: where our parameters hold each tensor, by name.
      expected: a tree like our parameters, with the expected shapes; its values are not used.
    """
    for name, tensor in stored.items():
        shape = places[name].shape(expected)
        if tensor.shape != shape:
            raise InputError(
                f"{tensor.path}: tensor {name} has shape {tensor.shape}, expected {shape}; "
                "check config.json"
            )
        if tensor.dtype not in DTYPES:
            raise InputError(
                f"{tensor.path}: tensor {name} has dtype {tensor.dtype}, expected one of "
                f"{', '.join(DTYPES)}; convert it with the library that wrote it"
            )


def _leaf_dtypes(
    stored: dict[str, StoredTensor], places: dict[str, _Place], dtype: np.dtype | None
) -> dict[tuple[str, str, str], np.dtype]:
    """Return the dtype to read each parameter in, as {(part, module, leaf): dtype}.

    The dtype is `dtype` or, if `dtype` is None, the dtype of the parameter's stored tensors.

    Raises:
      InputError: if `dtype` is None and the layers of a leaf differ in dtype.
    """
    leaf_dtypes = {("embed", "embedding", "b"): dtype or DTYPES[stored[_EMBEDDING].dtype]}
    for name, tensor in stored.items():
        own = DTYPES[tensor.dtype]
        first = leaf_dtypes.setdefault(places[name][:3], dtype or own)
        if dtype is None and first != own:
            raise InputError(
                f"{tensor.path}: tensor {name} has dtype {own}, but other layers have {first}; "
                "convert the folder with --dtype, so that all layers have one dtype"
            )
    return leaf_dtypes


def _lazy(
    key: tuple[str, str, str],
    declaration: Declaration,
    dtypes: dict[tuple[str, str, str], np.dtype],
    stored: dict[str, StoredTensor],
    places: dict[str, _Place],
) -> Any:
    """Return one leaf of our parameters as a `LazyLeaf`, which reads one tensor per layer.

    The embedding's bias, for which Hugging Face has no tensor, is returned as zeros.

    Args:
      key: the leaf's part, module and name.
      declaration: the leaf's `Declaration`, which defines its shape.
      dtypes: the dtypes of all leaves, from `_leaf_dtypes`.
      stored: the stored tensors, by name.
      places: where our parameters hold each tensor, by name.
    """
    dtype = dtypes[key]
    names = [name for name, place in places.items() if place[:3] == key]
    if not names:
        return np.zeros(declaration.shape, dtype)
    shape = declaration.shape[declaration.stacked :]

    def read(layer: int | None) -> np.ndarray:
        name = names[layer or 0]
        tensor = stored[name]
        values, rows = np.empty(shape, dtype), tensor.shape[0]
        target = values.T if places[name].transposed else values
        _copy(target[:rows], tensor.read(), f"{tensor.path}: tensor {name}")
        target[rows:] = PADDING_BIAS if name == _HEAD_BIAS else 0
        return values

    return LazyLeaf(declaration.shape, dtype, read, layers=declaration.stacked)


def _tensors(
    params: transformer.Params, config: Config, rows: int, dtype: np.dtype | None
) -> Iterator[Tensor]:
    """Yield the tensors to write to a Hugging Face folder.

    A tensor's values are computed only when its function `values` is called.

    Args:
      rows: the size of the vocabulary to write.
      dtype: the dtype to cast the parameters to; None for each leaf's own.
    """
    bias = np.asarray(params["embed"]["embedding"]["b"])
    for name, place in _places(config).items():
        shape = place.shape(params)
        if name in _BY_VOCABULARY:
            shape = (rows, *shape[1:])
        added = bias if name == _EMBEDDING and bias.any() else None
        target = dtype or place.find(params).dtype
        values = partial(_tensor_values, name, place, params, shape, target, added)
        yield Tensor(name, target, shape, values)


def _tensor_values(
    name: str,
    place: _Place,
    params: transformer.Params,
    shape: tuple[int, ...],
    dtype: np.dtype,
    bias: np.ndarray | None,
) -> np.ndarray:
    values = np.empty(shape, dtype)
    _copy(values, place.values(params)[: shape[0]], f"tensor {name}", bias)
    return values


def _copy(
    target: np.ndarray, source: np.ndarray, name: str, bias: np.ndarray | None = None
) -> None:
    """Copy `source` to `target` in blocks of rows, and cast the values to the dtype of `target`.

    Args:
      name: the name of the tensor, for error messages.
      bias: values to add to each row in f32 before the cast (default: none).
    """
    if source.ndim == 2 and not source.flags.c_contiguous:
        target, source = target.T, source.T
    for start in range(0, len(source), _BLOCK):
        block = source[start : start + _BLOCK]
        if bias is not None:
            block = block.astype(np.float32) + bias.astype(np.float32)
        target[start : start + _BLOCK] = cast(block, target.dtype, name)
