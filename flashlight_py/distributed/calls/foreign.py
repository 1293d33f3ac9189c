"""Arrays of other libraries, seen as NumPy or CuPy arrays that share their memory.

PyTorch's tensors by their own methods, CPU memory by Python's buffer protocol, the rest by DLPack.
No library is imported here but the one whose array was given.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from flashlight_py.device import Array

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged of dlpack.h


def shared_view(verb: str, value: Any, writes: bool = True) -> Array | None:
    """Return an array of ``value``'s memory, or None where it is nothing that has any to share.

    A CuPy array where the memory is a GPU's, else a NumPy array, writeable if the verb ``writes``.
    A NumPy scalar has none, and is copied for verbs that read.

    Raises:
        TypeError: ``value`` is a NumPy scalar and the verb ``writes``, or its memory cannot be
            shared.
        ValueError: it is read-only and the verb ``writes``, or a tensor that requires grad.
    """
    if isinstance(value, np.generic):
        if not writes:
            return np.asarray(value)
        raise TypeError(
            f"{verb} works in place and a NumPy scalar ({type(value).__name__}) cannot change; "
            "pass np.array(x)"
        )
    if is_of(value, "torch", "Tensor"):
        _refuse_grad(verb, value, writes)
    try:
        view = _view(value)
    except (BufferError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{verb} cannot use this {_name(value)} without a copy: {error}; pass a copy that "
            "NumPy can hold, x = np.array(...)"
        ) from error
    if writes and isinstance(view, np.ndarray) and not view.flags.writeable:
        raise ValueError(
            f"{verb} works in place and this {_name(value)} is read-only (shape {view.shape}, "
            f"dtype {view.dtype}); pass a copy: x = np.array(...)"
        )
    return view


def _view(value: Any) -> Array | None:
    if is_of(value, "torch", "Tensor") and not value.is_cuda:
        return _of_torch(value)
    if is_of(value, "multiprocessing.sharedctypes", "SynchronizedBase"):
        value = value.get_obj()  # the ctypes array that multiprocessing.Array has a lock around
    buffer = _buffer(value)
    if buffer is not None:
        return np.asarray(buffer)
    if not hasattr(value, "__dlpack__"):
        return None
    return _of_dlpack(value)


def _of_torch(tensor: Any) -> Array:
    """Return a NumPy array of a tensor that is not on a GPU.

    ``numpy()`` serves every version of NumPy, while from_dlpack returns read-only arrays before
    2.1. Neither knows bfloat16, so that travels as int16 of the same memory.
    """
    torch = sys.modules["torch"]
    if tensor.dtype is not torch.bfloat16:
        plain: Array = tensor.numpy()
        return plain
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "NumPy has bfloat16 by ml_dtypes only, which is not installed; "
            "pip install 'flashlight-py[bfloat16]'"
        ) from error
    bits: Array = tensor.view(torch.int16).numpy()
    return bits.view(ml_dtypes.bfloat16)


def _refuse_grad(verb: str, tensor: Any, writes: bool) -> None:
    """Refuse a tensor whose history PyTorch records: it would see nothing of this."""
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        why = "works in place" if writes else "knows no gradients"
        raise ValueError(
            f"{verb} {why} and this tensor requires grad (shape {tuple(tensor.shape)}, "
            f"{tensor.dtype}); pass x.detach(), which shares its memory"
        )


def _of_dlpack(value: Any) -> Array:
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] in _DLPACK_CUDA:
        import cupy

        on_gpu: Array = cupy.from_dlpack(value)
        return on_gpu
    return np.from_dlpack(value)


def _buffer(value: Any) -> memoryview | None:
    try:
        return memoryview(value)
    except TypeError:  # the only way to ask before Python 3.12
        return None


def is_of(value: object, module: str, name: str) -> bool:
    """Return whether ``value`` is of class ``module.name``, without importing the module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
