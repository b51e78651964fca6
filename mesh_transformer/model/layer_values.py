"""What differs between the layers of one model, besides weights: rotary frequencies and windows.

The values are computed in NumPy.  If they differ, they are scanned beside the weights, so that all
layers still share one compiled body.

Array names end in their shape: R rotated part of a head, L layers.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from mesh_transformer.config_model import Model

# The config keys that `layer_values` depends on.
BY_LAYER = {"rotary_base", "rotary_scaling", "pe_rotary_dims", "unrotated_layers"}
BY_LAYER |= {"sliding_window", "sliding_layers", "sliding_rotary_base"}


class LayerValues(NamedTuple):
    """The values of one layer, or arrays of those of all layers, with an axis L before the others.

    Attributes:
      frequency_R: the angle per position of each rotated pair, f32; 0 in a layer that does not
        rotate.
      rotary_scale: the factor of sine and cosine, f32; None if it is 1 in all layers.
      is_sliding: whether the layer has the config's `sliding_window`.
    """

    frequency_R: Any
    rotary_scale: Any
    is_sliding: Any


def layer_values(config: Model) -> list[LayerValues]:
    """Return the values of each layer."""
    usual = frequencies(config.d_rotary, config.rotary_base, config.rotary_scaling, config.seq)
    sliding = usual
    if config.sliding_rotary_base is not None:
        sliding = frequencies(config.d_rotary, config.sliding_rotary_base)
    if config.rotary_pairs == "backward_halves":
        usual, sliding = ((-frequency_R, scale) for frequency_R, scale in (usual, sliding))

    always_1 = usual[1] == sliding[1] == 1

    def of(layer: int) -> LayerValues:
        is_sliding = layer in (config.sliding_layers or ())
        frequency_R, scale = sliding if is_sliding else usual
        if layer in (config.unrotated_layers or ()):
            frequency_R, scale = 0 * frequency_R, 1.0
        own = None if always_1 else np.float32(scale)
        return LayerValues(frequency_R.astype(np.float32), own, np.bool_(is_sliding))

    return [of(layer) for layer in range(config.layers)]


def stacked(config: Model) -> LayerValues | None:
    """Return the values of all layers as arrays; None if they are equal."""
    first, *rest = values = layer_values(config)
    equal = jax.tree.map(lambda x, *xs: all(np.array_equal(x, y) for y in xs), first, *rest)
    return None if all(jax.tree.leaves(equal)) else jax.tree.map(lambda *xs: np.stack(xs), *values)


def have_same_layers(one: Model, other: Model) -> bool:
    """Return whether two configs give all layers the same values, up to rounding in f32."""

    def values(config: Model) -> list[Any]:
        window = min(config.sliding_window or config.seq, config.seq)
        return [
            (x.frequency_R, x.rotary_scale or 1.0, window if x.is_sliding else config.seq)
            for x in layer_values(config)
        ]

    pairs = zip(jax.tree.leaves(values(one)), jax.tree.leaves(values(other)), strict=True)
    return all(np.shape(a) == np.shape(b) and np.allclose(a, b, 1e-5, 0) for a, b in pairs)


def frequencies(
    dims: int, base: float | None = None, scaling: dict[str, Any] | None = None, seq: int = 0
) -> tuple[np.ndarray, float]:
    """Return the angles per position of `dims` / 2 pairs, and the factor of sine and cosine.

    Args:
      base: of the wavelengths; None for that of GPT-J.
      scaling: the config's `rotary_scaling`; the formulas are those of transformers'
        `modeling_rope_utils`.
      seq: the longest sequence.  With longrope and dynamic, the frequencies of all positions of all
        texts depend on it; in transformers, they depend on the length of each text.
    """
    base = 10000.0 if base is None else base
    frequency_R = base ** (-np.arange(0, dims, 2) / dims)
    if scaling is None:
        return frequency_R, 1.0
    scale = 1.0
    factor, kind = scaling["factor"], scaling["rope_type"]
    if kind == "dynamic":  # Neural tangent kernel: the longest wavelength grows with the length.
        longer = max(seq / scaling["original_max_position_embeddings"], 1)
        grown = base * (factor * longer - (factor - 1)) ** (dims / (dims - 2))
        return frequencies(dims, grown)
    if kind == "longrope":
        length = scaling["original_max_position_embeddings"]
        usual = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
        divisors_R = np.array(scaling["long_factor" if seq > length else "short_factor"])
        return frequency_R / divisors_R, scaling.get("attention_factor", usual)
    if kind == "linear":
        kept_R = np.zeros_like(frequency_R)
    elif kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns_R = scaling["original_max_position_embeddings"] * frequency_R / (2 * math.pi)
        kept_R = np.clip((turns_R - low) / (high - low), 0, 1)
    else:
        kept_R, scale = _yarn(dims, base, scaling)
    # The share `kept` of a frequency stays, and the rest is divided by the factor.
    return frequency_R * (kept_R + (1 - kept_R) / factor), scale


def _yarn(dims: int, base: float, scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Return the share of each frequency that YaRN (Peng 2023) keeps, and the factor of sines."""
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def pair(turns: float) -> float:
        """Return the number of the pair that turns so many times in `length` positions."""
        return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    first, last = pair(scaling.get("beta_fast", 32)), pair(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    ramp_R = (np.arange(dims // 2) - first) / (last - first if last > first else 0.001)
    if (scale := scaling.get("attention_factor")) is None:
        one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scale = magnitude(one) / magnitude(all_dims) if one and all_dims else magnitude(1)
    return 1 - np.clip(ramp_R, 0, 1), scale
