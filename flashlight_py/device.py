"""The array library of an array. CuPy is never imported before a CuPy array exists."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashlight_py.errors import BackendUnavailableError

__all__ = ["Array", "array_module", "device_of", "is_cupy", "to_device"]

operations_made: list[Callable[[], int]] = []
"""Each returns how many operations with effects beyond arrays, such as messages, were made."""

own_operations: list[Any] = []
"""The recordings of steps, while arrays are in use whose classes have an ``__operation__``."""

Function = TypeVar("Function", bound=Callable[..., Any])

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
    if is_cupy(array):
        return sys.modules["cupy"]
    library: ModuleType = getattr(array, "__array_library__", np)
    return library


def owner_of(values: Iterable[Any]) -> Any:
    """Return what does the operations on ``values``, by a method ``__operation__``; or None.

    That is the class of the first of them, or of those in their lists, or ``captured_gpu``.
    """
    return (_owner_of(values) or captured_gpu()) if own_operations else None


def _owner_of(values: Iterable[Any]) -> Any:
    for value in values:
        if isinstance(value, (list, tuple)):
            found = _owner_of(value)
        else:
            held = value.data if hasattr(type(value), "grad_buffer") else value
            found = type(held) if hasattr(type(held), "__operation__") else None
        if found is not None:
            return found
    return None


def captured_gpu() -> Any:
    """Return what captures a GPU's work of this thread, such as into a CUDA graph; or None."""
    found = _recording_here() if own_operations else None
    return found if getattr(found, "captures_gpu", False) else None


def _recording_here() -> Any:
    """Return the recording of this thread; others may have theirs."""
    return next((each for each in reversed(own_operations) if each.is_here()), None)


def leave_recording(reason: str) -> None:
    """Let a step that is recorded on this thread, if one is, stay as it is: ``reason``."""
    recording = _recording_here() if own_operations else None
    if recording is not None:
        recording.leave(reason)


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return the matrix product of two arrays of two dimensions; ``out``: where to write it.

    While a GPU's work is captured, in another way than CuPy's, which refuses that.
    """
    if own_operations and is_cupy(a):
        owner = captured_gpu()
        if owner is not None:
            return owner.product(a, b, out)  # type: ignore[no-any-return]
    found: Array = a.dot(b, out=out)
    return found


def deferred(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the owner of one of ``args`` makes of ``function(*args)``; else NotImplemented.

    See ``operation``, which does the same before the function begins.
    """
    owner = owner_of(args)
    return NotImplemented if owner is None else owner.__operation__(function, args, {})


# Native code and functions that do more than compute ask arrays of other kinds first
# (``__operation__``): optimizers, reductions, meters and leaves are recorded as one instruction
# each, and know nothing of it.
def operation(function: Function) -> Function:
    """Let arrays of other libraries than NumPy and CuPy do ``function`` in their own way.

    For what does more with arrays than compute others from them. Where an argument, or the array of
    one that is a variable, is of a class with a method ``__operation__``, that is called with the
    function, its arguments and its options, and returns the result.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        owner = owner_of((*args, *options.values()))
        if owner is None:
            return function(*args, **options)
        return owner.__operation__(function, args, options)

    return call  # type: ignore[return-value]


def effect(function: Function) -> Function:
    """Let a step that is recorded on this thread do ``function`` again in every replay.

    For what does more than compute, where there is no array for ``operation`` to find. What it
    returns, if anything, has to be the same each time.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        recording = _recording_here() if own_operations else None
        if recording is None:
            return function(*args, **options)
        return recording.operation(function, args, options)

    return call  # type: ignore[return-value]


def require(condition: Array, error: Callable[[], Exception]) -> None:
    """Raise ``error()`` unless all elements of ``condition`` are true; waits for a GPU.

    An array of another library may do that in its own way: ``__require__(error)``.
    """
    own = getattr(type(condition), "__require__", None) or getattr(captured_gpu(), "require", None)
    if own is not None:
        own(condition, error)
    elif not condition.all():
        raise error()


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
