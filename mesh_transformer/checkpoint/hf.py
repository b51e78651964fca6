"""GPT-J in Hugging Face's names, both ways: a folder of safetensors, config.json, a tokenizer.

Their Linear weights are [out, in], ours [in, out]; their layers lie side by side, ours are stacked.
The rotary convention is the same (interleaved pairs).  No torch, except to read `.bin` files.
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
from mesh_transformer.checkpoint.atomic_folder import whole_folder
from mesh_transformer.checkpoint.hf_files import DTYPES, Stored, Tensor, read_json, write_json
from mesh_transformer.checkpoint.host_arrays import FLOATS, LazyLeaf, cast, in_memory
from mesh_transformer.checkpoint.state_tree import check_same_model, check_state
from mesh_transformer.config import Config
from mesh_transformer.data.storage import local_path
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.mesh.declaration import Declaration, map_declared
from mesh_transformer.model import gptj
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


SHARD_BYTES = 5_000_000_000
# The head's bias of vocabulary that only pads: low enough that its probability is 0 in f32, and
# within the range of f16.
PADDING_BIAS = -1e4
_BLOCK = 16  # rows: transposing copies are five times as fast so, as they stay in the cache

# Their module below transformer.h.<i>. -> our (module, leaf), of a layer.
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
_BY_VOCABULARY = (_EMBEDDING, "lm_head.weight", _HEAD_BIAS)  # whose first axis is the vocabulary
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attn.embed_positions")  # constants, not weights


class _Place(NamedTuple):
    """Where one of their tensors stands in our parameters."""

    part: str
    module: str
    leaf: str
    layer: int | None
    transposed: bool

    def find(self, params: gptj.Params) -> Any:
        """Our leaf that it is, or is a layer of."""
        return params[self.part][self.module][self.leaf]

    def shape(self, params: gptj.Params) -> tuple[int, ...]:
        """Its shape in their orientation."""
        shape = self.find(params).shape[self.layer is not None :]
        return shape[::-1] if self.transposed else shape

    def values(self, params: gptj.Params) -> np.ndarray:
        """It in their orientation."""
        found = self.find(params)
        values = np.asarray(found if self.layer is None else found[self.layer])
        return values.T if self.transposed else values


def read(
    folder: str,
    *,
    config: Config | None = None,
    dtype: DTypeLike | None = None,
    lazy: bool = False,
) -> tuple[Config, dict[str, Any]]:
    """A folder's config, or `config` where that fits it, and its weights as a host state.

    The embedding's bias, which they have not, is zero.  A larger `config.n_vocab` is filled up:
    embedding rows and head columns with zeros, the head's bias with `PADDING_BIAS`, so that the
    added tokens have no probability and no part in the loss.  `dtype` None keeps the file's.
    The leaves of a `lazy` state are read (and found to be damaged) when they are asked for.

    Raises:
      InputError: for a folder that is no GPT-J, damaged, or contradicts `config` or itself.
    """
    found = read_config(folder)
    if config is not None:
        _check_same(folder, found, config)
    config = config or found
    places = _places(config)
    stored = _known(folder, hf_files.find(folder), places)
    declared = gptj.declarations(found)
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
        for part, modules in gptj.declarations(config).items()
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
    """Writes a host state's weights as a new folder that transformers loads.

    The embedding's bias is folded into its rows.  `dtype` None keeps every leaf's own.
    `tokenizer` (a folder, or what else `load_tokenizer` takes) goes with the weights; None takes
    `config.tokenizer`, unless the model's vocabulary is too small for it.  `trim_vocab` cuts the
    vocabulary to the tokenizer's.

    Raises:
      InputError: for a model that GPT-J cannot express, a folder that is there already, and what
        the storage refuses; nothing is left at `folder` then.
    """
    check_expressible(config)
    check_state(state, gptj.declarations(config))
    kept = Tokenizer.of(tokenizer, config, must_fit=trim_vocab)
    rows = len(kept.loaded) if trim_vocab else config.n_vocab
    tensors = list(_tensors(state["params"], config, rows, _dtype(dtype)))
    total = sum(tensor.n_bytes for tensor in tensors)
    with whole_folder(folder) as temporary:
        with tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None) as bar:
            hf_files.write(temporary, tensors, shard_bytes, bar)
        end_of_text = kept.loaded.eos_token_id if kept.fits else None
        write_configs(temporary, config, rows, tensors[0].dtype, end_of_text)
        kept.save(temporary)


def _dtype(dtype: DTypeLike | None) -> np.dtype | None:
    if dtype is None:
        return None
    found = np.dtype(dtype)
    if found not in FLOATS.values():
        raise InputError(f"dtype is {found}, expected float32, float16 or bfloat16")
    return found


def _places(config: Config) -> dict[str, _Place]:
    """Their tensors' names, in their order, and each one's place in our parameters."""
    places = {_EMBEDDING: _Place("embed", "embedding", "w", None, False)}
    for layer in range(config.layers):
        for name, (module, leaf) in _LAYER.items():
            linear = name.endswith(".weight") and not name.startswith("ln")
            place = _Place("layers", module, leaf, layer, linear)
            places[f"transformer.h.{layer}.{name}"] = place
    for name, (part, module, leaf) in _OUTER.items():
        places[name] = _Place(part, module, leaf, None, name == "lm_head.weight")
    return places


def _check_same(folder: str, found: Config, config: Config) -> None:
    """InputError where the folder's model is not the config's."""
    where = os.path.join(folder, "config.json")
    for key in ("layers", "d_model"):
        if getattr(found, key) != getattr(config, key):
            raise InputError(
                f"{where}: {key} is {getattr(found, key)}, the config has {getattr(config, key)}; "
                "use the model's own config"
            )
    check_same_model(config, found.as_dict(), where)
    if found.n_vocab > config.n_vocab:
        raise InputError(
            f"{where}: vocab_size is {found.n_vocab}, the config's n_vocab {config.n_vocab}; "
            "give n_vocab at least as many"
        )


def _known(folder: str, stored: dict[str, Stored], places: dict[str, _Place]) -> dict[str, Stored]:
    """The stored tensors that are weights; InputError where they are not those of `places`."""
    for name in places:
        if name not in stored:
            raise InputError(
                f"{folder}: tensor {name} is missing; copy the folder anew, or check config.json"
            )
    for name, tensor in stored.items():
        if name not in places and not name.endswith(_BUFFERS):
            raise InputError(
                f"{tensor.path}: tensor {name} has no place in the model; check config.json"
            )
    return {name: tensor for name, tensor in stored.items() if name in places}


def _check_stored(
    stored: dict[str, Stored], places: dict[str, _Place], expected: gptj.Params
) -> None:
    """InputError naming the first tensor of another shape than `expected`, or no float."""
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
                f"{', '.join(DTYPES)}; convert it with its own library"
            )


def _leaf_dtypes(
    stored: dict[str, Stored], places: dict[str, _Place], dtype: np.dtype | None
) -> dict[tuple[str, str, str], np.dtype]:
    """Each of our leaves' dtype: the given one, or that of its tensors, which then must agree."""
    found = {("embed", "embedding", "b"): dtype or DTYPES[stored[_EMBEDDING].dtype]}
    for name, tensor in stored.items():
        own = DTYPES[tensor.dtype]
        first = found.setdefault(places[name][:3], dtype or own)
        if dtype is None and first != own:
            raise InputError(
                f"{tensor.path}: tensor {name} is {own}, other layers' are {first}; "
                "say in which dtype to read them"
            )
    return found


def _lazy(
    key: tuple[str, str, str],
    declaration: Declaration,
    dtypes: dict[tuple[str, str, str], np.dtype],
    stored: dict[str, Stored],
    places: dict[str, _Place],
) -> Any:
    """One of our leaves, made of their tensors layer by layer; the bias they have not is zero."""
    dtype = dtypes[key]
    names = [name for name, place in places.items() if place[:3] == key]
    if not names:
        return np.zeros(declaration.shape, dtype)
    shape = declaration.shape[declaration.stacked :]

    def read(layer: int | None) -> np.ndarray:
        name = names[layer or 0]
        tensor = stored[name]
        values, rows = np.empty(shape, dtype), tensor.shape[0]
        theirs = values.T if places[name].transposed else values
        _copy(theirs[:rows], tensor.read(), f"{tensor.path}: tensor {name}")
        theirs[rows:] = PADDING_BIAS if name == _HEAD_BIAS else 0
        return values

    return LazyLeaf(declaration.shape, dtype, read, layers=declaration.stacked)


def _tensors(
    params: gptj.Params, config: Config, rows: int, dtype: np.dtype | None
) -> Iterator[Tensor]:
    """What is written, in their names; each is made when its turn comes."""
    bias = np.asarray(params["embed"]["embedding"]["b"])
    for name, place in _places(config).items():
        shape = place.shape(params)
        if name in _BY_VOCABULARY:
            shape = (rows, *shape[1:])
        added = bias if name == _EMBEDDING and bias.any() else None
        kept = dtype or place.find(params).dtype
        yield Tensor(name, kept, shape, partial(_made, name, place, params, shape, kept, added))


def _made(
    name: str,
    place: _Place,
    params: gptj.Params,
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
    """`target[...] = source (+ bias, in f32)`, block by block, cast to the target's dtype."""
    if source.ndim == 2 and not source.flags.c_contiguous:
        target, source = target.T, source.T
    for start in range(0, len(source), _BLOCK):
        block = source[start : start + _BLOCK]
        if bias is not None:
            block = block.astype(np.float32) + bias.astype(np.float32)
        target[start : start + _BLOCK] = cast(block, target.dtype, name)
