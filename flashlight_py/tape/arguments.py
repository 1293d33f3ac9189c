"""The arguments of a step: which of them are arrays, and which calls can be replayed alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import is_cupy
from flashlight_py.tape.recording import bounds, is_number

Array = np.ndarray[Any, Any]


def array_of(value: Any) -> Array | None:
    if isinstance(value, Variable):
        value = value.data
    return value if type(value) is np.ndarray else None


def gpu_array_of(value: Any) -> Any:
    """Return the CuPy array of an argument, or None."""
    held = value.data if isinstance(value, Variable) else value
    return held if is_cupy(held) else None


def are_plain(arrays: list[Array | None]) -> bool:
    """Return whether all are contiguous, and none has memory of another one."""
    given = [array for array in arrays if array is not None]
    spans = sorted(bounds(array) for array in given)
    are_apart = all(one[1] <= other[0] for one, other in pairwise(spans))
    return are_apart and all(each.flags.c_contiguous and each.flags.aligned for each in given)


def kind_of(value: Any) -> Any:
    """Return what arguments must have in common to be replayed alike; None: it cannot be."""
    array = array_of(value)
    if array is not None:
        is_leaf = not isinstance(value, Variable) or not (value.calc_grad or value.node)
        is_usable = is_leaf and is_number(array.dtype)
        return (
            (type(value), array.dtype.str, array.shape, array.flags.writeable)
            if is_usable
            else None
        )
    try:
        hash(value)
    except TypeError:
        return None
    return type(value), value


def described(value: Any) -> str:
    array = array_of(value)
    if array is not None and not is_number(array.dtype):
        return f"an array of {array.dtype}"
    if isinstance(value, Variable):
        return "a variable with a gradient"
    return f"an object of type {type(value).__name__}"
