"""What backends with a native library share: describing a call, starting it, waiting for it."""

from __future__ import annotations

import abc
import contextlib
import math
import zlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed import last_words
from flashlight_py.distributed.arrays import dtype_code, require_length
from flashlight_py.distributed.backend import COMPOSED, Backend, Matched, Message
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.describing import Describer
from flashlight_py.distributed.backends.interrupts import SITE_BYTES, raise_interruption
from flashlight_py.distributed.backends.native_errors import words_of, words_of_traceback
from flashlight_py.distributed.backends.native_work import GATHERED, SCATTERED, NativeWork, Received
from flashlight_py.distributed.call_site import Place, caller, site_of, text_at_site
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.work import AllOf, Done, Then, Work
from flashlight_py.errors import DistributedError, GroupClosedError

__all__ = ["MESSAGE_BYTES", "NativeBackend"]

MESSAGE_BYTES = 1024
_ARRAY = object()


class NativeBackend(Backend):
    """A backend whose operations run in a library with the C ABI of ``csrc/common``."""

    kind = DistributedBackend.GLOO

    def __init__(self, native: ModuleType, store: Store, timeout: float) -> None:
        self.ffi, self.lib = native.ffi, native.lib
        self.rank, self.size, self.timeout = store.rank, store.size, timeout
        self.people = store.people
        # What users know the ranks as.
        self.numbers = list(store.numbers) or list(range(self.size))
        self.name = f"rank {self.numbers[self.rank]} of {store.total or self.size}"
        last_words.listen(self)
        # The library's handle, which is freed when the last call that has it is done; None once the
        # group is closed.
        self._group: Any = None
        self._sites: dict[Place, Any] = {}
        self._next = Describer(self.ffi, timeout)  # the call that this thread is about to make
        self._pointer = self._next.pointer
        self._callers = Callers(self.name)
        self._running: dict[NativeWork, None] = {}  # in order; threads change it at the same time

    @abc.abstractmethod
    def _run(
        self,
        group: Any,
        data: Any,
        output: Any,
        peer: int,
        seconds: float,
        blocking: bool,
        site: Any = None,
    ) -> Any:
        """Start what ``self._next`` describes; a handle, or NULL where it has ended well.

        ``site`` is where it was called; None: where user code is.
        """

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

    def refuse(self, call: str) -> None:
        """Have the others raise; see ``Backend``."""
        self._refuse(call, self.lib.FL_BARRIER)

    def refuse_message(self, call: str, peer: int, tag: int, sends: bool) -> None:
        """Have the peer raise; see ``Backend``."""
        self._refuse(call, self.lib.FL_SEND if sends else self.lib.FL_RECV, peer, tag)

    def _refuse(self, call: str, verb: int, peer: int = -1, tag: int = 0) -> None:
        group, thread = self._group, self._callers.check("refuse")
        if group is None:
            return  # it has ended, which the others know
        site = self.ffi.new("fl_site *", {"text": text_at_site(call, SITE_BYTES)})
        null, seconds = self.ffi.NULL, self._next.seconds
        try:
            self._callers.threads.add(thread)
            self._describe("refuse", verb, None, ReduceOp.SUM, 1.0, tag)
            self._next.signature.ndim = self.lib.FL_REFUSED
            handle = self._run(group, null, null, peer, seconds, blocking=False, site=site)
        finally:
            self._callers.threads.discard(thread)
        self.lib.fl_op_free(handle)  # it goes on; who refused knows how it ends

    @abc.abstractmethod
    def call_ahead(self, rank: int) -> str:
        """Return a collective that ``rank`` has begun and this rank has not, in words, or ""."""

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Bound what is started within by ``seconds``; see ``Backend``."""
        before, self._next.seconds = self._next.seconds, seconds
        try:
            yield
        finally:
            self._next.seconds = before

    @contextlib.contextmanager
    def part_of(self, call: str) -> Iterator[None]:
        """Mark what is started within as steps of ``call``; see ``Backend``."""
        signature = self._next.signature
        before, signature.part_of = signature.part_of, 1 + COMPOSED.index(call)
        try:
            yield
        finally:
            signature.part_of = before

    def _start(
        self,
        name: str,
        verb: int,
        array: Array | None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        root: int = 0,
        peer: int = -1,
        like: Array | None = None,
        data: Any = None,
        keep: Any = None,
        output: Array | None = None,
        room: Any = None,
        result: Any = _ARRAY,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Work:
        """Start ``verb`` on ``array``, described by ``like`` (else itself).

        ``data`` and ``room`` are what the library gets in place of the addresses of array and
        output, ``keep`` what must live as long as the operation, ``result`` what the Work gives
        (else the array).
        """
        group, thread = self._open(name), self._callers.check(name)
        seconds = self._next.seconds if timeout is None else timeout
        result = array if result is _ARRAY else result
        source = self._pointer(array) if data is None else data
        target = self._pointer(output) if room is None else room
        try:
            self._callers.threads.add(thread)
            self._describe(name, verb, array if like is None else like, op, scale, root)
            handle = self._run(group, source, target, peer, seconds, blocking)
        finally:
            self._callers.threads.discard(thread)
        if handle == self.ffi.NULL:
            return Done(output if result is GATHERED else result)
        received = Received(name, result, array, output, root)
        work = NativeWork(self, name, handle, (array, output, room, keep), received, seconds)
        # The library writes into the array whether or not anybody keeps the Work, also after Ctrl-C
        # has ended a blocking wait for it.
        for other in list(self._running):
            if other.is_completed():
                self.forget(other)
        self._running[work] = None
        return work

    def is_calling(self) -> bool:
        """Tell whether this thread is in the middle of a call; see ``Backend``."""
        return self._callers.has_this()

    def _open(self, name: str) -> Any:
        """Return the library's handle for a call of ``name``."""
        group = self._group
        if group is None:
            raise GroupClosedError(f"[{name}] {self.name}: the group is closed")
        return group

    def _describe(
        self, name: str, verb: int, array: Array | None, op: ReduceOp, scale: float, root: int
    ) -> None:
        if array is not None:
            code = dtype_code(name, array.dtype)
            self._next.describe(array, verb, code, op, scale, root)
            return
        signature = self._next.signature
        signature.verb, signature.op, signature.scale, signature.root = verb, op, scale, root
        signature.dtype = signature.itemsize = signature.count = 0
        signature.ndim = self.lib.FL_ANY if verb == self.lib.FL_SCATTER else 0

    def _here(self) -> Any:
        """Return where user code has called, as the library takes it."""
        place = caller(3)
        site = self._sites.get(place)
        if site is None:
            text = site_of(place).encode()[-SITE_BYTES:]
            site = self._sites[place] = self.ffi.new("fl_site *", {"text": text})
        return site

    def message(self, room: Any) -> str:
        """Return what the library wrote into ``room``."""
        text: str = self.ffi.string(room).decode(errors="replace")
        return text

    def forget(self, work: NativeWork) -> None:
        """Let go of an operation that has ended, and of whose end the caller hears now."""
        self._running.pop(work, None)

    def synchronize(self) -> None:
        """Block until all that was started has ended; raises what the first failure raises."""
        for work in list(self._running):
            work.wait()

    def give_up(self, traceback: str) -> None:
        """Tell the others what this rank's program has raised; see ``Backend``."""
        self._end(words_of_traceback(self, traceback))

    def pass_on(self, error: DistributedError) -> None:
        """End the group, and have the others raise ``error``; see ``Backend``."""
        self._end(words_of(error))

    def _end(self, words: str) -> None:
        group = self._group
        if group is not None:
            self._give_up(group, words.encode(errors="replace"))

    @abc.abstractmethod
    def _give_up(self, group: Any, why: bytes) -> None:
        """Let the library tell the others."""

    def is_busy(self) -> bool:
        """Tell whether something runs; see ``Backend``."""
        return any(not work.is_completed() for work in list(self._running))

    def abandon(self) -> None:
        """Close the descriptors, in a forked child; see ``Backend``."""
        group, self._group = self._group, None
        if group is not None:
            self._abandon(group)

    @abc.abstractmethod
    def _abandon(self, group: Any) -> None:
        """Close the descriptors of the library's ``group``."""

    def close(self) -> None:
        """End what runs; the native threads have ended on return.

        What this very thread is in the middle of, as in a signal handler, ends when that goes on.
        """
        group, self._group = self._group, None
        if group is not None:
            self._close(group)
        self._running.clear()

    @abc.abstractmethod
    def _close(self, group: Any) -> None:
        """Close the library's ``group``."""


def _digest(table: Array) -> int:
    """Return a positive number of 31 bits that ranks with the same ``table`` have in common."""
    return 1 + zlib.crc32(table.tobytes()) % (2**31 - 1)
