"""The array library of an array. CuPy is never imported before a CuPy array exists."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashlight_py.errors import BackendUnavailableError

__all__ = ["Array", "array_module", "device_of", "is_cupy", "to_device"]

# A NumPy or CuPy array. CuPy has no complete stubs and follows NumPy's interface, so the type
# checker sees NumPy's.
Array: TypeAlias = NDArray[Any]


def is_cupy(value: object) -> bool:
    """Return whether ``value`` is a ``cupy.ndarray``, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def array_module(array: object) -> ModuleType:
    """Return the module (``numpy`` or ``cupy``) whose functions apply to ``array``.

    An array of another library names it by ``__array_library__``.
    """
    if type(array) is np.ndarray:
        return np
    if is_cupy(array):
        return sys.modules["cupy"]
    library: ModuleType = getattr(array, "__array_library__", np)
    return library


def device_of(array: Array) -> str:
    """Return where ``array`` lives: ``"cpu"`` or ``"cuda:<index>"``."""
    if is_cupy(array):
        return f"cuda:{array.device.id}"  # type: ignore[attr-defined]
    return "cpu"


def to_device(array: Array, device: str) -> Array:
    """Return ``array`` on ``device`` (``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``).

    It is the same object where it already lives there, a copy otherwise. Blocks until a
    copy to the CPU has arrived.

    Raises:
        ValueError: ``device`` names neither the CPU nor a CUDA device.
        BackendUnavailableError: a CUDA device is asked for and CuPy or the device is missing.
    """
    if device == "cpu":
        host: Array = array.get() if is_cupy(array) else array  # type: ignore[attr-defined]
        return host
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index.isdigit() or index == ""):
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:<index>', got {device!r}")
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"device {device!r} needs CuPy, which is not installed ({error}); "
            "install it with: pip install 'flashlight-py[cuda12]' (or [cuda13])"
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(
            f"device {device!r} was asked for and CUDA finds none here: {error}"
        ) from error
    number = int(index or 0)
    if number >= count:
        raise BackendUnavailableError(
            f"device {device!r} was asked for and this machine has {count} CUDA device(s)"
        )
    with cupy.cuda.Device(number):
        moved: Array = cupy.asarray(array)
    return moved


def constant(value: float, like: Array) -> Any:
    """Return a number in the dtype of ``like``, for arithmetic with it."""
    if type(like) is np.ndarray:  # NumPy takes half the time with an array
        return np.asarray(value, like.dtype)
    return like.dtype.type(value)


# Float16 counts no further than 2,048 and ends at 65,504: what adds up many elements, or divides by
# how many there are, does so in float32 and rounds once.
_FLOAT16 = "e"  # NumPy's letter; comparing dtypes takes longer, and steps are short


def widened(array: Array) -> Array:
    """Return a float16 array as float32, and any other as it is."""
    return array.astype(np.float32) if array.dtype.char == _FLOAT16 else array


def narrowed(result: Array, like: Array) -> Array:
    """Return ``result`` as float16 where ``like`` is, else as it is."""
    return result.astype(like.dtype) if like.dtype.char == _FLOAT16 else result


def total(array: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """Return the sum over ``axis``: that of float16 as float32, to be cast by the caller."""
    wide = np.float32 if array.dtype.char == _FLOAT16 else None
    found: Array = array.sum(axis=axis, keepdims=keepdims, dtype=wide)
    return found
