"""Groups of processes that one ``mpirun`` has started, joined by their MPI library.

The ranks compare each call over ``control``, their CPU backend, which detects mismatches, late and
lost ranks. Then MPI moves the arrays: collectives in turn, messages beside them.

MPI advances only while it is called. So operations are generators that yield while they wait, and
each wait steps all operations of all groups of this process. A background thread steps them while
no thread waits, if MPI allows calls from any thread.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.mpi.gpu_side import MpiGpuBackend
from flashlight_py.distributed.backends.mpi.leaving import UNFINISHED, Leaving, end_the_job
from flashlight_py.distributed.backends.mpi.verb_steps import Steps, VerbSteps, on_device
from flashlight_py.distributed.calls.arrays import require_length
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.failures.wording import UNUSABLE, did_not_join, who_that_was
from flashlight_py.distributed.verbs import BARRIER, SCATTER
from flashlight_py.distributed.work import Done, Work, limit_passed, wait_for
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)

# How often a rank that waits for MPI looks whether the others still work.
_LOOK_SECONDS = 0.05
# So long an operation of a CPU backend that is closed may take to end.
_ENDING_SECONDS = 0.5
_CLOSED = "the group was closed"

# A wait polls, as MPI has no wait with a time limit. First it yields the processor between polls,
# then it sleeps a tenth of the time since the last event, so sleeping costs a tenth at most.
_POLLS = 20
_YIELDING_SECONDS = 1e-3
_LONGEST_SLEEP = 2e-3
# As short as a wait for a comparison can be, which makes it one that somebody waits for.
_NO_TIME = 1e-4
# How long the background thread may take to end its last step.
_STOP_SECONDS = 10.0

# Calls, requests and groups of operations that failed. MPI cannot cancel a collective, which may
# still use its arrays and its communicator, so they live as long as the process.
_abandoned: list[Any] = []


class Operation(Work):
    """An operation: its ``comparison`` is first of its ``steps``, MPI's part takes ``seconds``."""

    def __init__(self, group: MpiBackend, name: str, seconds: float) -> None:
        self.name, self.seconds, self.where = name, seconds, f"[{name}] {group.place}"
        self.steps: Steps
        self.comparison: Work | None = None
        self.ended = self.doubts = False  # the second: a rank may be lost
        self.error: BaseException | None = None
        self.look_at = self.deadline = math.inf
        self.room: Array | None = None  # ``out``, which needs as many rows as arrive
        self._value: Any = None
        self._end_time: float | None = None
        self._group = group

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """Note how it has ended; requests that MPI still works on are kept."""
        if self.ended:  # a signal handler has closed the group meanwhile
            return
        if inspect.getgeneratorstate(self.steps) != inspect.GEN_RUNNING:
            self.steps.close()  # else this is a signal handler, which has interrupted it
        self._end_time, group = time.monotonic(), self._group
        if error is None and self.room is not None:
            try:
                require_length(self.name, self.room, value.shape[0], group.rank, group.size)
            except ValueError as failure:  # of this rank alone: the group goes on
                error = failure
        self._value, self.error, self.is_heard, self.ended = value, error, error is None, True

    def cause(self) -> DistributedError | None:
        """Return what other ranks have done where the comparison has failed, which ends soon."""
        try:
            if self.comparison is not None:
                self.comparison.wait(_ENDING_SECONDS)
        except DistributedError as error:  # else it was closed as well, or has failed by itself
            if isinstance(error, PeerLostError | CollectiveTimeoutError) and not error.goes_on:
                return error
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
            raise limit_passed(self.where, timeout)
        if self.error is not None:
            self.is_heard = True
            raise self.error
        return self._value

    def is_completed(self) -> bool:
        """Return whether it has ended, after one look at everything that is under way."""
        if not self.ended:
            self._group.progress.step()
        return self.ended

    def end_time(self) -> float | None:
        return self._end_time


# MPI's tag of a message is the number of the sender's comparison: both ends know it, also a receive
# from any rank.
class MpiBackend(Backend):
    """The ranks of ``comm``, and of ``control``, the CPU backend over which calls are compared.

    ``seconds`` bounds each operation; with ``checked`` ranks compare all that they call;
    ``gpu_aware`` says that the library takes pointers to a GPU's memory; ``path`` names it.
    """

    kind = DistributedBackend.MPI

    def __init__(
        self,
        progress: Progress,
        comm: Any,
        control: Backend,
        path: str,
        seconds: float,
        checked: bool,
        gpu_aware: bool,
    ) -> None:
        self.progress, self.control = progress, control
        self.network, self.memory = control.network, control.memory
        self.memory_ranks = control.memory_ranks
        self.leaving = Leaving(progress.mpi, comm)
        self.seconds, self._compares_all = seconds, checked
        self.rank, self.size, self.hosts = control.rank, control.size, control.hosts
        self.processes, self.path, self._gpu_aware = control.processes, path, gpu_aware
        self.place = f"rank {self.rank} of {self.size}"
        self._callers = Callers(self.place, [control])
        self._verb_steps = VerbSteps(progress.mpi, comm, progress.until, gpu_aware)
        self._queue: deque[Operation] = deque()
        self._beside: list[Operation] = []
        self._unheard: list[Operation] = []  # for ``synchronize``
        self._moved = 0  # collectives that have
        self._unusable = ""  # why no operation can be started any more
        progress.add(self)

    def limit(self, seconds: float) -> None:
        self.seconds = seconds
        self.control.limit(seconds)

    def cupy_side(self) -> Backend:
        """Return the backend of the same ranks for CuPy arrays."""
        return MpiGpuBackend(self, self._gpu_aware)

    def start(self, call: Call) -> Work:
        """Start ``call``; see ``Backend``. The order of a reduction's terms is the library's."""
        thread = self._callers.check(call.name)
        self.control.count = self.count
        try:
            self._callers.threads.add(thread)
            if call.refusal:
                if self._is_compared(call):
                    self.control.start(call)
                else:  # it fits no other rank's, and nobody would notice
                    self.control.abort(self._lost(call.name, f"MismatchError: {call}"))
                return Done()
            if call.verb.is_message:
                call.received = []  # what the two ends call it
            work = self._begin(call)
            return Done(work.wait()) if call.blocking else work
        finally:
            self._callers.threads.discard(thread)

    def _begin(self, call: Call) -> Operation:
        """Begin ``call``: once all ranks agree, MPI does it."""
        with self.progress.lock:  # operations begin on all ranks in the order of the comparisons
            if self._unusable:
                raise GroupClosedError(f"[{call.name}] {self.place}: {self._unusable}")
            seconds = self.seconds if call.seconds is None else call.seconds
            operation = Operation(self, call.name, seconds)
            operation.steps = self._steps(operation, call)
            if call.is_ragged and call.verb.fills(self.rank, call.root):
                operation.room = call.out
            try:
                if self._is_compared(call):
                    compared = replace(call, compared=True, blocking=False)
                    operation.comparison = self.control.start(compared)
                (self._beside if call.verb.is_message else self._queue).append(operation)
                if not call.blocking:
                    begun = (*self._unheard, operation)
                    self._unheard = [one for one in begun if not (one.ended and one.is_heard)]
                    self.advance()
            except BaseException as error:
                if not isinstance(error, DistributedError):  # the others count on this call
                    self.interrupt(operation, error)
                raise
        if not call.blocking and not operation.ended:
            self.progress.attend()
        return operation

    def _is_compared(self, call: Call) -> bool:
        """Return whether ranks compare ``call``: always if the result says what to move."""
        tells = call.is_ragged or call.verb.is_message or call.verb in (SCATTER, BARRIER)
        return self._compares_all or tells

    def _steps(self, operation: Operation, call: Call) -> Steps:
        found = None
        if operation.comparison is not None:
            while not operation.comparison.is_completed():
                yield
            found = operation.comparison.wait()
        now = time.monotonic()
        operation.look_at, operation.deadline = now + _LOOK_SECONDS, now + operation.seconds
        return (yield from on_device(call.like, self._verb_steps.of(call, found)))

    def synchronize(self) -> None:
        """Block until all has ended; raises the first failure nobody knows of. See ``Backend``."""
        wait_for(self._unheard)

    def advance(self) -> None:
        """Take each operation as far as it gets without waiting."""
        while self._queue and self._step(self._queue[0]):
            if self._queue:  # else it has broken the group
                self._moved += self._queue.popleft().deadline < math.inf
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
                operation.end(error=error)
            else:
                self._break(operation, error)
        except self.progress.mpi.Exception as error:
            failure = DistributedError(f"{operation.where}: MPI failed: {error}")
            failure.__cause__ = error
            self._break(operation, failure, f"MPI failed: {error}")
        except BaseException as error:
            self._break(operation, error, f"it stopped in {operation.name}: {error!r}")
            if not isinstance(error, Exception):
                raise
        else:
            self._look(operation)
        return operation.ended

    def _look(self, operation: Operation) -> None:
        """Once in a while: break the group if another rank has ended, or the time is up."""
        now = time.monotonic()
        if now < min(operation.look_at, operation.deadline):
            return
        operation.look_at = now + _LOOK_SECONDS
        trouble = self.control.lost(operation.name)
        if trouble is not None and not operation.doubts:  # one that left in order did its part:
            operation.doubts = True  # what it has sent may still end this operation
        elif trouble is not None:
            self._break(operation, trouble)
        elif now >= operation.deadline:
            who = "a rank did not join, or all" if operation.comparison is None else "all ranks"
            who += " joined and did not finish"
            limit = f"{operation.seconds:g} seconds"
            words = did_not_join(operation.where, who, limit, "MPI moves the arrays", "")
            self._break(operation, CollectiveTimeoutError(words))

    def interrupt(self, operation: Operation, error: BaseException) -> None:
        """Break the group after ``error``, as Ctrl-C, ended a wait; other waits raise that."""
        with self.progress.lock:
            if not operation.ended:
                reason = f"{type(error).__name__} in {operation.name}"
                closed = GroupClosedError(f"{operation.where}: a signal ended a wait: {reason}")
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
            operation.end(error=error)
        known = cause if isinstance(cause, DistributedError) and not reason else None
        self.control.abort(known or self._lost(operation.name, reason))
        for_all = cause if isinstance(cause, PeerLostError | CollectiveTimeoutError) else None
        self._end_all(f"this group broke earlier: {cause}", for_all)

    def _end_all(self, reason: str, error: DistributedError | None = None) -> None:
        """End what runs, with what ``error`` says of other ranks, which concerns all the same."""
        self._unusable = words = reason
        kind: type[DistributedError] = GroupClosedError
        if error is not None:
            kind, words = type(error), str(error).partition(f"{self.place}: ")[2] or str(error)
        for operation in (*self._queue, *self._beside):
            operation.end(error=kind(f"{operation.where}: {words}"))
        self._queue.clear()
        self._beside.clear()

    def abort(self, cause: str | DistributedError) -> None:
        self.control.abort(cause)

    def leave(self) -> None:
        self.control.leave()

    def lost(self, doing: str) -> DistributedError | None:
        return self.control.lost(doing)

    def is_busy(self) -> bool:
        return bool(self.pending()) or self.control.is_busy()

    def is_calling(self) -> bool:
        return self._callers.contains_this_thread()

    def pending(self) -> int:
        """Return how many operations have not ended."""
        return len(self._queue) + len(self._beside)

    def close(self) -> None:
        """Leave, and notify the others; may be repeated. A running operation fails."""
        with self.progress.lock:
            if self._unusable == _CLOSED:
                return
            healthy = not self._unusable and not self.pending()
            if not healthy:  # who waits for what this rank has not done must not go on
                self.control.abort(self._lost("close", "it has left the group"))
            self.control.close()
            self.leaving.leave(self._moved if healthy else UNFINISHED)
            self._end_all(_CLOSED)
        self.progress.remove(self, healthy)


class Progress:
    """All groups of this process; ``threaded``: any thread may call ``mpi`` at any time."""

    def __init__(self, mpi: Any, threaded: bool) -> None:
        self.lock = threading.RLock()  # held by whoever makes the groups advance
        self.threaded = threaded
        self.mpi, self._end_the_job = mpi, partial(end_the_job, mpi, self.linger)
        self._groups: list[MpiBackend] = []
        self._closed: list[MpiBackend] = []
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting = 0  # threads that wait, and so step
        self._moving = 0  # operations whose arrays are on their way
        self._pid = os.getpid()
        atexit.register(self._close_all)

    def add(self, group: MpiBackend) -> None:
        """Make ``group`` advance from now on; free those that every rank has left."""
        with self.lock:
            for closed in [other for other in self._closed if other.leaving.have_all_left()]:
                self._closed.remove(closed)
                if not closed.leaving.free():
                    _abandoned.append(closed)
            if not self._groups:
                abort.install()
                abort.afterwards.append(self._end_the_job)
            self._groups.append(group)

    def remove(self, group: MpiBackend, healthy: bool) -> None:
        """Forget ``group``; a ``healthy`` one is freed later, when all others have left it too."""
        with self.lock:
            self._groups.remove(group)
            (self._closed if healthy else _abandoned).append(group)
            if self._groups:
                return
            abort.afterwards.remove(self._end_the_job)
        with self._turn:
            thread, self._thread = self._thread, None
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
            group.leaving.leave(UNFINISHED)
        while time.monotonic() < end:
            with self.lock:
                if all(group.leaving.have_all_left() for group in groups):
                    return
            time.sleep(_LONGEST_SLEEP)

    def until(self, begins: Iterable[partial[Any]]) -> Steps:
        """Begin what MPI is to do, calls of its functions; yield until all has ended."""
        calls, requests, done = tuple(begins), list[Any](), False
        self._moving += 1
        try:
            # In C alone: where a signal's handler raises, no request is lost that MPI works on.
            requests.extend(map(partial.__call__, calls))
            while not (done := self.mpi.Request.Testall(requests)):
                yield
        finally:
            self._moving -= 1
            if not done:
                _abandoned.append((calls, requests))  # requests alone let go of their arrays

    def wait(self, operation: Operation, end: float | None) -> bool:
        """Step until ``operation`` has ended, or until ``end``, a time of ``time.monotonic``."""
        alone = self._pending() == 1  # then it sleeps until the calls have been compared
        left = None if end is None else max(0.0, end - time.monotonic())
        if operation.comparison is not None and not operation.ended:
            with contextlib.suppress(DistributedError):  # its next step raises it, or it goes on
                operation.comparison.wait(left if alone else _NO_TIME)  # it is awaited
        with self._turn:
            self._waiting += 1
        try:
            pauses = self._pauses()
            while not operation.ended:
                if end is not None and not time.monotonic() < end:
                    return False
                self.step()
                if not operation.ended:
                    next(pauses)
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
                name = "flashlight_py mpi"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._turn.notify()

    def _run(self) -> None:
        while self._groups:
            with self._turn:
                self._turn.wait_for(
                    lambda: not self._groups or (not self._waiting and self._pending())
                )
            pauses = self._pauses()
            while not self._waiting and self._pending():
                self.step()
                next(pauses)

    def _pauses(self) -> Iterator[None]:
        """Pause between steps of a wait: first not at all, then by a yield, then by a sleep."""
        since = time.monotonic()
        for _ in range(_POLLS - 1):
            yield
        while True:
            now = time.monotonic()
            if self._moving:
                since = now
            idle = now - since
            if idle < _YIELDING_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(idle / 10, _LONGEST_SLEEP))
            yield

    def _pending(self) -> int:
        return sum(group.pending() for group in tuple(self._groups))

    def _close_all(self) -> None:
        """At exit: leave every group, so that nobody waits for this rank in vain."""
        if self._pid != os.getpid():
            return  # a child that was forked has no part in its parent's groups
        for group in tuple(self._groups):
            group.close()


progress_of = cache(Progress)  # MPI is one per process, and so is its progress
