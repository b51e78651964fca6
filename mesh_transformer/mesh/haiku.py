"""All that the library uses of Haiku, which is in maintenance mode.

If a JAX version breaks Haiku, these names are what must be replaced.  Of the initializers, the
library uses `Constant`, `RandomNormal`, `TruncatedNormal` and their base class `Initializer`.
"""

from haiku import (
    Module,
    Transformed,
    get_parameter,
    initializers,
    running_init,
    transform,
    transparent,
    without_apply_rng,
)
from haiku.experimental import current_name

__all__ = [
    "Module",
    "Transformed",
    "current_name",
    "get_parameter",
    "initializers",
    "running_init",
    "transform",
    "transparent",
    "without_apply_rng",
]
