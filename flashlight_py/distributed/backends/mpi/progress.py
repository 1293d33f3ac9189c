"""Whoever waits makes every operation advance: MPI does nothing by itself while nobody calls it.

Operations are generators that yield while they have to wait. Every wait, in whichever group, steps
all operations of all groups of this process: so a rank that waits for one still serves the others.
A background thread does it while nobody waits, if MPI lets any thread call it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Generator, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.mpi.group import Group
    from flashlight_py.distributed.backends.mpi.operation import Operation

Steps: TypeAlias = Generator[None, None, Any]
Begin: TypeAlias = partial[Any]

# A wait polls, as MPI can wait neither for one of several kinds of things nor for a limited time.
# First it yields the processor between two looks; then, if nothing has happened for a while, it
# sleeps a tenth of the time for which nothing has: so sleeping costs a tenth at most.
_POLLS = 20
_YIELDING_SECONDS = 1e-3
_LONGEST_SLEEP = 2e-3
# As short as a wait for a comparison can be, which makes it one that somebody waits for.
_NO_TIME = 1e-4
# How long the background thread may take to end its last step.
_STOP_SECONDS = 10.0

# Calls and requests of operations that broke, and groups with such. MPI cannot cancel a collective:
# it may still write into its arrays, and send in its communicator, so they live as long as the
# process.
_abandoned: list[Any] = []


class Progress:
    """All groups of this process. ``lock`` is held by whoever makes them advance."""

    def __init__(self, mpi: Any, threaded: bool) -> None:
        self.lock = threading.RLock()
        self.threaded = threaded
        self._testall = mpi.Request.Testall
        self._groups: list[Group] = []
        self._closed: list[Group] = []
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._waiting = 0  # threads that wait, and so step
        self._moving = 0  # operations whose arrays are on their way
        self._pid = os.getpid()
        atexit.register(self._close_all)

    def add(self, group: Group) -> None:
        """Make ``group`` advance from now on; free those that every rank has left."""
        with self.lock:
            for closed in [other for other in self._closed if other.leaving.have_all_left()]:
                self._closed.remove(closed)
                if not closed.leaving.free():
                    _abandoned.append(closed)
            self._groups.append(group)

    def remove(self, group: Group, healthy: bool) -> None:
        """Forget ``group``; a ``healthy`` one is freed later, when all others have left it too."""
        with self.lock:
            self._groups.remove(group)
            (self._closed if healthy else _abandoned).append(group)
        if not self._groups:
            self._stop()

    def step(self) -> None:
        """Make every group advance once."""
        with self.lock:
            for group in tuple(self._groups):
                group.advance()

    def linger(self, end: float) -> None:
        """This program has ended, and printed why: let the others do so too, until ``end``."""
        groups = tuple(self._groups)
        for group in groups:
            group.leaving.leave(None)
        while time.monotonic() < end:
            with self.lock:
                if all(group.leaving.have_all_left() for group in groups):
                    return
            time.sleep(_LONGEST_SLEEP)

    def until(self, begins: Iterable[Begin]) -> Steps:
        """Begin what MPI is to do, calls of its functions; yield until all has ended."""
        calls, requests, done = tuple(begins), list[Any](), False
        self._moving += 1
        try:
            # In C alone: where a signal's handler raises, no request is lost that MPI works on.
            requests.extend(map(partial.__call__, calls))
            while not (done := self._testall(requests)):
                yield
        finally:
            self._moving -= 1
            if not done:
                _abandoned.append((calls, requests))  # requests alone let go of their arrays

    def wait(self, operation: Operation, end: float | None) -> bool:
        """Step until ``operation`` has ended, or until the clock (``time.monotonic``) says ``end``.

        While nothing else is under way it is its calls' comparison that is waited for, asleep.
        """
        alone = sum(group.pending() for group in tuple(self._groups)) == 1
        left = None if end is None else max(0.0, end - time.monotonic())
        operation.compare_for(left if alone else _NO_TIME)  # it is awaited
        with self._turn:
            self._waiting += 1
        try:
            pause = _Pause(self)
            while not operation.ended:
                if end is not None and not time.monotonic() < end:
                    return False
                self.step()
                if not operation.ended:
                    pause()
            return True
        finally:
            with self._turn:
                self._waiting -= 1
                self._turn.notify()

    def attend(self) -> None:
        """See to it that operations advance also while nobody waits for them."""
        if not self.threaded:
            return
        with self._turn:
            if self._thread is None:
                self._stopping = False
                name = "flashlight_py mpi"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._turn.notify()

    def _run(self) -> None:
        while self._await_turn():
            pause = _Pause(self)
            while not (self._waiting or self._stopping) and self._is_busy():
                self.step()
                pause()

    def _await_turn(self) -> bool:
        with self._turn:
            self._turn.wait_for(lambda: self._stopping or (not self._waiting and self._is_busy()))
            return not self._stopping

    def _is_busy(self) -> bool:
        return any(group.pending() for group in tuple(self._groups))

    def _stop(self) -> None:
        with self._turn:
            thread, self._thread = self._thread, None
            self._stopping = True
            self._turn.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def _close_all(self) -> None:
        """At exit: leave every group, so that nobody waits for this rank in vain."""
        if self._pid != os.getpid():
            return  # a child that was forked has no part in its parent's groups
        for group in tuple(self._groups):
            group.close()


class _Pause:
    """Between two steps of a wait: nothing, then a yield, then, where nothing moves, a sleep."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._polls = 0
        self._since = time.monotonic()

    def __call__(self) -> None:
        """Let others run; a sleep ends with nothing but its time, as MPI wakes nobody."""
        self._polls += 1
        if self._polls < _POLLS:
            return
        now = time.monotonic()
        if self._progress._moving:
            self._since = now
        idle = now - self._since
        if idle < _YIELDING_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(idle / 10, _LONGEST_SLEEP))


_of_process: Progress | None = None


def progress_of(mpi: Any, threaded: bool) -> Progress:
    """Return this process's one, made at the first call."""
    global _of_process  # noqa: PLW0603  (MPI is one per process, and so is its progress)
    if _of_process is None:
        _of_process = Progress(mpi, threaded)
    return _of_process
