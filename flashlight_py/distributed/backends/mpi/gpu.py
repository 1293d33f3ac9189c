"""CuPy arrays through MPI: by pointers to the GPU's memory, or through memory of the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.arrays import require_length
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.mpi.backend import MpiBackend
from flashlight_py.distributed.backends.mpi.memory import settle
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.work import Then, Work

__all__ = ["MpiGpuBackend"]


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

    def all_reduce(self, array: Array, op: ReduceOp, scale: float, blocking: bool = False) -> Work:
        """Reduce in place; see ``Backend``."""
        return self._in_place(array, lambda a: self._host.all_reduce(a, op, scale, blocking))

    def reduce(
        self, array: Array, op: ReduceOp, scale: float, root: int, blocking: bool = False
    ) -> Work:
        """Reduce in place on ``root``."""
        return self._in_place(array, lambda a: self._host.reduce(a, op, scale, root, blocking))

    def broadcast(self, array: Array, root: int, blocking: bool = False) -> Work:
        """Receive ``root``'s array in place; see ``Backend``."""
        return self._in_place(array, lambda a: self._host.broadcast(a, root, blocking))

    def recv(self, array: Array, src: int, tag: int, blocking: bool = False) -> Work:
        """Receive in place; see ``Backend``."""
        return self._in_place(array, lambda a: self._host.recv(a, src, tag, blocking))

    def send(self, array: Array, dst: int, tag: int, blocking: bool = False) -> Work:
        """Send; see ``Backend``."""
        return self._host.send(self._given(array), dst, tag, blocking)

    def reduce_scatter(
        self,
        array: Array,
        op: ReduceOp,
        scale: float,
        blocking: bool = False,
        out: Array | None = None,
        rows: Sequence[int] | None = None,
    ) -> Work:
        """Reduce to this rank's part; see ``Backend``."""
        reduce_scatter = functools.partial(self._host.reduce_scatter, op=op, scale=scale, rows=rows)
        return self._new(reduce_scatter, array, blocking, out)

    def all_gather(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Join all ranks' arrays; see ``Backend``."""
        return self._new(self._host.all_gather, array, blocking, out)

    def gather(
        self, array: Array, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Join all ranks' arrays on ``root``; elsewhere the result is None."""
        return self._new(functools.partial(self._host.gather, root=root), array, blocking, out)

    def all_to_all(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Give an equal part of the first dimension to each rank; see ``Backend``."""
        return self._new(self._host.all_to_all, array, blocking, out)

    def all_to_all_uneven(
        self,
        array: Array,
        rows: Sequence[int],
        blocking: bool = False,
        out: Array | None = None,
        came: list[int] | None = None,
    ) -> Work:
        """Give ``rows[r]`` rows of ``array`` to rank r; see ``Backend``."""
        uneven = functools.partial(self._host.all_to_all_uneven, rows=rows, came=came)
        return self._new(uneven, array, blocking, out)

    def scatter(
        self, array: Array | None, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Give rank r row r of ``root``'s ``array``, into ``out`` or a new array."""
        given = None if array is None else self._given(array)
        if out is not None:
            return self._in_place(out, lambda o: self._host.scatter(given, root, blocking, o))
        work = self._host.scatter(given, root, blocking)
        return work if self._aware else self._keep(Then(work, _to_gpu))

    def refuse(self, call: str) -> None:
        """Have the others raise; see ``Backend``."""
        self._host.refuse(call)

    def refuse_message(self, call: str, peer: int, tag: int, sends: bool) -> None:
        """Have the peer raise; see ``Backend``."""
        self._host.refuse_message(call, peer, tag, sends)

    def barrier(self, timeout: float | None = None) -> Work:
        """Wait for all; ``timeout`` in seconds; see ``Backend``."""
        return self._host.barrier(timeout)

    def synchronize(self) -> None:
        """Block until all that was started has ended, and is back on the GPU."""
        unfinished, self._unfinished = self._unfinished, []
        for work in unfinished:
            work.wait()
        self._host.synchronize()

    def close(self) -> None:
        """Do nothing: the host's side is closed by whoever made it."""
        self._unfinished.clear()

    def _given(self, array: Array) -> Array:
        """Return what MPI reads: ``array`` when it is computed, or its copy on the host."""
        if self._aware:
            settle(array)
            return array
        copy = _pinned(array)
        array.get(out=copy)  # type: ignore[attr-defined]
        return copy

    def _in_place(self, array: Array, start: Callable[[Array], Work]) -> Work:
        given = self._given(array)
        work = start(given)
        if self._aware:
            return work
        return self._keep(Then(work, functools.partial(_bring_back, array, given)))

    def _new(
        self, verb: Callable[..., Work], array: Array, blocking: bool, out: Array | None
    ) -> Work:
        """Start a verb that leaves its argument as it is."""
        if self._aware:
            return verb(self._given(array), blocking=blocking, out=out)
        work = verb(self._given(array), blocking=blocking)
        if out is None:
            return self._keep(Then(work, _to_gpu))
        name = getattr(verb, "func", verb).__name__.removesuffix("_uneven")
        return self._keep(Then(work, functools.partial(self._copy_into, name, out)))

    def _copy_into(self, verb: str, out: Array, came: Array | None) -> Array | None:
        if came is None:
            return None  # a gather's result on another rank than its root
        require_length(verb, out, came.shape[0], self.rank, self.size)
        out.set(came)  # type: ignore[attr-defined]
        settle(out)
        return out

    def _keep(self, work: Then) -> Then:
        """Remember what is still to be copied back, also if nobody waits for it."""
        self._unfinished = [other for other in self._unfinished if not other.is_finished()]
        self._unfinished.append(work)
        return work


def _pinned(array: Array) -> Array:
    """Return new memory of the host, not initialised, that the GPU can copy to by itself."""
    if not array.size:
        return np.empty(array.shape, array.dtype)
    memory = array_module(array).cuda.alloc_pinned_memory(array.nbytes)
    return np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)


def _bring_back(array: Array, copy: Array, _: Any) -> Array:
    array.set(copy)  # type: ignore[attr-defined]
    settle(array)  # the copy's memory is free from here on
    return array


def _to_gpu(result: Array | None) -> Array | None:
    import cupy

    if result is None:
        return None
    on_gpu: Array = cupy.asarray(result)
    settle(on_gpu)
    return on_gpu
