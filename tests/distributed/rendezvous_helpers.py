"""Ranks of a rendezvous as real processes: start, pause and kill them, and read their reports."""

import atexit
import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.distributed import leftovers

ROOT = Path(__file__).parents[2]
FINAL = ("closed", "refused", "crashed", "dying")
DEADLINE = 30.0


class Rank:
    """One rank and the events that it has reported."""

    def __init__(self, server: "_Server", plan: dict[str, Any]) -> None:
        self._server = server
        self.plan = plan
        self.events: dict[str, dict[str, Any]] = {}

    def await_event(self, *events: str, seconds: float = 0.0) -> dict[str, Any]:
        """Return the first of ``events`` that this rank reports; fail after the deadline."""
        end = time.monotonic() + max(DEADLINE, seconds)
        while not self.events.keys() & set(events):
            self._server.read_reports(end, f"rank {self.plan} to report {events}: {self.events}")
        return next(self.events[event] for event in events if event in self.events)

    def outcome(self) -> str:
        """Return the last report: "closed", or "refused: <text of the error>"."""
        final = self.await_event(*FINAL)
        return ": ".join(filter(None, (final["event"], final.get("text"))))

    def refusal(self) -> str:
        """Return the text of the RendezvousError that this rank raised."""
        outcome = self.outcome()
        assert outcome.startswith("refused: "), outcome
        return outcome.removeprefix("refused: ")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        process = os.pidfd_open(self.pid)
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            assert select.select([process], [], [], DEADLINE)[0], f"{self.plan} survives SIGKILL"
        finally:
            os.close(process)

    @property
    def pid(self) -> int:
        return int(self.await_event("started")["pid"])


class Ranks:
    """Starts ranks and kills them at the end. The process that forks them remains."""

    def __init__(self, **defaults: Any) -> None:
        plan = {"part": "exchange", "store": "file", "timeout": 20.0, "lengths": [3, 0, 5]}
        self.defaults = {**plan, "log": "/dev/stderr", **defaults}
        self.all: list[Rank] = []
        self._server = _Server.running()

    def start(self, rank: int, size: int, **plan: Any) -> Rank:
        env = {**self.defaults.get("env", {}), **plan.pop("env", {})}
        plan = {**self.defaults, "rank": rank, "size": size, **plan, "env": env}
        plan["path"] = str(plan.get("path", ""))
        handle = Rank(self._server, plan)
        self.all.append(handle)
        self._server.start(handle)
        return handle

    def start_all(
        self, size: int, plans: Mapping[int, dict[str, Any]] | None = None, **plan: Any
    ) -> list[Rank]:
        """Start all ranks; ``plans`` has additional entries for some ranks."""
        plans_of_ranks = plans or {}
        return [
            self.start(rank, size, **plan, **plans_of_ranks.get(rank, {})) for rank in range(size)
        ]

    def start_ready(self, rank: int, size: int, **plan: Any) -> Rank:
        """Start ``rank`` and wait until it has its store. Rank 0 then listens."""
        started = self.start(rank, size, **plan)
        started.await_event("constructed")
        return started

    def start_together(self, ranks: Iterable[int], size: int, **plan: Any) -> list[Rank]:
        """Start ``ranks`` of ``size``, and let them meet after all are ready."""
        started = [self.start(rank, size, pause_at="constructed", **plan) for rank in ranks]
        for rank in started:
            rank.await_event("constructed")
        for rank in started:
            rank.resume()
        return started

    def run(self, size: int, **plan: Any) -> None:
        """Start ``size`` ranks; all must exchange and close."""
        assert all_closed(self.start_all(size, **plan))

    def close(self) -> None:
        for rank in self.all:
            if not rank.events.keys() & {*FINAL, "ended"}:
                with contextlib.suppress(ProcessLookupError):  # it has ended with an unread report
                    rank.kill()


class _Server:
    """The process that forks ranks, shared by all tests of a session."""

    _started: ClassVar["list[_Server]"] = []

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        leftovers.helpers.add(self._process.pid)
        atexit.register(self._close)

    @classmethod
    def running(cls) -> "_Server":
        if not cls._started or cls._started[-1]._process.poll() is not None:
            cls._started.append(cls())
        return cls._started[-1]

    def start(self, rank: Rank) -> None:
        rank.plan["id"] = len(self._ranks)
        self._ranks.append(rank)
        self._process.stdin.write(json.dumps(rank.plan).encode() + b"\n")
        self._process.stdin.flush()

    def read_reports(self, end: float, awaited: str) -> None:
        """Pass the next reports to their ranks; fail at ``end`` with the text ``awaited``."""
        pipe = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            assert selector.select(max(0.0, end - time.monotonic())), f"waited for {awaited}"
        read = os.read(pipe.fileno(), 65536)
        assert read, "the process that forks the ranks has ended"
        *lines, self._buffer = (self._buffer + read).split(b"\n")
        for line in lines:
            event = json.loads(line)
            self._ranks[event["id"]].events[event["event"]] = event

    def _close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def all_closed(started: list[Rank]) -> bool:
    outcomes = [rank.outcome() for rank in started]
    assert outcomes == ["closed"] * len(started)
    return True


def ranks_at(*places: str) -> Any:
    """Return a fixture of ranks that meet in each of ``places`` in turn.

    "tcp": at a port; "tree": at a port, each rank below another one by default; "file": at the path
    ``meeting`` in the folder of the test.
    """
    return pytest.fixture(params=places)(_ranks)


def _ranks(request: pytest.FixtureRequest, port: int, tmp_path: Path) -> Iterator[Ranks]:
    plan: dict[str, Any] = {"host": "127.0.0.1", "port": port, "path": tmp_path / "meeting"}
    if request.param == "tree":
        plan |= {"env": {"FLASHLIGHT_TREE_FROM": "2"}, "fan": 1, "short_seconds": 0.5}
    with contextlib.closing(
        Ranks(store="file" if request.param == "file" else "tcp", **plan)
    ) as started:
        yield started
