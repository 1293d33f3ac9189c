"""One group's operations: collectives one after the other, messages beside them.

The ranks compare each call over ``control``, their CPU backend, which finds out who calls something
else, who is late, and who has left, and why; then MPI moves the arrays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.mpi.leaving import Leaving
from flashlight_py.distributed.backends.mpi.operation import Operation
from flashlight_py.distributed.backends.mpi.progress import Progress, Steps
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.failures.wording import UNUSABLE, did_not_join, who_that_was
from flashlight_py.distributed.verbs import BARRIER, SCATTER
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)

Body = Callable[[Any], Steps]


class Group:
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
        self.seconds, self._checked = seconds, checked
        self.rank, self.size = control.rank, control.size
        self.place = f"rank {self.rank} of {self.size}"
        self.leaving = Leaving(mpi, comm)
        self._queue: deque[Operation] = deque()
        self._beside: list[Operation] = []
        self._unheard: list[Operation] = []
        self._moved = 0  # collectives that have
        self._unusable = ""  # why no operation can be started any more
        progress.add(self)

    def start(self, call: Call, body: Body) -> Operation:
        """Start ``call``: where all ranks agree, ``body(what they have found)`` is the result."""
        with self.progress.lock:  # operations begin on all ranks in the order of the comparisons
            if self._unusable:
                raise GroupClosedError(f"[{call.name}] {self.place}: {self._unusable}")
            seconds = self.seconds if call.seconds is None else call.seconds
            operation = Operation(self, call.name, seconds)
            operation.steps = self._steps(operation, body)
            try:
                if self._checked or is_compared_always(call):
                    compared = replace(call, compared=True, blocking=False)
                    operation.comparison = self.control.start(compared)
                (self._beside if call.verb.is_message else self._queue).append(operation)
                if not call.blocking:
                    self._remember(operation)
                    self.advance()
            except BaseException as error:
                if not isinstance(error, DistributedError):  # the others count on this call
                    self.interrupt(operation, error)
                raise
        if not call.blocking and not operation.ended:
            self.progress.attend()
        return operation

    def refuse(self, call: Call) -> None:
        """Start ``call``, which fits no other rank's; where none are compared, end the group."""
        if self._checked or is_compared_always(call):
            self.control.start(call)
        else:
            self.control.abort(self._lost(call.name, f"MismatchError: {call}"))

    def _steps(self, operation: Operation, body: Body) -> Steps:
        found = None
        if operation.comparison is not None:
            while not operation.comparison.is_completed():
                yield
            found = operation.comparison.wait()
        operation.begin()
        return (yield from body(found))

    def _remember(self, operation: Operation) -> None:
        """Keep what has not ended, or has failed and nobody knows, for ``synchronize``."""
        self._unheard = [
            other
            for other in self._unheard
            if not other.ended or (other.error is not None and not other.was_raised)
        ]
        self._unheard.append(operation)

    def synchronize(self) -> None:
        """Wait for everything that was started; raises the first failure nobody knows of."""
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
            trouble = self._late(operation)
        if trouble is not None:
            self._break(operation, trouble)

    def _late(self, operation: Operation) -> DistributedError:
        where, limit = f"[{operation.name}] {self.place}", f"{operation.seconds:g} seconds"
        who = "all ranks joined and did not finish"
        if operation.comparison is None:
            who = "a rank did not join, or all joined and did not finish"
        return CollectiveTimeoutError(did_not_join(where, who, limit, "MPI moves the arrays", ""))

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
        cause = error if reason else self._cause(error)
        if cause is error:
            operation.fail(error)
        if isinstance(cause, DistributedError) and not reason:
            self.control.abort(cause)
        else:
            self.control.abort(self._lost(operation.name, reason))
        concerns_all = isinstance(cause, PeerLostError | CollectiveTimeoutError)
        self._end_all(f"this group broke earlier: {cause}", cause if concerns_all else None)

    def _cause(self, error: BaseException) -> BaseException:
        """Return what has closed ``control``: ``error``, unless an operation beside knows more."""
        pending = (*self._queue, *self._beside) if isinstance(error, GroupClosedError) else ()
        return next(filter(None, (operation.cause() for operation in pending)), error)

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
        """Leave, and notify the others; may be repeated."""
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


def is_compared_always(call: Call) -> bool:
    """Return whether ranks cannot do without comparing ``call``: its result says what to move."""
    return call.is_ragged or call.verb.is_message or call.verb in (SCATTER, BARRIER)


_CLOSED = "the group was closed"
