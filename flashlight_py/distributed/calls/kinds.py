"""Arrays of other libraries: how they are told apart, read in place, and made of results again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array, bfloat16, is_cupy

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged of dlpack.h
# bfloat16 without ml_dtypes: verbs move it, and NumPy cannot compute with it.
BFLOAT16_BYTES = np.dtype([("bfloat16", "V2")])


class ArrayKind(NamedTuple):
    """Arrays of the class ``module.name``, which nothing here imports.

    ``view`` returns a NumPy or CuPy array of one's memory, None if it has none to share; ``make`` a
    new one of the memory of such an array, on the device of a given one. ``is_filled``: verbs write
    into it; else they return a new one wherever they would.
    """

    module: str
    name: str
    view: Callable[[Any], Array | None]
    make: Callable[[Array, Any], Any]
    is_filled: bool = True


def is_of(value: object, module: str, name: str) -> bool:
    """Return whether ``value`` is of class ``module.name``, without importing the module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def kind_of(value: object) -> ArrayKind:
    """Return the row of ``KINDS`` that ``value`` belongs to, ``OTHER`` if to none."""
    if isinstance(value, np.ndarray) or is_cupy(value):
        return OTHER
    return next((kind for kind in KINDS if is_of(value, kind.module, kind.name)), OTHER)


def as_numpy(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a NumPy array of the memory of what verbs fill, where that is simple; else None."""
    if getattr(value, "has_history", None) is False:
        value = value.array
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ndarray):
        return None if isinstance(value, np.ma.MaskedArray) else value.view(np.ndarray)
    if not is_of(value, "torch", "Tensor") or value.requires_grad or value.is_cuda:
        return None
    try:
        return value.numpy()  # type: ignore[no-any-return]
    except (RuntimeError, TypeError):  # a sparse one, a conjugate, a dtype that NumPy lacks
        return None


def returned(given: Any, array: Array | None, in_place: bool) -> Any:
    """Return what a verb returns: ``given`` where it was filled, else ``array`` in its kind."""
    kind = OTHER if type(given) is np.ndarray else kind_of(given)
    if in_place and kind.is_filled:
        return given
    return array if kind is OTHER or array is None else kind.make(array, given)


def copy_to_fill(array: Array) -> Array:
    """Return a copy of ``array`` of which ``make`` needs no other one."""
    if is_cupy(array):
        return array.copy()
    room = np.empty(array.nbytes + 64, np.uint8)  # JAX takes over what begins at a multiple of 64
    copy = np.ndarray(array.shape, array.dtype, room, -room.ctypes.data % 64)
    copy[...] = array
    return copy


def _by_protocol(value: Any) -> Array | None:
    if is_of(value, "multiprocessing.sharedctypes", "SynchronizedBase"):
        value = value.get_obj()  # the ctypes array that multiprocessing.Array has a lock around
    with contextlib.suppress(TypeError):  # the only way to ask before Python 3.12
        return np.asarray(memoryview(value))
    if hasattr(value, "__dlpack__"):
        return _by_dlpack(value)
    return _by_cuda(value) if hasattr(value, "__cuda_array_interface__") else None


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
    if tensor.is_cuda:
        return _by_dlpack(tensor)
    torch = sys.modules["torch"]
    if tensor.dtype is not torch.bfloat16:  # which NumPy lacks
        return tensor.numpy()  # type: ignore[no-any-return]
    return tensor.view(torch.int16).numpy().view(bfloat16(BFLOAT16_BYTES))  # type: ignore[no-any-return]


def _to_torch(array: Array, _: Any) -> Any:
    torch = sys.modules["torch"]
    if is_cupy(array):
        return torch.from_dlpack(array)
    if array.dtype.name not in ("bfloat16", BFLOAT16_BYTES.name):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _of_jax(array: Any) -> Array:
    (device, *others) = array.devices()
    on_gpu = device.platform == "gpu" and not others  # else in the memory of the host, or brought
    return _by_dlpack(array) if on_gpu else np.asarray(array)


def _to_jax(array: Array, like: Any) -> Any:
    """Return an array of JAX on the devices of ``like``, and of its dtype whatever JAX allows."""
    jax = sys.modules["jax"]
    if is_cupy(array):
        return jax.dlpack.from_dlpack(array)
    place = like.sharding if like.committed else None
    if len(like.devices()) > 1 and array.shape != like.shape:  # cannot be cut as that is
        place = min(like.devices(), key=lambda device: device.id)
    wide = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    with wide(True) if array.dtype == like.dtype else contextlib.nullcontext():
        return jax.device_put(array, place)


KINDS = (
    ArrayKind("torch", "Tensor", _of_torch, _to_torch),
    ArrayKind("jax", "Array", _of_jax, _to_jax, is_filled=False),
)
OTHER = ArrayKind("", "", _by_protocol, lambda array, _: array)
