"""Receiving from any rank where ranks are reached in two ways."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.hierarchical_work import FutureWork, GuardedWork
from flashlight_py.distributed.call import Call, Matched

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.hierarchical_messages import HierarchicalMessages

# How long one way is waited on before the other is looked at: nothing waits for both.
_SLICE_SECONDS = 0.001

# How long a group that is closed waits for its receives, which end sooner.
_LEAVING_SECONDS = 0.5


class AnyRank:
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

    def run(self, patience: float = -1.0) -> Matched | None:
        """Receive; None where nothing has arrived within ``patience`` seconds, if not negative."""
        began = time.monotonic()
        while True:
            for backend, ranks in self._ways:
                found = self._look(backend, patience=_SLICE_SECONDS)
                if found is not None:
                    return found._replace(source=ranks[found.source])
            waited = time.monotonic() - began
            if 0 <= patience <= waited:
                return None
            if waited >= self._owner.timeout:
                backend, ranks = self._ways[-1]  # which knows what is sent instead, and raises it
                found = self._look(backend, seconds=_SLICE_SECONDS)
                if found is not None:
                    return found._replace(source=ranks[found.source])

    def _look(self, backend: Backend, **how: Any) -> Matched | None:
        work = backend.start(replace(self._call, blocking=True, **how))
        found: Matched | None = GuardedWork(work, self._owner).wait()
        return found


class Searches:
    """Receives that run on threads of their own, those of one tag one after the other."""

    def __init__(self) -> None:
        self._all: list[tuple[int, threading.Thread, FutureWork]] = []  # by tag, as they began
        self._starting = threading.RLock()  # signal handlers run on the thread that holds it

    def start(self, tag: int, run: Callable[[], Matched | None]) -> FutureWork:
        """Begin ``run`` when those before it under ``tag`` have ended."""
        future: Future[Matched | None] = Future()
        work = FutureWork(future)
        with self._starting:
            self._all = [one for one in self._all if one[1].is_alive()]
            before = next((one[1] for one in reversed(self._all) if one[0] == tag), None)
            thread = threading.Thread(
                target=_run_after,
                args=(before, run, future),
                name="flashlight_py receive",
                daemon=True,
            )
            thread.start()
            self._all.append((tag, thread, work))
        return work

    def running(self) -> list[FutureWork]:
        """Return those that have not ended."""
        return [work for _, _, work in list(self._all) if not work.is_completed()]

    def join(self) -> None:
        """Wait until none runs: whatever they wait for has been closed.

        For half a second at most: in a signal handler they may need what the thread holds that it
        has interrupted, and end when that goes on.
        """
        end = time.monotonic() + _LEAVING_SECONDS
        for _, thread, _ in list(self._all):
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))


def _run_after(
    before: threading.Thread | None,
    run: Callable[[], Matched | None],
    future: Future[Matched | None],
) -> None:
    if before is not None:
        before.join()
    try:
        future.set_result(run())
    except BaseException as error:  # noqa: BLE001  (whoever waits raises it)
        future.set_exception(error)
