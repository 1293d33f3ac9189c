"""A stand-in for cuBLAS on the CPU, which has a product for graphs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.cupy_stand_in import Stream

LETTERS = {2: "e", 0: "f", 1: "d"}  # of cudaDataType


class StandInCublas:
    """Two settings and a product of columns, where the addresses say that they are."""

    def __init__(self, ffi: Any) -> None:
        self.ffi, self.stream, self.workspace, self.products = ffi, 0, 0, 0

    def cublasSetStream_v2(self, handle: int, stream: int) -> int:
        self.stream, self.workspace = stream, 0  # cuBLAS goes back to a workspace of its own
        return 0

    def cublasSetWorkspace_v2(self, handle: int, workspace: int, size: int) -> int:
        assert size
        self.workspace = workspace
        return 0

    def cublasGemmStridedBatchedEx(self, *arguments: Any) -> int:
        assert self.workspace, "it would take memory of its own while a graph is captured"
        assert self.stream == Stream.current.ptr
        (_, trans_a, trans_b, m, n, k, alpha, *rest) = arguments
        (a, a_type, lda, step_a, b, b_type, ldb, step_b, beta, *rest) = rest
        (c, c_type, ldc, step_c, batch, compute, algorithm) = rest
        assert (alpha[0], beta[0], algorithm) == (1.0, 0.0, -1)
        assert compute == (70 if c_type == 1 else 68)
        assert a_type == b_type == c_type
        assert lda >= (k if trans_a else m)
        assert ldb >= (n if trans_b else k)
        assert ldc >= m
        assert min(step_a, step_b, step_c) >= 0
        dtype = np.dtype(LETTERS[c_type])
        one = columns(a, dtype, (k, m) if trans_a else (m, k), lda, step_a, batch)
        other = columns(b, dtype, (n, k) if trans_b else (k, n), ldb, step_b, batch)
        to = columns(c, dtype, (m, n), ldc, step_c, batch)

        def multiply() -> None:
            left = one.swapaxes(1, 2) if trans_a else one
            right = other.swapaxes(1, 2) if trans_b else other
            for number in range(batch):
                # As rows, so that the bits are those of NumPy's product of the same operands.
                to[number].T[...] = right[number].T.dot(left[number].T)

        self.products += 1
        nodes = Stream.current.nodes
        if nodes is None:
            multiply()
        else:
            nodes.append(multiply)
        return 0


def columns(
    address: int, dtype: np.dtype[Any], shape: tuple[int, int], leading: int, step: int, batch: int
) -> np.ndarray:
    """Return matrices of columns at ``address``."""
    rows, count = shape
    length = (batch - 1) * step + (count - 1) * leading + rows
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
    flat = np.frombuffer(memory, dtype)
    size = dtype.itemsize
    strides = step * size, size, leading * size
    return np.lib.stride_tricks.as_strided(flat, (batch, rows, count), strides)
