"""First values of parameters: means drawn, variances set."""

from __future__ import annotations

import math

import numpy as np

from flashlight_py.random import generator
from flashlight_py.tagi.parameters import Parameter
from flashlight_py.tagi.states import REAL

METHODS = ("He", "Xavier")


def spread(method: str, fan_in: int, fan_out: int) -> float:
    """Return the standard deviation of the means: ``sqrt(1 / fan_in)`` by He, ``sqrt(2 / (fan_in +
    fan_out))`` by Xavier.

    Raises:
        ValueError: ``method`` is neither.
    """
    if method not in METHODS:
        raise ValueError(f"init_method must be one of {', '.join(METHODS)}, got {method!r}")
    return math.sqrt(1 / fan_in if method == "He" else 2 / (fan_in + fan_out))


def gaussian(shape: tuple[int, ...], deviation: float, gain: float) -> Parameter:
    """Draw means from N(0, ``deviation``); the variances are ``(gain * deviation) ** 2``."""
    mean = generator().standard_normal(shape, REAL) * REAL.type(deviation)
    return Parameter(mean, np.full(shape, (gain * deviation) ** 2, REAL))


def constant(shape: tuple[int, ...], mean: float, variance: float) -> Parameter:
    """Return parameters that all have one mean and one variance."""
    return Parameter(np.full(shape, mean, REAL), np.full(shape, variance, REAL))
