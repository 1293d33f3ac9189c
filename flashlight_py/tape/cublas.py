"""Matrix products of CuPy arrays that can be captured into a CUDA graph.

CuPy refuses to call cuBLAS while a stream is captured (cupy/cupy#6290), though cuBLAS allows it
(its documentation, "CUDA Graphs Support"). So cuBLAS is called by CFFI, with CuPy's own handle.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from cffi import FFI

from flashlight_py.device import Array
from flashlight_py.errors import BackendUnavailableError
from flashlight_py.libraries import mapped

# What is used of cublas_v2.h; a handle and a stream are pointers.
_DECLARATIONS = """
int cublasSetStream_v2(uintptr_t handle, uintptr_t stream);
int cublasSetWorkspace_v2(uintptr_t handle, uintptr_t workspace, size_t size);
int cublasGemmStridedBatchedEx(
    uintptr_t handle, int transa, int transb, int m, int n, int k, const void *alpha,
    uintptr_t a, int a_type, int lda, long long a_stride,
    uintptr_t b, int b_type, int ldb, long long b_stride, const void *beta,
    uintptr_t c, int c_type, int ldc, long long c_stride, int batch, int compute, int algorithm);
"""
# By a dtype's letter: cudaDataType, cublasComputeType_t, and the C type of the factors.
_TYPES = {"e": (2, 68, "float"), "f": (0, 68, "float"), "d": (1, 70, "double")}
_DEFAULT_ALGORITHM = -1

# What cuBLAS asks for on the newest GPUs (its documentation of cublasSetWorkspace), in bytes.
WORKSPACE_BYTES = 32 << 20


@functools.cache
def ffi() -> FFI:
    """Return the declarations."""
    made = FFI()
    made.cdef(_DECLARATIONS)
    return made


@functools.cache
def library() -> Any:
    """Return the cuBLAS that CuPy has loaded.

    Raises:
        BackendUnavailableError: it has loaded none.
    """
    import cupy

    cupy.cuda.device.get_cublas_handle()  # which loads it
    found = next((library._name for library in mapped("libcublas.so")), None)
    if found is None:
        raise BackendUnavailableError("CuPy has loaded no libcublas.so")
    return ffi().dlopen(found)


def takes(a: Array, b: Array) -> bool:
    """Return whether ``Products`` has the product of such arrays."""
    return a.dtype == b.dtype and a.dtype.char in _TYPES


class Products:
    """Products on the current device and stream, with ``workspace``, which no other may use."""

    def __init__(self, workspace: Array) -> None:
        import cupy

        self._workspace, self._cupy, self._lib = workspace, cupy, library()
        self._handle = int(cupy.cuda.device.get_cublas_handle())

    def __call__(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return ``a @ b`` of at least two dimensions, the leading ones broadcast, or in ``out``.

        Blocks until it is queued. Both must be what it ``takes``.

        Raises:
            RuntimeError: cuBLAS failed.
        """
        xp: Any = self._cupy
        outer = xp.broadcast_shapes(a.shape[:-2], b.shape[:-2]) if a.ndim + b.ndim > 4 else ()
        shape = (*outer, a.shape[-2], b.shape[-1])
        fits = out is not None and out.shape == shape and out.flags.c_contiguous
        to: Any = out if fits else xp.empty(shape, a.dtype)
        if not a.shape[-1]:
            to.fill(0)
        elif to.size:
            self._queue(_Operand(xp, a, outer), _Operand(xp, b, outer), to)
        if out is not None and not fits:
            out[...] = to
            return out
        return to  # type: ignore[no-any-return]

    def _queue(self, a: _Operand, b: _Operand, to: Array) -> None:
        """Compute the transposed product, as cuBLAS takes columns for rows."""
        lib, new = self._lib, ffi().new
        kind, compute, c_type = _TYPES[to.dtype.char]
        one, zero = new(f"{c_type} *", 1.0), new(f"{c_type} *", 0.0)
        n, m = to.shape[-2:]
        stream, workspace = self._cupy.cuda.get_current_stream().ptr, self._workspace
        self._check(lib.cublasSetStream_v2(self._handle, stream))
        there = workspace.data.ptr, workspace.nbytes  # type: ignore[attr-defined]
        self._check(lib.cublasSetWorkspace_v2(self._handle, *there))
        self._check(
            lib.cublasGemmStridedBatchedEx(
                *(self._handle, b.transposed, a.transposed, m, n, a.array.shape[-1], one),
                *(b.array.data.ptr, kind, b.leading, b.stride),
                *(a.array.data.ptr, kind, a.leading, a.stride, zero),
                *(to.data.ptr, kind, m, n * m),  # type: ignore[attr-defined]
                *(math.prod(to.shape[:-2]), compute, _DEFAULT_ALGORITHM),
            )
        )

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLAS failed with status {status} in a product to be captured")


class _Operand:
    """An operand of rows that are contiguous, or columns (``transposed``): copied if need be."""

    def __init__(self, xp: Any, array: Array, outer: tuple[int, ...]) -> None:
        rows, columns = array.shape[-2:]
        whole = array.shape[:-2] == outer and len(outer) < 2 and min(array.strides) >= 0
        if whole and _is_rows(array):
            self.transposed, self.leading = 0, _leading(array.strides[-2], columns, array)
        elif whole and _is_rows(array.swapaxes(-1, -2)):
            self.transposed, self.leading = 1, _leading(array.strides[-1], rows, array)
        else:
            array = xp.ascontiguousarray(xp.broadcast_to(array, (*outer, rows, columns)))
            self.transposed, self.leading = 0, columns
            self.stride = rows * columns
        self.array: Any = array
        if whole:
            self.stride = array.strides[0] // array.itemsize if outer else 0


def _is_rows(array: Array) -> bool:
    rows, columns = array.shape[-2:]
    row, column = array.strides[-2:]
    is_dense = column == array.itemsize or columns == 1
    return bool(is_dense and (rows == 1 or row >= columns * array.itemsize))


def _leading(stride: int, length: int, array: Array) -> int:
    """Return the distance of rows in elements; that of a single one is anything large enough."""
    return max(stride // array.itemsize, length)
