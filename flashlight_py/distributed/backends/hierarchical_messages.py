"""Messages of a hierarchical backend, beside its collectives, and the Works of its threads.

A message travels through memory inside a host, else between hosts; a receive from any rank looks at
both ways in turn.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import replace
from typing import Any

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched
from flashlight_py.distributed.work import Done, Then, Work, limit_passed
from flashlight_py.errors import (
    DistributedError,
    GroupClosedError,
    MismatchError,
)

# How long one way is waited on before the other is looked at: nothing waits for both.
_SLICE_SECONDS = 0.001

# How long a group that is closed waits for its receives, which end sooner.
_LEAVING_SECONDS = 0.5


class HierarchicalMessages(Backend):
    """The messages of a backend over several hosts."""

    _hosts: list[list[int]]  # the ranks of each
    _host_of: dict[int, int]
    _inside: Backend
    _flat: Backend
    _callers: Callers
    _searches: Searches
    timeout: float

    @abc.abstractmethod
    def end(self, error: DistributedError) -> None:
        """End all backends because of ``error`` of one of them."""

    @abc.abstractmethod
    def of_lost_hosts(self, doing: str, error: GroupClosedError) -> DistributedError:
        """Return that hosts are lost, if that is why the parts have ended; else ``error``."""

    def guarded(self, doing: str, wait: Callable[[], Any]) -> Any:
        """Return what ``wait`` does for a part; what breaks that one ends the others as well."""
        try:
            return wait()
        except GroupClosedError as error:
            raise self.of_lost_hosts(doing, error) from error
        except DistributedError as error:
            group_lives = isinstance(error, MismatchError) and error.group_lives
            if not (group_lives or error.goes_on):
                self.end(error)
            raise

    def message(self, call: Call) -> Work:
        """Start a message: through memory inside the host, else between hosts; see ``Backend``."""
        self._callers.check("refuse" if call.refusal else call.name)
        if call.peer == ANY_RANK:
            search = _AnyRank(self, self._ways(), call)
            blocking = call.blocking
            return Done(search.run(call.patience)) if blocking else self._searches.start(search)
        backend, peer = self._way_to(call.peer)
        work = _GuardedWork(backend.start(replace(call, peer=peer)), self, call)
        if not call.is_open:
            return work
        return Then(work, lambda found: found and found._replace(source=call.peer))

    def _ways(self) -> list[tuple[Backend, Sequence[int]]]:
        """Return what carries messages to this rank, and whom it knows as which rank."""
        host = self._hosts[self._host_of[self.rank]]
        ways = (self._inside, host), (self._flat, range(self.size))
        return [way for way in ways if way[0].size > 1]

    def _way_to(self, rank: int) -> tuple[Backend, int]:
        host = self._hosts[self._host_of[self.rank]]
        return (self._inside, host.index(rank)) if rank in host else (self._flat, rank)


class FutureWork(Work):
    """An operation on the thread of a hierarchical backend."""

    def __init__(self, future: futures.Future[Any]) -> None:
        self._future = future
        self.failure_reported = False
        self._end_time: float | None = None
        future.add_done_callback(self._note_end)

    def _note_end(self, _: futures.Future[Any]) -> None:
        self._end_time = time.monotonic()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``."""
        if timeout is not None:
            limit = min(timeout, threading.TIMEOUT_MAX)
            if not futures.wait([self._future], limit).done:
                raise limit_passed("an operation over several hosts", timeout)
        try:
            return self._future.result()
        except DistributedError:
            self.failure_reported = True
            raise

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self._future.done()

    def end_time(self) -> float | None:
        """Return when it ended, if it has; see ``Work``."""
        return self._end_time


class _GuardedWork(Work):
    """``call``, a message; what breaks the backend that carries it ends the others as well."""

    def __init__(self, work: Work, owner: HierarchicalMessages, call: Call) -> None:
        self._work, self._owner, self._call = work, owner, call

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``."""
        work = self._work
        return self._owner.guarded(self._call.name, lambda: work.wait(timeout))

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self._work.is_completed()

    def end_time(self) -> float | None:
        """Return when it ended, if it has; see ``Work``."""
        return self._work.end_time()


class _AnyRank:
    """``call``, a receive of what any rank sends by one of ``ways``.

    Each of these is a backend and the ranks that its ranks are to ``owner``.
    """

    def __init__(
        self,
        owner: HierarchicalMessages,
        ways: Sequence[tuple[Backend, Sequence[int]]],
        call: Call,
    ) -> None:
        self._owner, self._ways, self._call = owner, ways, call
        self.tag, self.is_awaited = call.tag, call.blocking

    def run(self, patience: float = -1.0) -> Matched | None:
        """Receive; None where nothing has arrived within ``patience`` seconds, if not negative."""
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            for backend, ranks in self._ways:
                # Who knows all ranks notices that none of them will send any more.
                asks = self.is_awaited and len(ranks) == self._owner.size
                times = {"patience": _SLICE_SECONDS, "waited": waited * asks}
                found = self._look(backend, **times)
                if found is not None:
                    return found._replace(source=ranks[found.source])
            if 0 <= patience <= waited:
                return None
            if waited >= self._owner.timeout:
                backend, ranks = self._ways[-1]  # which knows what is sent instead, and raises it
                found = self._look(backend, seconds=_SLICE_SECONDS)
                if found is not None:
                    return found._replace(source=ranks[found.source])

    def _look(self, backend: Backend, **how: Any) -> Matched | None:
        work = backend.start(replace(self._call, blocking=True, **how))
        found: Matched | None = _GuardedWork(work, self._owner, self._call).wait()
        return found


class Searches:
    """Receives that run on threads of their own, those of one tag one after the other."""

    def __init__(self) -> None:
        self._all: list[_Search] = []  # as they began
        self._starting = threading.RLock()  # signal handlers run on the thread that holds it

    def start(self, receive: _AnyRank) -> FutureWork:
        """Begin ``receive`` when those of its tag before it have ended."""
        with self._starting:
            self._all = [one for one in self._all if one.thread.is_alive()]
            tag = receive.tag
            ahead = next((one for one in reversed(self._all) if one.receive.tag == tag), None)
            work = _Search(receive, ahead)
            work.thread.start()
            self._all.append(work)
        return work

    def running(self) -> list[FutureWork]:
        """Return those that have not ended."""
        return [work for work in list(self._all) if not work.is_completed()]

    def join(self) -> None:
        """Wait until none runs: whatever they wait for has been closed.

        For half a second at most: in a signal handler they may need what the thread holds that it
        has interrupted, and end when that goes on.
        """
        end = time.monotonic() + _LEAVING_SECONDS
        for work in list(self._all):
            if work.thread is not threading.current_thread():
                work.thread.join(max(0.0, end - time.monotonic()))


class _Search(FutureWork):
    """``receive`` on a thread, after the one ``ahead``; who waits for it waits for that one too."""

    def __init__(self, receive: _AnyRank, ahead: _Search | None) -> None:
        super().__init__(futures.Future())
        self.receive, self._ahead = receive, ahead
        name = "flashlight_py receive"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``."""
        work: _Search | None = self
        while work is not None and not work.receive.is_awaited:
            work.receive.is_awaited = True
            work = work._ahead
        return super().wait(timeout)

    def _run(self) -> None:
        if self._ahead is not None:
            self._ahead.thread.join()
            self._ahead = None  # nor what was ahead of that
        try:
            self._future.set_result(self.receive.run())
        except BaseException as error:  # noqa: BLE001  (whoever waits raises it)
            self._future.set_exception(error)
