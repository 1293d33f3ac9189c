"""The operations of groups, and who makes them advance: MPI does nothing while nobody calls it.

The ranks of a group compare each call over ``control``, their CPU backend, which finds out who
calls something else, who is late, and who has left, and why; then MPI moves the arrays: collectives
one after the other, messages beside them.

Operations are generators that yield while they have to wait. Every wait, in whichever group, steps
all operations of all groups of this process: so a rank that waits for one still serves the others.
A background thread does it while nobody waits, if MPI lets any thread call it.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.mpi import exits
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.failures.wording import UNUSABLE, did_not_join, who_that_was
from flashlight_py.distributed.verbs import BARRIER, SCATTER
from flashlight_py.distributed.work import Work, limit_passed
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)

Steps: TypeAlias = Generator[None, None, Any]
Begin: TypeAlias = partial[Any]

_log = logging.getLogger("flashlight_py")

# How often a rank that waits for MPI looks whether the others still work.
_LOOK_SECONDS = 0.05
# So long an operation of a CPU backend that is closed may take to end.
_ENDING_SECONDS = 0.5
# Messages of users have tags below this one, the largest that MPI promises.
_LAST_TAG = 32767
# In place of a count: an operation has not ended.
_UNFINISHED = -1
_CLOSED = "the group was closed"

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


class Operation(Work):
    """An operation called ``name``, its ``steps``, and the ``comparison`` that is first of them.

    What MPI does after it may take ``seconds``.
    """

    steps: Steps

    def __init__(self, group: Group, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.comparison: Work | None = None
        self.is_moving = False  # MPI works on it, or has
        self.ended = False
        self.error: BaseException | None = None
        self.was_raised = False  # somebody knows of its failure
        self._look_at = self.deadline = math.inf
        self._value: Any = None
        self._end_time: float | None = None
        self._group = group

    @property
    def is_news(self) -> bool:
        """It has not ended, or has failed and nobody knows."""
        return not self.ended or (self.error is not None and not self.was_raised)

    def begin(self) -> None:
        """Let MPI begin: start the clock."""
        now = time.monotonic()
        self.is_moving = True
        self.deadline = now + self.seconds
        self._look_at = min(now + _LOOK_SECONDS, self.deadline)

    def should_look(self) -> bool:
        """Return whether it is time to see what the others do; once in a while."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = min(now + _LOOK_SECONDS, self.deadline)
        return True

    def end(self, value: Any) -> None:
        """It ended well."""
        if self.ended:  # a signal handler has closed the group meanwhile
            return
        self._end_time = time.monotonic()
        self._value, self.ended = value, True

    def fail(self, error: BaseException) -> None:
        """It broke; requests that MPI still works on are kept."""
        if self.ended:
            return
        if inspect.getgeneratorstate(self.steps) != inspect.GEN_RUNNING:
            self.steps.close()  # else this is a signal handler, which has interrupted it
        self._end_time = time.monotonic()
        self.error, self.ended = error, True

    def cause(self) -> DistributedError | None:
        """Return what other ranks have done where the comparison has failed, which ends soon."""
        try:
            if self.comparison is not None:
                self.comparison.wait(_ENDING_SECONDS)
        except (PeerLostError, CollectiveTimeoutError) as error:
            return None if error.goes_on else error
        except DistributedError:
            return None  # it was closed as well, or has failed by itself
        return None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``. Ctrl-C breaks the group."""
        end = None if timeout is None else time.monotonic() + timeout
        try:
            in_time = self.ended or self._group.progress.wait(self, end)
        except BaseException as error:
            self._group.interrupt(self, error)
            raise
        if timeout is not None and not in_time:
            raise limit_passed(f"[{self.name}] {self._group.place}", timeout)
        if self.error is not None:
            self.was_raised = True
            raise self.error
        return self._value

    def is_completed(self) -> bool:
        """Return whether it has ended, after one look at everything that is under way."""
        if not self.ended:
            self._group.progress.step()
        return self.ended

    def end_time(self) -> float | None:
        """Return when it ended, if it has; see ``Work``."""
        return self._end_time


class Leaving:
    """The last words of the ranks of ``comm``: how many collectives have moved arrays.

    A communicator is freed when all ranks have left it for good, and only then: MPI hands its
    context on to new ones, and takes an operation that was abandoned, which it cannot cancel, for
    one of theirs.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        rank = int(comm.Get_rank())
        self._others = [other for other in range(int(comm.Get_size())) if other != rank]
        self._own: Any = None
        self._counts: list[int] = []
        self._on_their_way: list[Any] = []

    def leave(self, moved: int | None) -> None:
        """Notify the others that nothing more comes from here, once; None: something goes on."""
        if self._own is not None or self._mpi.Is_finalized():
            return
        self._own = np.array([_UNFINISHED if moved is None else moved], np.int64)
        buffer = [self._own, self._mpi.INT64_T]
        try:
            self._on_their_way = [
                self._comm.Isend(buffer, other, _LAST_TAG) for other in self._others
            ]
        except self._mpi.Exception as problem:  # what broke the group may keep this back as well
            _log.debug("the others wait for no word of rank %d: %s", self._comm.Get_rank(), problem)

    def have_all_left(self) -> bool:
        """Return whether every other rank has left."""
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _LAST_TAG):
            count = np.empty(1, np.int64)
            self._comm.Recv([count, self._mpi.INT64_T], self._mpi.ANY_SOURCE, _LAST_TAG)
            self._counts.append(int(count[0]))
        return len(self._counts) == len(self._others)

    def free(self) -> bool:
        """Free the communicator if nothing is on its way in it on any rank; return whether.

        All have left.
        """
        is_over = int(self._own[0]) != _UNFINISHED and set(self._counts) <= {int(self._own[0])}
        if is_over:
            self._mpi.Request.Waitall(self._on_their_way)
            self._comm.Free()
        return is_over


class Group(Backend):
    """The ranks of ``comm``, and of ``control``.

    ``seconds`` is how long each operation may take; with ``checked`` all calls are compared.
    """

    def __init__(
        self,
        mpi: Any,
        progress: Progress,
        comm: Any,
        control: Backend,
        seconds: float,
        checked: bool,
    ) -> None:
        self._mpi, self.progress, self.control = mpi, progress, control
        self.seconds, self._compares_all = seconds, checked
        self.rank, self.size = control.rank, control.size
        self.place = f"rank {self.rank} of {self.size}"
        self.leaving = Leaving(mpi, comm)
        self._queue: deque[Operation] = deque()
        self._beside: list[Operation] = []
        self._unheard: list[Operation] = []  # for ``synchronize``
        self._moved = 0  # collectives that have
        self._unusable = ""  # why no operation can be started any more
        progress.add(self)

    def _begin(self, call: Call, body: Callable[[Any], Steps]) -> Operation:
        """Begin ``call``: where all ranks agree, ``body(what they have found)`` is the result."""
        with self.progress.lock:  # operations begin on all ranks in the order of the comparisons
            if self._unusable:
                raise GroupClosedError(f"[{call.name}] {self.place}: {self._unusable}")
            seconds = self.seconds if call.seconds is None else call.seconds
            operation = Operation(self, call.name, seconds)
            operation.steps = self._steps(operation, body)
            try:
                if self._is_compared(call):
                    compared = replace(call, compared=True, blocking=False)
                    operation.comparison = self.control.start(compared)
                (self._beside if call.verb.is_message else self._queue).append(operation)
                if not call.blocking:
                    self._unheard = [other for other in self._unheard if other.is_news]
                    self._unheard.append(operation)
                    self.advance()
            except BaseException as error:
                if not isinstance(error, DistributedError):  # the others count on this call
                    self.interrupt(operation, error)
                raise
        if not call.blocking and not operation.ended:
            self.progress.attend()
        return operation

    def _refuse(self, call: Call) -> None:
        """Begin ``call``, which fits no other rank's; where none are compared, end the group."""
        if self._is_compared(call):
            self.control.start(call)
        else:
            self.control.abort(self._lost(call.name, f"MismatchError: {call}"))

    def _is_compared(self, call: Call) -> bool:
        """Return whether ranks compare ``call``: always if the result says what to move."""
        tells = call.is_ragged or call.verb.is_message or call.verb in (SCATTER, BARRIER)
        return self._compares_all or tells

    def _steps(self, operation: Operation, body: Callable[[Any], Steps]) -> Steps:
        found = None
        if operation.comparison is not None:
            while not operation.comparison.is_completed():
                yield
            found = operation.comparison.wait()
        operation.begin()
        return (yield from body(found))

    def synchronize(self) -> None:
        """Block until all has ended; raises the first failure nobody knows of. See ``Backend``."""
        unheard, self._unheard = self._unheard, []
        for operation in unheard:
            if not operation.was_raised:
                operation.wait()

    def pending(self) -> int:
        """Return how many operations have not ended."""
        return len(self._queue) + len(self._beside)

    def advance(self) -> None:
        """Take each operation as far as it gets without waiting."""
        while self._queue and self._step(self._queue[0]):
            if self._queue:  # else it has broken the group
                self._moved += self._queue.popleft().is_moving
        for operation in tuple(self._beside):
            if not operation.ended and self._step(operation) and operation in self._beside:
                self._beside.remove(operation)

    def _step(self, operation: Operation) -> bool:
        """Go on with ``operation``; return whether it has ended."""
        try:
            next(operation.steps)
        except StopIteration as end:
            operation.end(end.value)
        except DistributedError as error:
            if isinstance(error, MismatchError) and error.group_lives:
                operation.fail(error)
            else:
                self._break(operation, error)
        except self._mpi.Exception as error:
            failure = DistributedError(f"[{operation.name}] {self.place}: MPI failed: {error}")
            failure.__cause__ = error
            self._break(operation, failure, f"MPI failed: {error}")
        except BaseException as error:
            self._break(operation, error, f"it stopped in {operation.name}: {error!r}")
            if not isinstance(error, Exception):
                raise
        else:
            if operation.should_look():
                self._look(operation)
        return operation.ended

    def _look(self, operation: Operation) -> None:
        """Break the group if another rank has ended, or the time of ``operation`` is up."""
        trouble = self.control.lost(operation.name)
        if trouble is None and time.monotonic() >= operation.deadline:
            who = "all ranks joined and did not finish"
            if operation.comparison is None:
                who = "a rank did not join, or all joined and did not finish"
            where, limit = f"[{operation.name}] {self.place}", f"{operation.seconds:g} seconds"
            words = did_not_join(where, who, limit, "MPI moves the arrays", "")
            trouble = CollectiveTimeoutError(words)
        if trouble is not None:
            self._break(operation, trouble)

    def interrupt(self, operation: Operation, error: BaseException) -> None:
        """Break the group: a wait was ended from outside, by Ctrl-C or another signal.

        ``error`` is raised where it was; whoever else waits learns that the group is closed.
        """
        with self.progress.lock:
            if not operation.ended:
                reason = f"{type(error).__name__} in {operation.name}"
                where = f"[{operation.name}] {self.place}"
                closed = GroupClosedError(f"{where}: a signal ended a wait: {reason}")
                self._break(operation, closed, reason)

    def _lost(self, name: str, reason: str) -> PeerLostError:
        """Return what the other ranks are to raise: this one has ended, for ``reason``."""
        those = who_that_was([self.rank], self.control.processes)
        return PeerLostError(
            f"[{name}] {self.place}: lost rank {self.rank} ({reason}){those}. Look at its own "
            f"output. {UNUSABLE}"
        )

    def _break(self, operation: Operation, error: BaseException, reason: str = "") -> None:
        """End everything, ``operation`` with ``error``; ``reason``: why this rank is to blame."""
        cause = error
        if isinstance(error, GroupClosedError) and not reason:  # an operation beside may know more
            found = (other.cause() for other in (*self._queue, *self._beside))
            cause = next(filter(None, found), error)
        if cause is error:
            operation.fail(error)
        if isinstance(cause, DistributedError) and not reason:
            self.control.abort(cause)
        else:
            self.control.abort(self._lost(operation.name, reason))
        concerns_all = isinstance(cause, PeerLostError | CollectiveTimeoutError)
        self._end_all(f"this group broke earlier: {cause}", cause if concerns_all else None)

    def _end_all(self, reason: str, error: BaseException | None = None) -> None:
        """End what runs, with what ``error`` says of other ranks, which concerns all the same."""
        self._unusable = reason
        for operation in (*self._queue, *self._beside):
            where = f"[{operation.name}] {self.place}"
            if error is None:
                operation.fail(GroupClosedError(f"{where}: {reason}"))
            else:
                words = str(error).partition(f"{self.place}: ")[2] or str(error)
                operation.fail(type(error)(f"{where}: {words}"))
        self._queue.clear()
        self._beside.clear()

    def close(self) -> None:
        """Leave, and notify the others; may be repeated. What runs fails."""
        with self.progress.lock:
            if self._unusable == _CLOSED:
                return
            healthy = not self._unusable and not self.pending()
            if not healthy:  # who waits for what this rank has not done must not go on
                self.control.abort(self._lost("close", "it has left the group"))
            self.control.close()
            self.leaving.leave(self._moved if healthy else None)
            self._end_all(_CLOSED)
        self.progress.remove(self, healthy)


class Progress:
    """All groups of this process. ``lock`` is held by whoever makes them advance."""

    def __init__(self, mpi: Any, threaded: bool) -> None:
        self.lock = threading.RLock()
        self.threaded = threaded
        self._mpi, self._testall = mpi, mpi.Request.Testall
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
        exits.install(self._mpi, self.linger)

    def remove(self, group: Group, healthy: bool) -> None:
        """Forget ``group``; a ``healthy`` one is freed later, when all others have left it too."""
        with self.lock:
            self._groups.remove(group)
            (self._closed if healthy else _abandoned).append(group)
        exits.uninstall()
        if self._groups:
            return
        with self._turn:
            thread, self._thread = self._thread, None
            self._stopping = True
            self._turn.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

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
        if operation.comparison is not None and not operation.ended:
            with contextlib.suppress(DistributedError):  # its next step raises it, or it goes on
                operation.comparison.wait(left if alone else _NO_TIME)  # it is awaited
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
        while True:
            with self._turn:
                self._turn.wait_for(
                    lambda: self._stopping or (not self._waiting and self._is_busy())
                )
                if self._stopping:
                    return
            pause = _Pause(self)
            while not (self._waiting or self._stopping) and self._is_busy():
                self.step()
                pause()

    def _is_busy(self) -> bool:
        return any(group.pending() for group in tuple(self._groups))

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
