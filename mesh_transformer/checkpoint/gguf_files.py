"""The models in GGUF files, llama.cpp's format, in Hugging Face's terms: config and tensors.

`read_config` returns what a config.json would say, and `find` the tensors by Hugging Face's names,
so that `hf.read` reads both kinds of checkpoint.  The package gguf knows the names of tensors and
the quantized types.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.checkpoint.atomic_folder import atomic_file
from mesh_transformer.checkpoint.hf_files import Tensor
from mesh_transformer.checkpoint.host_arrays import FLOATS, cast
from mesh_transformer.checkpoint.stored_tensors import StoredTensor
from mesh_transformer.config import Config
from mesh_transformer.data.gguf_header import COPY_ADVICE, GgufHeader, GgufTensor, read_header
from mesh_transformer.data.gguf_tokenizer import metadata_of
from mesh_transformer.data.prefetch import Prefetch
from mesh_transformer.data.tokenizer import chat_template
from mesh_transformer.model.layer_values import frequencies
from mesh_transformer.storage import files
from mesh_transformer.util import InputError

TYPES = ("f32", "f16", "bf16", "q8_0")  # of matrices that can be written
# ggml's numbers of the types whose values are stored as they are.
_PLAIN = {0: "f32", 1: "f16", 30: "bf16"}
_FREQUENCIES = "rope_freqs.weight"


class Architecture(NamedTuple):
    """One of llama.cpp's architectures.

    Attributes:
      hf_type: Hugging Face's type of the model.
      neighbours: whether neighbouring entries of a head are rotated together, so that the rows of
        queries and keys have another order than at Hugging Face.
    """

    hf_type: str
    neighbours: bool = False


# {llama.cpp's name: architecture}
ARCHITECTURES = {
    "llama": Architecture("llama", neighbours=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}
# {key of the metadata, without the architecture: key of config.json}
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_KEY_HEADS, _EPS = "attention.head_count_kv", "attention.layer_norm_rms_epsilon"
_KEY_SIZE, _OTHER_SIZES = "attention.key_length", ("attention.value_length", "rope.dimension_count")
_SAMPLING = "general.sampling."
_SAMPLING_NAMES = {"repetition_penalty": "penalty_repeat"}  # where llama.cpp's name differs
_ROPE, _SCALING, _LINEAR = "rope.freq_base", "rope.scaling.", "rope.scale_linear"
_KNOWN = {  # keys that are read, or do not change the model
    *_SIZES,
    *_OTHER_SIZES,
    *(_KEY_HEADS, _KEY_SIZE, _EPS, _ROPE, _LINEAR),
    *(f"{_SCALING}{name}" for name in ("type", "factor", "original_context_length", "finetuned")),
    *("vocab_size", "tensor_data_layout", "pooling_type"),
}
# {another key: the values with which it does not change the model}, in llama.cpp.  Default: 0.
_NEUTRAL = {
    "attention.causal": (1,),
    f"{_SCALING}attn_factor": (1,),
    f"{_SCALING}yarn_attn_factor": (1,),
    f"{_SCALING}yarn_beta_fast": (32,),
    f"{_SCALING}yarn_beta_slow": (1,),
    f"{_SCALING}yarn_ext_factor": (-1,),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
}
# The keys of tokens that end an answer.
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def read_config(path: str) -> dict[str, Any]:
    """Return what a config.json of the model in a GGUF file would say.

    Raises:
      InputError: if llama.cpp's architecture of the model, or a variant, is not supported.
    """
    header = read_header(path)
    name = header.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise InputError(
            f"{path}: general.architecture is {name!r}, expected one of "
            f"{', '.join(ARCHITECTURES)}; give a file with one of these models"
        )
    if header.get("split.count", int, 1) > 1:
        raise InputError(
            f"{path} is one of {header.metadata['split.count']} parts of a model; join them: "
            "llama-gguf-split --merge"
        )
    values: dict[str, Any] = {"model_type": ARCHITECTURES[name].hf_type}
    values |= {theirs: header.get(f"{name}.{key}", int) for key, theirs in _SIZES.items()}
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = header.get(f"{name}.{_KEY_HEADS}", int, heads)
    size = header.get(f"{name}.{_KEY_SIZE}", int, values["hidden_size"] // max(heads, 1))
    for key in _OTHER_SIZES:
        if (other := header.get(f"{name}.{key}", int, size)) != size:
            raise InputError(
                f"{path}: {name}.{key} is {other}, expected {size}, the size of a head; give "
                "another model"
            )
    _check_other_keys(header, name, size)
    values["head_dim"] = size
    values["rms_norm_eps"] = header.get(f"{name}.{_EPS}", float)
    values["rope_parameters"] = _rotary(header, name)
    embedding = header.tensors.get("token_embd.weight")
    values["vocab_size"] = embedding.shape[0] if embedding and embedding.shape else 0
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    for key, tensor in (("attention_bias", "attn_output"), ("mlp_bias", "ffn_up")):
        values[key] = f"blk.0.{tensor}.bias" in header.tensors
    ends = [header.get(key, int) for key in _ENDS if key in header.metadata]
    values["eos_token_id"] = ends or None
    return values


def _check_other_keys(header: GgufHeader, name: str, size: int) -> None:
    """Raise InputError if a key that is not supported may change the model.

    Args:
      name: llama.cpp's name of the architecture.
      size: the size of a head.
    """
    neutral = _NEUTRAL | {"attention.scale": (0, max(size, 1) ** -0.5)}
    for key, value in header.metadata.items():
        architecture, _, own = key.partition(".")
        if architecture != name or own in _KNOWN:
            continue
        expected = neutral.get(own, (0,))
        if not isinstance(value, int | float) or not np.isclose(value, expected, 1e-6, 0).any():
            numbers = " or ".join(f"{number:g}" for number in expected)
            raise InputError(
                f"{header.path}: {key[:80]!r} is {str(value)[:80]!r}, which is not supported "
                f"(expected {numbers}); give another model"
            )


def read_sampling(path: str) -> dict[str, Any]:
    """Return the model's sampling settings in a GGUF file, by Hugging Face's names."""
    names = {ours: name for name, ours in _SAMPLING_NAMES.items()} | {"temp": "temperature"}
    metadata = read_header(path).metadata.items()
    own = {key.removeprefix(_SAMPLING): x for key, x in metadata if key.startswith(_SAMPLING)}
    return {names.get(key, key): value for key, value in own.items()}


def _rotary(header: GgufHeader, name: str) -> dict[str, Any]:
    """Return the key `rope_parameters` of a config.json."""
    base = header.get(f"{name}.{_ROPE}", float, 10000.0)
    factor = header.get(f"{name}.{_LINEAR}", float, 0.0)
    factor = header.get(f"{name}.{_SCALING}factor", float, factor)
    kind = header.get(f"{name}.{_SCALING}type", str, "linear")
    if kind == "linear" and factor in (0, 1):  # 0: no factor
        kind = "none"
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": base}
    if kind != "none":
        rope["factor"] = factor or header.get(f"{name}.{_SCALING}factor", float)
        if original := header.get(f"{name}.{_SCALING}original_context_length", int, 0):
            rope["original_max_position_embeddings"] = original
    if _FREQUENCIES in header.tensors:
        tensor = header.tensors[_FREQUENCIES]
        divisors = _read(header, _FREQUENCIES, tensor).astype(np.float64)
        rope |= LLAMA3 | {"factor": float(divisors.max(initial=1))}
        if kind != "none" or not np.allclose(divisors, llama3_divisors(rope, 2 * len(divisors))):
            raise InputError(
                f"{header.path}: tensor {_FREQUENCIES} has other values than those of Llama 3's "
                "rotary embedding, which alone are supported; give another model"
            )
    return rope


# What the files of Llama 3 say only by the divisors of their rotary frequencies.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_divisors(rope: dict[str, Any], dims: int) -> np.ndarray:
    """Return the divisors of the rotary frequencies of Llama 3.1 and later, [dims / 2].

    Args:
      rope: the key `rope_parameters` of a config.json.
    """
    plain, _ = frequencies(dims, rope["rope_theta"], None)
    return plain / frequencies(dims, rope["rope_theta"], rope)[0]


def find(path: str, names: Iterable[str], config: Config) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file by Hugging Face's names; others by their own.

    Args:
      names: Hugging Face's names of the model's tensors.
      config: the model's config.

    Raises:
      InputError: if a tensor is missing, or of a type that is not supported.
    """
    header = read_header(path)
    rest = {name: tensor for name, tensor in header.tensors.items() if name != _FREQUENCIES}
    # All layers of a matrix have one dtype only if all matrices have.
    kinds = {tensor.kind for tensor in rest.values() if len(tensor.shape) > 1}
    half = next(iter(kinds)) if len(kinds) == 1 else None
    stored = {}
    for name, theirs in _names(names, config).items():
        if theirs not in rest:
            raise InputError(f"{path}: tensor {theirs} is missing; {COPY_ADVICE}")
        heads = _reordered_heads(name, config)
        stored[name] = _stored(header, theirs, rest.pop(theirs), half, heads)
    return stored | {name: _stored(header, name, rest[name], half, None) for name in rest}


def is_quantized(path: str) -> bool:
    """Return whether a GGUF file has tensors of a quantized type."""
    return any(tensor.kind not in _PLAIN for tensor in read_header(path).tensors.values())


def _names(names: Iterable[str], config: Config) -> dict[str, str]:
    """Return {Hugging Face's name of a tensor: llama.cpp's}."""
    import gguf

    own = architecture_of(config)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == own)
    known = gguf.get_tensor_name_map(number, config.layers)
    return {name: known.get_name(name, (".weight", ".bias")) or name for name in names}


def architecture_of(config: Config) -> str:
    """Return llama.cpp's name of a model's architecture.

    Raises:
      InputError: if there is none.
    """
    for name, architecture in ARCHITECTURES.items():
        if architecture.hf_type == config.hf_type:
            return name
    supported = ", ".join(row.hf_type for row in ARCHITECTURES.values())
    raise InputError(
        f"config: hf_type is {config.hf_type!r}, but GGUF files are supported only for models of "
        f"type {supported}; use another format, such as hf"
    )


def _reordered_heads(name: str, config: Config) -> int | None:
    """Return the number of heads in a tensor whose rows llama.cpp sorts otherwise, else None."""
    if ARCHITECTURES[architecture_of(config)].neighbours:
        if ".q_proj." in name:
            return config.n_heads
        if ".k_proj." in name:
            return config.key_heads
    return None


def _reordered(values: np.ndarray, groups: tuple[int, int, int]) -> np.ndarray:
    """Return a tensor with the rows of each head in another order.

    Args:
      groups: (heads, -1, 2) if neighbours are rotated together, (heads, 2, -1) if halves are.
    """
    return values.reshape(*groups, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _stored(
    header: GgufHeader, name: str, tensor: GgufTensor, half: int | None, heads: int | None
) -> StoredTensor:
    _bytes_of(header, name, tensor)
    dtype = _PLAIN.get(tensor.kind, "f32") if tensor.kind == half else "f32"

    def read() -> np.ndarray:
        values = _read(header, name, tensor).astype(FLOATS[dtype], copy=False)
        return values if heads is None else _reordered(values, (heads, -1, 2))

    return StoredTensor(header.path, dtype.upper(), tensor.shape, read, tensor.start)


def _bytes_of(header: GgufHeader, name: str, tensor: GgufTensor) -> tuple[int, ...]:
    """Return the shape of a tensor's bytes in the file.

    Raises:
      InputError: if the tensor's type is not supported, or the file is too short.
    """
    where = f"{header.path}: tensor {name}"
    block = _block(tensor.kind)
    if block is None or not tensor.shape or tensor.shape[-1] % block[0]:
        raise InputError(
            f"{where} has shape {tensor.shape} and ggml's type {tensor.kind}, expected a type that "
            "the package gguf reads, with whole blocks; convert the model again"
        )
    shape = (*tensor.shape[:-1], tensor.shape[-1] // block[0] * block[1])
    end = tensor.start + math.prod(shape)
    if end > header.size:
        raise InputError(
            f"{where} ends at byte {end:,}, but the file has {header.size:,}; {COPY_ADVICE}"
        )
    return shape


@functools.cache
def _block(kind: int) -> tuple[int, int] | None:
    """Return the numbers of values and of bytes in a block of a type; None if it is unknown."""
    if kind in _PLAIN:
        return 1, FLOATS[_PLAIN[kind]].itemsize
    import gguf

    try:
        known = gguf.GGMLQuantizationType(kind)
        values, size = gguf.GGML_QUANT_SIZES[known]
        gguf.dequantize(np.zeros((1, size), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return values, size


def _read(header: GgufHeader, name: str, tensor: GgufTensor) -> np.ndarray:
    """Return a tensor's values; those of quantized tensors are f32."""
    raw = np.empty(_bytes_of(header, name, tensor), np.uint8)
    with files.open_file(header.path) as file:
        file.seek(tensor.start)
        if file.readinto(raw.reshape(-1).data) != raw.size:
            raise InputError(f"{header.path} was truncated while it was read; {COPY_ADVICE}")
    if tensor.kind in _PLAIN:
        return raw.view(FLOATS[_PLAIN[tensor.kind]])
    import gguf

    return gguf.dequantize(raw, gguf.GGMLQuantizationType(tensor.kind))


def write(
    path: str,
    tensors: Sequence[Tensor],
    values: dict[str, Any],
    config: Config,
    tokenizer: Any,
    kind: str,
) -> None:
    """Write a GGUF file that llama.cpp can run.

    Args:
      tensors: the model's tensors, as for Hugging Face, in f32.
      values: the model's config.json.
      tokenizer: the model's tokenizer, of transformers.
      kind: the type of matrices, one of `TYPES`.  Other tensors are in f32, and with "q8_0"
        matrices whose rows are not made of blocks of 32 values are in f16.

    Raises:
      InputError: if GGUF cannot represent the model or its tokenizer, or storage fails.
    """
    import gguf

    _check_expressible(path, config, values["rope_parameters"])
    metadata = _metadata(values, config, tokenizer, kind)
    names = _names((tensor.name for tensor in tensors), config)
    if values["rope_parameters"]["rope_type"] == "llama3":
        divisors = llama3_divisors(values["rope_parameters"], config.d_rotary).astype(np.float32)
        names[_FREQUENCIES] = _FREQUENCIES
        tensors = [Tensor(_FREQUENCIES, divisors.dtype, divisors.shape, lambda: divisors), *tensors]
    kinds = [_kind_of(tensor, kind) for tensor in tensors]
    with atomic_file(path) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture_of(config))
        with contextlib.closing(writer):
            for key, value in metadata.items():
                getattr(writer, f"add_{_WRITTEN[type(value)]}")(key, value)
            for tensor, own in zip(tensors, kinds, strict=True):
                block, size = gguf.GGML_QUANT_SIZES[own]
                count = math.prod(tensor.shape) // block * size
                writer.add_tensor_info(names[tensor.name], tensor.shape, tensor.dtype, count, own)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            # While one tensor is written, the next one is computed.
            heads = [_reordered_heads(tensor.name, config) for tensor in tensors]
            arrays = Prefetch(map(_encoded, tensors, kinds, heads), 1)
            total = sum(tensor.n_bytes for tensor in tensors)
            bar = tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None)
            with contextlib.closing(arrays), bar:
                for tensor, array in zip(tensors, arrays, strict=True):
                    writer.write_tensor_data(array)
                    bar.update(tensor.n_bytes)


# What the methods of gguf's writer call the types of values.
_WRITTEN = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}


def _kind_of(tensor: Tensor, kind: str) -> Any:
    """Return ggml's type for a tensor of a model whose matrices are of the type `kind`."""
    import gguf

    if len(tensor.shape) < 2:
        kind = "f32"
    elif kind == "q8_0" and tensor.shape[-1] % 32:
        kind = "f16"
    return gguf.GGMLQuantizationType[kind.upper()]


def _encoded(tensor: Tensor, kind: Any, heads: int | None) -> np.ndarray:
    """Return a tensor's bytes in a file."""
    values = tensor.values()
    if heads is not None:
        values = _reordered(values, (heads, 2, -1))
    if kind in _PLAIN:
        values = cast(values, FLOATS[_PLAIN[kind]], f"tensor {tensor.name}")
        return np.ascontiguousarray(values).view(np.uint8)
    import gguf

    return gguf.quantize(values, kind)


def _check_expressible(path: str, config: Config, rope: dict[str, Any]) -> None:
    """Raise InputError if reading what `write` writes would give another model."""
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "factor")}
    if rope["rope_type"] != "llama3":
        scaling.pop("original_max_position_embeddings", None)
    if scaling not in (LLAMA3, *({"rope_type": kind} for kind in ("default", "linear", "yarn"))):
        problem = f"a rotary embedding with {scaling}"
    elif config.sliding_window is not None:
        problem = f"sliding_window {config.sliding_window}"
    else:
        return
    raise InputError(
        f"{path}: the config has {problem}, which is not supported in GGUF files; use another "
        "format, such as hf"
    )


def _metadata(values: dict[str, Any], config: Config, tokenizer: Any, kind: str) -> dict[str, Any]:
    rope, size = values["rope_parameters"], config.d_head
    own = {key: values[theirs] for key, theirs in _SIZES.items()} | {
        _KEY_HEADS: config.key_heads,
        _EPS: config.norm_eps,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": config.d_rotary,
        "vocab_size": config.n_vocab,
        _ROPE: float(rope["rope_theta"]),
    }
    if rope["rope_type"] not in ("default", "llama3"):
        own |= {f"{_SCALING}type": rope["rope_type"], f"{_SCALING}factor": float(rope["factor"])}
        if original := rope.get("original_max_position_embeddings"):
            own[f"{_SCALING}original_context_length"] = original
    file_type = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[kind]
    result = {"general.name": config.name, "general.file_type": file_type}
    result |= {"general.quantization_version": 2}
    for key, value in config.sampling.items():
        number = value if key == "top_k" else float(value)
        result[f"{_SAMPLING}{_SAMPLING_NAMES.get(key, key)}"] = number
    result |= {f"{architecture_of(config)}.{key}": value for key, value in own.items()}
    result |= metadata_of(tokenizer, config.n_vocab)
    ends = dict.fromkeys(config.end_tokens or ())
    if (end := tokenizer.eos_token_id) is not None:
        ends = {end: None} | ends
    result |= dict(zip(_ENDS, ends, strict=False))
    if template := chat_template(tokenizer):
        result["tokenizer.chat_template"] = template
    return result
