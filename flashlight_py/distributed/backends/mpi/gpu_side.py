"""Communication of CuPy arrays by MPI, directly or through host memory."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.mpi.verb_steps import settle
from flashlight_py.distributed.calls.arrays import check_out_rows
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.verbs import BARRIER, SCATTER, SEND
from flashlight_py.distributed.work import Then, Work, wait_for


class MpiGpuBackend(Backend):
    """Backend for CuPy arrays; ``host`` is the MPI backend of the same ranks.

    If ``gpu_aware``, MPI accesses GPU memory, and CuPy reduces arrays on the GPU. Otherwise arrays
    are copied to pinned host memory and back. A call first waits until all work on the current
    stream has ended.
    """

    kind = DistributedBackend.MPI

    def __init__(self, host: Backend, gpu_aware: bool) -> None:
        self.rank, self.size = host.rank, host.size
        transfer = "memory of the GPU" if gpu_aware else "staged through pinned memory"
        self.path = f"{host.path}, {transfer}"
        self._host, self._aware = host, gpu_aware
        self._unfinished: list[Then] = []

    def start(self, call: Call) -> Work:
        if self._aware or call.refusal or call.verb is BARRIER:
            settle(call.array)
            settle(call.out)
            return self._host.start(call)
        host_array = None
        if call.array is not None:
            host_array = _pinned(call.array)
            call.array.get(out=host_array)
        # The host backend must know the shape of a scatter's result.
        host_out = _pinned(call.out) if call.verb is SCATTER and call.out is not None else None
        work = self._host.start(replace(call, array=host_array, out=host_out))
        if call.verb is SEND:
            return work
        work = Then(work, functools.partial(self._copy_back, call, host_array))
        # Keep unfinished works: ``synchronize`` copies their results if the caller never waits.
        self._unfinished = [other for other in self._unfinished if not other.is_settled]
        self._unfinished.append(work)
        return work

    def _copy_back(self, call: Call, host_array: Array | None, result: Any) -> Any:
        """Copy the result to the caller's array, or to a new array if the caller passed none."""
        if call.is_open:
            call.array.set(host_array)
            settle(call.array)
            return result
        if result is None or not call.verb.fills(self.rank, call.root):
            return call.array if call.verb.in_place else None
        target: Any = call.array if call.verb.in_place else call.out
        if target is None:
            target = sys.modules["cupy"].asarray(result)
        else:
            if target.shape != result.shape:
                check_out_rows(call.name, target, result.shape[0], self.rank, self.size)
            target.set(result)
        settle(target)  # afterwards the host copy may be reused
        return target

    def synchronize(self) -> None:
        """Block until all results are back on the GPU; raises each failure once."""
        wait_for(self._unfinished)
        self._host.synchronize()

    def close(self) -> None:
        """Do nothing: the creator of the host backend closes it."""
        self._unfinished.clear()


def _pinned(array: Array) -> Array:
    """Return pinned host memory like ``array``, uninitialised. The GPU can copy to it directly."""
    if not array.size:
        return np.empty(array.shape, array.dtype)
    memory = array_module(array).cuda.alloc_pinned_memory(array.nbytes)
    return np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
