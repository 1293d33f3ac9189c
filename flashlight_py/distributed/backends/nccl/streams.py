"""The order between a group's communication stream and the compute streams of users.

A collective waits for the work that was queued on the caller's current stream. A request for the
result makes the caller's stream wait for the collective. The host never waits, so only the watchdog
detects a collective that cannot end.

NCCL compares nothing, so the ranks compare their calls over the group's backend for NumPy arrays. A
call that reduces or broadcasts starts on the device immediately. If the calls differ or a rank is
missing, the communicator is aborted, because NCCL's kernels would wait forever. All other calls are
compared before they start, because the host needs sizes or peers.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashlight_py import errors
from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl.communicator import Communicator, poll
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.failures.wording import NOTHING_CHANGED
from flashlight_py.distributed.verbs import ALL_GATHER, BARRIER, VERBS, Verb
from flashlight_py.distributed.work import Done, Work

# Seconds in which the other ranks must answer ``find_missing``. Every rank calls it when its own
# watchdog detects a late collective.
_DIAGNOSIS_SECONDS = 2.0
_ENDING_SECONDS = 1.0  # Seconds until a process ends after its sockets have closed.
_ENDS_OF_GROUPS = (
    errors.MismatchError,
    errors.PeerLostError,
    errors.CollectiveTimeoutError,
    errors.GroupClosedError,
)


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
        except errors.DistributedError as error:
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

    def _judge(self, error: errors.DistributedError) -> None:
        """End the communicator, except after a mismatch of calls that NCCL has not started."""
        if not isinstance(error, errors.MismatchError) or not error.group_lives:
            self._end(error)
        elif any(call.startswith(_STARTED_CALLS) for call in error.calls):
            words = str(error).replace(NOTHING_CHANGED, _STARTED_TEXT)
            self._end(errors.MismatchError(words, group_lives=False, calls=error.calls))

    def find_lost(self, doing: str) -> None:
        """End the communicator if a rank is lost. Any thread may call this. Does not block."""
        if (error := self._cpu.lost(doing)) is not None:
            self._end(error)

    def _end(self, error: errors.DistributedError) -> None:
        """End the collectives of this rank because of ``error``, and notify the other ranks."""
        self.communicator.find_missing = None  # ``error`` names missing ranks already
        self.communicator.fail(error)
        self._cpu.abort(error)

    def find_missing(self) -> tuple[type[errors.DistributedError] | None, str]:
        """Ask all ranks. Return (more precise error class or None, sentence about lost ranks)."""
        seconds = min(self.communicator.timeout, _DIAGNOSIS_SECONDS)
        refusal = f"nothing more, because NCCL failed: {self.communicator.broken}"
        try:
            self._cpu.start(Call(BARRIER, seconds=seconds, refusal=refusal)).wait()
        except errors.MismatchError:
            # A rank that made a call ahead and then ended seems to answer. Look for its loss.
            if isinstance(self.communicator.broken, errors.PeerLostError):
                poll(lambda: self._cpu.lost("NCCL") is not None, _ENDING_SECONDS)
            if isinstance(lost := self._cpu.lost("NCCL"), errors.PeerLostError):
                return errors.PeerLostError, f"Asked over {self._cpu.path}: {lost}"
            return None, f"Every rank answered over {self._cpu.path}, so no rank is lost"
        except errors.DistributedError as error:
            # If the group is already closed, the reason is the error of an earlier comparison.
            ended = (_failure(work) for work in list(self._posted) if work.is_completed())
            cause = next(filter(None, ended), error)
            kind = errors.PeerLostError if isinstance(cause, errors.PeerLostError) else None
            return kind, f"Asked over {self._cpu.path}: {cause}"
        return None, f"No missing rank was found over {self._cpu.path}"


def _failure(work: Work, seconds: float | None = None) -> errors.DistributedError | None:
    """Wait for ``work``; return its error, or None. After ``seconds``, return a timeout error."""
    try:
        work.wait(seconds)
    except errors.DistributedError as error:
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


_INTERVAL = 0.2
# Seconds between checks while a profile is recorded, which shows when collectives ended.
_PROFILE_INTERVAL = 0.0005
# Maximum number of pending collectives of a communicator. CUDA queues 1,024 launches; a further
# launch would block the host, and an abort would block as well.
MAX_PENDING = 256
# Minimum seconds between checks for lost ranks: a check takes some system calls per rank.
_LOSS_INTERVAL = 0.15
# Statuses of an event that has not failed: success, cudaErrorNotReady, and errors during a capture
# by another thread (cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread).
_NO_FAILURES = {0, 600, *range(900, 909)}


@dataclass
class DeviceFlight:
    """A collective that was launched on the device; ``started`` is a time in seconds.

    ``event`` is recorded after the collective, and may later serve another collective. ``ended`` is
    the time at which the end of the collective was first detected. ``compared`` is the comparison
    of the ranks' calls. ``arrays`` are kept, because CuPy would reuse their memory too early.
    """

    verb: str
    event: Any
    arrays: Sequence[Array]
    compared: Work = field(default_factory=Done)
    started: float = field(default_factory=time.monotonic)
    has_ended: bool = False
    ended: float | None = None

    def start_time(self, free: float = 0.0) -> float:
        """Return when the device could start: all ranks have called, and ``free`` has passed."""
        if not self.compared.is_completed():
            return math.inf  # not late: the comparison has its own timeout
        return max(self.started, self.compared.end_time() or 0.0, free)

    def check(self) -> bool:
        """Return whether the collective has ended; releases the arrays if it has."""
        if not self.has_ended and self.event.done:
            self.has_ended, self.arrays, self.ended = True, (), time.monotonic()
        return self.has_ended


class Flights:
    """The pending collectives in launch order. They also end in this order.

    They use a fixed set of ``events``. The watchdog removes ended collectives while other threads
    add new ones.
    """

    def __init__(self, events: Iterable[Any]) -> None:
        self._pending: deque[DeviceFlight] = deque()
        self._events = deque(events)
        self._lock = threading.RLock()  # reentrant: releasing an array may run any code
        self.last_end = 0.0  # time at which the end of a collective was last detected

    def free_event(self) -> Any | None:
        """Return an event for the next collective, or None if all are in use."""
        with self._lock:
            if not self._events:
                self.oldest()
            return self._events[0] if self._events else None

    def add(self, flight: DeviceFlight) -> None:
        """Add ``flight``, whose event is from ``free_event``. Remove the oldest one if it ended."""
        with self._lock:
            self._events.popleft()
            self._pending.append(flight)
            if self._pending[0].check():
                self._remove_oldest()

    def oldest(self) -> DeviceFlight | None:
        """Return the first collective that has not ended, or None."""
        with self._lock:
            while self._pending and self._pending[0].check():
                self._remove_oldest()
            return self._pending[0] if self._pending else None

    def _remove_oldest(self) -> None:
        flight = self._pending.popleft()
        self._events.append(flight.event)
        self.last_end = flight.ended or self.last_end

    def newest(self) -> DeviceFlight | None:
        """Return the collective with the latest launch, or None if all have ended."""
        with self._lock:
            return self._pending[-1] if self._pending else None

    def clear(self) -> None:
        """Remove all collectives and release their arrays. No collective may be running."""
        with self._lock:
            while self._pending:
                self._pending.popleft().arrays = ()
            self._events.clear()


class NcclWatchdog:
    """A thread that ends the communicator if its oldest collective is late or fails."""

    def __init__(self, cuda: Any, index: int, flights: Flights, comparisons: Comparisons) -> None:
        self._runtime = cuda.runtime
        self._device = cuda.Device(index)  # only the watchdog's thread uses it
        self._communicator, self._flights = comparisons.communicator, flights
        self._comparisons, self._next = comparisons, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashlight-nccl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; blocks for at most one check."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._device.use()
            while self._communicator.broken is None:
                profiled = journal.listener is not None
                if self._stop.wait(_PROFILE_INTERVAL if profiled else _INTERVAL):
                    break
                self.check()
        except Exception as error:
            prefix, name = self._communicator.doing("watchdog"), type(error).__name__
            reason = "Without its watchdog the group cannot detect lost ranks, so it is closed"
            self._communicator.fail(errors.DistributedError(f"{prefix}: {name}: {error}. {reason}"))
            raise

    def check(self, needs_all: bool = False) -> None:
        """End the communicator if calls differ, a rank is lost, or a collective is late or fails.

        Set ``needs_all`` if this rank waits for other ranks before a launch. A check takes no lock
        that a thread inside a launch holds.
        """
        communicator = self._communicator
        self._comparisons.check()
        self._comparisons.look_back()
        # After an abort, ``watch`` would see no error: NCCL's state is that of a normal end.
        if communicator.broken is not None:
            return
        oldest, now = self._flights.oldest(), time.monotonic()
        blocks = now - communicator.launching_since > _INTERVAL
        if (oldest is not None or needs_all or blocks) and now >= self._next:
            self._next = now + _LOSS_INTERVAL
            self._comparisons.find_lost("NCCL" if oldest is None else oldest.verb)
        if oldest is not None:
            # If CUDA has failed, the event never completes, and only its status shows the failure.
            status = self._runtime.eventQuery(oldest.event.ptr)
            is_failure = status not in _NO_FAILURES
            failure = str(self._runtime.CUDARuntimeError(status)) if is_failure else ""
            if not oldest.has_ended:  # otherwise another collective uses its event
                communicator.watch(oldest.verb, oldest.start_time(self._flights.last_end), failure)
        elif blocks:
            communicator.watch("launch", math.inf)
