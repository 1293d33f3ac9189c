"""Matrix products as NumPy has them made: by the same function of the same BLAS."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from flashlight_py import libraries
from flashlight_py.tape.recording import bounds

Array = np.ndarray[Any, Any]

# As cblas.h has them.
ROW_MAJOR, COLUMN_MAJOR, AS_IT_IS, TRANSPOSED = 101, 102, 111, 112
_FUNCTIONS = ("sgemm", "dgemm", "sgemv", "dgemv", "sdot", "ddot")
# How builds spell their names: NumPy's wheels first; 64_ is for 64-bit integers.
_SPELLINGS = ("scipy_cblas_{}64_", "cblas_{}64_", "scipy_cblas_{}", "cblas_{}")


@functools.cache
def connect(tape: Any) -> bool:
    """Let the native module call NumPy's BLAS, if it can be found; return whether it can."""
    for library in libraries.mapped("blas"):
        for spelling in _SPELLINGS:
            names = [spelling.format(name) for name in _FUNCTIONS]
            if all(hasattr(library, name) for name in names):
                addresses = [ctypes.cast(library[name], ctypes.c_void_p).value for name in names]
                tape.use_blas("64_" in spelling, *addresses)
                return True
    return False


def product(a: Array, b: Array, c: Array) -> tuple[Any, ...] | None:
    """Return the instruction for ``c = a.dot(b)``: its name, numbers and operands; None: none.

    It follows what NumPy's ``cblas_matrixproduct`` does with arrays of these shapes and strides.
    """
    if a.dtype != b.dtype or a.dtype != c.dtype or a.dtype.char not in "fd":
        return None
    if not (a.size and b.size) or _overlaps(a, c) or _overlaps(b, c):
        return None
    if a.ndim == b.ndim == 1:
        return _of_vectors(a, b, c) if a.size > 1 else _outer(a, b, c.reshape(1, 1))
    is_plain = a.ndim == b.ndim == 2 and c.flags.c_contiguous
    return _of_two_dimensions(a, b, c) if is_plain else None


def _of_two_dimensions(a: Array, b: Array, c: Array) -> tuple[Any, ...] | None:
    (m, k), n = a.shape, b.shape[1]
    if k == 1:
        return _outer(a[:, 0], b[0], c)
    if m == n == 1:
        return _of_vectors(a[0], b[:, 0], c)
    if n == 1:
        return _of_matrix(a, b[:, 0], c, AS_IT_IS)
    return _of_matrix(b, a[0], c, TRANSPOSED) if m == 1 else _of_matrices(a, b, c)


def _of_vectors(x: Array, y: Array, c: Array) -> tuple[Any, ...] | None:
    size = c.itemsize
    if min(x.strides[0], y.strides[0]) <= 0 or x.strides[0] % size or y.strides[0] % size:
        return None
    steps = x.strides[0] // size, y.strides[0] // size
    return ("dot", int(size == 8)), (x, y, c), (x.size, *steps)


def _of_matrix(matrix: Array, x: Array, c: Array, transposed: int) -> tuple[Any, ...] | None:
    size = c.itemsize
    if x.strides[0] <= 0 or x.strides[0] % size:
        return None
    rows, columns = matrix.shape
    if matrix.flags.c_contiguous:
        order, step = ROW_MAJOR, max(columns, 1)
    elif matrix.flags.f_contiguous:
        order, step = COLUMN_MAJOR, max(rows, 1)
    else:
        return None
    numbers = rows, columns, step, x.strides[0] // size
    return ("gemv", int(size == 8), order, transposed), (matrix, x, c), numbers


def _of_matrices(a: Array, b: Array, c: Array) -> tuple[Any, ...] | None:
    if _begin(a) == _begin(b) and a.shape == b.shape[::-1] and a.strides == b.strides[::-1]:
        return None  # of a matrix and itself transposed NumPy has half computed
    flags, steps = [], []
    for each in (a, b):
        if each.flags.c_contiguous:
            flags.append(AS_IT_IS)
            steps.append(max(each.shape[1], 1))
        elif each.flags.f_contiguous:
            flags.append(TRANSPOSED)
            steps.append(max(each.shape[0], 1))
        else:
            return None
    sizes = a.shape[0], b.shape[1], a.shape[1]
    return ("gemm", int(c.itemsize == 8), *flags), (a, b, c), (*sizes, *steps, c.shape[1])


def _outer(a: Array, b: Array, c: Array) -> tuple[Any, ...] | None:
    size = c.itemsize
    if a.strides[0] % size or (b.size > 1 and b.strides[0] != size):
        return None
    numbers = a.size, b.size, a.strides[0] // size, c.shape[1]
    scalar = 1 if a.size == 1 else 2 if b.size == 1 else 0
    return ("outer", int(size == 8), scalar), (a, b, c), numbers


def _begin(array: Array) -> int:
    return bounds(array)[0]


def _overlaps(source: Array, target: Array) -> bool:
    low, high = bounds(source)
    begin, end = bounds(target)
    return begin < high and low < end
