"""The native kernels, csrc/tagi, where they were built."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array, is_cupy
from flashlight_py.tagi.states import REAL


def native() -> Any | None:
    """Return CFFI's module of the kernels, or None, with a warning, where it is missing."""
    return _native.optional("tagi", "fl.tagi computes with NumPy alone, some times slower")


def native_for(array: Array) -> Any | None:
    """Return the kernels for ``array``; None: it is CuPy's, or they were not built."""
    return None if is_cupy(array) else native()


def floats(module: Any, array: Array | None) -> Any:
    """Return a pointer to a float32 array, or to a copy if it is not contiguous; NULL for None.

    It keeps the memory while it is in a variable, as of all that a kernel is passed.
    """
    if array is None:
        return module.ffi.NULL
    return module.ffi.from_buffer("float[]", np.ascontiguousarray(array, REAL))


def address(module: Any, array: Array | None) -> Any:
    """Return the address of an array that need not be contiguous; NULL for None.

    It does not keep the array's memory: the array lives in a variable until the call has returned.
    """
    if array is None:
        return module.ffi.NULL
    return module.ffi.cast("void *", array.__array_interface__["data"][0])
