"""The dtype of ``fl.amp.autocast`` on this thread, and casts of inputs to it.

Under autocast, :func:`as_half` casts inputs of matrix products, which take most of the time.
:func:`as_float32` casts inputs of sums, exponentials and losses, which need float32's range or
digits. Other functions use ``as_variable`` and ``as_pair``, and compute in the widest input dtype.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import structure
from flashlight_py.autograd.variable import Input, Variable, record
from flashlight_py.device import Array

# For each leaf that was cast: its array and ``changed`` at that time, and the cast variable.
Casts: TypeAlias = dict[Variable, tuple[Array, int, Variable]]

_CAST = "feE"  # dtype characters of float16, float32 and bfloat16
_FLOAT32 = np.dtype(np.float32)


class Precision(threading.local):
    """The half dtype of autocast (None outside of it), and the casts made under autocast."""

    def __init__(self) -> None:
        self.dtype: np.dtype[Any] | None = None
        self.casts: Casts = {}


active_precision = Precision()


@contextmanager
def casting(dtype: np.dtype[Any] | None, casts: Casts | None = None) -> Iterator[None]:
    """Cast inputs of functions on this thread to ``dtype``. Reuse earlier casts in ``casts``."""
    before = active_precision.dtype, active_precision.casts
    _set(dtype, {} if casts is None else casts)
    try:
        yield
    finally:
        _set(*before)


def _set(dtype: np.dtype[Any] | None, casts: Casts) -> None:
    is_changed = active_precision.dtype != dtype
    active_precision.dtype, active_precision.casts = dtype, casts
    if is_changed:
        structure.changed()  # steps captured with the previous dtype cannot be replayed


def as_half(x: Input) -> Variable:
    """Return ``x`` in the autocast dtype, as a variable. Reuse the cast of an unchanged leaf."""
    x = x if isinstance(x, Variable) else Variable(x)
    return x if active_precision.dtype is None else _cast(x, active_precision.dtype)


def as_float32(x: Input) -> Variable:
    """Return ``x`` as a variable. Under autocast, cast float16 and bfloat16 to float32."""
    x = x if isinstance(x, Variable) else Variable(x)
    return x if active_precision.dtype is None else _cast(x, _FLOAT32)


def as_floating(x: Variable) -> Variable:
    """Return integers and Booleans as float64, without gradient, and other variables unchanged."""
    return Variable(x.data.astype(np.float64)) if x.data.dtype.kind in "iub" else x


def _cast(x: Variable, dtype: np.dtype[Any]) -> Variable:
    array = x.data
    if array.dtype == dtype or array.dtype.char not in _CAST:
        return x
    is_kept = x.node is None and x._calc_grad and dtype is not _FLOAT32
    if is_kept and x in active_precision.casts:
        data, changed, cast = active_precision.casts[x]
        if data is array and changed == x.changed and cast.has_history and cast.dtype == dtype:
            return cast
    cast = record(array.astype(dtype), (x, lambda grad: grad))
    if is_kept:
        active_precision.casts[x] = array, x.changed, cast
    return cast
