"""Initial values of parameters, drawn from the generator that ``set_seed`` seeds.

All functions return NumPy arrays. ``Module.to`` moves them, so a seed gives the same values on
every device. ``dtype`` is a floating dtype or its name. Other dtypes raise TypeError.
"""

import math
from collections.abc import Sequence
from typing import Any

from flashlight_py.device import Array, floating
from flashlight_py.random import generator


def uniform(
    shape: Sequence[int], low: float = 0.0, high: float = 1.0, dtype: Any = "float32"
) -> Array:
    """Return values with a uniform distribution from ``low`` to ``high``."""
    return generator().uniform(low, high, shape).astype(floating(dtype, "init"))  # type: ignore[no-any-return]


def normal(
    shape: Sequence[int], mean: float = 0.0, std: float = 1.0, dtype: Any = "float32"
) -> Array:
    """Return normally distributed values with mean ``mean`` and standard deviation ``std``."""
    return generator().normal(mean, std, shape).astype(floating(dtype, "init"))  # type: ignore[no-any-return]


def kaiming_uniform(shape: Sequence[int], fan_in: int, dtype: Any = "float32") -> Array:
    """Return uniform values within ``sqrt(3 / fan_in)`` of 0 (He et al., with gain 1)."""
    bound = math.sqrt(3 / fan_in)
    return uniform(shape, -bound, bound, dtype)


def kaiming_normal(shape: Sequence[int], fan_in: int, dtype: Any = "float32") -> Array:
    """Return normal values of variance ``1 / fan_in``."""
    return normal(shape, 0.0, math.sqrt(1 / fan_in), dtype)


def glorot_uniform(
    shape: Sequence[int], fan_in: int, fan_out: int, dtype: Any = "float32"
) -> Array:
    """Return uniform values within ``sqrt(6 / (fan_in + fan_out))`` of 0 (Glorot, AISTATS 2010)."""
    bound = math.sqrt(6 / (fan_in + fan_out))
    return uniform(shape, -bound, bound, dtype)


def glorot_normal(shape: Sequence[int], fan_in: int, fan_out: int, dtype: Any = "float32") -> Array:
    """Return normal values of variance ``2 / (fan_in + fan_out)`` (Glorot, AISTATS 2010)."""
    return normal(shape, 0.0, math.sqrt(2 / (fan_in + fan_out)), dtype)
