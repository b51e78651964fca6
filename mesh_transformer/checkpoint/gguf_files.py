"""The models in GGUF files, llama.cpp's format, in Hugging Face's terms: config and tensors.

`read_config` returns what a config.json would say, and `find` the tensors by Hugging Face's names,
so that `hf.read` reads both kinds of checkpoint.  The package gguf knows the names of tensors and
the quantized types.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from mesh_transformer.checkpoint.atomic_folder import atomic_file
from mesh_transformer.checkpoint.gguf_architectures import (
    ARCHITECTURES,
    Architecture,
    sliding_layers,
)
from mesh_transformer.checkpoint.hf_families import FAMILIES, OTHER_MODEL, Family
from mesh_transformer.checkpoint.hf_files import Tensor
from mesh_transformer.checkpoint.hf_layers import FULL, ORIGINAL, SLIDING
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
# {our config key: key of the metadata, without the architecture}
_SIZES = {
    "layers": "block_count",
    "seq": "context_length",
    "d_model": "embedding_length",
    "ff_size": "feed_forward_length",
    "n_heads": "attention.head_count",
    "key_heads": "attention.head_count_kv",
    "head_size": "attention.key_length",
}
_VALUE_SIZE, _ROTATED = "attention.value_length", "rope.dimension_count"
_SAMPLING = "general.sampling."
_SAMPLING_NAMES = {"repetition_penalty": "penalty_repeat"}  # where llama.cpp's name differs
_ROPE, _SCALING, _LINEAR = "rope.freq_base", "rope.scaling.", "rope.scale_linear"
_SLIDING_ROPE = f"{_ROPE}_swa"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_KNOWN: set[str] = {  # keys that are read, or do not change the model
    *_SIZES.values(),
    *(_VALUE_SIZE, _ROTATED, _ROPE, _LINEAR),
    *(f"{_SCALING}{name}" for name in ("type", "factor", "original_context_length")),
    *("vocab_size", "tensor_data_layout", "pooling_type"),
}
# {another key: the values with which it does not change the model}, in llama.cpp.  Default: 0.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (1,),
    f"{_SCALING}finetuned": (0, 1),
    f"{_SCALING}attn_factor": (1,),
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
    header, divisors_R = read_header(path), None
    if _FREQUENCIES in header.tensors:
        divisors_R = _read(header, _FREQUENCIES, header.tensors[_FREQUENCIES]).astype(np.float64)
    return config_of(header, divisors_R)


def config_of(header: GgufHeader, divisors_R: np.ndarray | None) -> dict[str, Any]:
    """As `read_config`, given a file's header and, if it has them, the divisors of frequencies."""
    name = header.get("general.architecture", str)

    def get(key: str, *options: Any) -> Any:
        return header.get(f"{name}.{key}", *options)

    if not (rows := {kind: row for kind, row in ARCHITECTURES.items() if row.name == name}):
        names = ", ".join(dict.fromkeys(row.name for row in ARCHITECTURES.values()))
        raise InputError(
            f"{header.path}: general.architecture is {name!r}, expected one of {names}; "
            f"{OTHER_MODEL}"
        )
    if header.get("split.count", int, 1) > 1:
        raise InputError(
            f"{header.path} is one of {header.metadata['split.count']} parts of a model; join "
            "them: llama-gguf-split --merge"
        )
    window = get(_WINDOW, int, 0)
    slides = [kind for kind, row in rows.items() if window and row.pattern is not None]
    kind = next(iter(slides or rows))
    row, family = rows[kind], FAMILIES[kind]
    heads, width = (get(_SIZES[ours], int) for ours in ("n_heads", "d_model"))
    usual = {"key_heads": heads, "head_size": width // max(heads, 1)}
    sizes = {ours: get(key, int, usual.get(ours)) for ours, key in _SIZES.items()}
    if sizes["layers"] > len(header.tensors):  # such as billions, in a damaged file
        raise InputError(
            f"{header.path}: {name}.block_count is {sizes['layers']:,}, but the file has "
            f"{len(header.tensors):,} tensors; {COPY_ADVICE}"
        )
    size = sizes["head_size"]
    rotated = get(_ROTATED, int, size)
    for key in (_VALUE_SIZE, *(() if row.partial else (_ROTATED,))):
        if (other := get(key, int, size)) != size:
            raise InputError(
                f"{header.path}: {name}.{key} is {other}, expected {size}, the size of a head; "
                f"{OTHER_MODEL}"
            )
    if row.square and heads * size != width:
        raise InputError(
            f"{header.path}: {heads} heads of size {size} in a model of width {width}; llama.cpp's "
            f"{name} supports only heads that are as wide as the model together; use "
            f"another format, or {OTHER_MODEL}"
        )
    values = {theirs: sizes[ours] for theirs, ours in family.sizes.items() if ours in sizes}
    values |= {"model_type": kind, family.inner or "intermediate_size": sizes["ff_size"]}
    for key, meaning in row.keys.items():
        if meaning.required or f"{name}.{key}" in header.metadata:
            value = get(key, meaning.kind)
            values |= {} if value == 0 and meaning.kind is float else {meaning.theirs: value}
    if row.wide_scores is not None:
        is_wide = sizes["layers"] == row.wide_scores
        values["query_pre_attn_scalar"] = usual["head_size"] if is_wide else size
    rope = _rotary(header, name, divisors_R)
    known, neutral = _KNOWN | row.keys.keys(), _NEUTRAL | row.neutral
    # llama.cpp computes this factor of YaRN itself, whatever the file says.
    yarn = 1 + 0.1 * math.log(max(rope.get("factor", 1), 1))
    neutral[f"{_SCALING}yarn_attn_factor"] = (1, yarn)
    neutral["attention.scale"] = (0, max(size, 1) ** -0.5)
    if row.partial:
        # Times the size of a head, it is rounded down.
        rope["partial_rotary_factor"] = min(1.0, (rotated + 0.5) / max(size, 1))
    if row.pattern is not None:
        known |= {_WINDOW, _PATTERN}
        values["sliding_window"] = window = window or row.window
        pattern = get(_PATTERN, (list, int), row.pattern)
        if not isinstance(pattern, list):
            pattern = sliding_layers(pattern, sizes["layers"])
        # Not read from types whose layers all have the window.
        values["layer_types"] = [SLIDING if slides and window else FULL for slides in pattern]
    if family.rope_by_kind:
        known.add(_SLIDING_ROPE)
        base = get(_SLIDING_ROPE, float, row.sliding_base or rope["rope_theta"])
        rope = {FULL: rope, SLIDING: {"rope_theta": base}}
    values["rope_parameters"] = rope
    _check_other_keys(header, name, known, neutral)
    embedding = header.tensors.get("token_embd.weight")
    values["vocab_size"] = embedding.shape[0] if embedding and embedding.shape else 0
    own_head = "output.weight" in header.tensors
    values["tie_word_embeddings"] = not own_head if row.tied is None else row.tied
    for key, tensor in (("attention_bias", "attn_output"), ("mlp_bias", "ffn_up")):
        if key in row.biases:
            values[key] = f"blk.0.{tensor}.bias" in header.tensors
    ends = [header.get(key, int) for key in _ENDS if key in header.metadata]
    values["eos_token_id"] = ends or None
    return values


def _check_other_keys(
    header: GgufHeader, name: str, known: set[str], neutral: dict[str, tuple[float, ...]]
) -> None:
    """Raise InputError if a key that is not supported may change the model.

    Args:
      known: the keys that are supported, without the architecture, whose name is `name`.
      neutral: {another key: the values with which it does not change the model}.
    """
    for key, value in header.metadata.items():
        architecture, _, own = key.partition(".")
        if architecture != name or own in known:
            continue
        expected = neutral.get(own, (0,))
        if not isinstance(value, int | float) or not np.isclose(value, expected, 1e-6, 0).any():
            numbers = " or ".join(f"{number:g}" for number in expected)
            raise InputError(
                f"{header.path}: {key[:80]!r} is {str(value)[:80]!r}, which is not supported "
                f"(expected {numbers}); {OTHER_MODEL}"
            )


def read_sampling(path: str) -> dict[str, Any]:
    """Return the model's sampling settings in a GGUF file, by Hugging Face's names."""
    names = {ours: name for name, ours in _SAMPLING_NAMES.items()} | {"temp": "temperature"}
    metadata = read_header(path).metadata.items()
    own = {key.removeprefix(_SAMPLING): x for key, x in metadata if key.startswith(_SAMPLING)}
    return {names.get(key, key): value for key, value in own.items()}


def _rotary(header: GgufHeader, name: str, divisors_R: np.ndarray | None) -> dict[str, Any]:
    """Return the key `rope_parameters` of a config.json."""
    base = header.get(f"{name}.{_ROPE}", float, 10000.0)
    factor = header.get(f"{name}.{_LINEAR}", float, 0.0)
    factor = header.get(f"{name}.{_SCALING}factor", float, factor)
    kind = header.get(f"{name}.{_SCALING}type", str, "linear")
    if kind == "linear" and factor in (0, 1):  # 0: no factor
        kind = "none"
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": base}
    if kind in ("linear", "yarn"):
        rope["factor"] = factor or header.get(f"{name}.{_SCALING}factor", float)
        if original := header.get(f"{name}.{_SCALING}original_context_length", int, 0):
            rope[ORIGINAL] = original
    if divisors_R is not None:
        rope |= LLAMA3 | {"factor": float(divisors_R.max(initial=1))}
        expected_R = llama3_divisors(rope, 2 * len(divisors_R))
        if kind != "none" or not np.allclose(divisors_R, expected_R):
            raise InputError(
                f"{header.path}: tensor {_FREQUENCIES} has other values than those of Llama 3's "
                f"rotary embedding, which alone are supported; {OTHER_MODEL}"
            )
    return rope


# What the files of Llama 3 say only by the divisors of their rotary frequencies.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 8192,
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
        change = functools.partial(_changed, name, config, back=True)
        stored[name] = _stored(header, theirs, rest.pop(theirs), half, change)
    return stored | {name: _stored(header, name, rest[name], half) for name in rest}


def is_quantized(path: str) -> bool:
    """Return whether a GGUF file has tensors of a quantized type."""
    return any(tensor.kind not in _PLAIN for tensor in read_header(path).tensors.values())


def _names(names: Iterable[str], config: Config) -> dict[str, str]:
    """Return {Hugging Face's name of a tensor: llama.cpp's}."""
    import gguf

    own = architecture_of(config).name
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == own)
    known = gguf.get_tensor_name_map(number, config.layers)
    return {name: known.get_name(name, (".weight", ".bias")) or name for name in names}


def layout_of(family: Family) -> Family:
    """Return a type whose tensors have llama.cpp's layout.

    Matrices are [out, in], and one that joins several holds all outputs of each one together.
    """
    return family._replace(groups=1, out_axis=0)


def architecture_of(config: Config) -> Architecture:
    """Return llama.cpp's architecture of a model.

    Raises:
      InputError: if there is none.
    """
    if config.hf_type not in ARCHITECTURES:
        raise InputError(
            f"config: hf_type is {config.hf_type!r}, but GGUF files are supported only for models "
            f"of type {', '.join(ARCHITECTURES)}; use another format, such as hf"
        )
    return ARCHITECTURES[config.hf_type]


def _changed(name: str, config: Config, values: np.ndarray, *, back: bool = False) -> np.ndarray:
    """Return a tensor as llama.cpp stores it, or `back` as Hugging Face does.

    Args:
      name: Hugging Face's name of the tensor.
    """
    if config.norm_kind.plus_one and name.endswith("norm.weight"):
        return values - 1 if back else values + 1
    heads = {"q_proj": config.n_heads, "k_proj": config.key_heads}.get(name.split(".")[-2])
    if heads is None or not architecture_of(config).neighbours:
        return values
    groups = (heads, -1, 2) if back else (heads, 2, -1)
    return values.reshape(*groups, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _stored(
    header: GgufHeader,
    name: str,
    tensor: GgufTensor,
    half: int | None,
    change: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> StoredTensor:
    _bytes_of(header, name, tensor)
    dtype = _PLAIN.get(tensor.kind, "f32") if tensor.kind == half else "f32"

    def read() -> np.ndarray:
        return change(_read(header, name, tensor).astype(FLOATS[dtype], copy=False))

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


def header_of(
    path: str, shapes: dict[str, tuple[int, ...]], values: dict[str, Any], config: Config
) -> tuple[GgufHeader, np.ndarray | None]:
    """Return the header of a file to write, without a tokenizer, and the divisors of frequencies.

    Args:
      shapes: the shapes of the model's tensors, by Hugging Face's names.
      values: the model's config.json.
    """
    row = architecture_of(config)
    own = {key: getattr(config, ours) for ours, key in _SIZES.items()}
    own |= {_VALUE_SIZE: config.d_head, "vocab_size": config.n_vocab}
    for key, meaning in row.keys.items():
        if (value := values[meaning.theirs]) is not None:
            own[key] = meaning.kind(value)
    scaling: dict[str, Any] = config.rotary_scaling or {}
    rope, kind, divisors_R = {"rope_theta": config.rotary_base} | scaling, None, None
    if config.pe == "rotary":
        own |= {_ROTATED: config.d_rotary, _ROPE: rope["rope_theta"]}
        kind = scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        own |= {f"{_SCALING}type": kind, f"{_SCALING}factor": scaling["factor"]}
        if original := scaling.get(ORIGINAL):
            own[f"{_SCALING}original_context_length"] = int(original)
    elif row.divides and scaling.items() >= LLAMA3.items():
        divisors_R = llama3_divisors(rope, config.d_rotary).astype(np.float32)
    if row.pattern and config.sliding_window is not None:
        slides = [layer in (config.sliding_layers or ()) for layer in range(config.layers)]
        own[_WINDOW] = config.sliding_window
        if slides != sliding_layers(row.pattern, config.layers):
            own[_PATTERN] = slides
        if row.sliding_base is not None:
            own[_SLIDING_ROPE] = config.sliding_rotary_base or rope["rope_theta"]
    metadata = {f"{row.name}.{key}": value for key, value in own.items()}
    metadata["general.architecture"] = row.name
    theirs = _names(shapes, config)
    tensors = {theirs[name]: GgufTensor(shape, 0, 0) for name, shape in shapes.items()}
    return GgufHeader(path, metadata, tensors, 0), divisors_R


def write(
    path: str,
    tensors: Sequence[Tensor],
    header: GgufHeader,
    divisors_R: np.ndarray | None,
    config: Config,
    tokenizer: Any,
    kind: str,
) -> None:
    """Write a GGUF file that llama.cpp can run.

    Args:
      tensors: the model's tensors, in llama.cpp's layout, by Hugging Face's names, in f32.
      header, divisors_R: what `header_of` returned.
      tokenizer: the model's tokenizer, of transformers.
      kind: the type of matrices, one of `TYPES`.  Other tensors are in f32, and with "q8_0"
        matrices whose rows are not made of blocks of 32 values are in f16.

    Raises:
      InputError: if GGUF cannot represent the tokenizer, or storage fails.
    """
    import gguf

    metadata = header.metadata | metadata_of(tokenizer, config.n_vocab)
    metadata |= _general(config, tokenizer, kind)
    names = [*header.tensors]
    if divisors_R is not None:
        own = Tensor(_FREQUENCIES, divisors_R.dtype, divisors_R.shape, lambda: divisors_R)
        names, tensors = [_FREQUENCIES, *names], [own, *tensors]
    kinds = [_kind_of(tensor, kind) for tensor in tensors]
    with atomic_file(path) as temporary:
        writer = gguf.GGUFWriter(temporary, metadata.pop("general.architecture"))
        with contextlib.closing(writer):
            for key, value in metadata.items():
                getattr(writer, f"add_{_WRITTEN[type(value)]}")(key, value)
            for name, tensor, own in zip(names, tensors, kinds, strict=True):
                block, size = gguf.GGML_QUANT_SIZES[own]
                count = math.prod(tensor.shape) // block * size
                writer.add_tensor_info(name, tensor.shape, tensor.dtype, count, own)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            # While one tensor is written, the next one is computed.
            arrays = Prefetch(map(functools.partial(_encoded, config), tensors, kinds), 1)
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


def _encoded(config: Config, tensor: Tensor, kind: Any) -> np.ndarray:
    """Return a tensor's bytes in a file."""
    values = _changed(tensor.name, config, tensor.values())
    if kind in _PLAIN:
        values = cast(values, FLOATS[_PLAIN[kind]], f"tensor {tensor.name}")
        return np.ascontiguousarray(values).view(np.uint8)
    import gguf

    return gguf.quantize(values, kind)


def _general(config: Config, tokenizer: Any, kind: str) -> dict[str, Any]:
    """Return the metadata that do not depend on the architecture, without the tokenizer's."""
    file_type = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[kind]
    result = {"general.name": config.name, "general.file_type": file_type}
    result |= {"general.quantization_version": 2}
    for key, value in config.sampling.items():
        number = value if key == "top_k" else float(value)
        result[f"{_SAMPLING}{_SAMPLING_NAMES.get(key, key)}"] = number
    ends = dict.fromkeys(config.end_tokens or ())
    if (end := tokenizer.eos_token_id) is not None:
        ends = {end: None} | ends
    result |= dict(zip(_ENDS, ends, strict=False))
    if template := chat_template(tokenizer):
        result["tokenizer.chat_template"] = template
    return result
