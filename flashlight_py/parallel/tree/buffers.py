"""What travels: a buffer of bytes on the CPU, and one on the GPU where a tree has arrays there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.parallel.native import native
from flashlight_py.parallel.tree import layout
from flashlight_py.parallel.tree.plan import Plan

__all__ = ["Buffers"]


class Buffers:
    """Room for the arrays of a plan and ``number_bytes`` of encoded numbers.

    ``used`` are the buffers that have any bytes, uint8, in an order that all ranks share.
    """

    def __init__(self, plan: Plan, number_bytes: int) -> None:
        self._plan = plan
        self._host: Array = np.empty(plan.array_bytes + number_bytes, np.uint8)
        self._gpu: Array | None = None
        if plan.gpu_arrays:
            xp = array_module(plan.gpu_arrays[0])
            self._gpu = xp.empty(layout.size_of(plan.gpu_arrays), xp.uint8)
        both = (self._host, self._gpu)
        self.used = [buffer for buffer in both if buffer is not None and buffer.size]

    def pack(self, numbers: bytes) -> None:
        """Copy the plan's arrays, and ``numbers``, into the buffers."""
        pack_on_host(self._plan.arrays, self._host)
        self._host[self._plan.array_bytes :] = np.frombuffer(numbers, np.uint8)
        if self._gpu is not None:
            layout.pack(self._plan.gpu_arrays, self._gpu)

    def unpack(self) -> bytes:
        """Copy the buffers into the plan's arrays; return the encoded numbers."""
        unpack_on_host(self._plan.arrays, self._host)
        if self._gpu is not None:
            layout.unpack(self._plan.gpu_arrays, self._gpu)
        return self._host[self._plan.array_bytes :].tobytes()


def pack_on_host(arrays: Sequence[Array], buffer: Array) -> None:
    """Copy NumPy arrays into ``buffer``, natively where that is there."""
    module = native()
    (layout if module is None else module).pack(arrays, buffer)


def unpack_on_host(arrays: Sequence[Array], buffer: Array) -> None:
    """Copy ``buffer`` into NumPy arrays, natively where that is there."""
    module = native()
    (layout if module is None else module).unpack(arrays, buffer)
