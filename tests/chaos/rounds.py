"""One round of chaos: a world calls a verb, one rank suffers a fault, and the other ranks are
judged."""

import dataclasses
import os
import random
import re
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from flashlight_py.distributed.backends.hierarchical import between_hosts
from tests.chaos.rank import EXIT_CODE
from tests.chaos.verbs import MESSAGES
from tests.distributed import conformance, leftovers
from tests.distributed.rendezvous_helpers import Rank, Ranks

BACKENDS = ("gloo", "shm", "hierarchical")
# Faults, and the exit codes of ranks that suffer them.
FATES = {
    "kill": -signal.SIGKILL,
    "stop": 0,
    "exception": 1,
    "exit": EXIT_CODE,
    "interrupt": -signal.SIGINT,
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
# Seconds within which ranks of one host must detect a lost rank, also on a loaded machine. The
# tables of ``python -m tests.chaos`` show the times.
SOON = 10.0
# TIMEOUT in seconds of rounds with a stopped rank, and of other rounds.
SHORT, LONG = 2.0, 30.0
CALLS = 200
# Floats per rank: a cache line, an array inside a message, arrays that are sent in chunks.
LENGTHS = (1, 100, 3_000, 40_000)


@dataclasses.dataclass(frozen=True)
class Round:
    """Parameters of a round; ``seed`` determines all random choices."""

    backend: str
    verb: str
    fate: str
    seed: int

    @property
    def drawn(self) -> dict[str, Any]:
        draw = random.Random(repr(self))
        size = draw.choice((3, 4))
        return {
            "size": size,
            "victim": draw.randrange(size),
            "root": draw.randrange(size),
            # Each call of split creates and closes groups, so there are fewer calls.
            "moment": draw.randrange(CALLS // 10 if self.verb == "split" else CALLS),
            "length": draw.choice(LENGTHS),
            "delay": draw.random() ** 3 * 0.02,
        }

    @property
    def command(self) -> str:
        """Return the command that repeats this round."""
        return (
            f"python -m tests.chaos --backend {self.backend} --verb {self.verb!r} "
            f"--fate {self.fate} --seed {self.seed}"
        )

    def plan(self, rank: int, folder: Path) -> dict[str, Any]:
        paths = {"path": str(folder / "meeting"), "log": str(folder / f"log-{rank}")}
        task = {"part": "endure", "verb": self.verb, "fate": self.fate}
        timeout = SHORT if self.fate == "stop" else LONG
        return {**self.drawn, **task, **paths, **world_of(self.backend, rank, timeout)}


def world_of(backend: str, rank: int, timeout: float, **params: Any) -> dict[str, Any]:
    """Return the part of a plan that makes ``rank`` use ``backend`` with further ``params``."""
    params["TIMEOUT"] = timeout
    if backend == "hierarchical":
        return {"params": params, "env": conformance.two_hosts(rank)}
    return {"params": {"BACKEND": backend, **params}, "env": {}}


def start_together(
    ranks: Ranks, folder: Path, size: int, backend: str, timeout: float = 20.0, **plan: Any
) -> list[Rank]:
    """Start ``size`` ranks in ``folder``, which compute unless ``plan`` has another part.

    They check each result for the ``seconds`` of ``plan``.
    """
    params = plan.pop("params", {})
    common = {"path": str(folder / "meeting"), "log": str(folder / "log"), "size": size}
    plan = {"part": "compute", **common, **plan}
    return [ranks.start(r, **plan, **world_of(backend, r, timeout, **params)) for r in range(size)]


def all_end_well(started: list[Rank]) -> bool:
    for rank in started:
        end = rank.await_event("ended")
        assert end["code"] == 0, Path(rank.plan["log"]).read_text()
        assert "computed" in rank.events
    return True


@dataclasses.dataclass
class Verdict:
    """The faults of a round (empty: correct), and the seconds until the last rank raised."""

    wrong: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def play(ranks: Ranks, game: Round) -> Verdict:
    verdict = Verdict()
    segments = leftovers.segments()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        size = game.drawn["size"]
        started = [ranks.start(rank, **game.plan(rank, folder)) for rank in range(size)]
        try:
            _Judge(game, started, folder, verdict).watch()
        except AssertionError as error:  # an event of await_event is late
            verdict.wrong.append(str(error))
        finally:
            _end(started)
        verdict.wrong += [f"left {file}" for file in os.listdir(folder) if "log" not in file]
    orphans = leftovers.unmapped_files(leftovers.segments() - segments)
    verdict.wrong += [f"left {file}" for file in orphans]
    return verdict


def _end(started: list[Rank]) -> None:
    """Kill the remaining ranks, also stopped ones."""
    for rank in started:
        if "ended" not in rank.events:
            os.kill(rank.pid, signal.SIGKILL)
            rank.await_event("ended")


class _Judge:
    def __init__(self, game: Round, started: list[Rank], folder: Path, verdict: Verdict) -> None:
        self._game, self._folder, self._verdict = game, folder, verdict
        self._number = game.drawn["victim"]
        self._victim = started[self._number]
        self._survivors = [rank for rank in started if rank is not self._victim]

    def watch(self) -> None:
        at = self._let_it_happen()
        for survivor in self._survivors:
            event = survivor.await_event("raised", "ended")
            self._judge_error(survivor, event, at)
        if self._game.fate == "stop":
            os.kill(self._victim.pid, signal.SIGCONT)
            event = self._victim.await_event("raised", "ended")
            # A rank whose own timeout passed may report that instead of the abort of another rank.
            right = {"PeerLostError", "CollectiveTimeoutError"} & set(event.get("classes", ()))
            self._expect(bool(right), f"the resumed rank: {event}")
        for survivor in self._survivors:
            self._judge_end(survivor, 0)
        self._judge_end(self._victim, FATES[self._game.fate])
        if self._game.fate == "exception":
            log = (self._folder / f"log-{self._number}").read_text()
            self._expect(
                "Traceback" in log and "ValueError: chaos" in log, f"its output is {log!r}"
            )

    def _let_it_happen(self) -> float:
        """Cause the fault, and return its time by the monotonic clock of the machine."""
        fated = self._victim.await_event("fated", "raised", "ended")
        if self._game.fate not in SIGNALS:
            return float(fated["at"])
        time.sleep(self._game.drawn["delay"])  # the moment is random
        os.kill(self._victim.pid, SIGNALS[self._game.fate])
        return time.monotonic()

    def _judge_error(self, rank: Rank, event: dict[str, Any], at: float) -> None:
        who = f"rank {rank.plan['rank']} of {rank.plan['size']}"
        stalled = self._game.fate == "stop"
        limit = SOON
        if stalled:  # a rank may wait longer for a rank that waits for another host
            limit += between_hosts(SHORT, 4) if self._game.backend == "hierarchical" else SHORT
        expected = {"CollectiveTimeoutError" if stalled else "PeerLostError"}
        if stalled and self._game.verb == "split":
            # A rank whose group failed calls the world next, which other ranks have not called yet.
            expected.add("PeerLostError")
        seconds = event["at"] - at
        self._verdict.seconds = max(self._verdict.seconds, seconds)
        is_right = bool(expected & set(event.get("classes", ())))
        self._expect(is_right, f"{who}: expected {expected}: {event}")
        self._expect(seconds < limit, f"{who}: noticed after {seconds:.2f} s")
        text = event.get("text", "")
        for pattern in self._patterns(rank):
            self._expect(bool(re.search(pattern, text)), f"{who}: no {pattern!r}: {text}")

    def _patterns(self, rank: Rank) -> list[str]:
        """Return the patterns that the message must match: rank, host, and the exception."""
        if self._game.fate == "stop" and not self._waits_for_victim(rank.plan["rank"]):
            return []
        patterns = [rf"\b{self._victim.pid}\b", re.escape(socket.gethostname())]
        if self._game.verb != "split":  # the ranks of a group have other numbers
            patterns.append(rf"ranks? (\d+, )*{self._number}\b")
        if self._game.fate == "exception":
            patterns.append(f"ValueError: chaos on rank {self._number}")
        return patterns

    def _waits_for_victim(self, rank: int) -> bool:
        """Return whether a rank waits for the stopped rank directly.

        Both ends wait for a message, and all members wait for a group.
        """
        away = (rank - self._number) % self._game.drawn["size"]
        if self._game.verb in MESSAGES:
            return away in (1, self._game.drawn["size"] - 1)
        return self._game.verb != "split"

    def _judge_end(self, rank: Rank, code: int) -> None:
        """Check that a rank ends, that its group is closed after the error, and that it may
        leave."""
        who, end = f"rank {rank.plan['rank']}", rank.await_event("ended")
        self._expect(end["code"] == code, f"{who} ended with {end['code']}, not {code}")
        again = rank.events.get("tried again", {}).get("got", "GroupClosedError")
        in_order = again == "GroupClosedError" or self._game.verb == "split"
        self._expect(in_order, f"{who} tried again and got {again}")

    def _expect(self, right: bool, otherwise: str) -> None:
        if not right:
            self._verdict.wrong.append(otherwise)
