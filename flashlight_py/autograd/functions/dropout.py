"""Dropout (Srivastava et al., JMLR 15, 2014), in its inverted form."""

from __future__ import annotations

import numpy as np

from flashlight_py.autograd.functions.operands import as_variable
from flashlight_py.autograd.variable import Input, Variable, record
from flashlight_py.device import array_module
from flashlight_py.random import generator


def dropout(x: Input, ratio: float) -> Variable:
    """Return ``x`` with each element zeroed with probability ``ratio``, the rest scaled up.

    The scale ``1 / (1 - ratio)`` keeps the expectation. The generator is the one that
    ``set_seed`` seeds. A ratio of 0 returns ``x`` itself.

    Raises:
        ValueError: ``ratio`` is not in ``0 <= ratio < 1``.
    """
    x = as_variable(x)
    check_ratio(ratio)
    if not ratio:
        return x
    array = x.data
    draw = generator(array_module(array)).random(array.shape, dtype=np.float32)
    mask = (draw >= ratio).astype(array.dtype)
    mask *= 1 / (1 - ratio)
    return record(array * mask, (x, lambda grad: grad * mask))


def check_ratio(ratio: float) -> None:
    """Check a dropout ratio.

    Raises:
        ValueError: ``ratio`` is not in ``0 <= ratio < 1``.
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"dropout: the ratio must be at least 0 and below 1, got {ratio}")
