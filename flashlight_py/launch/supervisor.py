"""One run of all ranks: until all have ended, one has failed, or somebody interrupts."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Iterable, Mapping

from flashlight_py import system
from flashlight_py.launch.failures import Failure, first_cause
from flashlight_py.launch.loop import HARMLESS, Poll
from flashlight_py.launch.output import RankOutput

# Seconds to wait for the cause, once a rank has failed because of another one: ranks that wait for
# the failed rank notice first.
CAUSE_SECONDS = 3.0
STAYING_SECONDS = 10.0  # after the last end of a rank, until ranks that still run are reported


class Supervisor:
    """Follows ``ranks``; ends all of them by SIGTERM when one fails, by SIGKILL ``grace`` s later.

    ``send`` sends a signal to every rank and to its children. ``failures`` are those from before
    the end began, ``undecided`` the ranks that have neither failed nor returned. ``interrupted`` is
    the signal that was sent to the launcher, SIGPIPE if output could not be written, or 0. ``say``
    is called once if some ranks still run long after others: one may hang at its exit.
    """

    def __init__(
        self,
        loop: Poll,
        send: Callable[[int], None],
        output: RankOutput,
        ranks: Iterable[int],
        grace: float,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.failures: dict[int, Failure] = {}
        self._gone: set[int] = set()  # with their host
        self.interrupted = 0
        self.is_ending = False
        self._loop, self._send, self._output, self._grace = loop, send, output, grace
        self._running = set(ranks)
        self.undecided = set(self._running)
        self._cause_until = self._kill_at = self._report_at = math.inf
        self._say = say  # None once it was called
        output.on_error = self.on_lost_output

    def run(self, until: float = math.inf) -> None:
        """Block until all ranks have ended, or the time ``until`` while some are undecided."""
        while self._running and (not self.undecided or system.monotonic() < until):
            times = (self._cause_until, self._kill_at, self._report_at, self._output.flush_at())
            self._loop.once(min(*times, until if self.undecided else math.inf))
            self._check_times()

    @property
    def cause(self) -> tuple[int, Failure] | None:
        return first_cause(self.failures.items()) if self.failures else None

    @property
    def lost(self) -> set[int]:
        """The ranks that failed of themselves, or whose host is lost; the first one at least."""
        own = {rank for rank, failure in self.failures.items() if not failure.follows}
        return own | self._gone or ({self.cause[0]} if self.cause else set())

    def on_failure(self, failures: Mapping[int, Failure]) -> None:
        """Record how ranks failed that are undecided; end all, unless the cause may be another."""
        new = {rank: failure for rank, failure in failures.items() if rank in self.undecided}
        self.undecided.difference_update(new)
        if self.is_ending or not new:
            return  # by our signal, as far as anybody can know
        self.failures.update(new)
        if self.undecided and all(failure.follows for failure in new.values()):
            self._cause_until = min(self._cause_until, system.monotonic() + CAUSE_SECONDS)
        else:
            self.end(signal.SIGTERM)

    def on_lost(self, ranks: Collection[int], failure: Failure) -> None:
        """Record that the host of ``ranks``, which are all that it has, is lost.

        Also while all are being ended: that others have lost these ranks is often noticed first.
        """
        self._gone.update(ranks)
        lost = {rank: failure for rank in ranks if rank in self.undecided}
        self.on_failure(lost)
        self.failures.update(lost)
        self.on_end(ranks)

    def on_return(self, rank: int) -> None:
        """Record that ``rank`` has done its work; end all if it was waited for in vain."""
        self.undecided.discard(rank)
        if self.failures and not self.undecided:
            self.end(signal.SIGTERM)

    def on_exit(self, rank: int, code: int) -> None:
        """Record the exit code of ``rank``, or minus the signal."""
        if code == 0:
            self.on_return(rank)
        else:
            self.on_failure({rank: Failure.of_exit(code, self._output.last_errors(rank))})
        self.on_end([rank])

    def on_end(self, ranks: Iterable[int]) -> None:
        """Record that ``ranks`` do not run, or not any more."""
        self._running.difference_update(ranks)
        self._report_at = system.monotonic() + STAYING_SECONDS

    def on_lost_output(self) -> None:
        """End all, as nobody can see what they write."""
        if not self.is_ending:
            self.interrupted = signal.SIGPIPE
            self.end(signal.SIGTERM)

    def on_signal(self, number: signal.Signals) -> None:
        """Hand on a signal to the ranks; all but SIGUSR1 and 2 also end them, a second one now."""
        if number in HARMLESS:
            self._send(number)
            return
        if self.interrupted:
            self._kill_at = 0.0
        self.interrupted = self.interrupted or number
        self.end(number)

    def end(self, number: int) -> None:
        if self.is_ending:
            return
        self.is_ending = True
        self._cause_until, self._kill_at = math.inf, system.monotonic() + self._grace
        self._send(number)
        self._send(signal.SIGCONT)  # one that is stopped would not notice it

    def _check_times(self) -> None:
        now = system.monotonic()
        if now >= self._cause_until:
            self.end(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._send(signal.SIGKILL)
        if now >= self._report_at:
            self._report_at = math.inf
            if self._say is not None and (ranks := sorted(self._running)) and not self.is_ending:
                named = ", ".join(map(str, ranks))
                who = f"ranks {named} still run" if len(ranks) > 1 else f"rank {named} still runs"
                self._say(
                    f"{who if len(ranks) <= 8 else f'{len(ranks)} ranks still run'}, "
                    f"{STAYING_SECONDS:g} s after the last of the others has ended with exit code "
                    "0; Ctrl-C ends the job"
                )
                self._say = None
        if now >= self._output.flush_at():
            self._output.flush(now)
