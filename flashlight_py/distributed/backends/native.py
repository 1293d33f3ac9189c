"""Calls as a native library takes them: the signature, what is read, and where the result goes."""

from __future__ import annotations

import abc
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backends.describing import describe
from flashlight_py.distributed.backends.interrupts import raise_interruption
from flashlight_py.distributed.backends.native_group import NativeGroup
from flashlight_py.distributed.backends.native_work import (
    COMPARED,
    GATHERED,
    SCATTERED,
    NativeWork,
    Received,
)
from flashlight_py.distributed.calls.arrays import require_length
from flashlight_py.distributed.calls.call import Call, Matched
from flashlight_py.distributed.verbs import ALL_GATHER, GATHER, SCATTER
from flashlight_py.distributed.work import AllOf, Done, Then, Work


class NativeBackend(NativeGroup):
    """A backend whose operations run in a library with the C ABI of ``csrc/common``."""

    def start(self, call: Call) -> Work:
        """Start ``call``; see ``Backend``."""
        if call.refusal:
            return self._refuse(call)
        if call.is_open:
            return self._receive_open(call)
        if call.compared:
            return self._compare(call)
        form = self._reduce_sections if call.verb.reduces else self._swap_sections
        if call.rows is None:
            forms = {ALL_GATHER: self._gather, GATHER: self._gather, SCATTER: self._scatter}
            form = forms.get(call.verb, self._plain)
        return form(call)

    def _compare(self, call: Call) -> Work:
        """Start comparing what ranks call; see ``Call.compared``."""
        rows = call.rows if call.verb.reduces else None
        root = None if rows is None else _digest(self._table(rows))
        work = self._launch(call, like=call.like, root=root, result=COMPARED)
        return Then(work, lambda number: _keep(call, number)) if call.verb.is_message else work

    def _table(self, rows: Sequence[int]) -> Array:
        """Return ``rows`` as what each rank (first index) has for each."""
        return np.tile(np.array(rows, np.int64), (self.size, 1))

    def _plain(self, call: Call) -> Work:
        """Start a verb that works in place, or whose result has a size that is known here."""
        if call.verb.writes != "result":
            return self._launch(call)
        out = self._result(call, call.verb.shape(call.array.shape, self.size, None))
        return self._launch(call, output=out, result=out)

    def _result(self, call: Call, shape: Any) -> Array:
        """Return where the result of ``call`` goes: a new array of ``shape`` unless it says so."""
        return np.empty(shape, call.array.dtype) if call.out is None else call.out

    def _gather(self, call: Call) -> Work:
        """Start a gather; the library fills ``out`` if what arrives has its size."""
        room, out = self.ffi.NULL, call.out
        if out is not None and out.nbytes:  # else whoever waits counts the rows
            room = self.ffi.new("fl_room *", (self._pointer(out), out.nbytes))
        wanted = call.verb.fills(self.rank, call.root)
        return self._launch(call, output=out, room=room, result=GATHERED if wanted else None)

    def _scatter(self, call: Call) -> Work:
        """Start a scatter: without ``out`` elsewhere than on the root, the library has the part."""
        out = call.out
        if call.array is not None:
            out = self._result(call, call.array.shape[1:])
        return self._launch(call, like=out, output=out, result=SCATTERED if out is None else out)

    def _reduce_sections(self, call: Call) -> Work:
        """Start a reduce_scatter of unequal parts; ranks compare a digest of them."""
        assert call.rows is not None
        table = self._table(call.rows)
        part = self._result(call, (call.rows[self.rank], *call.array.shape[1:]))
        sections = self._sections(call.array, table)
        return self._launch(call, root=_digest(table), output=part, result=part, **sections)

    def _swap_sections(self, call: Call) -> Work:
        """Start an all_to_all of unequal parts, of which the ranks first notify each other."""
        assert call.rows is not None
        table = self._rows_of_all(call)
        arrive = int(table[:, self.rank].sum())
        if call.received is not None:
            call.received += table[:, self.rank].tolist()
        out: Any = call.out
        fits = out is None or out.shape[0] == arrive
        if not fits:
            call = replace(call, out=None)
        got = self._result(call, (arrive, *call.array.shape[1:]))
        work = self._launch(call, output=got, result=got, **self._sections(call.array, table))
        if fits:
            return work
        return Then(work, lambda _: require_length(call.name, out, arrive, self.rank, self.size))

    def _rows_of_all(self, call: Call) -> Array:
        """Return how many rows each rank (first index) has for each; blocking."""
        mine = np.array(call.rows, np.int64)
        step = Call(ALL_GATHER, mine, seconds=call.seconds, part_of="all_to_all(rows=...)")
        table: Array = self.start(step).wait().reshape(self.size, self.size)
        return table

    def _sections(self, array: Array, table: Array) -> dict[str, Any]:
        """Return ``data`` and ``keep`` of a call: ``table`` has the rows of each rank for each."""
        row = array.itemsize * math.prod(array.shape[1:])
        bytes_of_all = np.ascontiguousarray(table * row)
        table_pointer = self.ffi.cast("int64_t *", bytes_of_all.ctypes.data)
        sections = self.ffi.new("fl_sections *", (self._pointer(array), table_pointer))
        return {"data": sections, "keep": (bytes_of_all, sections)}

    def _receive_open(self, call: Call) -> Work:
        """Receive what is found."""
        times = {"patience": call.patience, "waited": call.waited}
        match = self.ffi.new("fl_match *", {"source": -1, "partial": call.partial, **times})
        work = self._launch(call, room=match, result=COMPARED if call.compared else None)

        def found(number: int | None) -> Matched | None:
            _keep(call, number)
            return None if match.source < 0 else Matched(match.source, match.rows)

        return Then(work, found)

    def start_many(self, calls: Sequence[Call]) -> Work:
        """Start several messages at once, blocking ones on the caller's thread alone."""
        if not all(call.verb.is_message for call in calls):
            return super().start_many(calls)
        group, thread = self._open(calls[0].name), self._callers.check(calls[0].name)
        together = self.ffi.new("fl_message[]", len(calls))
        results = self.ffi.new("fl_op *[]", len(calls))
        try:
            self._callers.threads.add(thread)
            for room, call in zip(together, calls, strict=True):
                how = call, call.array, call.verb.code, call.tag
                name = describe(self._next, self.lib, *how)
                room.signature = self._next.signature[0]
                room.data = self._pointer(None if call.compared else call.array)
                room.peer = call.peer
                room.site = (self._site(name) or self._here())[0]
            seconds, blocking = self._seconds(calls[0]), calls[0].blocking
            self._exchange(group, together, results, seconds, blocking)
        finally:
            self._callers.threads.discard(thread)
        works = [self._ended(*pair) for pair in zip(calls, results, strict=True)]
        raise_interruption(self.lib, self.ffi.NULL)
        return AllOf(works)

    @abc.abstractmethod
    def _exchange(
        self, group: Any, messages: Any, results: Any, seconds: float, blocking: bool
    ) -> None:
        """Exchange ``messages``; ``results`` get what ``_run`` returns of each."""

    def _ended(self, call: Call, handle: Any) -> Work:
        """Return a message that has been exchanged, or still waits for an earlier one."""
        if handle == self.ffi.NULL:
            return Done(call.array)
        received = Received(call.name, call.array, call.array, None, call.tag)
        work = NativeWork(self, call.name, handle, call.array, received, self._seconds(call))
        self._running[work] = None
        return work


def _keep(call: Call, number: int | None) -> None:
    """Keep the number of a message that was compared, for the one who asks for it."""
    if call.received is not None and number is not None:
        call.received.append(number)


def _digest(table: Array) -> int:
    """Return a positive number of 31 bits that ranks with the same ``table`` have in common."""
    return 1 + zlib.crc32(table.tobytes()) % (2**31 - 1)
