"""The verbs of backends with a native library, as calls of it."""

from __future__ import annotations

import abc
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.arrays import require_length
from flashlight_py.distributed.backend import Matched, Message
from flashlight_py.distributed.backends.interrupts import raise_interruption
from flashlight_py.distributed.backends.native_group import MESSAGE_BYTES, NativeGroup
from flashlight_py.distributed.backends.native_work import GATHERED, SCATTERED, NativeWork, Received
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.work import AllOf, Done, Then, Work

__all__ = ["MESSAGE_BYTES", "NativeBackend"]


class NativeBackend(NativeGroup):
    """A backend whose operations run in a library with the C ABI of ``csrc/common``."""

    def all_reduce(self, array: Array, op: ReduceOp, scale: float, blocking: bool = False) -> Work:
        """Reduce in rank order and in place; see ``Backend``."""
        verb = self.lib.FL_ALL_REDUCE
        return self._start("all_reduce", verb, array, op=op, scale=scale, blocking=blocking)

    def reduce_scatter(
        self,
        array: Array,
        op: ReduceOp,
        scale: float,
        blocking: bool = False,
        out: Array | None = None,
        rows: Sequence[int] | None = None,
    ) -> Work:
        """Reduce in rank order; see ``Backend``."""
        verb, mine = self.lib.FL_REDUCE_SCATTER, array.shape[0] // self.size
        given: dict[str, Any] = {}
        if rows is not None:
            verb, mine = self.lib.FL_REDUCE_SCATTER_UNEVEN, rows[self.rank]
            table = np.tile(np.array(rows, np.int64), (self.size, 1))
            given = {"root": _digest(table), **self._sections(array, table)}
        part = np.empty((mine, *array.shape[1:]), array.dtype) if out is None else out
        return self._start(
            "reduce_scatter",
            verb,
            array,
            op=op,
            scale=scale,
            output=part,
            result=part,
            blocking=blocking,
            **given,
        )

    def reduce(
        self, array: Array, op: ReduceOp, scale: float, root: int, blocking: bool = False
    ) -> Work:
        """Reduce in rank order into ``root``'s array; see ``Backend``."""
        verb = self.lib.FL_REDUCE
        return self._start("reduce", verb, array, op=op, scale=scale, root=root, blocking=blocking)

    def broadcast(self, array: Array, root: int, blocking: bool = False) -> Work:
        """Receive ``root``'s array in place; see ``Backend``."""
        return self._start("broadcast", self.lib.FL_BROADCAST, array, root=root, blocking=blocking)

    def all_gather(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Join all ranks' arrays; see ``Backend``."""
        return self._gather("all_gather", self.lib.FL_ALL_GATHER, array, 0, blocking, out)

    def gather(
        self, array: Array, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Join all ranks' arrays on ``root``; see ``Backend``."""
        return self._gather("gather", self.lib.FL_GATHER, array, root, blocking, out)

    def _gather(
        self, name: str, verb: int, array: Array, root: int, blocking: bool, out: Array | None
    ) -> Work:
        """Start a gather; the library fills ``out`` if what comes has its size."""
        room = None
        if out is not None:
            room = self.ffi.new("fl_room *", (self._pointer(out), out.nbytes))
        wanted = verb == self.lib.FL_ALL_GATHER or self.rank == root
        return self._start(
            name,
            verb,
            array,
            root=root,
            output=out,
            room=room,
            result=GATHERED if wanted else None,
            blocking=blocking,
        )

    def scatter(
        self, array: Array | None, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Receive this rank's part of ``root``'s array; see ``Backend``."""
        if array is not None and out is None:
            out = np.empty(array.shape[1:], array.dtype)
        return self._start(
            "scatter",
            self.lib.FL_SCATTER,
            array,
            like=out,
            root=root,
            output=out,
            result=SCATTERED if out is None else out,
            blocking=blocking,
        )

    def all_to_all(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Exchange equal parts; see ``Backend``."""
        got, verb = np.empty_like(array) if out is None else out, self.lib.FL_ALL_TO_ALL
        return self._start("all_to_all", verb, array, output=got, result=got, blocking=blocking)

    def all_to_all_uneven(
        self,
        array: Array,
        rows: Sequence[int],
        blocking: bool = False,
        out: Array | None = None,
        came: list[int] | None = None,
    ) -> Work:
        """Exchange parts of different sizes; see ``Backend``."""
        table = self._rows_of_all(rows)
        come = int(table[:, self.rank].sum())
        if came is not None:
            came += table[:, self.rank].tolist()
        if out is not None and out.shape[0] == come:
            return self._exchange_sections(array, table, out, blocking)
        got = np.empty((come, *array.shape[1:]), array.dtype)
        work = self._exchange_sections(array, table, got, blocking)
        if out is None:
            return work
        return Then(work, lambda _: require_length("all_to_all", out, come, self.rank, self.size))

    def _exchange_sections(self, array: Array, table: Array, got: Array, blocking: bool) -> Work:
        verb, sections = self.lib.FL_ALL_TO_ALL_UNEVEN, self._sections(array, table)
        return self._start(
            "all_to_all", verb, array, output=got, result=got, blocking=blocking, **sections
        )

    def _sections(self, array: Array, table: Array) -> dict[str, Any]:
        """Return ``data`` and ``keep`` of a call: ``table`` has the rows of each rank for each."""
        row = array.itemsize * math.prod(array.shape[1:])
        bytes_of_all = np.ascontiguousarray(table * row)
        table_pointer = self.ffi.cast("int64_t *", bytes_of_all.ctypes.data)
        sections = self.ffi.new("fl_sections *", (self._pointer(array), table_pointer))
        return {"data": sections, "keep": (bytes_of_all, sections)}

    def _rows_of_all(self, rows: Sequence[int]) -> Array:
        """Return how many rows each rank (first index) has for each; blocking."""
        verb, mine = self.lib.FL_ALL_GATHER, np.array(rows, np.int64)
        with self.part_of("all_to_all(rows=...)"):
            work = self._start("all_to_all", verb, mine, result=GATHERED, blocking=True)
        table: Array = work.wait().reshape(self.size, self.size)
        return table

    def send(self, array: Array, dst: int, tag: int, blocking: bool = False) -> Work:
        """Send; ends when ``dst`` has received; see ``Backend``."""
        return self._start("send", self.lib.FL_SEND, array, root=tag, peer=dst, blocking=blocking)

    def recv(self, array: Array, src: int, tag: int, blocking: bool = False) -> Work:
        """Receive in place; see ``Backend``."""
        return self._start("recv", self.lib.FL_RECV, array, root=tag, peer=src, blocking=blocking)

    def recv_matched(
        self,
        array: Array,
        src: int | None,
        tag: int,
        partial: bool,
        blocking: bool = False,
        patience: float = -1.0,
    ) -> Work:
        """Receive what is found; see ``Backend``."""
        given = {"source": -1, "partial": partial, "rows": 0, "patience": patience}
        match, peer = self.ffi.new("fl_match *", given), -1 if src is None else src
        verb = self.lib.FL_RECV
        work = self._start("recv", verb, array, root=tag, peer=peer, room=match, blocking=blocking)
        return Then(work, lambda _: None if match.source < 0 else Matched(match.source, match.rows))

    def exchange(self, messages: Sequence[Message], blocking: bool = False) -> Work:
        """Send and receive several messages; blocking: on the caller's thread alone."""
        group, thread = self._open("exchange"), self._callers.check("exchange")
        together = self.ffi.new("fl_message[]", len(messages))
        results = self.ffi.new("fl_op *[]", len(messages))
        try:
            self._callers.threads.add(thread)
            for room, message in zip(together, messages, strict=True):
                verb = self.lib.FL_SEND if message.sends else self.lib.FL_RECV
                self._describe("exchange", verb, message.array, ReduceOp.SUM, 1.0, message.tag)
                room.signature = self._next.signature[0]
                room.data, room.peer = self._pointer(message.array), message.peer
                room.site = self._here()[0]
            self._exchange(group, together, results, blocking)
        finally:
            self._callers.threads.discard(thread)
        works = [self._ended(*pair) for pair in zip(messages, results, strict=True)]
        raise_interruption(self.lib, self.ffi.NULL)
        return AllOf(works)

    @abc.abstractmethod
    def _exchange(self, group: Any, messages: Any, results: Any, blocking: bool) -> None:
        """Exchange ``messages``; ``results`` get what ``_run`` returns of each."""

    def _ended(self, message: Message, handle: Any) -> Work:
        """Return a message that has been exchanged, or still waits for an earlier one."""
        array, name = message.array, "send" if message.sends else "recv"
        if handle == self.ffi.NULL:
            return Done(array)
        received = Received(name, array, array, None, message.tag)
        work = NativeWork(self, name, handle, array, received, self._next.seconds)
        self._running[work] = None
        return work

    def barrier(self, timeout: float | None = None) -> Work:
        """Wait for all; ``timeout`` in seconds; see ``Backend``."""
        return self._start("barrier", self.lib.FL_BARRIER, None, timeout=timeout, blocking=True)


def _digest(table: Array) -> int:
    """Return a positive number of 31 bits that ranks with the same ``table`` have in common."""
    return 1 + zlib.crc32(table.tobytes()) % (2**31 - 1)
