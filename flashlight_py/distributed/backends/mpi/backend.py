"""NumPy arrays between processes that one ``mpirun`` has started, through their MPI library."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.arrays import require_length
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.mpi import exits
from flashlight_py.distributed.backends.mpi.group import Group
from flashlight_py.distributed.backends.mpi.memory import as_bytes, on_device, settle
from flashlight_py.distributed.backends.mpi.movement import Movement
from flashlight_py.distributed.backends.mpi.progress import Progress, Steps
from flashlight_py.distributed.backends.mpi.reduction import Reduction
from flashlight_py.distributed.call import ANY_RANK, Call
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.control import abort
from flashlight_py.distributed.verbs import GATHER, SEND, VERBS, Verb
from flashlight_py.distributed.work import Done, Then, Work
from flashlight_py.errors import DistributedError

__all__ = ["MpiBackend"]

# Room for a dtype and a shape, pickled.
_KIND_BYTES = 2048
# Of all ranks together, of which a verb that the library lacks makes its result at a time.
_PIECE_BYTES = 4 << 20


class MpiBackend(Backend):
    """The ranks of ``comms``, three communicators that hold the same ones.

    ``seconds`` bounds each operation; with ``checked`` ranks compare what they call; ``gpu_aware``
    says that the library takes pointers to a GPU's memory. ``path`` names the library,
    ``processes`` the ranks' processes.
    """

    kind = DistributedBackend.MPI

    def __init__(
        self,
        mpi: Any,
        progress: Progress,
        comms: tuple[Any, Any, Any],
        path: str,
        seconds: float,
        checked: bool,
        gpu_aware: bool,
        processes: Sequence[str] = (),
    ) -> None:
        self._mpi, self._progress = mpi, progress
        self._group = Group(
            mpi, progress, comms, seconds, checked, processes, lambda: self.count[0]
        )
        self.processes = processes
        self.rank, self.size = self._group.rank, self._group.size
        self.path, self.gpu_aware = path, gpu_aware
        self._movement = Movement(mpi, comms[0], progress)
        self._reduction = Reduction(mpi, comms[0], progress, self._movement)
        self._bodies: dict[Verb, Callable[[Call, list[int]], Steps]] = {
            verb: getattr(self, f"_{verb.name}", self._by_meaning)
            for verb in VERBS
            if not verb.is_message
        }
        self._guarded = True
        exits.install(mpi, progress.linger)
        abort.watch(self)

    def start(self, call: Call) -> Work:
        """Start ``call``; see ``Backend``. The order of a reduction's terms is the library's."""
        if call.verb.is_message:
            return self._message(call)
        if call.refusal:
            self._group.refuse(call, _nothing)
            return Done()
        body, like = self._bodies[call.verb], call.like
        work = self._group.collective(call, lambda facts: on_device(like, body(call, facts)))
        return self._checked(call, work)

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

    def _barrier(self, call: Call, _: list[int]) -> Steps:
        yield from ()  # the header was all

    def _all_reduce(self, call: Call, _: list[int]) -> Steps:
        return self._reduction.all_reduce(call.array, call.op, call.scale)

    def _reduce(self, call: Call, _: list[int]) -> Steps:
        return self._reduction.reduce(call.array, call.op, call.scale, call.root)

    def _reduce_scatter(self, call: Call, _: list[int]) -> Steps:
        return self._reduction.reduce_scatter(call.array, call.op, call.scale, call.out, call.rows)

    def _by_meaning(self, call: Call, _: list[int]) -> Steps:
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

    def _broadcast(self, call: Call, _: list[int]) -> Steps:
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

    def _scatter(self, call: Call, facts: list[int]) -> Steps:
        mine, like = call.out, call.like
        if not all(facts):  # somebody does not know what will arrive
            empty = yield from self._send_kind(like, call.root)
            mine = empty() if mine is None else mine
        elif mine is None:
            mine = array_module(like).empty_like(like)
        whole = None if call.array is None else as_bytes(call.array)
        yield from self._movement.scatter(whole, as_bytes(mine), call.root)
        return mine

    def _send_kind(self, like: Array | None, root: int) -> Steps:
        """Return what makes an array like ``root``'s: of its dtype and shape, where it has it."""
        known = None if like is None else (is_cupy(like), like.dtype, like.shape)
        room = np.frombuffer(bytearray(pickle.dumps(known).ljust(_KIND_BYTES, b"\0")), np.uint8)
        yield from self._movement.broadcast(room, root)
        on_gpu, dtype, shape = pickle.loads(room.tobytes())
        library = sys.modules["cupy"] if on_gpu else np
        return functools.partial(library.empty, shape, dtype)

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

    def _message(self, call: Call) -> Work:
        """Start a message; there is no limit to the patience of a receive."""
        array, peer, messages = call.array, call.peer, self._group.messages
        sends = call.verb is SEND
        if call.refusal:
            refuse = functools.partial(messages.refuse, call.refusal, peer, call.tag, sends)
            self._group.message("refuse", refuse, peer, blocking=False).was_heard = True
            return Done()

        def begin() -> Steps:
            if sends:
                return on_device(array, messages.send(array, peer, call.tag))
            source = None if peer == ANY_RANK else peer
            return on_device(array, messages.recv(array, source, call.tag, call.partial))

        work = self._group.message(call.verb.name, begin, peer, call.blocking)
        return work if sends or call.is_open else Then(work, lambda _: array)

    def synchronize(self) -> None:
        """Block until all that was started has ended; see ``Backend``."""
        self._group.synchronize()

    def abort(self, cause: str | DistributedError) -> None:
        """Report to the others what has ended this rank's part; see ``Backend``."""
        text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        self._group.abort(text)

    def is_busy(self) -> bool:
        """Return whether something runs; see ``Backend``."""
        return self._group.is_busy()

    def close(self) -> None:
        """Leave the group; the others are told. What runs fails."""
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


def _nothing(_: list[int]) -> Steps:
    """Be done: the header was all."""
    yield from ()
