"""The dtype that ``fl.amp.autocast`` asks for on this thread, and casts of inputs to it.

A function takes its inputs by :func:`as_half` (products, which are most of the work), by
:func:`as_float32` (sums, exponentials, losses, which need the range or the digits), or by
``as_variable`` and ``as_pair`` (the others, which compute in the widest of the dtypes they get).
Outside of autocast all three are the same.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import structure
from flashlight_py.autograd.variable import Input, Variable, record
from flashlight_py.device import Array

# A leaf's cast in this region, with the leaf's array, and how often it had been changed.
Casts: TypeAlias = dict[Variable, tuple[Array, int, Variable]]

_CAST = "feE"  # float64 and integers stay as they are
_FLOAT32 = np.dtype(np.float32)


class Precision(threading.local):
    """The half dtype of the region of autocast, or None outside; and the casts made in it."""

    def __init__(self) -> None:
        self.dtype: np.dtype[Any] | None = None
        self.casts: Casts = {}


here = Precision()


@contextmanager
def casting(dtype: np.dtype[Any] | None, casts: Casts | None = None) -> Iterator[None]:
    """Have functions of this thread compute under ``dtype``; ``casts``: those known so far."""
    before = here.dtype, here.casts
    _set(dtype, {} if casts is None else casts)
    try:
        yield
    finally:
        _set(*before)


def _set(dtype: np.dtype[Any] | None, casts: Casts) -> None:
    is_other = here.dtype != dtype
    here.dtype, here.casts = dtype, casts
    if is_other:
        structure.changed()  # what is captured under another dtype computes something else


def as_half(x: Input) -> Variable:
    """Return ``x`` as a variable, inside of autocast in its dtype; a leaf is cast once a region."""
    x = x if isinstance(x, Variable) else Variable(x)
    return x if here.dtype is None else _cast(x, here.dtype)


def as_float32(x: Input) -> Variable:
    """Return ``x`` as a variable, inside of autocast as float32 where it is narrower."""
    x = x if isinstance(x, Variable) else Variable(x)
    return x if here.dtype is None else _cast(x, _FLOAT32)


def real(x: Variable) -> Variable:
    """Return ``x``, where it has integers or truth values as float64, which has no gradient."""
    return Variable(x.data.astype(np.float64)) if x.data.dtype.kind in "iub" else x


def _cast(x: Variable, dtype: np.dtype[Any]) -> Variable:
    array = x.data
    if array.dtype == dtype or array.dtype.char not in _CAST:
        return x
    is_kept = x.node is None and x._calc_grad and dtype is not _FLOAT32
    if is_kept and x in here.casts:
        data, changed, cast = here.casts[x]
        if data is array and changed == x.changed and cast.has_history and cast.dtype == dtype:
            return cast
    cast = record(array.astype(dtype), (x, lambda grad: grad))
    if is_kept:
        here.casts[x] = array, x.changed, cast
    return cast
