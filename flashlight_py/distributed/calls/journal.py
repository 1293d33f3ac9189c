"""The flight record of each group: its calls are counted, and the last ones kept in a ring.

csrc/fast/ring.h is the layout of what native code writes. A call that goes through Python takes a
place in the same ring, and its ``Record`` stands beside it.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import numpy as np

from flashlight_py._native import codes
from flashlight_py._native.codes import DTYPES
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.call_site import Instruction, line_of, place_of_caller
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.verbs import BARRIER, VERBS, Verb
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import GroupClosedError

SENDRECV = Verb("sendrecv", codes.SENDRECV, ("tag",), "result")
# These are in the order of ``COMPOSED`` (call.py).
BROADCAST_OBJECT = Verb("broadcast_object", codes.BROADCAST_OBJECT, ("root",), "result")
ALL_GATHER_OBJECT = Verb("all_gather_object", codes.ALL_GATHER_OBJECT, (), "result", ragged=True)
GATHER_OBJECT = Verb("gather_object", codes.GATHER_OBJECT, ("root",), "root's result", ragged=True)
SCATTER_OBJECT = Verb("scatter_object", codes.SCATTER_OBJECT, ("root",), "result")
OBJECTS = (BROADCAST_OBJECT, ALL_GATHER_OBJECT, GATHER_OBJECT, SCATTER_OBJECT)
NATIVE = {verb.code: verb for verb in (*VERBS, SENDRECV, *OBJECTS)}
"""The verbs of native code by their codes."""

# The ring of csrc/fast/ring.h.
_HEADER_BYTES = 64
_CALL = np.dtype(
    [("number", "u8"), ("started", "i8"), ("ended", "i8"), ("bytes", "i8"), ("shape", "i8", 3)]
    + [(name, "i1") for name in ("verb", "dtype", "op", "ndim")]
    + [(name, "i4") for name in ("flags", "peer", "tag")]
    + [("id", "u8")]
)
# Places in its header, in eights of bytes.
_NUMBER, _WRITTEN, _OFF, CALLERS = 0, 1, 2, slice(3, 8)

_NOTED = "flashlight_py_noted"  # an attribute of errors

_journals: list[weakref.ref[Journal]] = []  # a list can be read while another thread adds to it
# Those of the latest groups are kept: what was called in a closed one may explain a failure.
_latest: deque[Journal] = deque(maxlen=16)
_made: Counter[tuple[int, ...]] = Counter()
_forks = 0  # between the first process and this one
_listeners = 0  # profiles and recordings of steps, of any thread
_leaving = threading.RLock()

listener: Callable[[Record], None] | None = None
"""Called with each call as it begins, while a profile is taken."""
on_failure: Callable[[BaseException], None] | None = None
"""Called with the exception of each call that failed."""


# The number counts the calls of the group; 0: a message. The bytes are None if dtype and shape say
# them. Other fields that a call does not use are None, or missing at the end.
_FIELDS = ("group", "number", "verb", "dtype", "shape", "op", "root", "peer", "tag", "bytes")


class Record:
    """A call. Times are nanoseconds of ``time.monotonic_ns``; ``ended`` is 0 while it runs.

    ``what`` are its ``_FIELDS``. ``waits`` are the times (from, to) that the program spent in
    ``Work.wait`` for it, while profiled.
    """

    ended = 0
    error = ""
    id = 0  # of the group's calls in this process
    is_async = False
    size: int | None = None  # bytes that were not known when it began
    waits: tuple[tuple[int, int], ...] = ()
    work: weakref.ref[Work] | None = None
    flight: Any = None  # of a collective that the device does while the host goes on

    def __init__(self, what: tuple[Any, ...], started: int, place: Instruction | None) -> None:
        self.what, self.started, self.place = what, started, place

    def as_dict(self) -> dict[str, Any]:
        """Return what a reader wants to see, in plain types; times stay as they are."""
        self._settle()
        fields: dict[str, Any] = dict(zip(_FIELDS, self.what, strict=False))
        dtype, shape, op, size = map(fields.get, ("dtype", "shape", "op", "bytes"))
        if size is None and dtype is not None and shape is not None:
            size = int(dtype.itemsize * math.prod(shape))
        fields |= {
            "number": fields["number"] or None,
            "dtype": None if dtype is None else str(dtype),
            "shape": None if shape is None else list(shape),
            "op": None if op is None else op.name.lower(),
            "bytes": (size or 0) if self.size is None else self.size,
        }
        if self.place is not None:
            code, instruction, via = self.place
            fields["line"] = line_of(code, instruction)
            fields["via"] = via if via and via != fields["verb"] else None
        fields |= {
            "async": self.is_async or None,
            "started": self.started,
            "ended": self.ended or None,
            "waits": [list(wait) for wait in self.waits] or None,
            "error": self.error or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _settle(self) -> None:
        """Find out whether an operation that nobody has waited for has ended meanwhile."""
        if self.ended:
            return
        work = None if self.work is None else self.work()
        if self.flight is not None:
            ended = self.flight.ended
        else:
            ended = work.end_time() if work is not None and work.is_completed() else None
        if ended is not None:
            self.ended = int(ended * 1e9)


def name_of_group(ranks: Sequence[int]) -> str:
    """Return a name for a new group of ``ranks`` (of the world), equal on its members.

    They make the groups that they share in one order, so that they can count groups of equal ranks.
    """
    key = tuple(ranks)
    _made[key] += 1
    again = "" if _made[key] == 1 else f" #{_made[key]}"
    return f"ranks {', '.join(map(str, key))}{again}"


class Ring:
    """The memory that native code writes calls to, in one order with those of Python.

    ``notes`` has, for each call in ``memory``, a line of user code or the record of a call of
    Python. ``header[CALLERS]`` are the threads that are in a native call, or 0. The thread that
    ends an asynchronous operation writes the time of its end.
    """

    def __init__(self) -> None:
        self.memory = np.zeros(_HEADER_BYTES + codes.RECORDED_CALLS * _CALL.itemsize, np.uint8)
        self.notes: list[Any] = [None] * codes.RECORDED_CALLS
        self.header = memoryview(self.memory.data)[:_HEADER_BYTES].cast("Q")


class Journal(Ring):
    """Counts and records the calls of the group ``name``, of these ``ranks`` of the world.

    ``path`` is that of ``Backend``. ``count[0]`` is the number of collectives of this rank.
    """

    def __init__(self, name: str, ranks: Sequence[int], path: str) -> None:
        super().__init__()
        self.name, self.ranks, self.path = name, tuple(ranks), path
        self.count: Sequence[int] = self.header[_NUMBER : _NUMBER + 1]
        self._calls = self.memory[_HEADER_BYTES:].view(_CALL)
        self._errors: dict[int, str] = {}
        self._clocks: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._zero = 0, 0
        with _leaving:
            self.header[_OFF] = _listeners
            _journals[:] = [known for known in _journals if known() is not None]
            _journals.append(weakref.ref(self))
        if self.ranks:
            _latest.append(self)

    def run(self, calls: Sequence[Call], name: str, start: Callable[[], Work]) -> Work:
        """Record ``calls`` as one call of ``name``, which ``start`` starts; wait if they block."""
        call, verb = calls[0], calls[0].verb
        number = 0 if verb.is_message else self._count()
        kinds = {_kind(each) for each in calls}
        dtype, shape = kinds.pop() if len(kinds) == 1 else (None, None)
        size = None
        if shape is None:
            size = sum(each.array.nbytes for each in calls if each.array is not None)
        peer, tag = (call.peer, call.tag) if verb.is_message else (None, None)
        op, root = call.op if verb.reduces else None, call.root if verb.rooted else None
        what = (self.name, number, name, dtype, shape, op, root, peer, tag, size)
        record = self._begin(what, 3)
        try:
            work = start()
            if not call.blocking and not isinstance(work, Done):
                return _Recorded(work, record)
            value = work.wait()
        except BaseException as error:
            self._failed(record, number, error)
            raise
        record.flight = work.flight
        if record.flight is None:
            record.ended = monotonic_ns()
        return work if isinstance(work, Done) else Done(value)

    @contextmanager
    def recording(
        self, verb: str, root: int | None = None, like: tuple[Any, Any] = (None, None)
    ) -> Iterator[Record]:
        """Record what the body does, which blocks, as one call; ``like`` are dtype and shape."""
        number = self._count()
        record = self._begin((self.name, number, verb, *like, None, root), 4)
        try:
            yield record
        except BaseException as error:
            self._failed(record, number, error)
            raise
        record.ended = monotonic_ns()

    def begun(self, verb: str, array: Any, op: ReduceOp) -> Record:
        """Count and record a call that begins now, for a fast path that notes its end."""
        return self._begin((self.name, self._count(), verb, array.dtype, array.shape, op), 4)

    def refused(self, verb: str, error: Exception, peer: int | None = None) -> None:
        """Count and record a call that ``error`` ended before it began, on this rank or another."""
        number = self._count() if peer is None else 0
        what = (self.name, number, verb, None, None, None, None, peer)
        _fail(self._begin(what, 4), error)

    def has_noted(self, error: BaseException) -> bool:
        """Return whether ``error`` ended a call of this group that had begun or was refused."""
        return self.name in getattr(error, _NOTED, ())

    def failed(self, call: int, error: BaseException) -> None:
        """Note that the native call with this id has ended by ``error``."""
        slot = (call - 1) % codes.RECORDED_CALLS
        row = self._calls[slot : slot + 1]
        if row["id"][0] == call:
            if not row["flags"][0] & codes.RECORDED_PLACED:
                self.notes[slot] = place_of_caller(2)
            row["flags"] |= codes.RECORDED_FAILED | codes.RECORDED_PLACED
        oldest = self.header[_WRITTEN] - codes.RECORDED_CALLS
        known = {other: text for other, text in self._errors.items() if other > oldest}
        self._errors = {**known, call: f"{type(error).__name__}: {error}"}
        _note(error, self.name)

    def open_to_native(self, clocks: Callable[[], tuple[int, int]]) -> None:
        """Have native code write as well; ``clocks`` reads its clock, and ``time.monotonic_ns``."""
        self._clocks, self._zero = clocks, clocks()

    def records(self, most: int = codes.RECORDED_CALLS) -> list[Record]:
        """Return the last calls, as the ring has them and at most so many, the oldest first."""
        written = self.header[_WRITTEN]
        calls, notes = self._calls.copy(), list(self.notes)
        ticks, nanoseconds = self._clocks()
        rate = (nanoseconds - self._zero[1]) / max(1, ticks - self._zero[0])
        found = []
        for call in range(max(1, written - most + 1), written + 1):
            slot = (call - 1) % codes.RECORDED_CALLS
            if isinstance(note := notes[slot], Record) and note.id == call:
                found.append(note)
            elif calls[slot]["id"] == call:  # else it has just been overwritten
                found.append(self._record(calls[slot], note, rate))
        return found

    def _count(self) -> int:
        self.header[_NUMBER] = number = self.header[_NUMBER] + 1
        return number

    def _failed(self, record: Record, number: int, error: BaseException) -> None:
        """Note how call ``number`` has ended; 0: a message, which is not counted."""
        if number and not getattr(error, "has_begun", True):
            self.header[_NUMBER] -= 1
        _fail(record, error)

    def _begin(self, what: tuple[Any, ...], depth: int) -> Record:
        record = Record(what, monotonic_ns(), place_of_caller(depth))
        self.header[_WRITTEN] = record.id = self.header[_WRITTEN] + 1
        self.notes[(record.id - 1) % codes.RECORDED_CALLS] = record
        if listener is not None:
            listener(record)
        return record

    def _record(self, row: Any, note: Any, rate: float) -> Record:
        """Return what native code has written as a record."""
        verb, flags = NATIVE[int(row["verb"])], row["flags"]
        ndim, peer = int(row["ndim"]), int(row["peer"])
        dtype: Any = None
        shape = None
        if verb is not BARRIER and ndim >= 0:
            name = DTYPES[row["dtype"]]
            dtype = name if name == "bfloat16" else np.dtype(name)  # NumPy may not know that
            fits = ndim <= len(row["shape"])
            shape = tuple(int(extent) for extent in row["shape"][:ndim]) if fits else None
        op, root = ReduceOp(int(row["op"])) if verb.reduces else None, peer if verb.rooted else None
        other, tag = (peer, int(row["tag"])) if verb.is_message else (None, None)
        number = int(row["number"])
        what = (self.name, number, verb.name, dtype, shape, op, root, other, tag, int(row["bytes"]))
        ticks, nanoseconds = self._zero
        started = nanoseconds + int((int(row["started"]) - ticks) * rate)
        record = Record(what, started, note if flags & codes.RECORDED_PLACED else None)
        record.id, record.is_async = int(row["id"]), bool(flags & codes.RECORDED_ASYNC)
        if row["ended"] > 0:
            record.ended = nanoseconds + int((int(row["ended"]) - ticks) * rate)
        if flags & codes.RECORDED_FAILED:
            record.error = self._errors.get(record.id, "failed")
        return record


def _kind(call: Call) -> tuple[Any, Any]:
    like = call.like
    return call.holds or ((None, None) if like is None else (like.dtype, like.shape))


class _Recorded(Work):
    """An operation whose end is noted when somebody waits for it."""

    def __init__(self, work: Work, record: Record) -> None:
        self._work, self._record = work, record
        self._forks = _forks
        record.is_async = True
        record.work = weakref.ref(work)
        record.flight = work.flight

    def wait(self, timeout: float | None = None) -> Any:
        if self._forks != _forks:
            raise forked(self._record.what[2])
        record, began = self._record, monotonic_ns()
        try:
            value = self._work.wait(timeout)
        except BaseException as error:
            goes_on = getattr(error, "goes_on", False)
            if not (record.ended or goes_on) and self._work.is_completed():
                _fail(record, error)
            raise
        if not record.ended:
            now = monotonic_ns()
            ended = self._work.end_time()
            if record.flight is None:
                record.ended = now if ended is None else int(ended * 1e9)
            if listener is not None:
                record.waits = (*record.waits, (began, now))
        return value

    def is_completed(self) -> bool:
        """Return whether it has ended; in a forked child it has, as it is not this process's."""
        return self._forks != _forks or self._work.is_completed()

    def end_time(self) -> float | None:
        return None if self._forks != _forks else self._work.end_time()


def forks() -> int:
    """Return how many forks there are between the first process and this one."""
    return _forks


def forked(verb: str) -> GroupClosedError:
    """Return the error of a wait for a parent's operation, an instance of ``verb``."""
    return GroupClosedError(
        f"[{verb}] this process was forked from the rank that has started the operation, "
        "and cannot wait for it; wait in the parent"
    )


def _fail(record: Record, error: BaseException) -> None:
    record.ended = monotonic_ns()
    record.error = f"{type(error).__name__}: {error}"
    _note(error, record.what[0])


def _note(error: BaseException, group: str) -> None:
    setattr(error, _NOTED, {*getattr(error, _NOTED, ()), group})
    if on_failure is not None:
        on_failure(error)


def leave_to_python(more: int) -> None:
    """Leave native calls of all threads to Python: 1 as a profile or recording begins, else -1."""
    global _listeners  # noqa: PLW0603  (rings that are made meanwhile must know)
    with _leaving:
        _listeners += more
        for journal in _living():
            journal.header[_OFF] = _listeners


def recent() -> list[Record]:
    """Return the last calls of this process in all groups, in the order in which they began."""
    records = [record for journal in _living() for record in journal.records()]
    return sorted(records, key=lambda record: record.started)


def groups() -> dict[str, dict[str, Any]]:
    """Return the groups of this process by name: ranks in the world, path, number of calls."""
    return {
        each.name: {"ranks": list(each.ranks), "path": each.path, "calls": each.count[0]}
        for each in _living()
        if each.ranks
    }


def _living() -> list[Journal]:
    return [journal for known in list(_journals) if (journal := known()) is not None]


def _forget_in_child() -> None:
    """After a fork: the parent's calls are not the child's."""
    global _forks, _leaving, _listeners, listener
    _forks, _leaving = _forks + 1, threading.RLock()  # another thread may have held the other lock
    _listeners, listener = _listeners - (listener is not None), None  # the parent takes its profile
    _latest.clear()
    for journal in _living():  # a group of one process goes on here
        journal.memory[:] = 0
        journal.header[_OFF], journal.notes[:] = _listeners, [None] * codes.RECORDED_CALLS
    _made.clear()


os.register_at_fork(after_in_child=_forget_in_child)
