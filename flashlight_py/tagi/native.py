"""The native kernels, csrc/tagi, where they were built."""

from __future__ import annotations

from typing import Any

from flashlight_py import _native
from flashlight_py.device import Array


def native() -> Any | None:
    """Return CFFI's module of the kernels, or None, with a warning, where it is missing."""
    return _native.optional("tagi", "fl.tagi computes with NumPy alone, some times slower")


def address(module: Any, array: Array | None, pointer: str = "float *") -> Any:
    """Return where an array is that need not be contiguous, as a ``pointer``; NULL: there is none.

    It does not keep the array's memory: the array lives in a variable until the call has returned.
    """
    if array is None:
        return module.ffi.NULL
    return module.ffi.cast(pointer, array.__array_interface__["data"][0])
