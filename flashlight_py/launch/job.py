"""A job from its start to its end: attempts, the first cause, and another start where allowed."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from typing import Protocol

from flashlight_py.launch.attempt import Attempt, Team
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options
from flashlight_py.launch.output import Output
from flashlight_py.launch.plan import counts_of_remaining, may_restart, places

__all__ = ["Site", "StartError", "run_job"]


class StartError(Exception):
    """A rank cannot be started; ``__cause__`` is what the system says."""


class Site(Protocol):
    """Where the ranks of a job are, and how they are started there.

    ``hosts`` are names, ``counts`` how many ranks each has at first.
    """

    hosts: list[str]
    counts: list[int]

    def heard(self, counts: Sequence[int]) -> Iterable[int]:
        """Return the ranks whose ends this launcher hears."""

    def start(self, loop: Loop, attempt: Attempt, counts: Sequence[int], restarts: int) -> Team:
        """Start the ranks; each end and output is told to ``attempt``."""

    def conclude(self, loop: Loop, attempt: Attempt) -> None:
        """Add to ``attempt`` what the launchers of other hosts know of its end."""

    def close(self) -> None:
        """The job is over."""


def run_job(loop: Loop, site: Site, options: Options) -> int:
    """Run the job and return its exit code: that of the rank that failed first, or 0.

    Raises:
        StartError: the program cannot be started.
    """
    counts, restarts = list(site.counts), 0
    while True:
        output = Output(sum(counts), options.output_dir)
        attempt = Attempt(loop, output, site.heard(counts), options.grace)
        _follow(loop, site, attempt, output, counts, restarts, options.grace)
        if output.error:
            output.say(output.error)
        if attempt.interrupted:
            output.say(f"{_interruption(attempt.interrupted)}; all ranks were ended")
            return 128 + attempt.interrupted
        if attempt.cause is None:
            return 0
        output.say(_report(attempt, output, site, counts))
        remaining = counts_of_remaining(counts, attempt.lost) if options.min_n else counts
        if not may_restart(restarts, options.max_restarts, sum(remaining), options.min_n):
            return _exit_code(attempt)
        counts, restarts = remaining, restarts + 1
        output.say(f"starting again with {sum(counts)} rank(s), for the {_ordinal(restarts)} time")


def _follow(
    loop: Loop,
    site: Site,
    attempt: Attempt,
    output: Output,
    counts: Sequence[int],
    restarts: int,
    grace: float,
) -> None:
    """Run one attempt until nothing of it is left."""
    try:
        team = site.start(loop, attempt, counts, restarts)
    except OSError as error:
        raise StartError from error
    attempt.run(team)
    stuck = team.finish(grace)
    attempt.end_output()
    if stuck:
        output.say(f"processes that the kernel does not let go of are left: {stuck}")
    site.conclude(loop, attempt)


def _interruption(number: int) -> str:
    if number == signal.SIGPIPE:
        return "the output of the ranks is lost"
    return f"interrupted by {signal.Signals(number).name}"


def _report(attempt: Attempt, output: Output, site: Site, counts: Sequence[int]) -> str:
    assert attempt.cause is not None
    rank, failure = attempt.cause
    host = site.hosts[places(counts)[rank].host]
    others = "; the other ranks were ended" if sum(counts) > 1 else ""
    file = output.files_of(rank)
    where = f" (see {file})" if file else ""
    return f"rank {rank} of {sum(counts)} on {host} {failure.what}{where}{others}"


def _exit_code(attempt: Attempt) -> int:
    assert attempt.cause is not None
    code = attempt.cause[1].exit_code or 1
    return code if code > 0 else 128 - code


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"
