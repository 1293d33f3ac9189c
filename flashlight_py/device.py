"""Array libraries and devices of arrays. CuPy is imported only if a program uses it."""

import math
import sys
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashlight_py.errors import BackendUnavailableError

__all__ = ["Array", "array_module", "device_of", "is_cupy", "to_device"]

# A NumPy or CuPy array. CuPy's stubs are incomplete, so type checkers see NumPy's type.
Array: TypeAlias = NDArray[Any]


def is_cupy(value: object) -> bool:
    """Return whether ``value`` is a ``cupy.ndarray``, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def array_module(array: object) -> ModuleType:
    """Return the module (``numpy`` or ``cupy``) with the functions for ``array``.

    Arrays of other libraries name their module in ``__array_library__``.
    """
    if type(array) is np.ndarray:
        return np
    if is_cupy(array):
        return sys.modules["cupy"]
    library: ModuleType = getattr(array, "__array_library__", np)
    return library


def device_of(array: Array) -> str:
    """Return the device that stores ``array``: ``"cpu"`` or ``"cuda:<index>"``."""
    if is_cupy(array):
        return f"cuda:{array.device.id}"  # type: ignore[attr-defined]
    return "cpu"


def to_device(array: Array, device: str) -> Array:
    """Return ``array`` on ``device`` (``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``).

    Returns ``array`` itself if it is already on ``device``, else a copy. A copy to the CPU blocks.

    Raises:
        ValueError: If ``device`` names neither the CPU nor a CUDA device.
        BackendUnavailableError: If ``device`` is a CUDA device and CuPy or the device is missing.
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
            f"the index must be below {count}, the number of CUDA devices, got device {device!r}"
        )
    with cupy.cuda.Device(number):
        moved: Array = cupy.asarray(array)
    return moved


def cuda(purpose: str = "an array on a GPU") -> tuple[Any, int]:
    """Return the module CuPy and the number of CUDA devices. ``purpose`` appears in errors.

    Raises:
        BackendUnavailableError: If CuPy or a CUDA device is missing.
    """
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"{purpose} needs CuPy, which cannot be imported ({error}). Install it: "
            "pip install 'flashlight-py[cuda12]' (or [cuda13])"
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(
            f"{purpose} needs a GPU, and CUDA has no device ({error}). Use NumPy arrays, or a "
            "host on which nvidia-smi lists a device"
        ) from error
    return cupy, count


def as_packed(array: Array) -> Array:
    """Return ``array`` if C-contiguous, aligned and in native byte order, else such a copy."""
    flags, dtype = array.flags, array.dtype
    if flags.c_contiguous and dtype.isnative and getattr(flags, "aligned", True):  # for CuPy
        return array
    return array.astype(dtype if dtype.isnative else dtype.newbyteorder("="), order="C")


def constant(value: float, like: Array) -> Any:
    """Return ``value`` as a scalar of the dtype of ``like``."""
    if type(like) is np.ndarray:  # twice as fast as a NumPy scalar
        return np.asarray(value, like.dtype)
    return like.dtype.type(value)


# float16 represents integers up to 2,048 and numbers up to 65,504, bfloat16 integers up to 256.
# Sums over many elements, and divisions by their count, are computed in float32 and rounded once.
NARROW = "eE"  # dtype.char of float16 and bfloat16; a comparison of dtypes would be slower
_FLOATING = "efdgE"


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` is bfloat16 or a real floating dtype, and so can have gradients."""
    return dtype.char in _FLOATING


def floating(dtype: Any, operation: str) -> np.dtype[Any]:
    """Return the floating dtype that ``dtype`` names. ``operation`` appears in errors.

    Raises:
        TypeError: If ``dtype`` is not a real floating dtype.
        BackendUnavailableError: If ``dtype`` is bfloat16 and ml_dtypes is not installed.
    """
    try:
        parsed = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{operation}: expected a real floating dtype, got {dtype!r}") from error
    if not is_floating(parsed):
        raise TypeError(f"{operation}: expected a real floating dtype, got {parsed}")
    return parsed


def bfloat16(otherwise: np.dtype[Any] | None = None) -> np.dtype[Any]:
    """Return the bfloat16 dtype of ml_dtypes, or ``otherwise`` if ml_dtypes is not installed.

    Raises:
        BackendUnavailableError: If ml_dtypes is not installed and ``otherwise`` is None.
    """
    try:
        import ml_dtypes
    except ImportError as error:
        if otherwise is not None:
            return otherwise
        raise BackendUnavailableError(
            f"bfloat16 needs ml_dtypes, which cannot be imported ({error}). Install it: "
            "pip install 'flashlight-py[bfloat16]'"
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def may_become(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return whether an assignment may cast ``source`` to ``dtype`` by NumPy's rule "same_kind"."""
    # np.can_cast allows every cast to and from bfloat16.
    a, b = (np.float32 if kind.name == "bfloat16" else kind for kind in (source, dtype))
    return np.can_cast(a, b, "same_kind")


def widened(array: Array) -> Array:
    """Return ``array`` as float32 if it is float16 or bfloat16, else ``array`` itself."""
    return array.astype(np.float32) if array.dtype.char in NARROW else array


def narrowed(result: Array, like: Array) -> Array:
    """Return ``result``, cast to the dtype of ``like`` if that is float16 or bfloat16."""
    return result.astype(like.dtype) if like.dtype.char in NARROW else result


def total(array: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """Return the sum over ``axis``. The sum of float16 or bfloat16 values is float32."""
    char, shape = array.dtype.char, array.shape
    axes = axis if isinstance(axis, tuple) else (axis,)
    is_last, others = axes in ((-1,), (len(shape) - 1,)), shape[len(axes) :]
    fits = array.size > 2048 and char in "fd" and array.flags.c_contiguous and not is_cupy(array)
    if fits and not keepdims and (is_last or (others and axes == (*range(len(axes)),))):
        width = shape[-1] if is_last else math.prod(others)
        # NumPy's sum is as fast as BLAS over a long axis, and faster over few rows.
        if width <= 64 if is_last else array.size >= 256 * width:
            rows = array.reshape(-1, width)
            ones = np.ones_like(rows[0] if is_last else rows[:, 0])
            sums: Array = np.dot(rows, ones) if is_last else np.dot(ones, rows)
            return sums.reshape(shape[:-1] if is_last else others)
    wide = np.float32 if char in NARROW else None
    return array.sum(axis=axis, keepdims=keepdims, dtype=wide)  # type: ignore[no-any-return]
