"""The keys of Hugging Face's config.json for rotary embeddings, and for what differs by layer."""

import functools
import math
from typing import Any

from mesh_transformer.checkpoint.hf_families import OTHER_MODEL, Family
from mesh_transformer.config import Config
from mesh_transformer.families import ROTARY_LISTS, ROTARY_OPTIONS, ROTARY_SCALINGS
from mesh_transformer.util import InputError

FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"  # the context before the frequencies were scaled
_BITS = {"0", "1", "False", "True"}
_LARGEST = 3e38  # of 32 bits


def our_keys(family: Family) -> set[str]:
    """Return the config keys that `read` returns for some models of a type."""
    result = {"rotary_base", "rotary_scaling"} | ({"pe_rotary_dims"} if family.partial else set())
    if family.sliding is not None:
        # If all layers have the window, no key lists them.
        result |= {"sliding_window"} if family.one_window else {"sliding_window", "sliding_layers"}
    if family.rope_by_kind:
        result.add("sliding_rotary_base")
    return result | ({"unrotated_layers"} if family.unrotated else set())


def read(path: str, values: dict[str, Any], family: Family, ours: dict[str, Any]) -> dict[str, Any]:
    """Return the config keys of rotary embeddings and of single layers.

    Args:
      path: the config.json, for error messages.
      values: its content.
      ours: the sizes in it, by our names.
    """
    layers = ours["layers"]
    result = _windows(path, values, family, layers)
    result |= _rotary(path, values, family, ours, has_windows=bool(result))
    if family.unrotated:
        each = whole(path, values, "no_rope_layer_interval", 4)
        rotated = values.get("no_rope_layers")
        if rotated is None:
            rotated = [(n + 1) % each for n in range(layers)]
        elif (
            not isinstance(rotated, list) or len(rotated) < layers or {*map(repr, rotated)} - _BITS
        ):
            raise InputError(
                f"{path}: no_rope_layers is {rotated!r}, expected a 0 or 1 for each of the "
                f"{layers} layers; copy the file again"
            )
        result["unrotated_layers"] = [n for n in range(layers) if not rotated[n]] or None
    return result


def flag(path: str, values: dict[str, Any], key: str, default: bool) -> bool:
    """Return a value of config.json that is true or false; `path` is its path, for the error."""
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{path}: {key} is {value!r}, expected true or false; copy the file again")
    return value


def whole(path: str, values: dict[str, Any], key: str, default: int, least: int = 1) -> int:
    """Return a whole number of config.json, or the default if it is missing or null."""
    value = values.get(key)
    return default if value is None else check_whole(path, key, value, least)


def check_whole(path: str, key: str, value: Any, least: int = 1) -> int:
    """Return a value of config.json as a whole number; raise InputError if it is not."""
    if type(value) is not int or value < least:
        raise InputError(
            f"{path}: {key} is {value!r}, expected a whole number of at least {least}; copy the "
            "file again"
        )
    return value


def positive(path: str, key: str, value: Any) -> float:
    """Return a value of config.json as a number above 0; raise InputError if it is not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        raise InputError(f"{path}: {key} is {value!r}, expected a number above 0; copy it again")
    return value


def _windows(path: str, values: dict[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """Return our keys of the layers with a window; an empty dict if there are none."""
    if family.sliding is None:
        return {}
    if family.flags_window and not flag(path, values, "use_sliding_window", False):
        return {}
    window = values.get("sliding_window", family.window)
    kinds = None if family.one_window else values.get("layer_types")
    if kinds is None:
        read_whole = functools.partial(whole, path, values)
        sliding = [] if window is None else family.sliding(read_whole, layers)
    elif not isinstance(kinds, list) or len(kinds) != layers:
        raise InputError(
            f"{path}: layer_types is {kinds!r}, expected a list of {layers} names, one per layer; "
            "copy the file again"
        )
    else:
        if unknown := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
            raise InputError(
                f"{path}: layer_types has {unknown[0]!r}; only {FULL!r} and {SLIDING!r} are "
                f"supported; {OTHER_MODEL}"
            )
        sliding = [layer for layer, kind in enumerate(kinds) if kind == SLIDING]
    if not sliding:
        return {}
    window = check_whole(path, "sliding_window", window)
    return {"sliding_window": window, "sliding_layers": sliding}


def rope_parameters(
    path: str, values: dict[str, Any], by_kind: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of rotary embeddings in full and in sliding layers.

    transformers 5 writes `rope_parameters`, earlier releases `rope_scaling`.  If a file holds both,
    the older key replaces the newer one, as in transformers; in families with parameters by kind of
    layer it changes those of full layers.

    Args:
      by_kind: whether sliding layers have parameters of their own.
    """
    new, old = (
        _by_kind(path, key, _mapping(path, key, values.get(key)))
        for key in ("rope_parameters", "rope_scaling")
    )
    if by_kind:
        return new[0] | old[0], new[1] | old[1]
    return (old if any(old) else new)[0], {}


def _mapping(path: str, key: str, value: Any) -> dict[str, Any]:
    """Return a mapping of rotary parameters in which the older name `type` is `rope_type`."""
    if not isinstance(value, dict | None):
        raise InputError(f"{path}: {key} is {value!r}, expected a mapping; copy the file again")
    value = dict(value or {})
    kind = value.pop("type", None)
    return value if kind is None else {"rope_type": kind} | value


def _by_kind(path: str, key: str, rope: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of full and of sliding layers, which a mapping may nest by kind."""
    if FULL not in rope and SLIDING not in rope:
        return rope, {}
    full, sliding = (_mapping(path, f"{key}.{kind}", rope.get(kind)) for kind in (FULL, SLIDING))
    return full, sliding


def _rotary(
    path: str, values: dict[str, Any], family: Family, ours: dict[str, Any], has_windows: bool
) -> dict[str, Any]:
    assert family.rope is not None
    rope, sliding = rope_parameters(path, values, family.rope_by_kind)
    # transformers prefers this key outside the mapping, unless parameters are nested by kind.
    if not family.rope_by_kind and values.get(ORIGINAL) is not None:
        rope[ORIGINAL] = values[ORIGINAL]
    base = _first(rope.get("rope_theta"), values.get("rope_theta"), family.rope)
    base = positive(path, "rope_theta", base)
    result: dict[str, Any] = {"rotary_base": base, "rotary_scaling": _scaling(path, rope, ours)}
    if family.rope_by_kind and has_windows:
        if _scaling(path, sliding, ours) is not None:
            raise InputError(
                f"{path}: the rotary embedding of sliding layers is scaled, which is not "
                f"supported; {OTHER_MODEL}"
            )
        local = values.get("rope_local_base_freq")
        own = _first(sliding.get("rope_theta"), local, family.sliding_rope, base)
        result["sliding_rotary_base"] = positive(path, "rope_theta of sliding layers", own)
    share = _first(rope.get("partial_rotary_factor"), values.get("partial_rotary_factor"), 1)
    share = positive(path, "partial_rotary_factor", share)
    if share > 1 or (share < 1 and not family.partial):
        supported = "a number above 0, at most 1" if family.partial else "1"
        raise InputError(
            f"{path}: partial_rotary_factor is {share!r}; only {supported} is supported; "
            f"{OTHER_MODEL}"
        )
    if share < 1:
        head = ours.get("head_size") or ours["d_model"] // ours["n_heads"]
        result["pe_rotary_dims"] = int(head * share)
    return result


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _scaling(path: str, rope: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any] | None:
    """Return our `rotary_scaling`; raise InputError if its type is not supported."""
    kind = rope.get("rope_type")
    if kind in (None, "default"):
        return None
    if not isinstance(kind, str) or kind not in ROTARY_SCALINGS:
        raise InputError(
            f"{path}: its rotary embedding has type {kind!r}; only 'default', "
            f"{', '.join(map(repr, ROTARY_SCALINGS))} are supported; {OTHER_MODEL}"
        )
    rope = {ORIGINAL: ours["seq"]} | rope
    if kind == "dynamic":  # for which transformers reads no other key
        rope[ORIGINAL] = ours["seq"]
    if kind == "longrope" and rope.get("factor") is None:
        rope["factor"] = ours["seq"] / positive(path, ORIGINAL, rope[ORIGINAL])
    names = (*ROTARY_SCALINGS[kind], *ROTARY_OPTIONS.get(kind, ()))

    def number(name: str, value: Any) -> Any:
        if isinstance(value, list) and name in ROTARY_LISTS:
            return [number(name, entry) for entry in value]
        return value if name == "truncate" else float(positive(path, f"{name} of {kind}", value))

    numbers = {name: number(name, rope[name]) for name in names if rope.get(name) is not None}
    return {"rope_type": kind} | numbers


def rotary_share(config: Config) -> float:
    """Return the share of a head that is rotated; times the head's size, it rounds down to that."""
    share = config.d_rotary / config.d_head
    return share if int(config.d_head * share) == config.d_rotary else math.nextafter(share, 1)


def keys(config: Config, family: Family) -> dict[str, Any]:
    """Return the keys of config.json that `read` reads.

    Raises:
      InputError: if sliding layers have the scaling of other layers, which the keys cannot express.
    """
    slides = config.sliding_window is not None and config.sliding_layers
    is_scaled = config.rotary_scaling is not None and config.sliding_rotary_base is None
    if family.rope_by_kind and slides and is_scaled:
        raise InputError(
            f"config: rotary_scaling applies to sliding layers, but in Hugging Face's "
            f"{family.title} only to the others; set sliding_rotary_base, or keep this model in "
            "native format"
        )
    scaling: dict[str, Any] = dict(config.rotary_scaling or {"rope_type": "default"})
    result: dict[str, Any] = {}
    if (length := scaling.get(ORIGINAL)) is not None:
        scaling[ORIGINAL] = int(length)
    if scaling["rope_type"] == "dynamic":
        result["max_position_embeddings"] = scaling.pop(ORIGINAL)
    partial = config.d_rotary != config.d_head
    share = {"partial_rotary_factor": rotary_share(config)} if partial else {}
    base = {"rope_theta": config.rotary_base}
    rope: dict[str, Any] = scaling | base | share
    result |= base
    if config.rotary_scaling is not None:
        result["rope_scaling"] = scaling | share
    if scaling["rope_type"] == "longrope":  # for which Phi-3 has a default outside the mapping
        result[ORIGINAL] = scaling[ORIGINAL]
    if family.rope_by_kind:
        own = config.sliding_rotary_base or config.rotary_base
        result["rope_local_base_freq"] = own
        rope = {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": own}}
    result |= {"rope_parameters": rope} | share
    if family.sliding is not None:
        sliding = config.sliding_layers or []
        result["sliding_window"] = config.sliding_window
        result["use_sliding_window"] = config.sliding_window is not None
        if not family.one_window:
            kinds = [SLIDING if layer in sliding else FULL for layer in range(config.layers)]
            result["layer_types"] = kinds
    if family.unrotated:
        still = config.unrotated_layers or []
        result["no_rope_layers"] = [int(layer not in still) for layer in range(config.layers)]
    return result
