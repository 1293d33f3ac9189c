"""NumPy arrays between processes that one ``mpirun`` has started, through their MPI library."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed import last_words
from flashlight_py.distributed.arrays import require_length
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.mpi import exits
from flashlight_py.distributed.backends.mpi.calls import Call, digest, kind_of, shape_text
from flashlight_py.distributed.backends.mpi.group import ANY_RANK, Group
from flashlight_py.distributed.backends.mpi.memory import as_bytes, on_device
from flashlight_py.distributed.backends.mpi.movement import Movement
from flashlight_py.distributed.backends.mpi.progress import Progress, Steps
from flashlight_py.distributed.backends.mpi.reduction import Reduction
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.work import Then, Work

__all__ = ["MpiBackend"]

# Room for a dtype and a shape, pickled.
_KIND_BYTES = 2048


class MpiBackend(Backend):
    """The ranks of ``comms``, three communicators that hold the same ones.

    ``seconds`` bounds each operation; with ``checked`` ranks compare what they call; ``gpu_aware``
    says that the library takes pointers to a GPU's memory. ``path`` names the library, ``people``
    the ranks' processes.
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
        people: Sequence[str] = (),
    ) -> None:
        self._mpi, self._progress = mpi, progress
        self._group = Group(mpi, progress, comms, seconds, checked, people, lambda: self.count[0])
        self.people = people
        self.rank, self.size = self._group.rank, self._group.size
        self.path, self.gpu_aware = path, gpu_aware
        self._movement = Movement(mpi, comms[0], progress)
        self._reduction = Reduction(mpi, comms[0], progress, self._movement)
        self._guarded = True
        self._part_of = ""
        exits.install(mpi, progress.linger)
        last_words.listen(self)

    def all_reduce(self, array: Array, op: ReduceOp, scale: float, blocking: bool = False) -> Work:
        """Reduce in place; the order of ranks is the library's; see ``Backend``."""
        call = Call.of("all_reduce", array, op=op, scale=scale)

        def body(_: list[int]) -> Steps:
            return self._reduction.all_reduce(array, op, scale)

        return self._start(call, array, body, blocking)

    def reduce(
        self, array: Array, op: ReduceOp, scale: float, root: int, blocking: bool = False
    ) -> Work:
        """Reduce in place on ``root``; the others' arrays stay as they are."""
        call = Call.of("reduce", array, op=op, scale=scale, root=root)

        def body(_: list[int]) -> Steps:
            return self._reduction.reduce(array, op, scale, root)

        return self._start(call, array, body, blocking)

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
        call = Call.of("reduce_scatter", array, op=op, scale=scale)
        if rows is not None:
            text = f"{call.text[:-1]}, rows={list(rows)})"
            call = replace(call, text=text, key=text)

        def body(_: list[int]) -> Steps:
            return self._reduction.reduce_scatter(array, op, scale, out, rows)

        return self._start(call, array, body, blocking)

    def broadcast(self, array: Array, root: int, blocking: bool = False) -> Work:
        """Receive ``root``'s array in place; see ``Backend``."""

        def body(_: list[int]) -> Steps:
            yield from self._movement.broadcast(as_bytes(array), root)
            return array

        return self._start(Call.of("broadcast", array, root=root), array, body, blocking)

    def all_gather(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Join all ranks' arrays; see ``Backend``."""

        def body(rows: list[int]) -> Steps:
            whole, counts = _rows_like(array, rows, out)
            yield from self._movement.all_gather(as_bytes(array), as_bytes(whole), counts)
            return whole

        call = Call.of("all_gather", array, ragged=True, told=array.shape[0])
        work = self._start(call, array, body, blocking, needs_table=True)
        return self._into(out, work, "all_gather")

    def gather(
        self, array: Array, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Join all ranks' arrays on ``root``; the result elsewhere is None."""

        def body(rows: list[int]) -> Steps:
            if self.rank == root:
                whole, counts = _rows_like(array, rows, out)
                yield from self._movement.gather(as_bytes(array), as_bytes(whole), counts, root)
                return whole
            counts = [count * _row_bytes(array) for count in rows]
            yield from self._movement.gather(as_bytes(array), None, counts, root)
            return None

        call = Call.of("gather", array, root=root, ragged=True, told=array.shape[0])
        work = self._start(call, array, body, blocking, needs_table=True)
        return self._into(out if self.rank == root else None, work, "gather")

    def scatter(
        self, array: Array | None, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Give rank r row r of ``root``'s ``array``, into ``out`` or a new array.

        On ``root`` alone there is an ``array``, of shape ``(size, *shape of a part)``; where
        ``out`` is None the result is a new array of the shape and dtype that ``root`` gave.
        """
        like = out if array is None else array[0]
        kind = "" if like is None else f"{kind_of(like)} {shape_text(like.shape)}"

        def body(told: list[int]) -> Steps:
            mine = out
            if not all(told):  # somebody does not know what is coming
                empty = yield from self._tell_kind(like, root)
                mine = empty() if out is None else out
            elif mine is None:
                mine = array_module(like).empty_like(like)
            whole = None if array is None else as_bytes(array)
            yield from self._movement.scatter(whole, as_bytes(mine), root)
            return mine

        words = f"{kind}, root={root}" if kind else f"root={root}"
        told = digest(kind) if kind else 0
        call = Call(f"scatter({words})", f"scatter(root={root})", told, told_alike=True)
        return self._start(call, like, body, blocking, needs_table=True)

    def _tell_kind(self, like: Array | None, root: int) -> Steps:
        """Return what makes an array like ``root``'s: of its dtype and shape, where it has it."""
        known = None if like is None else (is_cupy(like), like.dtype, like.shape)
        room = np.frombuffer(bytearray(pickle.dumps(known).ljust(_KIND_BYTES, b"\0")), np.uint8)
        yield from self._movement.broadcast(room, root)
        on_gpu, dtype, shape = pickle.loads(room.tobytes())
        library = sys.modules["cupy"] if on_gpu else np
        return functools.partial(library.empty, shape, dtype)

    def all_to_all(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Give an equal part of the first dimension to each rank; see ``Backend``."""

        def body(_: list[int]) -> Steps:
            taken = array_module(array).empty_like(array) if out is None else out
            yield from self._movement.all_to_all(as_bytes(array), as_bytes(taken))
            return taken

        return self._start(Call.of("all_to_all", array), array, body, blocking)

    def all_to_all_uneven(
        self,
        array: Array,
        rows: Sequence[int],
        blocking: bool = False,
        out: Array | None = None,
        came: list[int] | None = None,
    ) -> Work:
        """Give ``rows[r]`` rows of ``array`` to rank r; see ``Backend``."""
        gives = [int(count) for count in rows]

        def body(totals: list[int]) -> Steps:
            takes = yield from self._swap_counts(gives)
            if came is not None:
                came.extend(takes)
            taken, bytes_taken = _rows_like(array, takes, out)
            bytes_given = [count * _row_bytes(array) for count in gives]
            most = sum(totals) * _row_bytes(array)
            given = as_bytes(array)
            yield from self._movement.all_to_all_uneven(
                given, bytes_given, as_bytes(taken), bytes_taken, most
            )
            return taken

        call = Call.of("all_to_all", array, ragged=True, told=array.shape[0])
        call = replace(call, text=f"{call.text[:-1]}, rows=...)", key=f"uneven {call.key}")
        work = self._start(call, array, body, blocking, needs_table=True)
        return self._into(out, work, "all_to_all")

    def _into(self, out: Array | None, work: Work, verb: str) -> Work:
        """Return ``work``, which fails at its end if ``out`` has another length than what came."""
        if out is None:
            return work
        room = out

        def check(came: Array) -> Array:
            require_length(verb, room, came.shape[0], self.rank, self.size)
            return came

        return Then(work, check)

    def _swap_counts(self, gives: list[int]) -> Steps:
        given, taken = np.array(gives, np.int64), np.empty(self.size, np.int64)
        yield from self._movement.all_to_all(as_bytes(given), as_bytes(taken))
        return taken.tolist()

    def send(self, array: Array, dst: int, tag: int, blocking: bool = False) -> Work:
        """Send; ends when ``dst`` has received; see ``Backend``."""

        def begin() -> Steps:
            return on_device(array, self._group.messages.send(array, dst, tag))

        return self._group.message("send", begin, dst, blocking)

    def recv(self, array: Array, src: int, tag: int, blocking: bool = False) -> Work:
        """Receive in place; see ``Backend``."""

        return Then(self._recv(array, src, tag, False, blocking), lambda _: array)

    def _recv(self, array: Array, src: int | None, tag: int, partial: bool, blocking: bool) -> Work:
        def begin() -> Steps:
            return on_device(array, self._group.messages.recv(array, src, tag, partial))

        return self._group.message("recv", begin, ANY_RANK if src is None else src, blocking)

    def recv_matched(
        self,
        array: Array,
        src: int | None,
        tag: int,
        partial: bool,
        blocking: bool = False,
        patience: float = -1.0,
    ) -> Work:
        """Receive what is found; see ``Backend``. There is no limit to its patience."""
        if is_cupy(array):
            return super().recv_matched(array, src, tag, partial, blocking, patience)
        return self._recv(array, src, tag, partial, blocking)

    def refuse(self, call: str) -> None:
        """Have the others raise; see ``Backend``."""
        self._group.refuse(Call(text=call, key=call), _nothing)

    def refuse_message(self, call: str, peer: int, tag: int, sends: bool) -> None:
        """Have the peer raise; see ``Backend``."""
        refuse = functools.partial(self._group.messages.refuse, call, peer, tag, sends)
        self._group.message("refuse", refuse, peer, blocking=False).was_heard = True

    def barrier(self, timeout: float | None = None) -> Work:
        """Wait for all; ``timeout`` in seconds; see ``Backend``. The header is the barrier."""

        call = Call.of("barrier")
        return self._group.collective(call, _nothing, True, timeout, needs_table=True)

    @contextlib.contextmanager
    def part_of(self, call: str) -> Iterator[None]:
        """Mark what is started within as steps of ``call``; see ``Backend``."""
        before, self._part_of = self._part_of, call
        try:
            yield
        finally:
            self._part_of = before

    def synchronize(self) -> None:
        """Block until all that was started has ended; see ``Backend``."""
        self._group.synchronize()

    def give_up(self, traceback: str) -> None:
        """Report to the others what this rank's program has raised; see ``Backend``."""
        self._group.give_up(traceback)

    def is_busy(self) -> bool:
        """Return whether something runs; see ``Backend``."""
        return self._group.is_busy()

    def close(self) -> None:
        """Leave the group; the others are told. What runs fails."""
        self._group.close()
        if self._guarded:
            self._guarded = False
            exits.uninstall()

    def _start(
        self,
        call: Call,
        array: Array | None,
        body: Callable[[list[int]], Steps],
        blocking: bool,
        needs_table: bool = False,
    ) -> Work:
        """Start ``call``, about arrays like ``array``."""

        def steps(told: list[int]) -> Steps:
            return on_device(array, body(told))

        if self._part_of:
            call = call.as_part_of(self._part_of)
        return self._group.collective(call, steps, blocking, needs_table=needs_table)


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
