"""Functions that ``run`` of Ray, Dask and Spark call in the process of the user."""

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

SLOT_SECONDS = 60.0  # seconds to wait until other jobs or a failed attempt free slots
POLL_SECONDS = 0.5  # seconds between two polls of an engine

Outcomes = dict[int, bytes | Failure]  # by rank: the pickled result, or the failure


def run(
    name: str, attempt: Callable[[Start, SpawnCall], Sequence[bytes]], fn: Callable[..., Any],
    args: Sequence[Any], nprocs: int, params: Mapping[str, Any] | None, timeout: float | None,
    max_restarts: int,
) -> list[Any]:  # fmt: skip
    """Run ``fn(rank, *args)`` on ``nprocs`` ranks, like ``spawn``.

    ``attempt`` starts all ranks and returns their pickled results in rank order. Before it raises
    an exception, it must end all ranks.
    """
    call = SpawnCall.checked(name, fn, args, nprocs, params, timeout, max_restarts)
    content, subject = (fn, tuple(args), dict(params or {})), "the function or its arguments"
    task = dumps(content, main_can_be_imported=False, name=f"{call.name}: {subject} ")
    return call.results(call.attempted(lambda n: attempt(Start(call.size, n, task), call)))


class EngineRanks(Protocol):
    """The ranks of one attempt. Ray or Dask starts them and reports when each rank ends."""

    def start(self) -> None:
        """Start all ranks; do not wait until they run."""

    def outcomes(self, ranks: Set[int], until: float) -> Outcomes:
        """Wait until one of ``ranks`` ends, or until the ``time.monotonic`` time ``until``.

        Returns the outcomes of the ended ranks. The dict may be empty, even before ``until``.
        """

    def end(self) -> None:
        """End the running ranks and prevent the start of further ranks."""


def follow(call: SpawnCall, ranks: EngineRanks) -> list[bytes]:
    """Start ``ranks``, wait for them, end them, and return their results in rank order.

    If ranks fail, raise RankFailedError for the rank that caused the other failures. If ranks still
    run at the deadline of ``call``, raise TimeoutError.
    """
    outcomes, ends = Outcomes(), call.ends
    waiting, failures = set(range(call.size)), dict[int, Failure]()
    try:
        ranks.start()
        while waiting and time.monotonic() < ends:
            outcomes.update(ranks.outcomes(waiting, ends))
            waiting.difference_update(outcomes)
            failures = {rank: x for rank, x in outcomes.items() if isinstance(x, Failure)}
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
    return [outcome for _, outcome in sorted(outcomes.items()) if isinstance(outcome, bytes)]


def wait_for_slots(
    call: SpawnCall, seconds: float, count: Callable[[], int], unit: str, advice: str
) -> None:
    """Wait at most ``seconds`` until ``count()`` returns at least the number of ranks of ``call``.

    Raises:
        ValueError: If there are too few slots and ``seconds`` is 0. The message has the number of
            slots, their name ``unit``, and ``advice``.
        TimeoutError: If there are too few slots after ``seconds`` or the timeout of ``call``.
    """
    began = time.monotonic()
    while (available := count()) < call.size:
        waited = time.monotonic() - began
        if began + waited >= min(began + seconds, call.ends):
            after = f" after {waited:.0f} s" if seconds else ""
            raise (TimeoutError if seconds else ValueError)(
                f"{call.name}: expected at least {call.size} {unit}, one per rank, got "
                f"{available}{after}. {advice}"
            )
        time.sleep(POLL_SECONDS)


def lost_rank(reason: object) -> Failure:
    """Return the Failure of a rank that ended without a report. The engine gives the ``reason``."""
    line = next((line for line in str(reason).splitlines() if line.strip()), type(reason).__name__)
    return Failure(f"was lost: {line}", time.monotonic())


def host_of(address: str) -> str:
    """Return the host of an address such as ``tcp://[::1]:8786`` or ``h0:7077``."""
    return urlsplit(f"//{address.rpartition('//')[2]}").hostname or ""


def seconds_until(ends: float) -> float | None:
    """Return the seconds from now to the ``time.monotonic`` time ``ends``; None for infinity."""
    return None if math.isinf(ends) else max(ends - time.monotonic(), 0.0)
