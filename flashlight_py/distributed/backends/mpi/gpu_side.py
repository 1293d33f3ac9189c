"""CuPy arrays through MPI: by pointers to the GPU's memory, or through memory of the host."""

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
    """The CuPy side of ``host``, the MPI backend of the same ranks.

    If the library takes pointers to a GPU's memory (``gpu_aware``), CuPy combines reductions on the
    GPU. Otherwise arrays are copied to pinned memory of the host and back. The host waits for the
    current stream first.
    """

    kind = DistributedBackend.MPI

    def __init__(self, host: Backend, gpu_aware: bool) -> None:
        self.rank, self.size = host.rank, host.size
        how = "memory of the GPU" if gpu_aware else "staged through pinned memory"
        self.path = f"{host.path}, {how}"
        self._host, self._aware = host, gpu_aware
        self._unfinished: list[Then] = []

    def start(self, call: Call) -> Work:
        if self._aware or call.refusal or call.verb is BARRIER:
            settle(call.array)
            settle(call.out)
            return self._host.start(call)
        given = None
        if call.array is not None:
            given = _pinned(call.array)
            call.array.get(out=given)
        # Of what a scatter brings, the host's side must know the shape.
        room = _pinned(call.out) if call.verb is SCATTER and call.out is not None else None
        work = self._host.start(replace(call, array=given, out=room))
        if call.verb is SEND:
            return work
        work = Then(work, functools.partial(self._bring_back, call, given))
        # Arrays that are still to be copied back are so also if nobody waits for them.
        self._unfinished = [other for other in self._unfinished if not other.is_settled]
        self._unfinished.append(work)
        return work

    def _bring_back(self, call: Call, given: Array | None, result: Any) -> Any:
        """Copy ``result`` (of an open receive: all of ``given``) to the caller's or a new array."""
        if call.is_open:
            if result is not None:
                call.array.set(given)
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
        settle(target)  # the copy's memory is free from here on
        return target

    def synchronize(self) -> None:
        """Block until all that was started is back on the GPU; raises a failure once."""
        wait_for(self._unfinished)
        self._host.synchronize()

    def close(self) -> None:
        """Do nothing: the host's side is closed by whoever made it."""
        self._unfinished.clear()


def _pinned(array: Array) -> Array:
    """Return new memory of the host, not initialised, that the GPU can copy to by itself."""
    if not array.size:
        return np.empty(array.shape, array.dtype)
    memory = array_module(array).cuda.alloc_pinned_memory(array.nbytes)
    return np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
