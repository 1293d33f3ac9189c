"""The journal of a group: a counter of its calls, and a ring buffer with its latest calls.

Native code writes each call as an entry with the layout of csrc/fast/ring.h. A call of Python code
reserves an entry, too, but its data is a ``Record`` in ``Journal.notes``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any

import numpy as np

from flashlight_py import system
from flashlight_py._native import codes
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.verbs import BARRIER, VERBS, Verb
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import GroupClosedError

PACKAGE = f"{Path(__file__).parents[2]}/"
# Lines of contextlib.py are skipped, too. Otherwise records would name __exit__ instead of a verb.
# csrc/fast/binding.c skips the same files.
_folders = [PACKAGE, contextlib.__file__]

Site = tuple[str, int]
"""Path and line number of a source file."""

Instruction = tuple[CodeType, int, str]
"""A line of user code whose number is computed only on demand, because that takes longer than a
call. Fields: code object, ``f_lasti`` of a frame, name of the called function."""


@functools.cache
def _is_ours(path: str) -> bool:
    return path.startswith(hidden_files())


def hidden_files() -> tuple[str, ...]:
    """Return the files and folders that contain no user code."""
    return tuple(_folders)


def hide_folder(folder: str) -> None:
    """Treat a folder or file like this package: ``caller`` skips its lines."""
    if folder not in _folders:
        _folders.append(folder)
        _is_ours.cache_clear()


def frame_of_caller(depth: int) -> tuple[FrameType, CodeType]:
    """Return the frame of the calling user code, and the code object of the called function.

    The first ``depth`` frames belong to this package, so they are skipped without a check.
    """
    frame = sys._getframe(depth)
    code = ours = frame.f_code
    while _is_ours(code.co_filename) and (back := frame.f_back) is not None:
        if code.co_filename != _folders[1]:
            ours = code
        frame = back
        code = frame.f_code
    return frame, ours


# Result of ``caller`` on this thread, if ``called_at`` has set it.
_pinned: ContextVar[Site | None] = ContextVar("site", default=None)


def caller(depth: int = 1) -> Site:
    """Return the line of user code that called this package. Skip ``depth`` frames."""
    if (pinned := _pinned.get()) is not None:
        return pinned
    frame, _ = frame_of_caller(depth + 1)
    return frame.f_code.co_filename, frame.f_lineno


def site_of(site: Site) -> str:
    """Return ``site`` as "folder/file.py:line". Bytes that are not UTF-8 are escaped."""
    path, line = site
    name = "/".join(path.split("/")[-2:])
    return f"{name.encode(errors='backslashreplace').decode()}:{line}"


def instruction_of_caller(depth: int) -> Instruction:
    """Return the calling line of user code as an ``Instruction``, without its line number."""
    frame, ours = frame_of_caller(depth + 1)
    return frame.f_code, frame.f_lasti, ours.co_name


def line_of(code: CodeType, instruction: int) -> str:
    """Return "folder/file.py:12" for the first two fields of an ``Instruction``."""
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end and line]
    return site_of((code.co_filename, lines[0] if lines else code.co_firstlineno))


def call_site() -> str:
    return site_of(caller())


def text_at_site(text: str, limit: int) -> bytes:
    """Return ``text`` and the calling line. If they exceed ``limit`` bytes, cut out the middle."""
    raw = f"{text} at {call_site()}".encode(errors="backslashreplace")
    half = limit // 2
    return raw if len(raw) <= limit else raw[: half - 2] + b" ... " + raw[3 + half - limit :]


@contextlib.contextmanager
def called_at(site: Site) -> Iterator[None]:
    """Make ``caller`` return ``site`` in a ``with`` block of this thread."""
    token = _pinned.set(site)
    try:
        yield
    finally:
        _pinned.reset(token)


SENDRECV = Verb("sendrecv", codes.SENDRECV, ("tag",), "result")
# These verbs have the order of their names in ``COMPOSED`` (call.py).
BROADCAST_OBJECT = Verb("broadcast_object", codes.BROADCAST_OBJECT, ("root",), "result")
ALL_GATHER_OBJECT = Verb("all_gather_object", codes.ALL_GATHER_OBJECT, (), "result", ragged=True)
GATHER_OBJECT = Verb("gather_object", codes.GATHER_OBJECT, ("root",), "root's result", ragged=True)
SCATTER_OBJECT = Verb("scatter_object", codes.SCATTER_OBJECT, ("root",), "result")
OBJECTS = (BROADCAST_OBJECT, ALL_GATHER_OBJECT, GATHER_OBJECT, SCATTER_OBJECT)
NATIVE = {verb.code: verb for verb in (*VERBS, SENDRECV, *OBJECTS)}
"""Verbs that native code runs, by their number ``code``."""

# Bits that tell csrc/fast/plain.c the properties of a verb. The index is the code of the verb.
_flags = bytearray(codes.VERBS)
for _verb in VERBS:
    bits = codes.VERB_KNOWN | _verb.rooted * codes.VERB_ROOTED | _verb.prefix * codes.VERB_PREFIX
    bits |= _verb.in_place * codes.VERB_IN_PLACE | _verb.reduces * codes.VERB_REDUCES
    _flags[_verb.code] = bits

# Layout of the ring in csrc/fast/ring.h.
_HEADER_BYTES = 64
_CALL = np.dtype(
    [("number", "u8"), ("started", "i8"), ("ended", "i8"), ("bytes", "i8"), ("shape", "i8", 3)]
    + [(name, "i1") for name in ("verb", "dtype", "op", "ndim")]
    + [(name, "i4") for name in ("flags", "peer", "tag")]
    + [("id", "u8")]
)
# Positions in the header of the ring, in words of 8 bytes.
_NUMBER, _WRITTEN, _OFF, CALLERS = 0, 1, 2, slice(3, 8)

_NOTED = "flashlight_py_noted"  # attribute of errors: names of groups that recorded the error

_journals: list[weakref.ref[Journal]] = []  # a list can be read while another thread appends
# Calls of a closed group may explain a failure, so the newest groups are not freed.
_latest: deque[Journal] = deque(maxlen=16)
_made: Counter[tuple[int, ...]] = Counter()
forks = 0  # number of forks from the first process to this one
_listeners = 0  # number of active profiles and step recordings, of all threads
_leaving = threading.RLock()

listener: Callable[[Record], None] | None = None
"""Called with the record of each call when the call begins, while a profile is active."""
on_failure: Callable[[BaseException], None] | None = None
"""Called with the exception of each failed call."""


# ``number`` is the number of the collective in the group, or 0 for a message. ``bytes`` is None if
# dtype and shape give the size. Unused fields are None; unused fields at the end may be missing.
_FIELDS = ("group", "number", "verb", "dtype", "shape", "op", "root", "peer", "tag", "bytes")


class Record:
    """A recorded call. Times are in ``time.monotonic_ns``; ``ended`` is 0 while the call runs.

    ``values`` has the values of the fields in ``_FIELDS``. While a profile is active, ``waits`` has
    the start and the end of each ``Work.wait`` for this call.
    """

    ended = 0
    error = ""
    id = 0  # number of this call among all calls of the ring, from 1
    is_async = False
    size: int | None = None  # bytes, if they were not known when the call started
    waits: tuple[tuple[int, int], ...] = ()
    work: weakref.ref[Work] | None = None
    flight: Any = None  # for a GPU collective: an object with its end time

    def __init__(self, values: tuple[Any, ...], started: int, line: Instruction | None) -> None:
        self.values, self.started, self.line = values, started, line

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in JSON types, for flight records. Times are in nanoseconds."""
        self._settle()
        fields: dict[str, Any] = dict(zip(_FIELDS, self.values, strict=False))
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
        if self.line is not None:
            code, instruction, via = self.line
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
    """Return a name for a new group of ``ranks`` of the world, equal on all its members.

    If several groups have the same ranks, the name contains their number, by order of creation.
    """
    key = tuple(ranks)
    _made[key] += 1
    again = "" if _made[key] == 1 else f" #{_made[key]}"
    return f"ranks {', '.join(map(str, key))}{again}"


class Journal:
    """Counts and records the calls of the group ``name``, made of the world's ranks ``ranks``.

    ``path`` names the transport, as in ``Backend``. ``count[0]`` is the number of collectives that
    this rank has called.

    ``memory`` is a ring buffer of calls. Native code and Python share it, so all calls are in
    order. For each entry, ``notes`` has the line of user code, or the record of a Python call.
    ``header[CALLERS]`` has the ids of threads that run a native call, or 0. The thread that
    completes an asynchronous operation writes its end time.
    """

    def __init__(self, name: str, ranks: Sequence[int], path: str) -> None:
        self.memory = np.zeros(_HEADER_BYTES + codes.RECORDED_CALLS * _CALL.itemsize, np.uint8)
        self.notes: list[Any] = [None] * codes.RECORDED_CALLS
        self.header = memoryview(self.memory.data)[:_HEADER_BYTES].cast("Q")
        self.name, self.ranks, self.path = name, tuple(ranks), path
        self.count: Sequence[int] = self.header[_NUMBER : _NUMBER + 1]
        self._calls = self.memory[_HEADER_BYTES:].view(_CALL)
        self._errors: dict[int, str] = {}
        self._clocks: Callable[[], tuple[int, int]] = lambda: (0, 0)  # ticks and monotonic_ns
        self._zero = 0, 0
        with _leaving:
            self.header[_OFF] = _listeners
            _journals[:] = [reference for reference in _journals if reference() is not None]
            _journals.append(weakref.ref(self))
        if self.ranks:
            _latest.append(self)

    def run(self, calls: Sequence[Call], name: str, start: Callable[[], Work]) -> Work:
        """Record ``calls`` as one call with the name ``name``, and start them by ``start()``.

        Returns the Work of ``start()``. If the calls are blocking, waits for it first.
        """
        call, verb = calls[0], calls[0].verb
        number = 0 if verb.is_message else self._count()
        kinds = {_dtype_and_shape(one_call) for one_call in calls}
        dtype, shape = kinds.pop() if len(kinds) == 1 else (None, None)
        arrays = [step.array for step in calls if step.array is not None]
        size = sum(array.nbytes for array in arrays) if shape is None else None
        peer, tag = (call.peer, call.tag) if verb.is_message else (None, None)
        op, root = call.op if verb.reduces else None, call.root if verb.rooted else None
        record = self._begin((self.name, number, name, dtype, shape, op, root, peer, tag, size), 3)
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

    @contextlib.contextmanager
    def recording(
        self, verb: str, root: int | None = None, like: tuple[Any, Any] = (None, None)
    ) -> Iterator[Record]:
        """Record a ``with`` block as one call. ``like``: dtype and shape of its array, or None."""
        number = self._count()
        record = self._begin((self.name, number, verb, *like, None, root), 4)
        try:
            yield record
        except BaseException as error:
            self._failed(record, number, error)
            raise
        record.ended = monotonic_ns()

    def record_rejection(self, verb: str, error: Exception, peer: int | None = None) -> None:
        """Count and record a call that did not begin because a rank raised ``error``."""
        number = self._count() if peer is None else 0
        _fail(self._begin((self.name, number, verb, None, None, None, None, peer), 4), error)

    def has_recorded(self, error: BaseException) -> bool:
        return self.name in getattr(error, _NOTED, ())

    def record_failure(self, call: int, error: BaseException) -> None:
        """Record that the native call with the id ``call`` failed by ``error``."""
        slot = (call - 1) % codes.RECORDED_CALLS
        row = self._calls[slot : slot + 1]
        if row["id"][0] == call:
            if not row["flags"][0] & codes.RECORDED_PLACED:
                self.notes[slot] = instruction_of_caller(2)
            row["flags"] |= codes.RECORDED_FAILED | codes.RECORDED_PLACED
        oldest = self.header[_WRITTEN] - codes.RECORDED_CALLS
        errors = {other: text for other, text in self._errors.items() if other > oldest}
        self._errors = {**errors, call: f"{type(error).__name__}: {error}"}
        _note(error, self.name)

    def open_to_native(self, fast: Any) -> None:
        """Allow the native module ``fast`` to record calls."""
        fast.verbs(bytes(_flags))
        self._clocks, self._zero = fast.clocks, fast.clocks()

    def records(self, most: int = codes.RECORDED_CALLS) -> list[Record]:
        """Return up to ``most`` of the newest records, the oldest first."""
        written = self.header[_WRITTEN]
        calls, notes = self._calls.copy(), list(self.notes)
        ticks, nanoseconds = self._clocks()
        rate = (nanoseconds - self._zero[1]) / max(1, ticks - self._zero[0])
        records = []
        for call in range(max(1, written - most + 1), written + 1):
            slot = (call - 1) % codes.RECORDED_CALLS
            if isinstance(note := notes[slot], Record) and note.id == call:
                records.append(note)
            elif calls[slot]["id"] == call:  # if not overwritten by a newer call
                records.append(self._record(calls[slot], note, rate))
        return records

    def _count(self) -> int:
        self.header[_NUMBER] = number = self.header[_NUMBER] + 1
        return number

    def _failed(self, record: Record, number: int, error: BaseException) -> None:
        """Record that a call failed. If ``error.has_begun`` is False, do not count the call."""
        if number and not getattr(error, "has_begun", True):
            self.header[_NUMBER] -= 1
        _fail(record, error)

    def _begin(self, fields: tuple[Any, ...], depth: int) -> Record:
        record = Record(fields, monotonic_ns(), instruction_of_caller(depth))
        self.header[_WRITTEN] = record.id = self.header[_WRITTEN] + 1
        self.notes[(record.id - 1) % codes.RECORDED_CALLS] = record
        if listener is not None:
            listener(record)
        return record

    def _record(self, row: Any, note: Any, rate: float) -> Record:
        verb, flags = NATIVE[int(row["verb"])], row["flags"]
        ndim, peer = int(row["ndim"]), int(row["peer"])
        dtype, shape = None, None
        if verb is not BARRIER and ndim >= 0:
            name = codes.DTYPES[row["dtype"]]
            dtype = name if name == "bfloat16" else np.dtype(name)  # NumPy may lack bfloat16
            shape = tuple(map(int, row["shape"][:ndim])) if ndim <= len(row["shape"]) else None
        op, root = ReduceOp(int(row["op"])) if verb.reduces else None, peer if verb.rooted else None
        other, tag = (peer, int(row["tag"])) if verb.is_message else (None, None)
        number, size = int(row["number"]), int(row["bytes"])
        fields = (self.name, number, verb.name, dtype, shape, op, root, other, tag, size)
        ticks, nanoseconds = self._zero
        started = nanoseconds + int((int(row["started"]) - ticks) * rate)
        record = Record(fields, started, note if flags & codes.RECORDED_PLACED else None)
        record.id, record.is_async = int(row["id"]), bool(flags & codes.RECORDED_ASYNC)
        if row["ended"] > 0:
            record.ended = nanoseconds + int((int(row["ended"]) - ticks) * rate)
        if flags & codes.RECORDED_FAILED:
            record.error = self._errors.get(record.id, "failed")
        return record


def _dtype_and_shape(call: Call) -> tuple[Any, Any]:
    like = call.like
    return call.holds or ((None, None) if like is None else (like.dtype, like.shape))


class _Recorded(Work):
    """A pending operation. ``wait()`` also records its end."""

    def __init__(self, work: Work, record: Record) -> None:
        self._work, self._record = work, record
        self._forks = forks
        record.is_async = True
        record.work = weakref.ref(work)
        record.flight = work.flight

    def wait(self, timeout: float | None = None) -> Any:
        if self._forks != forks:
            raise forked(self._record.values[2])
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
        return self._forks != forks or self._work.is_completed()

    def end_time(self) -> float | None:
        return None if self._forks != forks else self._work.end_time()


def forked(verb: str) -> GroupClosedError:
    return GroupClosedError(
        f"[{verb}] expected wait() in the process that started the operation, got a call in a "
        "forked child. Wait in the parent."
    )


def _fail(record: Record, error: BaseException) -> None:
    record.ended = monotonic_ns()
    record.error = f"{type(error).__name__}: {error}"
    _note(error, record.values[0])


def _note(error: BaseException, group: str) -> None:
    setattr(error, _NOTED, {*getattr(error, _NOTED, ()), group})
    if on_failure is not None:
        on_failure(error)


def leave_to_python(more: int) -> None:
    """Add ``more`` to the number of active profiles. If it is not 0, Python handles all calls."""
    global _listeners  # noqa: PLW0603 (new rings read it)
    with _leaving:
        _listeners += more
        for journal in _live_journals():
            journal.header[_OFF] = _listeners


def recent_records() -> list[Record]:
    """Return the newest calls of all groups of this process, in the order of their start."""
    records = [record for journal in _live_journals() for record in journal.records()]
    return sorted(records, key=lambda record: record.started)


def groups() -> dict[str, dict[str, Any]]:
    """Return for the name of each group its ranks in the world, transport and number of calls."""
    return {
        group.name: {"ranks": list(group.ranks), "path": group.path, "calls": group.count[0]}
        for group in _live_journals()
        if group.ranks
    }


def _live_journals() -> list[Journal]:
    return [journal for reference in list(_journals) if (journal := reference()) is not None]


def _forget_in_child() -> None:
    global forks, _leaving, _listeners, listener
    forks, _leaving = forks + 1, threading.RLock()  # another thread may have held the old lock
    _listeners, listener = _listeners - (listener is not None), None  # the child has no profile
    _latest.clear()
    for journal in _live_journals():  # the child may use groups of one process
        journal.memory[:] = 0
        journal.header[_OFF], journal.notes[:] = _listeners, [None] * codes.RECORDED_CALLS
    _made.clear()


system.register_at_fork(after_in_child=_forget_in_child)
