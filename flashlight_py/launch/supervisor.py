"""One attempt of all ranks. It ends if all ranks have ended, a rank fails, or a signal arrives."""

import math
import signal
from collections.abc import Callable, Collection, Iterable, Mapping

from flashlight_py import system
from flashlight_py.launch.failures import Failure, first_cause
from flashlight_py.launch.loop import HARMLESS, SIGCONT, SIGKILL, SIGPIPE, Poll
from flashlight_py.launch.output import RankOutput

# Ranks that wait for a failed rank may report an error before the failed rank does.
CAUSE_SECONDS = 3.0  # seconds to wait for the cause after a rank failed because of another rank
STAYING_SECONDS = 10.0  # seconds from the latest exit of a rank until running ranks are reported


class Supervisor:
    """One attempt. If a rank fails, all ranks receive SIGTERM, and SIGKILL ``grace`` seconds later.

    ``send`` sends a signal to every rank and its children. ``failures`` are the failures that were
    detected before this SIGTERM. ``undecided`` are the ranks that have neither failed nor returned.
    ``interrupted`` is the signal that the launcher received, SIGPIPE if output could not be
    written, or 0. If ranks still run STAYING_SECONDS after the latest exit of a rank, ``say`` is
    called once with a text for the user.
    """

    def __init__(
        self, loop: Poll, send: Callable[[int], None], output: RankOutput, ranks: Iterable[int],
        grace: float, say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.failures: dict[int, Failure] = {}
        self._ranks_of_lost_hosts: set[int] = set()
        self.interrupted = 0
        self.is_ending = False
        self._loop, self._send, self._output, self._grace = loop, send, output, grace
        self._running = set(ranks)
        self.undecided = set(self._running)
        self._cause_until = self._kill_at = self._report_at = math.inf
        self._say = say  # None after it was called
        output.on_error = self.on_lost_output

    def run(self, until: float = math.inf) -> None:
        """Block until all ranks have ended. If a rank is undecided at ``until``, return then."""
        while self._running and (not self.undecided or system.monotonic() < until):
            times = (self._cause_until, self._kill_at, self._report_at, self._output.flush_at())
            self._loop.once(min(*times, until if self.undecided else math.inf))
            self._check_times()

    @property
    def cause(self) -> tuple[int, Failure] | None:
        return first_cause(self.failures.items()) if self.failures else None

    @property
    def lost(self) -> set[int]:
        """Ranks of lost hosts, and ranks that caused a failure. A restart does not start them."""
        causes = {rank for rank, failure in self.failures.items() if not failure.follows}
        return causes | self._ranks_of_lost_hosts or ({self.cause[0]} if self.cause else set())

    def on_failure(self, failures: Mapping[int, Failure]) -> None:
        """Record failures. End all ranks now, or later if another rank may be the cause."""
        first = {rank: failure for rank, failure in failures.items() if rank in self.undecided}
        self.undecided.difference_update(first)
        if self.is_ending or not first:
            return  # our signal probably caused these failures
        self.failures.update(first)
        if self.undecided and all(failure.follows for failure in first.values()):
            self._cause_until = min(self._cause_until, system.monotonic() + CAUSE_SECONDS)
        else:
            self.end(signal.SIGTERM)

    def on_lost(self, ranks: Collection[int], failure: Failure) -> None:
        """Record that a host with the ranks ``ranks`` is lost.

        The loss is recorded even if the job is ending, because the ranks of other hosts often
        report the lost peer before the launcher detects the loss.
        """
        self._ranks_of_lost_hosts.update(ranks)
        lost = {rank: failure for rank in ranks if rank in self.undecided}
        self.on_failure(lost)
        self.failures.update(lost)
        self.on_end(ranks)

    def on_return(self, rank: int) -> None:
        """Record that ``rank`` returned. If no rank is undecided and a rank failed, end all."""
        self.undecided.discard(rank)
        if self.failures and not self.undecided:
            self.end(signal.SIGTERM)

    def on_exit(self, rank: int, code: int) -> None:
        """Record that ``rank`` exited with ``code``, or was killed by signal ``-code``."""
        if code == 0:
            self.on_return(rank)
        else:
            self.on_failure({rank: Failure.of_exit(code, self._output.last_errors(rank))})
        self.on_end([rank])

    def on_end(self, ranks: Iterable[int]) -> None:
        """Record that ``ranks`` do not run any more, or were never started."""
        self._running.difference_update(ranks)
        self._report_at = system.monotonic() + STAYING_SECONDS

    def on_lost_output(self) -> None:
        if not self.is_ending:
            self.interrupted = SIGPIPE
            self.end(signal.SIGTERM)

    def on_signal(self, number: signal.Signals) -> None:
        """Forward SIGUSR1 and SIGUSR2. At another signal end all ranks; at the next, kill them."""
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
        self._send(SIGCONT)  # a stopped process would not handle the signal

    def _check_times(self) -> None:
        now = system.monotonic()
        if now >= self._cause_until:
            self.end(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = math.inf
            self._send(SIGKILL)
        if now >= self._report_at:
            self._report_at = math.inf
            if self._say is not None and (ranks := sorted(self._running)) and not self.is_ending:
                numbers = ", ".join(map(str, ranks))
                text = f"ranks {numbers} still run" if ranks[1:] else f"rank {numbers} still runs"
                self._say(
                    f"{text if len(ranks) <= 8 else f'{len(ranks)} ranks still run'}, "
                    f"{STAYING_SECONDS:g} s after the last other rank exited with code 0. Press "
                    "Ctrl-C to end the job"
                )
                self._say = None
        self._output.flush(now)
