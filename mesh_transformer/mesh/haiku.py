"""All that the library uses of Haiku, which is in maintenance mode.

If a JAX version breaks Haiku, these names are what must be replaced.
"""

from haiku import Module as Module
from haiku import Transformed as Transformed
from haiku import get_parameter as get_parameter
from haiku import running_init as running_init
from haiku import transform as transform
from haiku import transparent as transparent
from haiku import without_apply_rng as without_apply_rng
from haiku.experimental import current_name as current_name
from haiku.initializers import Constant as Constant
from haiku.initializers import Initializer as Initializer
from haiku.initializers import RandomNormal as RandomNormal
from haiku.initializers import TruncatedNormal as TruncatedNormal
