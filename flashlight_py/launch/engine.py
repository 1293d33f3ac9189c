"""``spawn`` on an engine that is there already: what Ray, Dask and Spark have in common.

``run`` is called where the program is. An engine brings a function that starts every rank once, in
processes that go on to live afterwards; what happens there is in ``engine_rank``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from flashlight_py.launch.calls import Call
from flashlight_py.launch.engine_rank import Start
from flashlight_py.launch.failures import Failure, first_cause
from flashlight_py.launch.pickling import dumps

T = TypeVar("T")

# How long is waited for the cause, in seconds, once a rank has ended by a mere consequence.
CAUSE_SECONDS = 3.0
# How long is waited for places that others have, or that a failed attempt frees, in seconds.
ROOM_SECONDS = 60.0
# How often is seen what an engine does not report, in seconds.
LOOK_SECONDS = 0.5
# How often work is cancelled that must end, in seconds.
_CANCEL_SECONDS = 0.2

Outcomes = dict[int, bytes | Failure]
"""By rank, the pickled result, or how it failed."""

Attempt = Callable[[Start, Call], Sequence[bytes]]
"""Starts every rank and returns the pickled results in rank order; leaves none when it raises."""


def run(
    what: str,
    attempt: Attempt,
    fn: Callable[..., Any],
    args: Sequence[Any],
    nprocs: int,
    params: Mapping[str, Any] | None,
    timeout: float | None,
    max_restarts: int,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``nprocs`` ranks that ``attempt`` starts; see ``spawn``."""
    call = Call.checked(what, fn, args, nprocs, params, timeout, max_restarts)
    try:
        task = dumps((fn, tuple(args), dict(params or {})), main_can_be_imported=False)
    except TypeError as error:
        raise TypeError(f"{call.name}: the function or its arguments {error}") from error
    return call.results(call.attempted(lambda n: attempt(Start(call.size, n, task), call)))


class Ranks(Protocol):
    """The ranks of one attempt, in an engine that reports the end of each."""

    def start(self) -> None:
        """Start all; does not wait until they run."""

    def outcomes(self, ranks: Set[int], until: float) -> Outcomes:
        """Wait for the end of one of ``ranks``, for a while, and return how those did that have.

        At the latest until ``until``, a time of ``time.monotonic``.
        """

    def end(self) -> None:
        """End the ranks that run, and see that no further one begins."""


def follow(call: Call, ranks: Ranks) -> list[bytes]:
    """Start ``ranks``, return the results of all, in order, and see that none is left.

    Raises:
        RankFailedError: a rank failed; the first cause.
        TimeoutError: time is up.
    """
    try:
        ranks.start()
        return _collected(call, ranks)
    finally:
        ranks.end()


def _collected(call: Call, ranks: Ranks) -> list[bytes]:
    waiting, results, failures = set(range(call.size)), dict[int, bytes](), dict[int, Failure]()
    ends = call.ends
    while waiting and time.monotonic() < ends:
        for rank, outcome in ranks.outcomes(waiting, ends).items():
            waiting.discard(rank)
            if isinstance(outcome, Failure):
                failures[rank] = outcome
            else:
                results[rank] = outcome
        if any(not failure.follows for failure in failures.values()):
            break
        if failures:
            ends = min(ends, time.monotonic() + CAUSE_SECONDS)
    if failures:
        raise call.failed(*first_cause(failures.items()))
    if waiting:
        raise call.late(waiting)
    return [results[rank] for rank in sorted(results)]


def interruptible(
    call: Call,
    work: Callable[[], T],
    cancel: Callable[[], None],
    kind: type[threading.Thread] = threading.Thread,
) -> T:
    """Return what ``work`` does, in a thread, which ``cancel`` ends when time is up or by Ctrl-C.

    ``cancel`` is called until that has happened: the work may not have begun at first. ``kind`` is
    that of the thread.

    Raises:
        TimeoutError: time is up.
        Exception: what ``work`` raises.
    """
    outcome: Future[T] = Future()
    thread = kind(target=_set, args=[outcome, work], daemon=True)
    thread.start()
    try:
        thread.join(seconds_until(call.ends))
        is_late = thread.is_alive()
    finally:
        while thread.is_alive():
            cancel()
            thread.join(_CANCEL_SECONDS)
    if is_late:
        raise call.late(range(call.size))
    return outcome.result()


def _set(outcome: Future[T], work: Callable[[], T]) -> None:
    try:
        outcome.set_result(work())
    except Exception as error:  # noqa: BLE001 - the thread that waits raises it
        outcome.set_exception(error)


def wait_for_room(
    call: Call, seconds: float, count: Callable[[], int], places: str, advice: str
) -> None:
    """Wait until ``count()`` says that there is a place for each rank, for so long at most.

    Raises:
        ValueError: there is not, and ``seconds`` is 0; says how many there are.
        TimeoutError: there was not for so long.
    """
    began = time.monotonic()
    while (found := count()) < call.size:
        waited = time.monotonic() - began
        if began + waited >= min(began + seconds, call.ends):
            after = f", after {waited:.0f} s," if seconds else ""
            raise (TimeoutError if seconds else ValueError)(
                f"{call.name}: {call.size} ranks need as many {places}, and{after} the cluster has "
                f"{found}; {advice}"
            )
        time.sleep(LOOK_SECONDS)  # engines themselves only look again and again


def lost(why: object) -> Failure:
    """Return the failure of a rank that has not reported it itself."""
    text = str(why)
    line = next((line for line in text.splitlines() if line.strip()), type(why).__name__)
    return Failure(f"was lost: {line}", time.monotonic())


def host_of(address: str) -> str:
    """Return the host of an address with a port, such as ``tcp://[::1]:8786`` or ``h0:7077``."""
    return urlsplit(f"//{address.rpartition('//')[2]}").hostname or ""


def seconds_until(ends: float) -> float | None:
    """Return the seconds until a time of ``time.monotonic``, at least 0; None: for ever."""
    return None if math.isinf(ends) else max(ends - time.monotonic(), 0.0)
