"""A job from its start to its end: attempts, the first cause, and another start where allowed."""

from __future__ import annotations

import signal
from functools import partial

from flashlight_py.launch.attempt import Attempt
from flashlight_py.launch.hosts import StartError, Team
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options
from flashlight_py.launch.output import Output
from flashlight_py.launch.ranks import counts_of_remaining, places
from flashlight_py.launch.records import store_records

_CANNOT_RUN = 127  # as shells say


def run_job(loop: Loop, team: Team, options: Options) -> int:
    """Run the job and return its exit code: that of the rank that failed first, or 0."""
    counts, restarts = [host.slots for host in team.hosts], 0
    while True:
        output = Output(sum(counts), options.output_dir)
        say = partial(_say, output, team)
        attempt = Attempt(loop, team.signal, output, range(sum(counts)), options.grace, say)
        loop.on_signal = attempt.on_signal
        try:
            team.start(attempt, counts, restarts)
            attempt.run()
        except StartError as error:
            say(f"cannot run {error}")
            return _CANNOT_RUN
        stuck = team.finish()
        attempt.end_output()
        if stuck:
            say(f"processes that the kernel does not let go of are left: {stuck}")
        if output.error:
            output.say(output.error)
        if attempt.interrupted:
            say(f"{_interruption(attempt.interrupted)}; all ranks were ended")
            return 128 + attempt.interrupted
        if attempt.cause is None:
            return 0
        say(_report(attempt, output, team, counts))
        for text in sorted(team.left_out):
            say(text)
        if where := store_records(team.records, sum(counts)):
            say(where)
        remaining = counts_of_remaining(counts, attempt.lost) if options.min_n else counts
        if not may_restart(restarts, options.max_restarts, sum(remaining), options.min_n):
            return _exit_code(attempt)
        counts, restarts = remaining, restarts + 1
        say(f"starting again with {sum(counts)} rank(s), for the {_ordinal(restarts)} time")


def may_restart(restarts: int, most: int | None, remaining: int, least: int | None) -> bool:
    """Return whether a job that was started again ``restarts`` times may be so once more.

    At most ``most`` times; None: never, but as often as ranks can be lost where ``least`` says
    how many are enough. ``remaining`` is how many it would have.
    """
    if least is not None and remaining < least:
        return False
    return restarts < (most if most is not None else 0 if least is None else restarts + 1)


def _say(output: Output, team: Team, text: str) -> None:
    """Write a line of the launcher's own wherever output of the ranks is shown."""
    output.say(text)
    team.say(text)


def _interruption(number: int) -> str:
    if number == signal.SIGPIPE:
        return "the output of the ranks is lost"
    return f"interrupted by {signal.Signals(number).name}"


def _report(attempt: Attempt, output: Output, team: Team, counts: list[int]) -> str:
    assert attempt.cause is not None
    rank, failure = attempt.cause
    host = team.hosts[places(counts)[rank].host]
    others = "; the other ranks were ended" if sum(counts) > 1 else ""
    file = output.files_of(rank)
    where = f" (see {file})" if file else ""
    return f"rank {rank} of {sum(counts)} on {host.name} {failure.what}{where}{others}"


def _exit_code(attempt: Attempt) -> int:
    assert attempt.cause is not None
    code = attempt.cause[1].exit_code or 1
    return code if code > 0 else 128 - code


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"
