"""Order of the measurements: all contenders in turn, in rounds, while the other ranks block."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from harness.facts import available_bytes, cores
from harness.launchers import Library
from harness.statistics import Measurement
from harness.team import Team, TeamFailed

__all__ = ["Case", "Conductor", "Contender", "Plan"]

MOST_ITERATIONS = 200_000
FEWEST_ROUNDS = 3
# Calls that take longer need no call before the measurement, which would only double the time.
LONG_SECONDS = 0.5
# Fraction of the free memory for arrays; the libraries need the rest.
USABLE_MEMORY = 0.6


@dataclass(frozen=True)
class Plan:
    """Duration of a measurement: ``rounds`` rounds of ``batch_seconds`` for each contender.

    If one case would take more than ``case_seconds``, it has fewer rounds.
    """

    rounds: int
    batch_seconds: float
    case_seconds: float


@dataclass(frozen=True)
class Contender:
    """A column of a table: the ranks of a library, and the task that they run.

    ``task`` is added to the task of the case, for example another dtype or kind of array.
    """

    title: str
    library: Library
    ranks: int
    task: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A case: the task of all contenders, and the bytes that one rank holds at once."""

    measurement: Measurement
    task: Mapping[str, Any]
    memory: int = 0


class Conductor:
    """Starts the ranks of each library at their first use, measures, and ends the ranks.

    ``absent`` contains the libraries that could not start, and the reasons. ``details`` contains
    the
    answers of the contenders when they prepared the last case.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.absent: dict[str, str] = {}
        self.facts: dict[str, dict[str, str]] = {}
        self.idle_shares: dict[str, float] = {}
        self.details: dict[str, list[Any]] = {}
        self._teams: dict[tuple[str, int], Team] = {}

    def measure(self, case: Case, contenders: Sequence[Contender]) -> Measurement:
        """Fill the measurement of the case: all rounds of all contenders that can run it."""
        result = case.measurement
        description = f"{result.ranks} ranks, {result.task}, {result.dtype}, {result.nbytes} bytes"
        print(description, file=sys.stderr, flush=True)
        if reason := self._too_large(case, contenders):
            result.left_out.update(dict.fromkeys((c.title for c in contenders), reason))
            return result
        self.details = {}
        ready = self._prepare(case, contenders, result)
        calls = self._calibrate(ready, result)
        self._rounds(ready, calls, result)
        for title, team in ready.items():
            if self._guard(team, title, result, "check", title) is None:
                result.seconds.pop(title, None)
        for title, team in ready.items():
            self._guard(team, title, result, "forget")
        return result

    def _too_large(self, case: Case, contenders: Iterable[Contender]) -> str:
        needed = case.memory * sum(contender.ranks for contender in contenders)
        usable = int(USABLE_MEMORY * available_bytes())
        if needed <= usable:
            return ""
        return f"needs {needed >> 20} MiB for all ranks, and {usable >> 20} MiB are available"

    def _prepare(
        self, case: Case, contenders: Iterable[Contender], result: Measurement
    ) -> dict[str, Team]:
        ready = {}
        for contender in contenders:
            team = self._team(contender)
            if team is None:
                continue
            task = {**case.task, **contender.task}
            answers = self._guard(team, contender.title, result, "prepare", contender.title, task)
            refused = [detail for status, detail in answers or () if status == "refused"]
            if refused:
                result.left_out[contender.title] = refused[0]
            elif answers:
                ready[contender.title] = team
                self.details[contender.title] = [detail for _, detail in answers]
        return ready

    def _team(self, contender: Contender) -> Team | None:
        """Return the contender's ranks and start them if necessary, or return None if they cannot
        start."""
        library = contender.library
        key = library.title, contender.ranks
        if key not in self._teams and library.title not in self.absent:
            try:
                self._teams[key] = Team(library, contender.ranks, cores())
            except TeamFailed as failure:
                self.absent[library.title] = str(failure)
                return None
            name = f"{library.title}, {contender.ranks} rank(s)"
            self.facts[name] = {**self._teams[key].facts, "started": self._teams[key].setting}
        return self._teams.get(key)

    def _guard(
        self, team: Team, title: str, result: Measurement, *command: Any
    ) -> list[Any] | None:
        """Ask a team. If it fails, leave it out of this case and all later cases, with the
        reason."""
        try:
            return team.ask(*command)
        except TeamFailed as failure:
            result.left_out[title] = str(failure)
            return None

    def _calibrate(
        self, ready: Mapping[str, Team], result: Measurement
    ) -> dict[str, tuple[int, int]]:
        """Return the number of calls of each contender that take about ``batch_seconds``, and the
        number of calls before them."""
        chosen = {}
        for title, team in ready.items():
            iterations, seconds = 1, self._time(title, team, (1, 1), result)
            while (
                seconds is not None
                and seconds * iterations < self.plan.batch_seconds / 4
                and iterations < MOST_ITERATIONS
            ):
                iterations = min(10 * iterations, MOST_ITERATIONS)
                seconds = self._time(title, team, (iterations, warm_up(iterations)), result)
            if seconds is not None:
                fitting = round(self.plan.batch_seconds / seconds)
                iterations = max(1, min(fitting, MOST_ITERATIONS))
                chosen[title] = iterations, warm_up(iterations) if seconds < LONG_SECONDS else 0
                result.seconds[title] = [seconds]  # used to plan the rounds, then replaced by them
        return chosen

    def _rounds(
        self, ready: Mapping[str, Team], calls: Mapping[str, tuple[int, int]], result: Measurement
    ) -> None:
        """Measure in turn. Each round starts with another contender, so no contender always follows
        the same one."""
        titles = list(calls)
        count = self._number_of_rounds(calls, result)
        result.seconds = {title: [] for title in titles}
        for number in range(count):
            turn = number % len(titles) if titles else 0
            for title in titles[turn:] + titles[:turn]:
                if title in result.seconds:
                    self._one_round(title, ready[title], calls[title], result)

    def _one_round(
        self, title: str, team: Team, calls: tuple[int, int], result: Measurement
    ) -> None:
        seconds = self._time(title, team, calls, result)
        if seconds is None:
            del result.seconds[title]
        else:
            result.seconds[title].append(seconds)

    def _number_of_rounds(self, calls: Mapping[str, tuple[int, int]], result: Measurement) -> int:
        once = sum(result.seconds[title][0] * sum(numbers) for title, numbers in calls.items())
        fitting = int(self.plan.case_seconds / once) if once else self.plan.rounds
        return min(self.plan.rounds, max(FEWEST_ROUNDS, fitting))

    def _time(
        self, title: str, team: Team, calls: tuple[int, int], result: Measurement
    ) -> float | None:
        try:
            return team.seconds_per_call(title, *calls)
        except TeamFailed as failure:
            result.left_out[title] = str(failure)
            return None

    def require(self, title: str) -> None:
        """End the program with a failure if this library could not start.

        Raises:
            SystemExit: If it could not start, with the reason.
        """
        if title in self.absent:
            raise SystemExit(f"{title} could not be measured: {self.absent[title]}")

    def __enter__(self) -> Conductor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for (title, ranks), team in self._teams.items():
            team.close()
            self.idle_shares[f"{title}, {ranks} rank(s)"] = team.idle_share
        self._teams = {}


def warm_up(iterations: int) -> int:
    """Return the number of calls before the measurement, because other contenders have filled the
    caches."""
    return max(1, min(iterations // 10, 1000))
