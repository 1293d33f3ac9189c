"""TAGI (tractable approximate Gaussian inference): networks that learn without gradients.

Weights and activations are Gaussian. Names, argument orders and defaults are those of pytagi. A
pytagi script runs if it imports this package in place of ``pytagi``. See ``docs/tagi.md``.
"""

from typing import TYPE_CHECKING, Any

from flashlight_py.random import set_seed as manual_seed
from flashlight_py.tagi import cuda, metric, nn
from flashlight_py.tagi.metric import HRCSoftmaxMetric
from flashlight_py.tagi.utilities import Normalizer, Utils, exponential_scheduler

if TYPE_CHECKING:
    from flashlight_py.tagi.nn import *

__all__ = [
    *dir(nn),
    "HRCSoftmaxMetric",
    "Normalizer",
    "Utils",
    "cuda",
    "exponential_scheduler",
    "manual_seed",
    "metric",
    "nn",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(nn, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
