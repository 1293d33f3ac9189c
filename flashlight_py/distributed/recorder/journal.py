"""The calls of one group, counted and recorded; and the calls of all groups of this process."""

from __future__ import annotations

import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

from flashlight_py.distributed.call import Call
from flashlight_py.distributed.recorder import incidents
from flashlight_py.distributed.recorder.fast_calls import NUMBER, FastCalls
from flashlight_py.distributed.recorder.record import Record, What, place_of_caller
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import GroupClosedError

__all__ = ["Journal", "groups", "name_of_group", "recent"]

# Calls that went through Python; those of the native all_reduce have rings of their own.
_KEPT = 512

_NOTED = "flashlight_py_noted"  # an attribute of errors

_recent: deque[Record] = deque(maxlen=_KEPT)
_journals: list[weakref.ref[Journal]] = []  # a list can be read while another thread adds to it
_made: Counter[tuple[int, ...]] = Counter()
_forks = 0  # between the first process and this one


def name_of_group(ranks: Sequence[int]) -> str:
    """Return a name for a new group of ``ranks`` (of the world) that its members agree on.

    They make the groups that they share in one order, so the second of the same ranks is the
    second on each of them.
    """
    key = tuple(ranks)
    _made[key] += 1
    again = "" if _made[key] == 1 else f" #{_made[key]}"
    return f"ranks {', '.join(map(str, key))}{again}"


class Journal:
    """Counts the calls of the group ``name`` and records them.

    ``ranks`` are its ranks in the world, ``path`` says in words what carries the data.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], path: str, fast_calls: FastCalls | None
    ) -> None:
        self.name, self.ranks, self.path = name, tuple(ranks), path
        self.fast_calls = fast_calls
        own = memoryview(bytearray(8)).cast("Q")
        self._header = own if fast_calls is None else fast_calls.header
        self.count: Sequence[int] = self._header[NUMBER : NUMBER + 1]
        _journals[:] = [known for known in _journals if known() is not None]
        _journals.append(weakref.ref(self))

    @property
    def calls(self) -> int:
        """How many collectives this rank has called."""
        return self._header[NUMBER]

    def run(self, calls: Sequence[Call], name: str, start: Callable[[], Work]) -> Work:
        """Record ``calls``, which users know as one call of ``name`` and ``start`` starts.

        Waits for the end of blocking ones.
        """
        call, verb = calls[0], calls[0].verb
        number = 0 if verb.is_message else self._count()
        kinds = {_kind(each) for each in calls}
        dtype, shape = kinds.pop() if len(kinds) == 1 else (None, None)
        size = None if shape is not None else sum(_bytes(each) for each in calls)
        peer, tag = (call.peer, call.tag) if verb.is_message else (None, None)
        op, root = call.op if verb.reduces else None, call.root if verb.rooted else None
        what = (self.name, number, name, dtype, shape, op, root, peer, tag, size)
        record = _begin(what, 3)
        try:
            work = start()
            if not call.blocking and not isinstance(work, Done):
                return _Recorded(work, record)
            value = work.wait()
        except BaseException as error:
            _fail(record, error)
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
        record = _begin((self.name, self._count(), verb, *like, None, root), 4)  # and contextlib's
        try:
            yield record
        except BaseException as error:
            _fail(record, error)
            raise
        record.ended = monotonic_ns()

    def refused(self, verb: str, error: Exception, peer: int | None = None) -> None:
        """Count and record a call that this rank refused to make, because of ``error``."""
        number = self._count() if peer is None else 0
        what = (self.name, number, verb, None, None, None, None, peer)
        _fail(_begin(what, 4), error)

    def has_noted(self, error: BaseException) -> bool:
        """Return whether ``error`` ended a call that had begun, or one that was refused."""
        return hasattr(error, _NOTED)

    def _count(self) -> int:
        self._header[NUMBER] = number = self._header[NUMBER] + 1
        return number


def _kind(call: Call) -> tuple[Any, Any]:
    like = call.like
    return (None, None) if like is None else (like.dtype, like.shape)


def _bytes(call: Call) -> int:
    return 0 if call.array is None else call.array.nbytes


def _begin(what: tuple[Any, ...], depth: int) -> Record:
    record = Record(what, monotonic_ns(), place_of_caller(depth))
    _recent.append(record)
    if incidents.listener is not None:
        incidents.listener(record)
    return record


class _Recorded(Work):
    """An operation whose end is noted when somebody waits for it."""

    def __init__(self, work: Work, record: Record) -> None:
        self._work, self._record = work, record
        self._forks = _forks
        record.is_async = True
        record.work = weakref.ref(work)
        record.flight = work.flight

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``."""
        if self._forks != _forks:
            verb = What(*self._record.what).verb
            raise GroupClosedError(
                f"[{verb}] this process was forked from the rank that has started the operation, "
                "and cannot wait for it; wait in the parent"
            )
        record, began = self._record, monotonic_ns()
        try:
            value = self._work.wait(timeout)
        except BaseException as error:
            # Where only this wait has ended, the operation goes on.
            if not record.ended and self._work.is_completed():
                _fail(record, error)
            raise
        if not record.ended:
            now = monotonic_ns()
            ended = self._work.end_time()
            if record.flight is None:
                record.ended = now if ended is None else int(ended * 1e9)
            if incidents.listener is not None:
                record.waits = (*record.waits, (began, now))
        return value

    def is_completed(self) -> bool:
        """Return whether it has ended; in a forked child it has, as it is not this process's."""
        return self._forks != _forks or self._work.is_completed()

    def end_time(self) -> float | None:
        """Return when it ended, in seconds; see ``Work``."""
        return None if self._forks != _forks else self._work.end_time()


def _fail(record: Record, error: BaseException) -> None:
    record.ended = monotonic_ns()
    record.error = f"{type(error).__name__}: {error}"
    setattr(error, _NOTED, True)
    incidents.report(error)


def recent() -> list[Record]:
    """Return the last calls of this process in all groups, in the order in which they began."""
    records = list(_recent)
    for journal in _living():
        if journal.fast_calls is not None:
            records += journal.fast_calls.records(journal.name)
    return sorted(records, key=lambda record: record.started)


def groups() -> dict[str, dict[str, Any]]:
    """Return the groups of this process by name: ranks in the world, path, number of calls."""
    return {
        journal.name: {"ranks": list(journal.ranks), "path": journal.path, "calls": journal.calls}
        for journal in _living()
        if journal.ranks
    }


def _living() -> list[Journal]:
    found = [known() for known in list(_journals)]
    return [journal for journal in found if journal is not None]


def _forget_in_child() -> None:
    """After a fork: what the parent has called is not the child's."""
    global _forks  # noqa: PLW0603  (a process is forked once)
    _forks += 1
    _recent.clear()
    _journals.clear()
    _made.clear()


os.register_at_fork(after_in_child=_forget_in_child)
