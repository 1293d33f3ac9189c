"""Access to the native kernels of csrc/tagi."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array, is_cupy
from flashlight_py.tagi.states import REAL


def tagi_kernels() -> Any | None:
    """Return the CFFI module of the kernels; None, with a warning, if it is not built."""
    return _native.optional("tagi", "fl.tagi computes with NumPy alone, several times slower")


def native_for(array: Array) -> Any | None:
    """Return the kernels for ``array``; None for a CuPy array or if they are not built."""
    return None if is_cupy(array) else tagi_kernels()


def floats(module: Any, array: Array | None) -> Any:
    """Return a pointer to ``array``, or to a contiguous float32 copy of it; NULL for None.

    Store the result in a variable during the kernel call, because it keeps the memory alive.
    """
    if array is None:
        return module.ffi.NULL
    return module.ffi.from_buffer("float[]", np.ascontiguousarray(array, REAL))


def data_pointer(module: Any, array: Array | None) -> Any:
    """Return the address of an array with any strides; NULL for None.

    The result does not keep the memory alive. Keep the array in a variable during the call.
    """
    if array is None:
        return module.ffi.NULL
    return module.ffi.cast("void *", array.__array_interface__["data"][0])
