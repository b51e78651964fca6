"""LoRA adapters in the format of the package peft: adapter_config.json and adapter_model.*.

A folder holds, for each adapted matrix of Hugging Face's model, lora_A [R, in] and lora_B [R, out]
transposed.  The adapted matrix is W + alpha / R * B A, in the orientation [out, in].  A matrix that
holds several of ours, such as queries, keys and values, has one pair.
"""

import os
import re
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mesh_transformer.checkpoint import hf, hf_files
from mesh_transformer.checkpoint.atomic_folder import atomic_folder
from mesh_transformer.checkpoint.hf_config import family_of
from mesh_transformer.checkpoint.hf_files import Tensor
from mesh_transformer.checkpoint.stored_tensors import DTYPES, StoredTensor, read_json
from mesh_transformer.config import Config
from mesh_transformer.model.lora import adapter_names
from mesh_transformer.util import InputError, brief

CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
# Keys that make adapters compute something else, unless they are absent, null, false or empty.
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "alora_invocation_tokens",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
)
# Initial values of adapters that leave the base model's weights as they are.
_PLAIN_INITIALS = (None, True, False, "gaussian", "eva", "orthogonal")


def base_of(folder: str) -> str:
    """Return the path or name of the base model that a folder of adapters names."""
    name = read_json(os.path.join(folder, CONFIG)).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(
            f"{os.path.join(folder, CONFIG)}: base_model_name_or_path is {brief(repr(name))}, "
            "expected the path of the base model; set it"
        )
    return name


def read(folder: str, base: Config) -> tuple[Config, dict[str, Any]]:
    """Return the adapters in a folder as the config of a model with adapters, and its state.

    The rank is the largest in the folder; adapters of a lower rank are padded with zeros.  Layers
    that the folder does not adapt have zeros.

    Args:
      base: the config of the base model.

    Returns:
      The config, and {"params": adapters, "step": 0} in float32, as native checkpoints hold them.

    Raises:
      InputError: if the adapters do not fit the base model, or are of a kind that is not supported.
    """
    path = os.path.join(folder, CONFIG)
    values = read_json(path)
    _check_supported(path, values)
    base = base.merged()
    places = hf.places_of(base, family_of(base))
    pairs = _pairs(hf_files.find(folder, names=_FILES), places)
    ranks = {name: pair["A"].shape[0] for name, pair in pairs.items()}
    if empty := [name for name, own in ranks.items() if not own]:
        raise InputError(f"{path}: the adapter of {empty[0]} has rank 0; leave it out")
    rank = max(ranks.values())
    scales = {name: _scale(path, values, name, ranks[name]) for name in pairs}
    scale = next(iter(scales.values()))
    held = {place.target for name in pairs for place in places[name]}
    config = base.replace(
        lora_rank=rank,
        lora_alpha=scale * rank,
        lora_targets=[target for target in base.layer_kind.lora_targets if target in held],
    )
    params: dict[str, Any] = {}
    like = hf.shapes(base)
    for name, pair in pairs.items():
        a_RD, b_NR = (_values(pair[factor], name) for factor in "AB")
        b_NR = b_NR if scales[name] == scale else b_NR * np.float32(scales[name] / scale)
        own = ranks[name]
        for place in places[name]:
            leaves = params.setdefault(place.module, {})
            inputs, outputs = place.find(like).shape[1:]
            shapes = ((base.layers, inputs, rank), (base.layers, rank, outputs))
            a, b = (
                leaves.setdefault(leaf, np.zeros(shape, np.float32))
                for leaf, shape in zip(adapter_names(place.leaf), shapes, strict=True)
            )
            total = place.tensor_shape(like)[place.out_axis or 0]
            if pair["A"].shape[1] != inputs or pair["B"].shape != (total, own):
                raise InputError(
                    f"{pair['A'].path}: the adapter of {name} has shapes {pair['A'].shape} and "
                    f"{pair['B'].shape}, expected ({own}, {inputs}) and "
                    f"({total}, {own}); give the base model that it was trained on"
                )
            a[place.layer, :, :own] = a_RD.T
            for source, target in place.outputs(b_NR, b[place.layer, :own]):
                target[...] = source
    return config, {"params": {"layers": params}, "step": np.zeros((), np.int32)}


def _check_supported(path: str, values: dict[str, Any]) -> None:
    """Raise InputError if the adapters of an adapter_config.json, read from `path`, are not LoRA.

    That is, if they are anything but W + alpha / R * B A.
    """
    unsupported = {key: values[key] for key in _UNSUPPORTED if values.get(key)}
    if values.get("peft_type") != "LORA":
        unsupported = {"peft_type": values.get("peft_type")}
    if values.get("bias", "none") != "none":
        unsupported["bias"] = values["bias"]
    if values.get("init_lora_weights") not in _PLAIN_INITIALS:
        unsupported["init_lora_weights"] = values["init_lora_weights"]
    for key, value in unsupported.items():
        raise InputError(
            f"{path}: {key} is {brief(repr(value))}, which is not supported; merge the adapters "
            "into the base model with peft (merge_and_unload), and give the merged folder"
        )


def _pairs(
    stored: dict[str, StoredTensor], places: dict[str, list[hf.Place]]
) -> dict[str, dict[str, StoredTensor]]:
    """Return {name of an adapted tensor: {"A": its lora_A, "B": its lora_B}}."""
    prefix = next(iter(places)).partition(".")[0] + "."
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        match = _NAME.fullmatch(name)
        weight = match and f"{match[1].removeprefix(prefix)}.weight"
        weight = weight and next((n for n in (prefix + weight, weight) if n in places), None)
        place = places[weight][0] if weight else None
        if match is None or weight is None or place is None or place.out_axis is None:
            raise InputError(
                f"{tensor.path}: tensor {brief(name)} is not an adapter of one of the base model's "
                "matrices; give the base model that the adapters were trained on"
            )
        if place.layer is None:
            raise InputError(
                f"{tensor.path}: tensor {brief(name)} adapts the output head, which is not "
                "supported; merge the adapters with peft (merge_and_unload)"
            )
        pairs.setdefault(weight, {})[match[2]] = tensor
        if tensor.dtype not in DTYPES or len(tensor.shape) != 2:
            raise InputError(
                f"{tensor.path}: tensor {brief(name)} has dtype {tensor.dtype} and shape "
                f"{tensor.shape}, expected a matrix of {', '.join(DTYPES)}; save it again"
            )
    for name, pair in pairs.items():
        for factor in {"A", "B"} - pair.keys():
            path = next(iter(pair.values())).path
            raise InputError(f"{path}: lora_{factor} of {name} is missing; copy the folder again")
    if not pairs:
        raise InputError("the adapters hold no tensors; copy the folder again")
    return pairs


def _values(tensor: StoredTensor, name: str) -> np.ndarray:
    return hf.cast(tensor.read(), np.dtype(np.float32), f"{tensor.path}: the adapter of {name}")


def _scale(path: str, values: dict[str, Any], name: str, rank: int) -> float:
    """Return the factor alpha / R of an adapter, or alpha / sqrt(R) with `use_rslora`."""
    patterns = values.get("alpha_pattern") or {}
    alpha = values.get("lora_alpha", 8)
    for pattern in patterns if isinstance(patterns, dict) else [str(patterns)]:
        plain = pattern.removeprefix("^")
        if not re.fullmatch(r"[\w.]+", plain):
            raise InputError(
                f"{path}: alpha_pattern has {brief(pattern)}, expected names of modules; write "
                "them out"
            )
        module = name.removesuffix(".weight")
        if module == plain or (plain == pattern and module.endswith(f".{plain}")):
            alpha = patterns[pattern]
            break
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise InputError(f"{path}: alpha is {brief(repr(alpha))}, expected a number; correct it")
    return alpha / (rank**0.5 if values.get("use_rslora") else rank)


def write(
    folder: str,
    adapters: dict[str, Any],
    config: Config,
    base: str,
    *,
    dtype: DTypeLike | None = None,
) -> None:
    """Write adapters to a new folder that the package peft can load.

    Adapters of queries, keys and values that Hugging Face stores in one matrix become one adapter.
    If they do not share their first factor, its rank is the sum of theirs.

    Args:
      adapters: the parameters of a checkpoint of adapters, in host memory.
      base: the path or hub name of the base model, to store.
      dtype: the dtype to cast the adapters to (default: each leaf's own).

    Raises:
      InputError: if Hugging Face has no model of this kind, or `folder` already exists.
    """
    family = family_of(config)
    assert config.lora_alpha is not None
    like = hf.shapes(config)
    ranks: dict[str, int] = {}  # of the modules in a layer, by their names
    tensors: list[Tensor] = []
    for name, places in hf.places_of(config, family).items():
        place = places[0]
        if place.layer is None or place.out_axis is None:
            continue
        held = [place for place in places if config.adapts(place.target)]
        if not held:
            continue
        layers = adapters["layers"]
        total = place.tensor_shape(like)[place.out_axis or 0]
        a, b = _factors(held, layers, total)
        module = name.removesuffix(".weight")
        ranks[module.removeprefix(f"{family.prefix}{family.layers}.{place.layer}.")] = len(a)
        for factor, values in (("A", a), ("B", b)):
            target = np.dtype(dtype) if dtype is not None else values.dtype
            stored_name = f"base_model.model.{module}.lora_{factor}.weight"
            cast = partial(hf.cast, values, target, f"tensor {stored_name}")
            tensors.append(Tensor(stored_name, target, values.shape, cast))
    rank = config.lora_rank
    other = {module: own for module, own in sorted(ranks.items()) if own != rank}
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _number(config.lora_alpha),
        "target_modules": sorted(ranks),
        "rank_pattern": other,
        "alpha_pattern": {
            module: _number(config.lora_alpha * own / rank) for module, own in other.items()
        },
        "fan_in_fan_out": family.out_axis == 1,
        "bias": "none",
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with atomic_folder(folder) as temporary:
        hf_files.write(temporary, tensors, name=_FILES[0])
        hf_files.write_json(os.path.join(temporary, CONFIG), values)


def _factors(
    held: list[hf.Place], layers: dict[str, Any], outputs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors A [R, in] and B [out, R] of one of Hugging Face's tensors.

    Args:
      held: the places of those of its parts that have adapters.
    """

    def own(place: hf.Place, factor: int) -> np.ndarray:
        leaf = layers[place.module][adapter_names(place.leaf)[factor]]
        return np.asarray(leaf[place.layer])

    firsts = [own(place, 0) for place in held]  # [in, R] each
    shared = all(np.array_equal(first, firsts[0]) for first in firsts)
    rank = firsts[0].shape[1]
    a = firsts[0].T if shared else np.concatenate([first.T for first in firsts])
    b = np.zeros((outputs, len(a)), firsts[0].dtype)
    for number, place in enumerate(held):
        start = 0 if shared else number * rank
        for target, source in place.outputs(b[:, start : start + rank], own(place, 1)):
            target[...] = source
    return np.ascontiguousarray(a), b


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
