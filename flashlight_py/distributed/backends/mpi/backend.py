"""NumPy arrays between processes that one ``mpirun`` has started, through their MPI library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.mpi import exits
from flashlight_py.distributed.backends.mpi.group import Group, Progress, Steps
from flashlight_py.distributed.backends.mpi.memory import on_device, settle
from flashlight_py.distributed.backends.mpi.movement import Movement
from flashlight_py.distributed.backends.mpi.reduction import Reduction
from flashlight_py.distributed.calls.arrays import WITH_TEXT, as_bytes, of_bytes, require_length
from flashlight_py.distributed.calls.call import Call, Matched
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.verbs import GATHER, VERBS, Verb
from flashlight_py.distributed.work import Done, Then, Work
from flashlight_py.errors import DistributedError

# Of all ranks together, of which a verb that the library lacks makes its result at a time.
_PIECE_BYTES = 4 << 20


class MpiBackend(Backend):
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
        self.rank, self.size, self.processes = control.rank, control.size, control.processes
        self.control, self.path, self.gpu_aware = control, path, gpu_aware
        self._progress = progress
        self._group = Group(mpi, progress, comm, control, seconds, checked)
        self._callers = Callers(self._group.place, [control])
        self._movement = Movement(mpi, comm, progress)
        self._reduction = Reduction(mpi, comm, progress, self._movement)
        self._bodies: dict[Verb, Callable[[Call, Any], Steps]] = {
            verb: getattr(self, f"_{verb.name}", self._by_meaning) for verb in VERBS
        }
        self._guarded = True
        exits.install(mpi, progress.linger)

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
                self._group.refuse(call)
                return Done()
            if call.verb.is_message:
                call.received = []  # what the two ends call it
            body, like = self._bodies[call.verb], call.like
            work = self._group.start(call, lambda found: on_device(like, body(call, found)))
            return self._checked(call, Done(work.wait()) if call.blocking else work)
        finally:
            self._callers.threads.discard(thread)

    def _checked(self, call: Call, work: Work) -> Work:
        """Return ``work``, which fails at its end if ``out`` has another length than what came."""
        elsewhere = call.verb is GATHER and self.rank != call.root
        if call.out is None or not call.is_ragged or elsewhere:
            return work
        room = call.out

        def check(arrived: Array) -> Array:
            require_length(call.name, room, arrived.shape[0], self.rank, self.size)
            return arrived

        return Then(work, check)

    def _barrier(self, call: Call, _: None) -> Steps:
        yield from ()  # to have compared it is to have arrived

    def _all_reduce(self, call: Call, _: None) -> Steps:
        return self._reduction.all_reduce(call.array, call.op, call.scale)

    def _reduce(self, call: Call, _: None) -> Steps:
        return self._reduction.reduce(call.array, call.op, call.scale, call.root)

    def _reduce_scatter(self, call: Call, _: None) -> Steps:
        return self._reduction.reduce_scatter(call.array, call.op, call.scale, call.out, call.rows)

    def _by_meaning(self, call: Call, _: None) -> Steps:
        """Combine in place what the library does not: every rank receives all arrays, in pieces."""
        flat, xp, combine = call.array.reshape(-1), array_module(call.array), call.verb.meaning
        assert combine is not None
        step = max(1, _PIECE_BYTES // (flat.itemsize * self.size))
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            pieces, counts = xp.empty((self.size, part.size), flat.dtype), [part.nbytes] * self.size
            yield from self._movement.all_gather(as_bytes(part), as_bytes(pieces), counts)
            if call.verb.fills(self.rank, call.root):
                part[...] = combine(list(pieces), self.rank, call)
                settle(part)
        return call.array

    def _broadcast(self, call: Call, _: None) -> Steps:
        yield from self._movement.broadcast(as_bytes(call.array), call.root)
        return call.array

    def _all_gather(self, call: Call, rows: list[int]) -> Steps:
        array = call.array
        whole, counts = _rows_like(array, rows, call.out)
        yield from self._movement.all_gather(as_bytes(array), as_bytes(whole), counts)
        return whole

    def _gather(self, call: Call, rows: list[int]) -> Steps:
        array, root = call.array, call.root
        if self.rank == root:
            whole, counts = _rows_like(array, rows, call.out)
            yield from self._movement.gather(as_bytes(array), as_bytes(whole), counts, root)
            return whole
        counts = [count * _row_bytes(array) for count in rows]
        yield from self._movement.gather(as_bytes(array), None, counts, root)
        return None

    def _scatter(self, call: Call, kind: tuple[Any, tuple[int, ...]]) -> Steps:
        mine, like = call.out, call.like
        library: Any = np if like is None else array_module(like)
        if self.gpu_aware:  # who receives may not know which memory the root's is
            library = yield from self._library_of(library, call.root)
        if mine is None:
            dtype, shape = kind
            mine = library.empty(shape, dtype)
        whole = None if call.array is None else as_bytes(call.array)
        yield from self._movement.scatter(whole, as_bytes(mine), call.root)
        return of_bytes(mine.view(np.uint8)) if mine.dtype == WITH_TEXT else mine

    def _library_of(self, library: Any, root: int) -> Steps:
        """Return NumPy or CuPy: the ``library`` of ``root``."""
        is_cupy = np.array([library is not np], np.uint8)
        yield from self._movement.broadcast(is_cupy, root)
        return sys.modules["cupy"] if is_cupy[0] else np

    def _all_to_all(self, call: Call, totals: list[int]) -> Steps:
        array = call.array
        if call.rows is None:
            received = array_module(array).empty_like(array) if call.out is None else call.out
            yield from self._movement.all_to_all(as_bytes(array), as_bytes(received))
            return received
        sends = [int(count) for count in call.rows]
        receives = yield from self._swap_counts(sends)
        if call.received is not None:
            call.received.extend(receives)
        received, bytes_received = _rows_like(array, receives, call.out)
        bytes_sent = [count * _row_bytes(array) for count in sends]
        most = sum(totals) * _row_bytes(array)
        data, room = as_bytes(array), as_bytes(received)
        yield from self._movement.all_to_all_uneven(data, bytes_sent, room, bytes_received, most)
        return received

    def _swap_counts(self, sends: list[int]) -> Steps:
        sent, received = np.array(sends, np.int64), np.empty(self.size, np.int64)
        yield from self._movement.all_to_all(as_bytes(sent), as_bytes(received))
        return received.tolist()

    def _send(self, call: Call, _: None) -> Steps:
        number = _number_of(call)
        yield from self._movement.send(as_bytes(call.array), call.peer, number)
        return call.array

    def _recv(self, call: Call, found: Matched | None) -> Steps:
        if found is None and call.is_open:
            return None  # nothing has arrived in time
        array, source = call.array, call.peer if found is None else found.source
        part = array[: found.rows] if found is not None and array.ndim else array
        yield from self._movement.recv(as_bytes(part), source, _number_of(call))
        return array if found is None else found

    def synchronize(self) -> None:
        """Block until all that was started has ended; see ``Backend``."""
        self._group.synchronize()

    def abort(self, cause: str | DistributedError) -> None:
        """Notify the others of what has ended this rank's part; see ``Backend``."""
        self.control.abort(cause)

    def leave(self) -> None:
        """Let the others know that this rank begins no more messages; see ``Backend``."""
        self.control.leave()

    def lost(self, doing: str) -> DistributedError | None:
        """Return why nothing can be done in the group any more; see ``Backend``."""
        return self.control.lost(doing)

    def is_busy(self) -> bool:
        """Return whether something runs; see ``Backend``."""
        return bool(self._group.pending()) or self.control.is_busy()

    def is_calling(self) -> bool:
        """Return whether this thread is in the middle of a call; see ``Backend``."""
        return self._callers.has_this()

    def close(self) -> None:
        """Leave the group; the others are notified. What runs fails."""
        self._group.close()
        if self._guarded:
            self._guarded = False
            exits.uninstall()


def _row_bytes(array: Array) -> int:
    return int(np.prod(array.shape[1:], dtype=np.int64)) * array.itemsize


def _rows_like(array: Array, rows: list[int], out: Array | None) -> tuple[Array, list[int]]:
    """Return where the rows of all ranks go, and how many bytes each rank's are.

    That is ``out`` if it is as long, else a new array: the other ranks are on their way.
    """
    counts = [count * _row_bytes(array) for count in rows]
    if out is not None and out.shape[0] == sum(rows):
        return out, counts
    whole: Array = array_module(array).empty((sum(rows), *array.shape[1:]), array.dtype)
    return whole, counts


def _number_of(call: Call) -> int:
    assert call.received is not None
    return call.received[0]
