"""Comparison of the ranks' calls over the group's backend for NumPy arrays.

NCCL compares nothing. A call that reduces or broadcasts starts on the device immediately. If the
calls differ or a rank is missing, the communicator is aborted, because NCCL's kernels would wait
forever. All other calls are compared before they start, because the host needs sizes or peers.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

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

# Seconds in which the other ranks must answer ``find_missing``. Every rank calls it when its own
# watchdog detects a late collective.
_DIAGNOSIS_SECONDS = 2.0
_ENDING_SECONDS = 1.0  # Seconds until a process ends after its sockets have closed.
_ENDS_OF_GROUPS = (MismatchError, PeerLostError, CollectiveTimeoutError, GroupClosedError)


def begins_at_once(verb: Verb) -> bool:
    """Return whether NCCL starts ``verb`` before the ranks have compared it."""
    return verb.reduces or (verb.in_place and not verb.is_message)


_STARTED_CALLS = tuple(f"{verb}(cupy " for verb in VERBS if begins_at_once(verb))
_STARTED_TEXT = (
    "NCCL had started the call. The arrays are undefined, and this group cannot be used again"
)


class Comparisons:
    """Comparisons of calls over ``cpu``. The first failure ends ``communicator``.

    The next call, the watchdog or a wait checks the pending comparisons.
    """

    def __init__(self, cpu: Backend, communicator: Communicator) -> None:
        self._cpu, self.communicator = cpu, communicator
        self._looks_back = cpu.look_back
        self._posted: deque[Work] = deque()
        # The watchdog needs a lock of its own for ``_posted``: it must be able to end a launch, and
        # a launch holds the communicator's lock.
        self._lock = threading.RLock()  # reentrant, because a signal handler may need it
        self.latest: Work = Done()
        # ``_ahead``: number of calls made ahead. ``compared_ahead``: number of them that have been
        # compared, and the time at which the latest comparison ended.
        self._ahead, self.compared_ahead, self._name = 0, (0, 0.0), ""

    def post(self, call: Call) -> None:
        """Start to compare ``call``, before NCCL starts it. The caller holds ``communicator.lock``.

        Raises DistributedError if an earlier comparison failed.
        """
        self._add(compared(call, blocking=False, is_ahead=self._looks_back is not None))
        if self._posted:
            self.check()
        self.communicator.require(call.name)

    def refuse(self, call: Call) -> None:
        """Make the other ranks, or the peer of a message, raise. This rank rejected ``call``."""
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
        """Compare the calls made ahead; return whether all of them are compared. Does not block."""
        ahead = self._ahead
        if self.compared_ahead[0] >= ahead or self._looks_back is None:
            return True
        try:
            is_over: bool = self._looks_back(self._name, self.communicator.timeout)
        except DistributedError as error:
            self._judge(error)
            return True
        if is_over:
            self.compared_ahead = ahead, time.monotonic()
        return is_over

    def check(self) -> None:
        """End the communicator if a comparison failed. Any thread may call this. Does not block."""
        while True:
            with self._lock:
                if not self._posted or not self._posted[0].is_completed():
                    return
                ended = self._posted.popleft()
            if (error := _failure(ended)) is not None:
                self._judge(error)

    def finish(self, seconds: float | None = None) -> None:
        """Block until all posted calls have been compared, at most ``seconds`` for each (None:
        forever)."""
        is_over = lambda: self.look_back() or self.communicator.broken is not None  # noqa: E731
        if not poll(is_over, math.inf if seconds is None else seconds):
            return
        while (work := self.oldest()) is not None:
            if _failure(work, seconds) is not None and not work.is_completed():
                return

    def oldest(self) -> Work | None:
        """Return the oldest pending comparison, or None; does not block."""
        self.check()
        with self._lock:
            is_over = self.communicator.broken is not None or not self._posted
            return None if is_over else self._posted[0]

    def compare(self, call: Call) -> Any:
        """Block until every rank has made the same call; return the result of the comparison.

        Raises the errors of ``Work.wait``, which end the communicator. A MismatchError ends it only
        if NCCL has started one of the calls on another rank.
        """
        return self.run([compared(call, blocking=True)])

    def rows_for_this_rank(self, call: Call) -> list[int]:
        """Return the number of rows that each rank sends to this rank in an all_to_all."""
        sent_rows, size = np.array(call.rows, np.int64), self._cpu.size
        table = self.run([Call(ALL_GATHER, sent_rows, part_of="all_to_all(rows=...)")])
        rows: list[int] = table.reshape(size, size)[:, self._cpu.rank].tolist()
        return rows

    def run(self, calls: Sequence[Call]) -> Any:
        """Run ``calls`` on the CPU backend as one operation. Raises like ``compare``."""
        cpu = self._cpu
        try:
            return (cpu.start(calls[0]) if len(calls) == 1 else cpu.start_many(calls)).wait()
        except _ENDS_OF_GROUPS as error:
            self.check()
            self._judge(error)
            if self.communicator.broken in (None, error):
                raise
            raise self.communicator.error() from error

    def _judge(self, error: DistributedError) -> None:
        """End the communicator, except after a mismatch of calls that NCCL has not started."""
        if not isinstance(error, MismatchError) or not error.group_lives:
            self._end(error)
        elif any(call.startswith(_STARTED_CALLS) for call in error.calls):
            words = str(error).replace(NOTHING_CHANGED, _STARTED_TEXT)
            self._end(MismatchError(words, group_lives=False, calls=error.calls))

    def find_lost(self, doing: str) -> None:
        """End the communicator if a rank is lost. Any thread may call this. Does not block."""
        if (error := self._cpu.lost(doing)) is not None:
            self._end(error)

    def _end(self, error: DistributedError) -> None:
        """End the collectives of this rank because of ``error``, and notify the other ranks."""
        self.communicator.find_missing = None  # ``error`` names missing ranks already
        self.communicator.fail(error)
        self._cpu.abort(error)

    def find_missing(self) -> tuple[type[DistributedError] | None, str]:
        """Ask all ranks. Return (more precise error class or None, sentence about lost ranks)."""
        seconds = min(self.communicator.timeout, _DIAGNOSIS_SECONDS)
        refusal = f"nothing more, because NCCL failed: {self.communicator.broken}"
        try:
            self._cpu.start(Call(BARRIER, seconds=seconds, refusal=refusal)).wait()
        except MismatchError:
            # A rank that made a call ahead and then ended seems to answer. Look for its loss.
            if isinstance(self.communicator.broken, PeerLostError):  # NCCL has reported a loss
                poll(lambda: self._cpu.lost("NCCL") is not None, _ENDING_SECONDS)
            if isinstance(lost := self._cpu.lost("NCCL"), PeerLostError):
                return PeerLostError, f"Asked over {self._cpu.path}: {lost}"
            return None, f"Every rank answered over {self._cpu.path}, so no rank is lost"
        except DistributedError as error:
            # If the group is already closed, the reason is the error of an earlier comparison.
            ended = (_failure(work) for work in list(self._posted) if work.is_completed())
            cause = next(filter(None, ended), error)
            kind = PeerLostError if isinstance(cause, PeerLostError) else None
            return kind, f"Asked over {self._cpu.path}: {cause}"
        return None, f"No missing rank was found over {self._cpu.path}"


def _failure(work: Work, seconds: float | None = None) -> DistributedError | None:
    """Wait for ``work``; return its error, or None. After ``seconds``, return a timeout error."""
    try:
        work.wait(seconds)
    except DistributedError as error:
        return error
    return None


class _Ahead(Work):
    """The pending comparison of the ``number``-th call made ahead; ``look_back`` completes it."""

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
        """Do nothing: ``Work.wait`` of the compared call raises an error of the comparison."""


def compared(call: Call, blocking: bool, is_ahead: bool = False) -> Call:
    """Return a copy of ``call`` that is only compared. This is faster than ``replace``."""
    options = call.op, call.scale, call.root, call.peer, call.tag, call.rows, call.out
    rest = blocking, call.seconds, call.part_of
    return Call(call.verb, call.array, *options, *rest, compared=True, is_ahead=is_ahead)
