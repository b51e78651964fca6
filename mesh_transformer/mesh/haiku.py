"""All that the library uses of Haiku, which is in maintenance mode.

If a JAX version breaks Haiku, these names are what must be replaced.
"""

from haiku import (
    Module,
    Transformed,
    get_parameter,
    running_init,
    transform,
    transparent,
    without_apply_rng,
)
from haiku.experimental import current_name
from haiku.initializers import Constant, Initializer, RandomNormal, TruncatedNormal

__all__ = [
    "Constant",
    "Initializer",
    "Module",
    "RandomNormal",
    "Transformed",
    "TruncatedNormal",
    "current_name",
    "get_parameter",
    "running_init",
    "transform",
    "transparent",
    "without_apply_rng",
]
