"""Receiving from any rank where ranks are reached in two ways."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend, Matched
from flashlight_py.distributed.backends.hierarchical_work import FutureWork, GuardedWork

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.hierarchical_messages import HierarchicalMessages

__all__ = ["AnyRank", "Searches"]

# How long one way is waited on before the other is looked at: nothing waits for both.
_SLICE_SECONDS = 0.001


class AnyRank:
    """A receive into ``array`` of what any rank sends by one of ``ways``.

    Each of these is a backend and the ranks that its ranks are to ``owner``.
    """

    def __init__(
        self,
        owner: HierarchicalMessages,
        ways: Sequence[tuple[Backend, Sequence[int]]],
        array: Array,
        tag: int,
        partial: bool,
    ) -> None:
        self._owner, self._ways = owner, ways
        self._array, self._tag, self._partial = array, tag, partial

    def run(self, patience: float = -1.0) -> Matched | None:
        """Receive; None where nothing has come within ``patience`` seconds, if not negative."""
        began = time.monotonic()
        while True:
            for backend, ranks in self._ways:
                found = self._look(backend, _SLICE_SECONDS)
                if found is not None:
                    return found._replace(source=ranks[found.source])
            waited = time.monotonic() - began
            if 0 <= patience <= waited:
                return None
            if waited >= self._owner.timeout:
                self._run_late()

    def _look(self, backend: Backend, patience: float) -> Matched | None:
        arguments = (self._array, None, self._tag, self._partial, True, patience)
        found: Matched | None = GuardedWork(backend.recv_matched(*arguments), self._owner).wait()
        return found

    def _run_late(self) -> None:
        """Raise the timeout of the last way, which knows what is sent instead."""
        backend, _ = self._ways[-1]
        with backend.within(_SLICE_SECONDS):
            self._look(backend, -1.0)


class Searches:
    """Receives that run on threads of their own, those of one tag one after the other."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[threading.Thread, FutureWork]] = {}
        self._all: list[tuple[threading.Thread, FutureWork]] = []

    def start(self, tag: int, run: Callable[[], Matched | None]) -> FutureWork:
        """Begin ``run`` when those before it under ``tag`` have ended."""
        future: Future[Matched | None] = Future()
        before = self._last.get(tag)

        def work() -> None:
            if before is not None:
                before[0].join()
            try:
                future.set_result(run())
            except BaseException as error:  # noqa: BLE001  (whoever waits raises it)
                future.set_exception(error)

        self._all = [one for one in self._all if one[0].is_alive()]
        started = threading.Thread(target=work, name="flashlight_py receive", daemon=True)
        self._last[tag] = started, FutureWork(future)
        self._all.append(self._last[tag])
        started.start()
        return self._last[tag][1]

    def running(self) -> list[FutureWork]:
        """Return those that have not ended."""
        return [work for thread, work in self._all if thread.is_alive()]

    def join(self) -> None:
        """Wait until none runs: whatever they wait for has been closed."""
        for thread, _ in self._all:
            if thread is not threading.current_thread():
                thread.join()
