"""Which array library an array belongs to. CuPy is never imported before a CuPy array exists."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "array_module", "device_of", "is_cupy", "to_device"]

# A NumPy or CuPy array. CuPy has no complete stubs and follows NumPy's interface, so the type
# checker sees NumPy's.
Array: TypeAlias = NDArray[Any]


def is_cupy(value: object) -> bool:
    """Return whether ``value`` is a ``cupy.ndarray``, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def array_module(array: object) -> ModuleType:
    """Return the module (``numpy`` or ``cupy``) whose functions apply to ``array``."""
    return sys.modules["cupy"] if is_cupy(array) else np


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
    cupy = _import_cupy(device)
    with cupy.cuda.Device(int(index or 0)):
        moved: Array = cupy.asarray(array)
    return moved


def _import_cupy(device: str) -> Any:
    from flashlight_py.errors import BackendUnavailableError

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
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise BackendUnavailableError(
            f"device {device!r} was asked for and this machine has {count} CUDA device(s)"
        )
    return cupy
