"""Matrix products of CuPy arrays while a CUDA graph is captured. CuPy's own products fail then.

This module calls cuBLAS with the operands, types and algorithm that CuPy uses. A captured product
therefore has the same bits as an eager product.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from contextlib import ExitStack
from typing import Any

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.errors import BackendUnavailableError
from flashlight_py.libraries import loaded_libraries
from flashlight_py.structure import thread_state
from flashlight_py.tape.operands import CannotCapture
from flashlight_py.tape.recording import line_of_user

# For each dtype: cudaDataType, cublasComputeType_t, and the C type of the factors 1 and 0.
_TYPES: dict[str, tuple[int, int, Any]] = {
    "e": (2, 68, ctypes.c_float),
    "f": (0, 77 if os.environ.get("CUPY_TF32", "0") > "0" else 68, ctypes.c_float),
    "d": (1, 70, ctypes.c_double),
}
_TENSOR_CORES = 99  # CUBLAS_GEMM_DEFAULT_TENSOR_OP, used by CuPy since Ampere
_DEFAULT = -1
_PLAIN, _TRANSPOSED = 0, 1
# Workspace in bytes that NVIDIA recommends for Hopper. Without one, cuBLAS allocates memory.
_WORKSPACE = 32 << 20


def capture_products(stack: ExitStack, recorder: Any) -> None:
    """Replace products of CuPy arrays by cuBLAS calls while ``recorder`` records this thread.

    When ``stack`` ends, it restores CuPy's functions. Products that cuBLAS does not support, such
    as products of integers, remain calls of CuPy.
    """
    import cupy

    workspace, stream = cupy.empty(_WORKSPACE, np.uint8), cupy.cuda.get_current_stream()
    recorder.keep(workspace)
    owners = (cupy.ndarray, "dot"), (cupy.ndarray, "__matmul__"), (cupy, "matmul"), (cupy, "dot")
    for owner, name in owners:
        usual = getattr(owner, name)
        is_own = name in vars(owner)

        def product(
            a: Any, b: Any, out: Any = None, usual: Any = usual, name: str = name, **options: Any
        ) -> Any:
            is_known = thread_state.recorder is recorder and not options and _is_for_blas(a, b)
            if is_known and (name != "dot" or b.ndim == 2):
                # All products use one workspace, so they must not overlap in time.
                if cupy.cuda.get_current_stream().ptr != stream.ptr:
                    raise CannotCapture(f"a product on another stream at {line_of_user()}")
                return _product(a, b, out, workspace)
            return usual(a, b, **options) if out is None else usual(a, b, out=out, **options)

        setattr(owner, name, product)
        stack.callback(setattr, owner, name, usual) if is_own else stack.callback(
            delattr, owner, name
        )


def _is_for_blas(a: Any, b: Any) -> bool:
    """Return whether CuPy uses cuBLAS for ``a @ b``, and ``_product`` supports the arrays."""
    dtypes = {x.dtype.char if is_cupy(x) else "" for x in (a, b)}
    if len(dtypes) > 1 or not dtypes <= _TYPES.keys():
        return False
    is_matrix = a.ndim > 1 and b.ndim > 1 and bool(a.size and b.size)
    return is_matrix and a.shape[-2] * b.shape[-1] > 1 and a.shape[-1] == b.shape[-2]


def _product(a: Any, b: Any, out: Any, workspace: Any) -> Array:
    import cupy

    (n, k), m = a.shape[-2:], b.shape[-1]
    outer = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    result = cupy.empty((*outer, n, m), a.dtype)
    a, a_form, a_lead, a_step = _operand(a, outer, is_first=True)
    b, b_form, b_lead, b_step = _operand(b, outer, is_first=False)
    code, compute, real = _TYPES[a.dtype.char]
    is_new = int(cupy.cuda.Device().compute_capability) >= 80
    algorithm = _TENSOR_CORES if is_new or a.dtype.char == "e" else _DEFAULT
    one, zero = ctypes.byref(real(1)), ctypes.byref(real(0))
    library, handle = _cublas(), ctypes.c_void_p(cupy.cuda.device.get_cublas_handle())
    stream, pointer = cupy.cuda.get_current_stream().ptr, ctypes.c_void_p
    _require(library.cublasSetStream_v2(handle, pointer(stream)))
    room = pointer(workspace.data.ptr), ctypes.c_size_t(workspace.nbytes)
    _require(library.cublasSetWorkspace_v2(handle, *room))
    # cuBLAS stores matrices by columns, so swapped operands give the result by rows.
    leading = handle, b_form, a_form, m, n, k, one
    operands = (b, b_lead, b_step), (a, a_lead, a_step), (result, m, n * m)
    first, second, third = [
        (pointer(array.data.ptr), code, lead, *([ctypes.c_longlong(step)] if outer else []))
        for array, lead, step in operands
    ]
    rest = (*([math.prod(outer)] if outer else []), compute, algorithm)
    multiply = library.cublasGemmStridedBatchedEx if outer else library.cublasGemmEx
    _require(multiply(*leading, *first, *second, zero, *third, *rest))
    if out is None:
        return result  # type: ignore[no-any-return]
    out[...] = result
    return out  # type: ignore[no-any-return]


def _operand(x: Any, outer: tuple[int, ...], is_first: bool) -> tuple[Any, int, int, int]:
    """Return ``x`` for cuBLAS, whether it is transposed, its leading dimension and batch stride.

    ``outer`` is the shape of the batch. A matrix may be contiguous by rows and by columns. Then the
    first operand is stored by rows and the second by columns, as in CuPy's call.
    """
    import cupy

    rows, columns = x.shape[-2:]
    if x.ndim == 2:
        ways = [(x.flags.c_contiguous, _PLAIN, columns), (x.flags.f_contiguous, _TRANSPOSED, rows)]
        for fits, form, lead in ways if is_first else reversed(ways):
            if fits:
                return x, form, lead, 0
        return cupy.ascontiguousarray(x), _PLAIN, columns, 0
    if x.ndim - 2 < len(outer) or x.shape[:-2] != outer:
        x = cupy.broadcast_to(x, (*outer, rows, columns))
    return cupy.ascontiguousarray(x), _PLAIN, columns, rows * columns


@functools.cache
def _cublas() -> Any:
    for library in loaded_libraries("libcublas"):
        if hasattr(library, "cublasGemmEx"):
            return library
    raise BackendUnavailableError("capture: matrix products need cuBLAS. Install it for CuPy")


def _require(status: int) -> None:
    if status:
        raise RuntimeError(f"a captured matrix product: expected status 0 of cuBLAS, got {status}")
