"""Calls compared over the group's backend for NumPy arrays, as NCCL compares nothing.

A call that reduces or broadcasts starts on the device at once. If the calls differ or a rank is
missing, the communicator is aborted, because NCCL's kernels would wait for ever. For all other
calls the host needs sizes or peers, so they are compared first.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl.communicator import Communicator, poll
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.failures.wording import NOTHING_CHANGED
from flashlight_py.distributed.verbs import ALL_GATHER, BARRIER, VERBS, Verb
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)

# Seconds that the others have to answer when one of them seems to be missing. They ask as well,
# as soon as their own watchdog finds that the collective does not end.
_DIAGNOSIS_SECONDS = 2.0
_ENDING_SECONDS = 1.0  # of a process whose sockets are closed already
_ENDS_OF_GROUPS = (MismatchError, PeerLostError, CollectiveTimeoutError, GroupClosedError)


def begins_at_once(verb: Verb) -> bool:
    """Return whether NCCL is given ``verb`` before the ranks have compared it."""
    return verb.reduces or (verb.in_place and not verb.is_message)


_BEGUN = tuple(f"{verb}(cupy " for verb in VERBS if begins_at_once(verb))
_BEGUN_IN_WORDS = (
    "NCCL had begun it, so what the arrays hold is undefined, and this group cannot be used again"
)


@runtime_checkable
class ComparesAhead(Protocol):
    """A backend that lets a comparison end before the other ranks join; see ``Call.is_ahead``."""

    def look_back(self, name: str, seconds: float) -> bool:
        """Return whether all ranks have made the calls that this rank made ahead.

        Does not block. ``name`` is the last of them, for errors.

        Raises:
            MismatchError: the ranks differ in one of them.
            CollectiveTimeoutError: a rank has not made one for ``seconds``.
        """


class Comparisons:
    """Compares calls over ``cpu``; the first failure ends ``communicator``.

    The next call, the watchdog or a wait looks at the pending comparisons.
    """

    def __init__(self, cpu: Backend, communicator: Communicator) -> None:
        self._cpu, self.communicator = cpu, communicator
        self._looks_back = cpu.look_back if isinstance(cpu, ComparesAhead) else None
        self._posted: deque[Work] = deque()
        # Of ``_posted``. The communicator's lock is held during a launch, which the watchdog
        # must be able to end.
        self._lock = threading.RLock()  # signal handlers run on the thread that holds it
        self.latest: Work = Done()
        # Calls that a backend compares later: how many, and how many were compared by which time.
        self._ahead, self.compared_ahead, self._name = 0, (0, 0.0), ""

    def post(self, call: Call) -> None:
        """Begin to compare ``call``, which NCCL is about to begin; the lock is held.

        Raises DistributedError if an earlier comparison has found an error.
        """
        self._add(compared(call, blocking=False, is_ahead=self._looks_back is not None))
        if self._posted:
            self.look()
        self.communicator.require(call.name)

    def refuse(self, call: Call) -> None:
        """Let other ranks raise (for a message, its peer); if NCCL began there, end the group."""
        if call.verb.is_message:
            self._cpu.start(call)
            return
        with self.communicator.lock:
            self._add(call)

    def _add(self, call: Call) -> None:
        work = self._cpu.start(call)
        if call.is_ahead and type(work) is Done:
            self._ahead, self._name = self._ahead + 1, call.name
            self.latest = _Ahead(self, self._ahead)
        else:
            self.latest = work
            with self._lock:
                self._posted.append(work)

    def look_back(self) -> bool:
        """Compare the calls made ahead; return whether all are compared. Any thread; no wait."""
        ahead = self._ahead
        if self.compared_ahead[0] >= ahead or self._looks_back is None:
            return True
        try:
            is_over = self._looks_back(self._name, self.communicator.timeout)
        except DistributedError as error:
            self._judge(error)
            return True
        if is_over:
            self.compared_ahead = ahead, time.monotonic()
        return is_over

    def look(self) -> None:
        """End the communicator if a comparison has failed; from any thread. Does not wait."""
        while True:
            with self._lock:
                if not self._posted or not self._posted[0].is_completed():
                    return
                ended = self._posted.popleft()
            if (error := _failure(ended)) is not None:
                self._judge(error)

    def finish(self, seconds: float | None = None) -> None:
        """Block until all that was posted has been compared, but for each at most ``seconds``."""
        is_over = lambda: self.look_back() or self.communicator.broken is not None  # noqa: E731
        if not poll(is_over, math.inf if seconds is None else seconds):
            return
        while (work := self.oldest()) is not None:
            if _failure(work, seconds) is not None and not work.is_completed():
                return

    def oldest(self) -> Work | None:
        """Return the first that is still being compared, if any; does not wait."""
        self.look()
        with self._lock:
            is_over = self.communicator.broken is not None or not self._posted
            return None if is_over else self._posted[0]

    def ask(self, call: Call) -> Any:
        """Block until every rank has called what goes with ``call``; see ``Call.compared``.

        Raises as ``Work.wait``, which ends the communicator; a MismatchError only if NCCL has begun
        one of the calls on another rank.
        """
        return self.meet([compared(call, blocking=True)])

    def rows_for_this_rank(self, call: Call) -> list[int]:
        """Return how many rows each rank has for this one, which has ``rows`` for them."""
        mine, size = np.array(call.rows, np.int64), self._cpu.size
        table = self.meet([Call(ALL_GATHER, mine, part_of="all_to_all(rows=...)")])
        rows: list[int] = table.reshape(size, size)[:, self._cpu.rank].tolist()
        return rows

    def meet(self, calls: Sequence[Call]) -> Any:
        """Return the result of blocking ``calls`` over the CPU's backend; raises as ``ask``."""
        cpu = self._cpu
        try:
            work = cpu.start(calls[0]) if len(calls) == 1 else cpu.start_many(calls)
            return work.wait()
        except _ENDS_OF_GROUPS as error:
            self.look()
            self._judge(error)
            if self.communicator.broken in (None, error):
                raise
            raise self.communicator.error() from error

    def _judge(self, error: DistributedError) -> None:
        """End the communicator because of ``error``, unless NCCL has begun none of the calls."""
        if not isinstance(error, MismatchError) or not error.group_lives:
            self._end(error)
        elif any(call.startswith(_BEGUN) for call in error.calls):
            words = str(error).replace(NOTHING_CHANGED, _BEGUN_IN_WORDS)
            self._end(MismatchError(words, group_lives=False, calls=error.calls))

    def find_lost(self, doing: str) -> None:
        """End the communicator if a rank is lost, though nothing waits for it; from any thread."""
        if (trouble := self._cpu.lost(doing)) is not None:
            self._end(trouble)

    def _end(self, trouble: DistributedError) -> None:
        """End what runs on the device, and the waits of other ranks for this one over ``cpu``."""
        self.communicator.who_is_missing = None  # that is known
        self.communicator.fail(trouble)
        self._cpu.abort(trouble)

    def who_is_missing(self) -> tuple[type[DistributedError] | None, str]:
        """Find out who is still there, after NCCL has failed; the others raise as well."""
        seconds = min(self.communicator.timeout, _DIAGNOSIS_SECONDS)
        refusal = f"nothing more, as NCCL has failed there: {self.communicator.broken}"
        try:
            self._cpu.start(Call(BARRIER, seconds=seconds, refusal=refusal)).wait()
        except MismatchError:
            # A rank that has ended since may have answered by a call that it made ahead.
            if (gone := self._lost_within(_ENDING_SECONDS)) is not None:
                return PeerLostError, f"Asked over {self._cpu.path}: {gone}"
            return None, f"Every rank answered over {self._cpu.path}, so none is gone"
        except DistributedError as error:
            # A comparison has found it before where the group is closed by now.
            ended = (_failure(work) for work in list(self._posted) if work.is_completed())
            found = next(filter(None, ended), error)
            lost = PeerLostError if isinstance(found, PeerLostError) else None
            return lost, f"Asked over {self._cpu.path}: {found}"
        return None, f"Nothing is known over {self._cpu.path}"

    def _lost_within(self, seconds: float) -> DistributedError | None:
        """Return the lost rank, for up to ``seconds`` if only NCCL has noticed its end so far."""
        if isinstance(self.communicator.broken, PeerLostError):
            poll(lambda: self._cpu.lost("NCCL") is not None, seconds)
        lost = self._cpu.lost("NCCL")
        return lost if isinstance(lost, PeerLostError) else None


def _failure(work: Work, seconds: float | None = None) -> DistributedError | None:
    """Wait for ``work``, up to ``seconds``, and return why it has failed, or not ended; or None."""
    try:
        work.wait(seconds)
    except DistributedError as error:
        return error
    return None


class _Ahead(Work):
    """The comparison of call ``number`` of those that a backend compares later."""

    def __init__(self, comparisons: Comparisons, number: int) -> None:
        self._comparisons, self._number, self._ended = comparisons, number, 0.0

    def is_completed(self) -> bool:
        count, ended = self._comparisons.compared_ahead
        if not self._ended and count >= self._number:
            self._ended = ended
        return bool(self._ended)

    def end_time(self) -> float | None:
        return self._ended or None

    def wait(self, timeout: float | None = None) -> None:
        """Return at once: whoever waits for the call finds what its comparison has found."""


def compared(call: Call, blocking: bool, is_ahead: bool = False) -> Call:
    """Return ``call`` as one that ranks only compare; faster than ``replace``."""
    how = call.op, call.scale, call.root, call.peer, call.tag, call.rows, call.out
    rest = blocking, call.seconds, call.part_of
    return Call(call.verb, call.array, *how, *rest, compared=True, is_ahead=is_ahead)
