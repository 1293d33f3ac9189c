"""Arrays between processes that one ``mpirun`` has started, through their MPI library.

CuPy arrays go by pointers to the GPU's memory, or through memory of the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.mpi.bodies import Bodies
from flashlight_py.distributed.backends.mpi.group import Group, Progress
from flashlight_py.distributed.backends.mpi.movement import on_device, settle
from flashlight_py.distributed.calls.arrays import require_length
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.verbs import BARRIER, GATHER, SCATTER, SEND
from flashlight_py.distributed.work import Done, Then, Work
from flashlight_py.errors import DistributedError


class MpiBackend(Group):
    """The ranks of ``comm``, and of ``control``, the CPU backend over which calls are compared.

    ``seconds`` bounds each operation; with ``checked`` ranks compare all that they call;
    ``gpu_aware`` says that the library takes pointers to a GPU's memory; ``path`` names it.
    """

    kind = DistributedBackend.MPI

    def __init__(
        self,
        mpi: Any,
        progress: Progress,
        comm: Any,
        control: Backend,
        path: str,
        seconds: float,
        checked: bool,
        gpu_aware: bool,
    ) -> None:
        super().__init__(mpi, progress, comm, control, seconds, checked)
        self.processes, self.path, self.gpu_aware = control.processes, path, gpu_aware
        self._callers = Callers(self.place, [control])
        self._bodies = Bodies(mpi, comm, progress, gpu_aware)

    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """The ranks of each host, as the backend knows that compares calls; see ``Backend``."""
        return self.control.hosts

    def start(self, call: Call) -> Work:
        """Start ``call``; see ``Backend``. The order of a reduction's terms is the library's."""
        thread = self._callers.check(call.name)
        self.control.count = self.count
        try:
            self._callers.threads.add(thread)
            if call.refusal:
                self._refuse(call)
                return Done()
            if call.verb.is_message:
                call.received = []  # what the two ends call it
            body, like = self._bodies.of(call.verb), call.like
            work = self._begin(call, lambda found: on_device(like, body(call, found)))
            return self._fitting(call, Done(work.wait()) if call.blocking else work)
        finally:
            self._callers.threads.discard(thread)

    def _fitting(self, call: Call, work: Work) -> Work:
        """Return ``work``, which fails at its end if ``out`` has another length than what came."""
        elsewhere = call.verb is GATHER and self.rank != call.root
        if call.out is None or not call.is_ragged or elsewhere:
            return work
        room = call.out

        def check(arrived: Array) -> Array:
            require_length(call.name, room, arrived.shape[0], self.rank, self.size)
            return arrived

        return Then(work, check)

    def abort(self, cause: str | DistributedError) -> None:
        """Notify the others of what has ended this rank's part; see ``Backend``."""
        self.control.abort(cause)

    def leave(self) -> None:
        """Let the others know that this rank begins no more messages; see ``Backend``."""
        self.control.leave()

    def cupy_side(self) -> Backend:
        """Return the backend of the same ranks for CuPy arrays."""
        return MpiGpuBackend(self)

    def lost(self, doing: str) -> DistributedError | None:
        """Return why nothing can be done in the group any more; see ``Backend``."""
        return self.control.lost(doing)

    def is_busy(self) -> bool:
        """Return whether something runs; see ``Backend``."""
        return bool(self.pending()) or self.control.is_busy()

    def is_calling(self) -> bool:
        """Return whether this thread is in the middle of a call; see ``Backend``."""
        return self._callers.has_this()


class MpiGpuBackend(Backend):
    """The CuPy side of ``host``, the MPI backend of the same ranks.

    Where the library takes pointers to a GPU's memory, arrays go to it as they are; reductions are
    combined by CuPy on the GPU. Else arrays are copied to pinned memory of the host, and back.
    The host waits for the current stream before it hands memory to MPI.
    """

    kind = DistributedBackend.MPI

    def __init__(self, host: MpiBackend) -> None:
        self.rank, self.size = host.rank, host.size
        how = "memory of the GPU" if host.gpu_aware else "staged through pinned memory"
        self.path = f"{host.path}, {how}"
        self._host, self._aware = host, host.gpu_aware
        self._unfinished: list[Then] = []

    def start(self, call: Call) -> Work:
        """Start ``call``; see ``Backend``."""
        if call.refusal or call.verb is BARRIER:
            return self._host.start(call)
        if self._aware:
            for array in (call.array, call.out):
                if array is not None:
                    settle(array)
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
        # What is still to be copied back is so also if nobody waits for it.
        self._unfinished = [other for other in self._unfinished if not other.is_finished()]
        self._unfinished.append(work)
        return work

    def _bring_back(self, call: Call, given: Array | None, result: Any) -> Any:
        """Copy ``result`` to the GPU: into what the caller gave, or a new array.

        That of a receive which is open is in ``given``, of which all goes back.
        """
        if call.is_open:
            if result is not None:
                call.array.set(given)
                settle(call.array)
            return result
        if result is None or not call.verb.fills(self.rank, call.root):
            return call.array if call.verb.in_place else None
        target: Any = call.array if call.verb.in_place else call.out
        if target is None:
            import cupy

            target = cupy.asarray(result)
            settle(target)
            return target
        if target.shape != result.shape:
            require_length(call.name, target, result.shape[0], self.rank, self.size)
        target.set(result)
        settle(target)  # the copy's memory is free from here on
        return target

    def synchronize(self) -> None:
        """Block until all that was started has ended, and is back on the GPU."""
        unfinished, self._unfinished = self._unfinished, []
        for work in unfinished:
            work.wait()
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
