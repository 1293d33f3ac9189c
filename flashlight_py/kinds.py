"""Arrays of other libraries: detection, views as NumPy or CuPy arrays, conversion of results."""

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array, bfloat16, is_cupy

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged of dlpack.h
# bfloat16 without ml_dtypes. Verbs can move it, but NumPy cannot compute with it.
BFLOAT16_BYTES = np.dtype([("bfloat16", "V2")])


class ArrayKind(NamedTuple):
    """The class of arrays ``module.name``. This package does not import the module.

    ``view`` returns a NumPy or CuPy array of the same memory, or None if that is impossible.
    ``make(array, like)`` converts a NumPy or CuPy array to this class, on the device of ``like``.
    ``is_filled`` is True if verbs can write into such arrays. Otherwise verbs return new arrays.
    """

    module: str
    name: str
    view: Callable[[Any], Array | None]
    make: Callable[[Array, Any], Any]
    is_filled: bool = True


def is_instance(value: object, module: str, name: str) -> bool:
    """Return whether ``value`` is an instance of ``module.name``. Do not import the module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def kind_of(value: object) -> ArrayKind:
    if isinstance(value, np.ndarray) or is_cupy(value):
        return OTHER
    return next((kind for kind in KINDS if is_instance(value, kind.module, kind.name)), OTHER)


def as_numpy(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the NumPy array of an array, Variable or CPU tensor. For other values, return None."""
    if getattr(value, "has_history", None) is False:
        value = value.array
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ndarray):
        return None if isinstance(value, np.ma.MaskedArray) else value.view(np.ndarray)
    if not is_instance(value, "torch", "Tensor") or value.requires_grad or value.is_cuda:
        return None
    try:
        return value.numpy()  # type: ignore[no-any-return]
    except (RuntimeError, TypeError):  # sparse, conjugate, or of a dtype that NumPy lacks
        return None


def user_result(argument: Any, array: Array | None, in_place: bool) -> Any:
    """Return ``argument`` if the verb has filled it, else ``array`` in the same library."""
    kind = OTHER if type(argument) is np.ndarray else kind_of(argument)
    if in_place and kind.is_filled:
        return argument
    return array if kind is OTHER or array is None else kind.make(array, argument)


def copy_to_fill(array: Array) -> Array:
    """Return a copy of ``array`` that JAX can use as its own memory, without another copy."""
    if is_cupy(array):
        return array.copy()
    memory = np.empty(array.nbytes + 64, np.uint8)  # to align by 64 bytes, which saves JAX a copy
    copy = np.ndarray(array.shape, array.dtype, memory, -memory.ctypes.data % 64)
    copy[...] = array
    return copy


def _by_protocol(value: Any) -> Array | None:
    if is_instance(value, "multiprocessing.sharedctypes", "SynchronizedBase"):
        value = value.get_obj()  # the ctypes array inside the lock of multiprocessing.Array
    with contextlib.suppress(TypeError):  # for an object without the buffer protocol
        return np.asarray(memoryview(value))
    if hasattr(value, "__dlpack__"):
        return _by_dlpack(value)
    return _by_cuda(value) if hasattr(value, "__cuda_array_interface__") else None


def _by_dlpack(value: Any) -> Array:
    """Return an array of the same memory. CuPy's stream waits for the stream of ``value``."""
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _DLPACK_CUDA:
        import cupy

        return cupy.from_dlpack(value)  # type: ignore[no-any-return]
    return np.from_dlpack(value)


# Hide the stream of ``value`` from CuPy. Depending on an environment variable, CuPy would otherwise
# block this thread, or would not wait.
def _by_cuda(value: Any) -> Array:
    """Return a CuPy array of the same memory. CuPy's stream waits for the stream of ``value``."""
    import cupy

    interface = value.__cuda_array_interface__
    if interface.get("stream") is not None:
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, interface["stream"])
        cupy.cuda.get_current_stream().wait_event(event)
    source = SimpleNamespace(__cuda_array_interface__={**interface, "stream": None}, owner=value)
    return cupy.asarray(source)  # type: ignore[no-any-return]


def _of_torch(tensor: Any) -> Array:
    if tensor.is_cuda:
        return _by_dlpack(tensor)
    torch = sys.modules["torch"]
    if tensor.dtype is not torch.bfloat16:  # NumPy lacks bfloat16
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
    (device, *more_devices) = array.devices()
    on_gpu = device.platform == "gpu" and not more_devices  # NumPy copies other arrays to the host
    return _by_dlpack(array) if on_gpu else np.asarray(array)


def _to_jax(array: Array, like: Any) -> Any:
    """Return a JAX array on the devices of ``like``, even of a dtype that JAX disables."""
    jax = sys.modules["jax"]
    if is_cupy(array):
        return jax.dlpack.from_dlpack(array)
    target = like.sharding if like.committed else None
    if len(like.devices()) > 1 and array.shape != like.shape:  # the sharding does not fit
        target = min(like.devices(), key=lambda device: device.id)
    enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    with enable_x64(True) if array.dtype == like.dtype else contextlib.nullcontext():
        return jax.device_put(array, target)


KINDS = (
    ArrayKind("torch", "Tensor", _of_torch, _to_torch),
    ArrayKind("jax", "Array", _of_jax, _to_jax, is_filled=False),
)
OTHER = ArrayKind("", "", _by_protocol, lambda array, _: array)
