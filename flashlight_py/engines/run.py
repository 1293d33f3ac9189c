"""The common part of ``run`` on Ray, Dask and Spark, in the program; ``rank`` is in the ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol
from urllib.parse import urlsplit

from flashlight_py.engines.rank import Start
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure, first_cause
from flashlight_py.launch.pickling import dumps
from flashlight_py.launch.supervisor import CAUSE_SECONDS

ROOM_SECONDS = 60.0  # to wait for places that others use, or that a failed attempt frees
LOOK_SECONDS = 0.5  # between two looks at what an engine does not report

Outcomes = dict[int, bytes | Failure]  # by rank, the pickled result, or how it failed


def run(
    what: str,
    attempt: Callable[[Start, SpawnCall], Sequence[bytes]],
    fn: Callable[..., Any],
    args: Sequence[Any],
    nprocs: int,
    params: Mapping[str, Any] | None,
    timeout: float | None,
    max_restarts: int,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``nprocs`` ranks; see ``spawn``.

    ``attempt`` starts every rank and returns the pickled results in rank order, or ends all ranks.
    """
    call = SpawnCall.checked(what, fn, args, nprocs, params, timeout, max_restarts)
    sent, words = (fn, tuple(args), dict(params or {})), "the function or its arguments"
    task = dumps(sent, main_can_be_imported=False, what=f"{call.name}: {words} ")
    return call.results(call.attempted(lambda n: attempt(Start(call.size, n, task), call)))


class EngineRanks(Protocol):
    """The ranks of one attempt, in an engine that reports the end of each."""

    def start(self) -> None:
        """Start all; does not wait until they run."""

    def outcomes(self, ranks: Set[int], until: float) -> Outcomes:
        """Wait for one of ``ranks`` to end, at most until a time of ``time.monotonic``.

        Returns the outcomes of all that ended.
        """

    def end(self) -> None:
        """End the ranks that run, and see that no further one begins."""


def follow(call: SpawnCall, ranks: EngineRanks) -> list[bytes]:
    """Start ``ranks``, return the results of all, in order, and see that none is left.

    Raises RankFailedError for the first cause, or TimeoutError.
    """
    found, ends = Outcomes(), call.ends
    waiting, failures = set(range(call.size)), dict[int, Failure]()
    try:
        ranks.start()
        while waiting and time.monotonic() < ends:
            found.update(ranks.outcomes(waiting, ends))
            waiting.difference_update(found)
            failures = {rank: each for rank, each in found.items() if isinstance(each, Failure)}
            if any(not failure.follows for failure in failures.values()):
                break
            if failures:
                ends = min(ends, time.monotonic() + CAUSE_SECONDS)
    finally:
        ranks.end()
    if failures:
        raise call.failed(*first_cause(failures.items()))
    if waiting:
        raise call.late(waiting)
    return [each for _, each in sorted(found.items()) if isinstance(each, bytes)]


def wait_for_room(
    call: SpawnCall, seconds: float, count: Callable[[], int], places: str, advice: str
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
