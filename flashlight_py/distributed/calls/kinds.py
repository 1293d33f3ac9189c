"""Arrays of other libraries: how they are told apart, read in place, and made of results again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array, is_cupy

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged of dlpack.h
_ALIGNED = 64  # bytes, as JAX needs it to take memory over without a copy


class Kind(NamedTuple):
    """Arrays of the class ``module.name``, which nothing here imports.

    Args:
        view: returns a NumPy or CuPy array of the memory of such an array.
        make: returns a new such array of the memory of a NumPy or CuPy array, where a given one is.
        is_filled: verbs write into it; else they return new ones wherever they would.
    """

    module: str
    name: str
    view: Callable[[Any], Array]
    make: Callable[[Array, Any], Any]
    is_filled: bool = True


def is_of(value: object, module: str, name: str) -> bool:
    """Return whether ``value`` is of class ``module.name``, without importing the module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def kind_of(value: object) -> Kind | None:
    """Return the row of ``KINDS`` that ``value`` belongs to."""
    if isinstance(value, np.ndarray) or is_cupy(value):
        return None
    return next((kind for kind in KINDS if is_of(value, kind.module, kind.name)), None)


def is_filled(value: object) -> bool:
    """Return whether verbs can write into arrays of the kind of ``value``."""
    kind = kind_of(value)
    return kind is None or kind.is_filled


def returned(given: Any, array: Array | None, in_place: bool) -> Any:
    """Return what a verb returns: ``given`` where it was filled, else ``array`` in its kind."""
    kind = kind_of(given)
    if in_place and (kind is None or kind.is_filled):
        return given
    return array if kind is None or array is None else kind.make(array, given)


def view_of(value: Any) -> Array | None:
    """Return an array of ``value``'s memory; None where it is nothing that has any to share."""
    kind = kind_of(value)
    if kind is not None:
        return kind.view(value)
    if is_of(value, "multiprocessing.sharedctypes", "SynchronizedBase"):
        value = value.get_obj()  # the ctypes array that multiprocessing.Array has a lock around
    try:
        buffer = memoryview(value)
    except TypeError:  # the only way to ask before Python 3.12
        buffer = None
    if buffer is not None:
        return np.asarray(buffer)
    if hasattr(value, "__dlpack__"):
        return _by_dlpack(value)
    return _by_cuda(value) if hasattr(value, "__cuda_array_interface__") else None


def copy_to_fill(array: Array) -> Array:
    """Return a copy of ``array`` of which libraries whose arrays never change can make one."""
    if is_cupy(array):
        return array.copy()
    room = np.empty(array.nbytes + _ALIGNED, np.uint8)
    begin = -room.ctypes.data % _ALIGNED
    copy = np.ndarray(array.shape, array.dtype, room, begin)
    copy[...] = array
    return copy


def _by_dlpack(value: Any) -> Array:
    """Return an array of the same memory; CuPy has its current stream wait for the producer's."""
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _DLPACK_CUDA:
        import cupy

        return cupy.from_dlpack(value)  # type: ignore[no-any-return]
    return np.from_dlpack(value)


# CuPy itself would block until that stream has come so far, or not wait at all, as its environment
# says: so it is told of none.
def _by_cuda(value: Any) -> Array:
    """Return a CuPy array of the same memory; its stream waits for the one that the owner names."""
    import cupy

    interface = value.__cuda_array_interface__
    if interface.get("stream") is not None:
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, interface["stream"])
        cupy.cuda.get_current_stream().wait_event(event)
    silent = SimpleNamespace(__cuda_array_interface__={**interface, "stream": None}, owner=value)
    return cupy.asarray(silent)  # type: ignore[no-any-return]


def _of_torch(tensor: Any) -> Array:
    """Return an array of a tensor.

    ``numpy()`` serves every version of NumPy, while from_dlpack returns read-only arrays before
    2.1. Neither knows bfloat16, so that travels as int16 of the same memory.
    """
    if tensor.is_cuda:
        return _by_dlpack(tensor)
    torch = sys.modules["torch"]
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()  # type: ignore[no-any-return]
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "NumPy has bfloat16 by ml_dtypes only, which is not installed; "
            "pip install 'flashlight-py[bfloat16]'"
        ) from error
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]


def _to_torch(array: Array, _: Any) -> Any:
    torch = sys.modules["torch"]
    if is_cupy(array):
        return torch.from_dlpack(array)
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _of_jax(array: Any) -> Array:
    """Return an array of one of JAX: of a single GPU's by CuPy, else of what it is on the host."""
    (device, *others) = array.devices()
    return _by_dlpack(array) if device.platform == "gpu" and not others else np.asarray(array)


def _to_jax(array: Array, like: Any) -> Any:
    """Return an array of JAX on the devices of ``like``, and of its dtype whatever JAX allows."""
    jax = sys.modules["jax"]
    if is_cupy(array):
        return jax.dlpack.from_dlpack(array)
    devices, place = like.devices(), like.sharding if like.committed else None
    if len(devices) > 1 and array.shape != like.shape:  # cannot be cut as that is
        place = min(devices, key=lambda device: device.id)
    wide = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    with wide(True) if array.dtype == like.dtype else contextlib.nullcontext():
        return jax.device_put(array, place)


KINDS = (
    Kind("torch", "Tensor", _of_torch, _to_torch),
    Kind("jax", "Array", _of_jax, _to_jax, is_filled=False),
)
