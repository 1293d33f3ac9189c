"""The array library of an array. CuPy is never imported before a CuPy array exists."""

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
    cupy, count = cuda(f"device {device!r}")
    number = int(index or 0)
    if number >= count:
        raise BackendUnavailableError(
            f"device {device!r} was asked for and this machine has {count} CUDA device(s)"
        )
    with cupy.cuda.Device(number):
        moved: Array = cupy.asarray(array)
    return moved


def cuda(wanted: str = "an array on a GPU") -> tuple[Any, int]:
    """Return CuPy and the number of CUDA devices; BackendUnavailableError if either is missing."""
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"{wanted} needs CuPy, which cannot be imported ({error}). Install it: "
            "pip install 'flashlight-py[cuda12]' (or [cuda13])"
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(
            f"{wanted} needs a GPU, and CUDA finds none ({error}). Use NumPy arrays, or run where "
            "nvidia-smi lists a device"
        ) from error
    return cupy, count


def constant(value: float, like: Array) -> Any:
    """Return a number in the dtype of ``like``, for arithmetic with it."""
    if type(like) is np.ndarray:  # NumPy takes half the time with an array
        return np.asarray(value, like.dtype)
    return like.dtype.type(value)


# Float16 counts no further than 2,048 and ends at 65,504, bfloat16 counts to 256: what adds up many
# elements, or divides by how many there are, does so in float32 and rounds once.
NARROW = "eE"  # their letters, of ml_dtypes' bfloat16 too; comparing dtypes takes longer
_FLOATING = "efdgE"


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether values of ``dtype`` may have gradients: NumPy's real ones, and bfloat16."""
    return dtype.char in _FLOATING


def floating(dtype: Any, what: str) -> np.dtype[Any]:
    """Return a dtype, also by its name; ``"bfloat16"`` is ml_dtypes'. ``what``: for errors.

    Raises TypeError if it is no real floating dtype, and BackendUnavailableError if it is bfloat16
    and ml_dtypes is not installed.
    """
    try:
        found = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{what} needs a real floating dtype, got {dtype!r}") from error
    if not is_floating(found):
        raise TypeError(f"{what} needs a real floating dtype, got {found}")
    return found


def bfloat16(otherwise: np.dtype[Any] | None = None) -> np.dtype[Any]:
    """Return the dtype of ml_dtypes, or ``otherwise`` if ml_dtypes is not installed.

    Raises BackendUnavailableError if ml_dtypes is not installed and ``otherwise`` is None.
    """
    try:
        import ml_dtypes
    except ImportError as error:
        if otherwise is not None:
            return otherwise
        raise BackendUnavailableError(
            "NumPy lacks the dtype bfloat16; install it with: "
            f"pip install 'flashlight-py[bfloat16]' ({error})"
        ) from error
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def may_become(given: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return whether a value is cast to ``dtype`` in assignments: not complex to real, say."""
    # ml_dtypes would allow everything.
    a, b = (np.float32 if each.name == "bfloat16" else each for each in (given, dtype))
    return np.can_cast(a, b, "same_kind")


def widened(array: Array) -> Array:
    """Return an array of float16 or bfloat16 as float32, and any other as it is."""
    return array.astype(np.float32) if array.dtype.char in NARROW else array


def narrowed(result: Array, like: Array) -> Array:
    """Return ``result`` in the dtype of ``like`` where that is narrow, else as it is."""
    return result.astype(like.dtype) if like.dtype.char in NARROW else result


def total(array: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """Return the sum over ``axis``: that of narrow dtypes as float32, to be cast by the caller."""
    wide = np.float32 if array.dtype.char in NARROW else None
    found: Array = array.sum(axis=axis, keepdims=keepdims, dtype=wide)
    return found
