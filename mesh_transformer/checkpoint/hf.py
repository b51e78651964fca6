"""Reading and writing models as Hugging Face folders: weights, config.json and tokenizer.

Hugging Face stores a separate tensor for each layer, most matrices as [out, in], and in some models
queries, keys and values in one tensor.  This library stores matrices as [in, out], stacked over
layers.  `hf_families` lists the tensors of each type of model.  torch is not needed.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint import gguf_files, hf_files
from mesh_transformer.checkpoint.atomic_folder import atomic_folder
from mesh_transformer.checkpoint.hf_config import (
    check_gguf,
    config_values,
    family_of,
    read_config,
    text_tensors,
    write_configs,
)
from mesh_transformer.checkpoint.hf_families import FAMILIES, Family
from mesh_transformer.checkpoint.hf_files import Tensor
from mesh_transformer.checkpoint.host_arrays import FLOATS, LazyLeaf, cast
from mesh_transformer.checkpoint.state_tree import (
    Path,
    check_same_model,
    check_state,
    in_memory,
    map_leaves,
)
from mesh_transformer.checkpoint.stored_tensors import DTYPES, StoredTensor
from mesh_transformer.config import Config
from mesh_transformer.data.gguf_header import is_gguf
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.model import transformer
from mesh_transformer.util import InputError, brief

SHARD_BYTES = 5_000_000_000
# The head's bias for padding tokens: low enough that their probability is 0 in f32, and within the
# range of f16.
PADDING_BIAS = -1e4
_BLOCK = 16  # rows copied at once; transposing blocks that fit the CPU cache is five times as fast

# Ends of the names of constants, which are not weights.
_BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attn.embed_positions",
    ".attn.causal_mask",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
)
_EMBED = ("embed", "embedding", "w")
_HEAD_BIAS = ("proj", "projection/head", "b")
# The leaves of which one axis is the vocabulary.
_BY_VOCABULARY = (_EMBED, ("proj", "projection/head", "w"), _HEAD_BIAS)


class Place(NamedTuple):
    """A place in our parameters that holds the values of a Hugging Face tensor, or some of them.

    Attributes:
      part, module, leaf: the keys of our leaf, which is `params[part][module][leaf]`.
      layer: the tensor's index on the leaf's layer axis; None if the leaf has no layer axis.
      out_axis: for a matrix [in, out], the tensor's axis of outputs; None for other leaves.
      groups, start, size: the tensor's outputs are divided into `groups` groups of `size`.  The
        leaf holds a part of each group, from `start` on.  If `size` is 0, it holds all outputs.
    """

    part: str
    module: str
    leaf: str
    layer: int | None = None
    out_axis: int | None = None
    groups: int = 1
    start: int = 0
    size: int = 0

    @property
    def target(self) -> str:
        """The name of the matrix in the config key `lora_targets`."""
        return self.module.partition("/")[2] or self.leaf

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.part, self.module, self.leaf)

    def find(self, params: transformer.Params) -> Any:
        """Return the leaf of `params`; if it is stacked over layers, all of its layers."""
        return params[self.part][self.module][self.leaf]

    def tensor_shape(self, params: transformer.Params) -> tuple[int, ...]:
        """Return the shape of the tensor that holds the leaf."""
        *rest, outputs = self.find(params).shape[self.layer is not None :]
        shape = (*rest, self.groups * self.size or outputs)
        return shape[::-1] if self.out_axis == 0 else shape

    def views(
        self, tensor: np.ndarray, leaf: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield views (of the tensor, of the leaf) of the same values, which cover the leaf.

        If one of the two has more rows of the vocabulary or more positions, they are left out.

        Args:
          leaf: one layer of the leaf, if it is stacked.
        """
        if self.out_axis is not None:
            tensor, leaf = (tensor if self.out_axis == 0 else tensor.T), leaf.T
        size = len(leaf) // self.groups
        for group in range(self.groups):
            start = group * (self.size or size) + self.start
            part, own = tensor[start : start + size], leaf[group * size : (group + 1) * size]
            yield part[: len(own)], own[: len(part)]

    def outputs(
        self, tensor: np.ndarray, leaf: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """As `views`, for the second factor of an adapter: tensor [out, R] and leaf [R, out]."""
        return self._replace(out_axis=0).views(tensor, leaf)


def shapes(config: Config) -> transformer.Params:
    """Return a tree like the parameters, of arrays that show the shapes; they take no memory."""
    declared = transformer.declarations(config)
    return map_declared(lambda d: np.broadcast_to(0, d.shape), declared)


def read(
    folder: str,
    *,
    config: Config | None = None,
    dtype: DTypeLike | None = None,
    lazy: bool = False,
    drop_extra: bool = False,
    text_only: bool = False,
) -> tuple[Config, dict[str, Any]]:
    """Return the config and the state of the model in a Hugging Face folder.

    The state is {"params": nested dicts of numpy arrays, "step": 0}, in the structure of native
    checkpoints.  The embedding's bias, which Hugging Face's GPT-J does not have, is zero.

    Args:
      config: the config to return instead of the folder's own.  It must describe the same model,
        except that its `n_vocab` may be larger if the head has a bias.  In that case the vocabulary
        is padded: embedding rows and head columns with zeros, the head's bias with `PADDING_BIAS`.
        The added tokens then have probability 0 and do not change the loss.  With learned position
        embeddings, its `seq` may be smaller: the first positions are then read.
      dtype: the dtype to cast the parameters to (default: the dtype in the files).
      lazy: whether to return `LazyLeaf`s, which are read from disk (and checked for damage) on use.
      drop_extra: whether to leave out tensors that are not part of the model, such as those of a
        value head, and print their names.  Otherwise they are an error.
      text_only: whether the folder holds a multi-modal model, whose text part is read.

    Raises:
      InputError: if the folder does not hold a supported model, is damaged or inconsistent, or does
        not fit `config`.
    """
    stored_config = read_config(folder, text_only=text_only)
    if config is not None:
        _check_same(folder, stored_config, config)
    config = config or stored_config
    assert stored_config.hf_type is not None
    family = FAMILIES[stored_config.hf_type]
    if is_gguf(folder):
        family = gguf_files.layout_of(family)
    places = places_of(stored_config, family)
    if is_gguf(folder):
        stored = gguf_files.find(folder, places, stored_config)
    else:
        optional = family.head_weights if stored_config.tie_head else ()
        stored = hf_files.find(folder, optional)
        stored = text_tensors(stored) if text_only else stored
        stored = _with_full_names(stored, stored_config, family)
    stored = _select_weights(folder, stored, places, drop_extra)
    _check_stored(stored, places, shapes(stored_config))
    dtypes = _leaf_dtypes(stored, places, _dtype(dtype))
    declared = transformer.declarations(config)
    params = map_leaves(lambda key, d: _lazy(key, d, dtypes[key], stored, places), declared)
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

    The embedding's bias, which GPT-J has here but not at Hugging Face, is added to each row of the
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
      InputError: if Hugging Face cannot represent the model, `folder` already exists, or storage
        fails.  If storage fails, nothing is left at `folder`.
    """
    family = family_of(config)
    check_state(state, transformer.declarations(config))
    chosen = Tokenizer.of(tokenizer, config, must_fit=trim_vocab)
    rows = min(len(chosen.loaded), config.n_vocab) if trim_vocab else config.n_vocab
    places = places_of(config, family)
    tensors = list(_tensors(state["params"], places, rows, _dtype(dtype)))
    with atomic_folder(folder) as temporary:
        hf_files.write(temporary, tensors, shard_bytes)
        own = chosen.loaded if chosen.fits else None
        write_configs(temporary, config, rows, tensors[0].dtype, own)
        chosen.save(temporary)


def write_gguf(
    path: str,
    state: dict[str, Any],
    config: Config,
    *,
    kind: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Write a model's weights and tokenizer to a new GGUF file, which llama.cpp can run.

    Args:
      path: the file to create.
      state, tokenizer: as for `write`.
      kind: the type of matrices, one of `gguf_files.TYPES` (default: the embedding's dtype).

    Raises:
      InputError: if GGUF cannot represent the model or its tokenizer, `path` already exists, or
        storage fails.  If storage fails, nothing is left at `path`.
    """
    gguf_files.architecture_of(config)  # raises before the tokenizer is loaded
    chosen = Tokenizer.of(tokenizer, config, must_fit=True).loaded
    values, _ = config_values(config, config.n_vocab, chosen)
    check_state(state, transformer.declarations(config))
    own = state["params"]["embed"]["embedding"]["w"].dtype
    kind = kind or next(name for name, dtype in FLOATS.items() if dtype == own)
    places = places_of(config, gguf_files.layout_of(family_of(config)))
    tensors = list(_tensors(state["params"], places, config.n_vocab, np.dtype(np.float32)))
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    header, divisors_R = gguf_files.header_of(path, shapes, values, config)
    check_gguf(header, divisors_R, config)
    gguf_files.write(path, tensors, header, divisors_R, config, chosen, kind)


def _dtype(dtype: DTypeLike | None) -> np.dtype | None:
    if dtype is None:
        return None
    result = np.dtype(dtype)
    if result not in FLOATS.values():
        raise InputError(f"dtype is {result}, expected float32, float16 or bfloat16")
    return result


def places_of(config: Config, family: Family) -> dict[str, list[Place]]:
    """Return {Hugging Face tensor name: the places of its values}, in Hugging Face's order."""
    places = {family.embedding_weight: [Place(*_EMBED)]}
    if family.positions:
        name = f"{family.prefix}{family.positions}.weight"
        places[name] = [Place("embed", "embedding", "pos_embs")]
    declared = transformer.declarations(config)["layers"]
    groups = family.groups or config.n_heads
    held = {
        name: leaves
        for name, leaves in family.layer.items()
        if all(leaf in declared.get(module, {}) for module, leaf in leaves)
    }
    for layer in range(config.layers):
        for name, leaves in held.items():
            own = [declared[module][leaf].shape for module, leaf in leaves]
            axis = family.out_axis if len(own[0]) == 3 else None
            sizes = [shape[-1] // groups for shape in own]
            packing = {"groups": groups, "size": sum(sizes)} if len(leaves) > 1 else {}
            places[f"{family.prefix}{family.layers}.{layer}.{name}"] = [
                Place("layers", module, leaf, layer, axis, start=sum(sizes[:number]), **packing)
                for number, (module, leaf) in enumerate(leaves)
            ]
    last = transformer.declarations(config)["proj"].get("projection/norm", {})
    for name, leaf in (("weight", "scale"), ("bias", "offset")):
        if leaf in last:
            places[f"{family.prefix}{family.norm}.{name}"] = [
                Place("proj", "projection/norm", leaf)
            ]
    if not config.tie_head:
        places[family.head_weights[0]] = [Place("proj", "projection/head", "w", out_axis=0)]
    if config.layer_kind.biased_ends:
        places[f"{family.head}.bias"] = [Place(*_HEAD_BIAS)]
    return places


def _with_full_names(
    stored: dict[str, StoredTensor], config: Config, family: Family
) -> dict[str, StoredTensor]:
    """Return stored tensors by the names that `places_of` uses.

    Some files, such as those of GPT-2 on Hugging Face's hub, leave out the prefix of the names.
    Files may hold a tied output head a second time, or in place of the embedding.
    """
    bare = family.embedding_weight.removeprefix(family.prefix) in stored

    def full_name(name: str) -> str:
        if name.startswith(("lm_head.", f"{family.head}.")):
            return f"{family.head}.{name.rpartition('.')[2]}"
        return family.prefix + name if bare else name

    named = {full_name(name): tensor for name, tensor in stored.items()}
    if config.tie_head and (head := named.pop(family.head_weights[0], None)) is not None:
        named.setdefault(family.embedding_weight, head)
    return named


def _check_same(folder: str, stored: Config, config: Config) -> None:
    """Raise InputError if `config` does not describe the folder's model, whose config is `stored`.

    `config` may have a larger `n_vocab` or a smaller `seq`; see `read`.
    """
    where = os.path.join(folder, "config.json")
    for key in ("layers", "d_model"):
        if getattr(stored, key) != getattr(config, key):
            raise InputError(
                f"{where}: {key} is {getattr(stored, key)}, but the config has "
                f"{getattr(config, key)}; use the model's own config"
            )
    check_same_model(config, stored.as_dict(), where)
    if stored.pe == "fixed" and config.seq > stored.seq:
        raise InputError(
            f"{where}: the model has learned {stored.seq} positions, but the config's seq is "
            f"{config.seq}; set seq to at most {stored.seq}"
        )
    if stored.n_vocab < config.n_vocab and not config.layer_kind.biased_ends:
        raise InputError(
            f"{where}: vocab_size is {stored.n_vocab}, but the config's n_vocab is "
            f"{config.n_vocab}; set n_vocab to {stored.n_vocab} (only models whose output head has "
            "a bias can be padded)"
        )
    if stored.n_vocab > config.n_vocab:
        raise InputError(
            f"{where}: vocab_size is {stored.n_vocab}, but the config's n_vocab is "
            f"{config.n_vocab}; set n_vocab to at least {stored.n_vocab}"
        )


def _select_weights(
    folder: str,
    stored: dict[str, StoredTensor],
    places: dict[str, list[Place]],
    drop_extra: bool,
) -> dict[str, StoredTensor]:
    """Return those stored tensors that are weights; drop constants such as attention masks.

    Raises:
      InputError: if a weight is missing, or if a stored tensor is neither a weight nor a known
        constant and `drop_extra` is false.
    """
    for name in places:
        if name not in stored:
            raise InputError(
                f"{folder}: tensor {name} is missing; copy the folder again, or check config.json"
            )
    extra = [name for name in stored if name not in places and not name.endswith(_BUFFERS)]
    if extra and not drop_extra:
        others = f" (and {len(extra) - 1} more)" if extra[1:] else ""
        raise InputError(
            f"{stored[extra[0]].path}: tensor {brief(extra[0])}{others} is not part of the model "
            "that config.json describes; use the config.json of these weights, or leave such "
            "tensors out: mesh-transformer convert --drop-extra"
        )
    if extra:
        print(f"{folder}: left out {', '.join(map(brief, extra))}", file=sys.stderr, flush=True)
    return {name: tensor for name, tensor in stored.items() if name in places}


def _check_stored(
    stored: dict[str, StoredTensor], places: dict[str, list[Place]], expected: transformer.Params
) -> None:
    """Raise InputError if a tensor has an unexpected shape, or a dtype that is not in `DTYPES`.

    Args:
      expected: a tree like our parameters, with the expected shapes; its values are not used.
    """
    for name, tensor in stored.items():
        shape = places[name][0].tensor_shape(expected)
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
    stored: dict[str, StoredTensor], places: dict[str, list[Place]], dtype: np.dtype | None
) -> dict[Path, np.dtype]:
    """Return the dtype to read each parameter in, as {(part, module, leaf): dtype}.

    The dtype is `dtype` or, if `dtype` is None, the dtype of the parameter's stored tensors.  Those
    in float64 are read in float32.

    Raises:
      InputError: if `dtype` is None and the layers of a leaf differ in dtype.
    """
    leaf_dtypes: dict[Path, np.dtype] = {}
    for name, tensor in stored.items():
        own = DTYPES["F32" if tensor.dtype == "F64" else tensor.dtype]
        for place in places[name]:
            first = leaf_dtypes.setdefault(place.key, dtype or own)
            if dtype is None and first != own:
                raise InputError(
                    f"{tensor.path}: tensor {name} has dtype {own}, but other layers have {first}; "
                    "convert the folder with --dtype, so that all layers have one dtype"
                )
    leaf_dtypes["embed", "embedding", "b"] = leaf_dtypes[_EMBED]
    return leaf_dtypes


def _lazy(
    key: Path,
    declaration: Declaration,
    dtype: np.dtype,
    stored: dict[str, StoredTensor],
    places: dict[str, list[Place]],
) -> Any:
    """Return one leaf of our parameters as a `LazyLeaf`, which reads one tensor per layer.

    The embedding's bias, for which Hugging Face has no tensor, is returned as zeros.
    """
    tensors = [(name, place) for name, held in places.items() for place in held if place.key == key]
    if not tensors:
        return np.zeros(declaration.shape, dtype)
    shape = declaration.shape[declaration.stacked :]

    def read(layer: int | None) -> np.ndarray:
        name, place = tensors[layer or 0]
        tensor = stored[name]
        values = np.empty(shape, dtype)
        if key in _BY_VOCABULARY:  # and may have more tokens than the tensor
            values[...] = PADDING_BIAS if key == _HEAD_BIAS else 0
        for source, target in place.views(tensor.read(), values):
            _copy(target, source, f"{tensor.path}: tensor {name}")
        return values

    return LazyLeaf(declaration.shape, dtype, read, layers=declaration.stacked)


def _tensors(
    params: transformer.Params, places: dict[str, list[Place]], rows: int, dtype: np.dtype | None
) -> Iterator[Tensor]:
    """Yield the tensors to write to a Hugging Face folder.

    A tensor's values are computed only when its function `values` is called.

    Args:
      rows: the size of the vocabulary to write.
    """
    bias = np.asarray(params["embed"]["embedding"].get("b", 0.0))
    added: dict[Path, np.ndarray] = {_EMBED: bias} if bias.any() else {}

    def values(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        tensor = np.empty(shape, dtype)
        for place in places[name]:
            leaf = place.find(params)
            leaf = np.asarray(leaf if place.layer is None else leaf[place.layer])
            for target, source in place.views(tensor, leaf):
                _copy(target, source, f"tensor {name}", added.get(place.key))
        return tensor

    for name, (place, *_) in places.items():
        shape = place.tensor_shape(params)
        if place.key in _BY_VOCABULARY:
            shape = (rows, *shape[1:])
        target = dtype or place.find(params).dtype
        yield Tensor(name, target, shape, partial(values, name, shape, target))


def _copy(
    target: np.ndarray, source: np.ndarray, name: str, bias: np.ndarray | None = None
) -> None:
    """Copy `source` to `target` in blocks of rows, and cast the values to the dtype of `target`.

    Args:
      bias: values to add to each row in f32 before the cast (default: none).
    """
    if source.ndim == 2 and not source.flags.c_contiguous:
        target, source = target.T, source.T
    for start in range(0, len(source), _BLOCK):
        block = source[start : start + _BLOCK]
        if bias is not None:
            block = block.astype(np.float32) + bias.astype(np.float32)
        target[start : start + _BLOCK] = cast(block, target.dtype, name)
