"""One run of all ranks: until all have ended, one has failed, or somebody interrupts."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from flashlight_py.launch.failures import Failure, first_cause, is_consequence
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.output import Output, Source
from flashlight_py.launch.processes import describe_exit

__all__ = ["Attempt", "Team", "failure_of_exit"]

# How long to listen for the cause, in seconds, once a rank has ended by a mere consequence.
CAUSE_SECONDS = 3.0
# After so many seconds in which no rank has ended, once one has, it is told who still runs.
STAYING_SECONDS = 10.0
# So much of a rank's last line is repeated, in characters.
_LONGEST_CAUSE = 200
# Between looks at a shared folder, which tells nobody when it changes.
POLL_SECONDS = 0.25


class Team(Protocol):
    """The ranks of an attempt, wherever they are. They tell the attempt of output and ends."""

    def signal(self, number: int) -> None:
        """Send ``number`` to every rank and to what it has started."""

    def finish(self, grace: float) -> list[int]:
        """Once all ranks have ended, end what they have left: by SIGKILL after ``grace`` seconds.

        Returns the processes that the kernel does not let go of.
        """


class Attempt:
    """Follows ``ranks``; ends all of them by SIGTERM when one fails, by SIGKILL ``grace`` s later.

    ``failures`` are those from before it began to end the ranks. ``interrupted`` is the signal
    that was sent to the launcher, SIGPIPE if their output could not be written, or 0. ``poll``, if
    set, is called a few times a second.
    """

    def __init__(self, loop: Loop, output: Output, ranks: Iterable[int], grace: float) -> None:
        self.failures: dict[int, Failure] = {}
        self.interrupted = 0
        self.is_ending = False
        self.poll: Callable[[], None] | None = None
        self._poll_at = 0.0
        self._loop, self._output, self._grace = loop, output, grace
        self._running = set(ranks)
        self._team: Team | None = None
        self._cause_until = self._kill_at = self._tell_at = math.inf
        self._has_told = False
        loop.hear_signal = self.hear_signal

    def run(self, team: Team) -> None:
        """Block until all ranks have ended."""
        self._team = team
        while self._running:
            poll_at = self._poll_at if self.poll else math.inf
            times = (self._cause_until, self._kill_at, self._tell_at, self._output.flush_at())
            self._loop.once(min(*times, poll_at))
            self._look_at_the_clock()

    @property
    def cause(self) -> tuple[int, Failure] | None:
        """The rank that failed first, and how."""
        return first_cause(self.failures.items()) if self.failures else None

    @property
    def lost(self) -> set[int]:
        """The ranks that failed of themselves; the first one at least, if any."""
        own = {rank for rank, failure in self.failures.items() if not failure.follows}
        return own or ({self.cause[0]} if self.cause else set())

    def hear_output(self, source: Source, data: bytes) -> None:
        """Show what a rank writes; end all if that cannot be done."""
        self._output.take(source, data)
        self._heed_output()

    def end_output(self) -> None:
        """Show what is left of the output, once nothing of the ranks is."""
        self._team = None
        self._output.end()
        self._heed_output()

    def hear_end(self, rank: int, code: int) -> None:
        """Hear how a rank ended: its exit code, or minus the signal."""
        if code == 0:
            self._running.discard(rank)
            self._tell_at = time.monotonic() + STAYING_SECONDS
        else:
            self.hear_failure(rank, failure_of_exit(code, self._output.last_errors(rank)))

    def hear_failure(self, rank: int, failure: Failure) -> None:
        """Hear that a rank failed, if it ran; end all, at once if it is no mere consequence."""
        if rank not in self._running:
            return
        self._running.discard(rank)
        if self.is_ending:
            return  # by our signal, as far as anybody can tell
        self.failures[rank] = failure
        if failure.follows and self._running:
            self._cause_until = min(self._cause_until, time.monotonic() + CAUSE_SECONDS)
        else:
            self.end(signal.SIGTERM)

    def hear_signal(self, number: signal.Signals) -> None:
        """Hand on a signal to the ranks; all but SIGUSR1 and 2 also end them, a second one now."""
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            if self._team is not None:
                self._team.signal(number)
            return
        if self.interrupted:
            self._kill_at = 0.0
        self.interrupted = self.interrupted or number
        self.end(number)

    def say(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._output.say(text)

    def end(self, number: int) -> None:
        """Begin to end all ranks by ``number``."""
        if self.is_ending:
            return
        self.is_ending = True
        self._cause_until, self._kill_at = math.inf, time.monotonic() + self._grace
        if self._team is not None:
            self._team.signal(number)
            self._team.signal(signal.SIGCONT)  # one that is stopped would not hear it

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if now >= self._cause_until:
            self.end(signal.SIGTERM)
        if now >= self._kill_at and self._team is not None:
            self._kill_at = math.inf
            self._team.signal(signal.SIGKILL)
        if now >= self._tell_at:
            self._tell_who_stays()
        if now >= self._output.flush_at():
            self._output.flush(now)
            self._heed_output()
        if self.poll is not None and now >= self._poll_at:
            self._poll_at = now + POLL_SECONDS
            self.poll()

    def _tell_who_stays(self) -> None:
        """Say once that some ranks still run: one may hang at its exit, where nobody notices."""
        self._tell_at = math.inf
        if self._has_told or self.is_ending:
            return
        self._has_told = True
        self._output.say(
            f"{_still_run(sorted(self._running))}, {STAYING_SECONDS:g} s after the last of the "
            "others has ended with exit code 0; Ctrl-C ends the job"
        )

    def _heed_output(self) -> None:
        if self._output.error and not self.is_ending:
            self.interrupted = signal.SIGPIPE
            self.end(signal.SIGTERM)


def _still_run(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} still runs"
    named = ", ".join(map(str, ranks[:8]))
    return f"ranks {named} still run" if len(ranks) <= 8 else f"{len(ranks)} ranks still run"


def failure_of_exit(code: int, errors: Sequence[str]) -> Failure:
    """Describe an exit by ``code``, or by a signal if negative; ``errors``: its last, chained."""
    error = errors[-1] if errors else ""
    now = time.time()  # comparable between hosts
    if code == 1 and error:
        return Failure(f"raised {_beginning(error)}", now, is_consequence(errors), exit_code=code)
    before = f"; its last traceback ended with {_beginning(error)}" if error else ""
    return Failure(f"{describe_exit(code)}{before}", now, exit_code=code)


def _beginning(error: str) -> str:
    """Return the beginning of a line; the rank's own output has all of it."""
    return error if len(error) <= _LONGEST_CAUSE else f"{error[:_LONGEST_CAUSE]} [...]"
