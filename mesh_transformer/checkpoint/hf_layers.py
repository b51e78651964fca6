"""The keys of Hugging Face's config.json for rotary embeddings, and for what differs by layer."""

from typing import Any

from mesh_transformer.checkpoint.hf_families import Family
from mesh_transformer.config import Config
from mesh_transformer.families import ROTARY_SCALINGS, YARN_OPTIONS
from mesh_transformer.util import InputError

_FULL, _SLIDING = "full_attention", "sliding_attention"


def our_keys(family: Family) -> set[str]:
    """Return the config keys that `read` returns for some models of a type."""
    result = {"rotary_base", "rotary_scaling", "pe_rotary_dims"}
    if family.sliding is not None:
        # If all layers have the window, no key lists them.
        result |= {"sliding_window"} if family.one_window else {"sliding_window", "sliding_layers"}
    if family.rope_by_kind is not None:
        result.add("sliding_rotary_base")
    return result | ({"unrotated_layers"} if family.unrotated else set())


def read(path: str, values: dict[str, Any], family: Family, ours: dict[str, Any]) -> dict[str, Any]:
    """Return the config keys of rotary embeddings and of single layers.

    Args:
      path: the config.json, for error messages.
      values: its content.
      ours: the sizes in it, by our names.
    """
    result = _rotary(path, values, family, ours)
    layers = ours["layers"]
    if family.sliding is not None:
        window = values.get("sliding_window")
        kinds = values.get("layer_types") or []
        sliding = [layer for layer, kind in enumerate(kinds) if kind == _SLIDING]
        if not kinds and window is not None:
            sliding = family.sliding(values, layers)
        if unknown := set(kinds) - {_FULL, _SLIDING}:
            raise InputError(
                f"{path}: layer_types has {min(unknown)!r}; only {_FULL!r} and {_SLIDING!r} are "
                f"supported; give another {family.title} folder"
            )
        if sliding:
            result |= {"sliding_window": _whole(path, values, "sliding_window")}
            result["sliding_layers"] = sliding
    if family.unrotated:
        each = values.get("no_rope_layer_interval", 4)
        rotated = values.get("no_rope_layers") or [(n + 1) % each for n in range(layers)]
        result["unrotated_layers"] = [n for n in range(layers) if not rotated[n]] or None
    return result


def _whole(path: str, values: dict[str, Any], key: str) -> int:
    if type(value := values.get(key)) is not int or value < 1:
        raise InputError(f"{path}: {key} is {value!r}, expected a whole number above 0")
    return value


def _rotary(
    path: str, values: dict[str, Any], family: Family, ours: dict[str, Any]
) -> dict[str, Any]:
    assert family.rope is not None
    # transformers 5 writes rope_parameters, earlier releases the other keys.
    rope = values.get("rope_parameters") or {}
    sliding: dict[str, Any] = {"rope_theta": values.get("rope_local_base_freq")}
    if _FULL in rope or _SLIDING in rope:
        rope, sliding = rope.get(_FULL) or {}, rope.get(_SLIDING) or {}
    rope = rope | (values.get("rope_scaling") or {})
    base = rope.get("rope_theta", values.get("rope_theta")) or family.rope
    result: dict[str, Any] = {"rotary_base": base, "rotary_scaling": _scaling(path, rope, ours)}
    if family.rope_by_kind is not None:
        if _scaling(path, sliding, ours) is not None:
            raise InputError(
                f"{path}: the rotary embedding of sliding layers is scaled, which is not "
                f"supported; give another {family.title} folder"
            )
        own = sliding.get("rope_theta") or values.get("rope_local_base_freq")
        result["sliding_rotary_base"] = own or family.rope_by_kind
    for key in ("rotary_base", "sliding_rotary_base"):
        number = result.get(key, 1.0)
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
            raise InputError(f"{path}: rope_theta is {number!r}, expected a number above 0")
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if share is not None and share != 1:
        head = ours.get("head_size") or ours["d_model"] // ours["n_heads"]
        result["pe_rotary_dims"] = int(head * share)
    return result


def _scaling(path: str, rope: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any] | None:
    """Return our `rotary_scaling`; raise InputError if its type is not supported."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in (None, "default"):
        return None
    if kind not in ROTARY_SCALINGS:
        raise InputError(
            f"{path}: its rotary embedding has type {kind!r}; only 'default', "
            f"{', '.join(map(repr, ROTARY_SCALINGS))} are supported; give another folder"
        )
    rope = {"original_max_position_embeddings": ours["seq"]} | rope
    names = (*ROTARY_SCALINGS[kind], *(YARN_OPTIONS if kind == "yarn" else ()))
    numbers = {name: rope[name] for name in names if rope.get(name) is not None}
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            raise InputError(f"{path}: {name} of its rotary embedding is {value!r}, not a number")
    return {"rope_type": kind} | {
        name: value if isinstance(value, bool) else float(value) for name, value in numbers.items()
    }


def keys(config: Config, family: Family) -> dict[str, Any]:
    """Return the keys of config.json that `read` reads."""
    scaling: dict[str, Any] = dict(config.rotary_scaling or {"rope_type": "default"})
    if (length := scaling.get("original_max_position_embeddings")) is not None:
        scaling["original_max_position_embeddings"] = int(length)
    share = {}
    if config.d_rotary != config.d_head:
        factor = config.d_rotary / config.d_head
        # So that rounding down gives the number again.
        up = factor if int(config.d_head * factor) == config.d_rotary else factor * (1 + 2**-50)
        share = {"partial_rotary_factor": up}
    base = {"rope_theta": config.rotary_base}
    rope: dict[str, Any] = scaling | base | share
    result: dict[str, Any] = dict(base)
    if config.rotary_scaling is not None:
        result["rope_scaling"] = scaling | share
    if family.rope_by_kind is not None:
        own = config.sliding_rotary_base
        result["rope_local_base_freq"] = own
        rope = {_FULL: rope, _SLIDING: {"rope_type": "default", "rope_theta": own}}
    result |= {"rope_parameters": rope} | share
    if family.sliding is not None:
        sliding = config.sliding_layers or []
        result["sliding_window"] = config.sliding_window
        result["use_sliding_window"] = config.sliding_window is not None
        if len(sliding) < config.layers or family.rope_by_kind is not None:
            kinds = [_SLIDING if layer in sliding else _FULL for layer in range(config.layers)]
            result["layer_types"] = kinds
    if family.unrotated:
        still = config.unrotated_layers or []
        result["no_rope_layers"] = [int(layer not in still) for layer in range(config.layers)]
    return result
