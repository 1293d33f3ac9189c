"""One group's operations: collectives one after the other, messages beside them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flashlight_py.distributed.backends.mpi.agreement import Agreement
from flashlight_py.distributed.backends.mpi.calls import Header
from flashlight_py.distributed.backends.mpi.failures import Farewell, late, lost
from flashlight_py.distributed.backends.mpi.messages import Messages
from flashlight_py.distributed.backends.mpi.notes import Kind, Notes
from flashlight_py.distributed.backends.mpi.operation import Operation
from flashlight_py.distributed.backends.mpi.presence import Presence
from flashlight_py.distributed.backends.mpi.progress import Progress, Steps
from flashlight_py.distributed.call import ANY_RANK, Call
from flashlight_py.errors import DistributedError, GroupClosedError, MismatchError

__all__ = ["Group"]

_log = logging.getLogger("flashlight_py")

# A rank may leave when a message is through for it; the other end may need a few more looks.
_GRACE_SECONDS = 1.0


class Group:
    """The ranks of three communicators that hold the same ones: ``calls``, ``wire``, ``notes``.

    ``seconds`` is how long each operation may take; with ``checked`` ranks compare their calls.
    ``processes`` says which process each rank is, ``count`` how many calls users have made.
    """

    def __init__(
        self,
        mpi: Any,
        progress: Progress,
        comms: tuple[Any, Any, Any],
        seconds: float,
        checked: bool,
        processes: Sequence[str] = (),
        count: Callable[[], int] = int,
    ) -> None:
        self.processes = processes
        self._mpi, self._comms, self.progress = mpi, comms, progress
        self.calls, wire, notes = comms
        self.rank, self.size = int(self.calls.Get_rank()), int(self.calls.Get_size())
        self.place = f"rank {self.rank} of {self.size}"
        self.seconds, self._checked = seconds, checked
        self._notes = Notes(mpi, notes)
        self._agreement = Agreement(mpi, self.calls, progress)
        self._presence = Presence(self.rank, self.size, self._notes, self._where_i_am)
        self.messages = Messages(mpi, wire, self._notes, progress, self.place)
        self._queue: deque[Operation] = deque()
        self._beside: list[Operation] = []
        self._begun = self._completed = 0
        self._count = count
        self._unusable = ""  # why no operation can be started any more
        self._unheard: list[Operation] = []
        self._last = "no call of this group"  # that all have joined, in words
        self._last_at = time.monotonic()
        progress.add(self)

    def collective(self, call: Call, body: Callable[[list[int]], Steps]) -> Operation:
        """Start ``call``: when all ranks agree, ``body(each one's fact)`` makes the result."""
        steps = self._collective(Header.of(call), body)
        return self._start(call.name, steps, None, call.blocking, call.seconds)

    def refuse(self, call: Call, body: Callable[[list[int]], Steps]) -> None:
        """Start ``call``, which fits no other rank's; where none are compared, end the group."""
        if self._checked:
            self.collective(call, body).was_heard = True
        else:
            self.abort(f"MismatchError: {call}")

    def _collective(self, header: Header, body: Callable[[list[int]], Steps]) -> Steps:
        facts: list[int] = []
        if self._checked or header.is_needed:
            first = self._queue[0]
            number = first.call or self._begun
            facts = yield from self._agreement.reach(header, first.where, number, first.site)
            self._last, self._last_at = f"call {number}, {header.call}", time.monotonic()
        return (yield from body(facts))

    def message(
        self, name: str, steps: Callable[[], Steps], peer: int, blocking: bool
    ) -> Operation:
        """Start a message to or from ``peer``; ``steps()`` begins it."""
        with self.progress.lock:
            self._check_usable(name)
            return self._start(name, steps(), peer, blocking, None)

    def _start(
        self, name: str, steps: Steps, peer: int | None, blocking: bool, seconds: float | None
    ) -> Operation:
        limit = self.seconds if seconds is None else seconds
        operation = Operation(self, name, steps, limit, peer, self._count())
        with self.progress.lock:
            self._check_usable(name)
            if not blocking:
                self._remember(operation)
            if peer is None:
                self._queue.append(operation)
            else:
                operation.begin(0)
                self._beside.append(operation)
            self.advance()
        if not blocking and not operation.ended:
            self.progress.attend()
        return operation

    def _check_usable(self, name: str) -> None:
        if self._unusable:
            raise GroupClosedError(f"[{name}] {self.place}: {self._unusable}")

    def _remember(self, operation: Operation) -> None:
        """Keep what has not ended, or has failed unheard, for ``synchronize``."""
        self._unheard = [
            other
            for other in self._unheard
            if not other.ended or (other.error is not None and not other.was_heard)
        ]
        self._unheard.append(operation)

    def synchronize(self) -> None:
        """Wait for everything that was started; raises the first failure nobody has heard of."""
        unheard, self._unheard = self._unheard, []
        for operation in unheard:
            if not operation.was_heard:
                operation.wait()

    def is_busy(self) -> bool:
        """Return whether an operation has not ended."""
        return bool(self._queue or self._beside)

    def advance(self) -> None:
        """Read the notes, then take each operation as far as it gets without waiting."""
        try:
            self._read_notes()
        except self._mpi.Exception as error:
            self._mpi_failed(self._oldest(), error)
        while self._queue and self._step(self._next_in_line()):
            self._queue.popleft()
            self._completed += 1
        for operation in tuple(self._beside):
            if not operation.ended and self._step(operation):
                self._beside.remove(operation)

    def _read_notes(self) -> None:
        for source, kind, content in self._notes.hear():
            if kind in (Kind.OFFER, Kind.REPLY):
                self.messages.hear(source, kind, content)
            else:
                self._presence.hear(source, kind, content)

    def _next_in_line(self) -> Operation:
        first = self._queue[0]
        if not first.number:
            self._begun += 1
            first.begin(self._begun)
        return first

    def _step(self, operation: Operation) -> bool:
        """Go on with ``operation``; tell whether it has ended, and the group lives on."""
        try:
            next(operation.steps)
        except StopIteration as end:
            operation.end(end.value)
        except MismatchError as error:
            operation.fail(error)
        except self._mpi.Exception as error:
            self._mpi_failed(operation, error)
        except BaseException as error:
            self._break(operation, error, self._own(f"it stopped in {operation.name}: {error!r}"))
            if not isinstance(error, Exception):
                raise
        else:
            self._look_for_trouble(operation)
        return operation.ended and not self._unusable

    def _look_for_trouble(self, operation: Operation) -> None:
        """Break the group if a rank that ``operation`` needs has left or is late."""
        leaver = self._leaver(operation)
        if leaver is not None:
            farewell = self._presence.farewells[leaver]
            error = lost(operation.where, self.rank, leaver, farewell, self.processes)
            self._break(operation, error, replace(farewell, completed=self._completed))
        elif operation.grace is None and time.monotonic() >= operation.deadline:
            self._call_the_roll(operation)

    def _leaver(self, operation: Operation) -> int | None:
        if operation.peer is None:
            return self._presence.leaver(operation.number)
        left = self._presence.farewells
        gone = next(iter(left), None) if operation.peer == ANY_RANK else operation.peer
        if gone is None or gone not in left:
            return None
        operation.grace = operation.grace or time.monotonic() + _GRACE_SECONDS
        return gone if time.monotonic() >= operation.grace else None

    def _call_the_roll(self, operation: Operation) -> None:
        """Find out who has not come; meanwhile they still may."""
        if operation.roll_call is None:
            operation.roll_call = self._presence.ask(self._peers(operation))
        elif operation.roll_call.is_over():
            missing, detail = self._absent(operation)
            error = late(operation.where, missing, operation.seconds, detail, self.processes)
            farewell = Farewell(self._completed, missing, detail, operation.seconds)
            self._break(operation, error, farewell)

    def _peers(self, operation: Operation) -> list[int]:
        """Return the ranks that ``operation`` may be waiting for."""
        peer = operation.peer
        return list(self._presence.others) if peer is None or peer == ANY_RANK else [peer]

    def _absent(self, operation: Operation) -> tuple[tuple[int, ...], str]:
        assert operation.roll_call is not None
        if operation.peer is None:
            missing = operation.roll_call.behind(operation.number)
            answered = len(operation.roll_call.answers)
            asked = f"asked where they are, {answered} of {self.size - 1} ranks answered"
            ago = time.monotonic() - self._last_at
            return missing, f"{asked}; all joined {self._last}, {ago:.1f} s ago"
        peers = self._peers(operation)
        answers = {peer: operation.roll_call.answers.get(peer, (0, []))[1] for peer in peers}
        details = [self.messages.explain(peer, waits_for) for peer, waits_for in answers.items()]
        return tuple(peers), "; ".join(details)

    def _where_i_am(self, rank: int) -> tuple[int, list[str]]:
        return self._begun, self.messages.waiting_with(rank)

    def interrupt(self, error: BaseException) -> None:
        """Break the group: a wait was ended from outside, by Ctrl-C or another signal.

        ``error`` is raised where it was; whoever else waits learns that the group is closed.
        """
        with self.progress.lock:
            operation = self._oldest()
            if operation is not None:
                reason = f"{type(error).__name__} in {operation.name}"
                closed = GroupClosedError(f"{operation.where}: a signal ended a wait: {reason}")
                self._break(operation, closed, self._own(reason))

    def _oldest(self) -> Operation | None:
        """Return an operation that has not ended: a collective, if there is one."""
        return next(iter((*self._queue, *self._beside)), None)

    def _mpi_failed(self, operation: Operation | None, error: Exception) -> None:
        if operation is None:
            self._end_all(f"MPI failed: {error}")
            return
        failure = DistributedError(f"{operation.where}: MPI failed: {error}")
        failure.__cause__ = error
        self._break(operation, failure, self._own(f"MPI failed: {error}"))

    def _own(self, reason: str, raised: bool = False) -> Farewell:
        """Return what this rank says that is itself to blame."""
        return Farewell(self._completed, (self.rank,), reason, raised=raised)

    def abort(self, traceback: str) -> None:
        """End everything: this rank's program has raised."""
        with self.progress.lock:
            if not self._unusable and not self._mpi.Is_finalized():
                self._tell(lambda: self._presence.leave(self._own(traceback, raised=True)))
                self._end_all("this rank's program has raised an exception")

    def _break(self, operation: Operation, error: BaseException, farewell: Farewell) -> None:
        """End everything, ``operation`` with ``error``, and tell the other ranks why."""
        operation.fail(error)
        self._tell(lambda: self._presence.leave(farewell))
        self._end_all(f"this group broke earlier: {error}")

    def _tell(self, say: Callable[[], None]) -> None:
        try:
            say()
        except self._mpi.Exception as problem:  # what broke the group may keep notes back as well
            _log.debug("%s: the others cannot be told: %s", self.place, problem)

    def _end_all(self, reason: str) -> None:
        self._unusable = reason
        for operation in (*self._queue, *self._beside):
            if not operation.ended:
                operation.fail(GroupClosedError(f"{operation.where}: {reason}"))
        self._queue.clear()
        self._beside.clear()

    def close(self) -> None:
        """Leave, and tell the others; may be repeated."""
        with self.progress.lock:
            if self._unusable == _CLOSED:
                return
            healthy = not self._unusable and not self.is_busy()
            if not self._unusable and not self._mpi.Is_finalized():
                self._tell(lambda: self._presence.leave(self._own("it has left the group")))
            self.go(self._completed if healthy else None)
            self._end_all(_CLOSED)
        self.progress.remove(self, healthy)

    def go(self, completed: int | None = None) -> None:
        """Notify the others that this rank has nothing more to say in this group.

        ``completed`` collectives were all that it has begun; None: some have not ended.
        """
        with self.progress.lock:
            if not self._mpi.Is_finalized():
                self._tell(lambda: self._presence.go(completed))

    def drain(self) -> bool:
        """Take the notes that others still send; tell whether nothing more will come."""
        for source, kind, content in self._notes.hear():
            if kind in (Kind.LEFT, Kind.GONE):
                self._presence.hear(source, kind, content)
        return self._presence.are_all_gone()

    def are_others_gone(self) -> bool:
        """Return whether every other rank has said its last word in this group."""
        return self._presence.are_all_gone()

    def free(self) -> bool:
        """Free the communicators, if nothing is on its way in them on any rank; tell whether.

        MPI hands their contexts on to new communicators, and takes an operation that was abandoned,
        which it cannot cancel, for one of theirs.
        """
        is_over = self._presence.have_all_completed(self._completed)
        for comm in self._comms if is_over else ():
            comm.Free()
        return is_over


_CLOSED = "the group was closed"
