"""A rank that did not return: what it tells of its end, and whose end was the first cause."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flashlight_py.errors import (
    CollectiveTimeoutError,
    GroupClosedError,
    PeerLostError,
    RankFailedError,
    RendezvousError,
)
from flashlight_py.launch.processes import describe_exit
from flashlight_py.tracebacks import folded

__all__ = ["CONSEQUENCES", "Failure", "first_cause", "is_consequence"]

# How far from a cause is what a rank raises because of another one. Who has waited in vain may be
# the first to fail, where ranks wait for each other; who has lost another rank is never the first.
_WAITED, _LOST = 1, 2
CONSEQUENCES: Mapping[type[Exception], int] = {
    CollectiveTimeoutError: _WAITED,
    RendezvousError: _WAITED,
    PeerLostError: _LOST,
    GroupClosedError: _LOST,
}
_BY_NAME = {error.__name__: distance for error, distance in CONSEQUENCES.items()}


class Failure(NamedTuple):
    """How one rank ended.

    ``what`` completes the sentence "rank 1 of 4 ...". ``follows`` is 0 where it is no consequence
    of another rank's failure, and the larger, the farther it is from the cause. ``exit_code`` is
    that of a process which ended
    without raising, or minus the signal. ``at`` is when it was noticed, in seconds, compared only
    within one job: of ``time.monotonic`` in ``spawn``, whose ranks are on one machine; of
    ``time.time`` in ``flrun``, where each host's launcher may notice with a clock of its own.
    """

    what: str
    at: float
    follows: int = 0
    traceback: str = ""
    exit_code: int | None = None

    @classmethod
    def of_exception(cls, error: BaseException, at: float) -> Failure:
        """Describe what a rank's call raised; ``SystemExit`` counts as an exit."""
        text = folded(error).rstrip()
        if isinstance(error, SystemExit):
            code = _code_of(error)
            return cls(f"exited with code {code}", at, traceback=text, exit_code=code)
        return cls(f"raised {_in_one_line(error)}", at, _follows(error), text)

    @classmethod
    def of_exit(cls, code: int, at: float) -> Failure:
        """Describe a process that ended without a report: its exit code, or minus the signal."""
        return cls(f"{describe_exit(code)} before it had returned", at, exit_code=code)

    def as_error(self, what_was_done: str, rank: int, size: int) -> RankFailedError:
        """Return the exception that tells of this failure."""
        others = "; the other ranks were ended" if size > 1 else ""
        message = f"{what_was_done}: rank {rank} of {size} {self.what}{others}"
        if self.traceback:
            message = f"{message}\n\n{self.traceback}"
        return RankFailedError(message, rank, self.exit_code)


def is_consequence(last_lines: Iterable[str]) -> int:
    """Return how far chained tracebacks with ``last_lines`` are from a cause; 0: they are one."""
    kinds = (line.partition(":")[0].rpartition(".")[2] for line in last_lines)
    return max((_BY_NAME.get(kind, 0) for kind in kinds), default=0)


def first_cause(failures: Iterable[tuple[int, Failure]]) -> tuple[int, Failure]:
    """Return the (rank, failure) that the others most likely follow from."""
    return min(failures, key=lambda each: (each[1].follows, each[1].at))


def _in_one_line(error: BaseException) -> str:
    """Return the class and the beginning of the message, as the last lines of a traceback do."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    return next(line for line in lines if not line.startswith(" "))  # a SyntaxError's place is


def _code_of(error: SystemExit) -> int:
    """Return the exit code that Python makes of ``sys.exit``'s argument."""
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _follows(error: BaseException) -> int:
    """Return how far ``error``, or what led to it, is from a cause; 0: no other rank is named."""
    seen: list[BaseException] = []
    led_to: BaseException | None = error
    while led_to is not None and led_to not in seen:
        for kind, distance in CONSEQUENCES.items():
            if isinstance(led_to, kind):
                return distance
        seen.append(led_to)
        led_to = led_to.__cause__ or led_to.__context__
    return 0
