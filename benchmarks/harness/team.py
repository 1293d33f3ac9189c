"""Ranks of a library as processes that live through the whole benchmark, and messages to them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from harness.channel import Line, listen, pick_up
from harness.launchers import Library, launch

__all__ = ["Team", "TeamFailed"]

BENCHMARKS = Path(__file__).parent.parent
# Seconds until a library that hangs is left out.
MOST_SECONDS = float(os.environ.get("FLASHLIGHT_BENCH_SECONDS", "inf"))
START_SECONDS = min(120.0, MOST_SECONDS)
ANSWER_SECONDS = min(180.0, MOST_SECONDS)
LEAVE_SECONDS = 10.0
DYING_SECONDS = 1.0
QUOTED_LINES = 8  # lines of a failed library's output in an error


class TeamFailed(Exception):
    """The ranks died, did not answer in time or could not start. The message contains their
    output."""


class Team:
    """The ranks of one library, until ``close``.

    Args:
        library: The library.
        ranks: Number of processes.
        cores: Number of cores that they may use.

    Raises:
        TeamFailed: If a rank does not connect within START_SECONDS.
    """

    def __init__(self, library: Library, ranks: int, cores: int) -> None:
        self.title, self.ranks = library.title, ranks
        self.failure = ""
        self.idle_share = 0.0
        self._lines: list[Line] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        seen_by_all = library.hosts[0].shared if library.hosts else None
        self._folder = Path(tempfile.mkdtemp(prefix="flashlight-bench-", dir=seen_by_all))
        self._log = self._folder / "log"
        self.facts = self._start(library, cores)

    def _start(self, library: Library, cores: int) -> dict[str, str]:
        address, private = self._folder / "door", self._folder / "ranks"
        private.mkdir()
        plan = launch(library, self.ranks, cores, private, address)
        self.setting = plan.setting
        with listen(address) as door, self._log.open("wb") as log:
            starts: list[Any] = [host.popen for host in library.hosts] or [subprocess.Popen]
            for command, start in zip(plan.commands, itertools.cycle(starts), strict=False):
                self._processes.append(
                    start(
                        command,
                        cwd=BENCHMARKS,
                        env=_environment(library, plan.environment),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            return self._pick_up_all(door)

    def _pick_up_all(self, door: socket.socket) -> dict[str, str]:
        """Return the facts that rank 0 reports after all ranks have connected."""
        deadline = time.monotonic() + START_SECONDS
        by_rank: dict[int, tuple[Line, dict[str, str]]] = {}
        while len(by_rank) < self.ranks:
            self._await_caller(door, deadline)
            line = pick_up(door)
            self._lines.append(line)
            self._await_one_of([line], deadline, "starting")
            rank, facts = self._receive(line, "start")
            by_rank[rank] = line, facts
        self._lines = [by_rank[rank][0] for rank in range(self.ranks)]
        return by_rank[0][1]

    def ask(self, *command: Any) -> list[Any]:
        """Send every rank the same command, and return all answers in rank order.

        Raises:
            TeamFailed: If a rank died or does not answer in time. The team is closed, and later
                calls fail.
            KeyboardInterrupt: If Ctrl-C is pressed. The team is closed, because answers may be in
                transit.
        """
        if self.failure:
            raise TeamFailed(self.failure)
        try:
            return self._ask(command)
        except KeyboardInterrupt:
            with contextlib.suppress(TeamFailed):
                self._fail("interrupted")
            raise

    def _ask(self, command: tuple[Any, ...]) -> list[Any]:
        for line in self._lines:
            self._send(line, command)
        deadline = time.monotonic() + ANSWER_SECONDS
        answers: dict[int, Any] = {}
        while len(answers) < self.ranks:
            waiting = {line: i for i, line in enumerate(self._lines) if i not in answers}
            line = self._await_one_of(waiting, deadline, str(command[0]))
            answers[waiting[line]] = self._receive(line, str(command[0]))
        return [answers[rank] for rank in range(self.ranks)]

    def seconds_per_call(self, key: str, iterations: int, warm_up: int) -> float:
        """Return the seconds per call of ``iterations`` calls on the slowest rank."""
        return float(max(self.ask("measure", key, iterations, warm_up))) / iterations

    def close(self) -> None:
        """End the ranks, and kill ranks that do not end. Idempotent."""
        if self.failure or not self._processes:
            return
        try:
            used = self.ask("leave")
        except TeamFailed:
            return  # after a failure everything is closed
        self.idle_share = max(cpu / wall if wall else 0.0 for cpu, wall in used)
        self._end_processes(LEAVE_SECONDS)
        shutil.rmtree(self._folder)

    def _send(self, line: Line, command: tuple[Any, ...]) -> None:
        try:
            line.send(command)
        except ConnectionError:
            self._fail(f"a rank was gone before {command[0]!r}")

    def _receive(self, line: Line, doing: str) -> Any:
        try:
            return line.recv()
        except (EOFError, ConnectionError):
            self._fail(f"a rank ended during {doing!r}")

    def _await_one_of(self, objects: Iterable[Any], deadline: float, doing: str) -> Any:
        """Return one of ``objects`` that is readable; blocks until one is."""
        ready = wait(objects, max(0.0, deadline - time.monotonic()))
        return ready[0] if ready else self._fail(f"no answer in time while {doing}")

    def _await_caller(self, door: socket.socket, deadline: float) -> None:
        """Block until a rank connects. A process that ends before is a failure."""
        with _Watch(self._processes) as watched:
            ready = wait([door, *watched.descriptors], max(0.0, deadline - time.monotonic()))
        if door not in ready:
            self._fail("a process ended while starting" if ready else "did not start in time")

    def _fail(self, problem: str) -> NoReturn:
        """End all processes first, because a dying process may still write output, then return the
        error."""
        self._end_processes(DYING_SECONDS)
        words = self._log.read_text(errors="replace").strip().splitlines()
        shutil.rmtree(self._folder)
        self.failure = "; ".join([problem, *words[-QUOTED_LINES:]])
        raise TeamFailed(self.failure)

    def _end_processes(self, patience: float) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            _end_process(process, patience)
        self._lines, self._processes = [], []


class _Watch:
    """Descriptors that become readable when a process ends."""

    def __init__(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        self.descriptors = [os.pidfd_open(process.pid) for process in processes]

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def _environment(library: Library, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the library's variables, overridden by the caller's environment, with the library's
    programs first in PATH."""
    merged = {**variables, **os.environ}
    merged["PATH"] = f"{library.python.parent}{os.pathsep}{merged.get('PATH', '')}"
    if library.libraries:
        paths = [library.libraries, *filter(None, [merged.get("LD_LIBRARY_PATH")])]
        merged["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    merged.pop("PYTHONPATH", None)
    return merged


def _end_process(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait ``patience`` seconds, then end the process and its children."""
    for number, seconds in ((None, patience), (signal.SIGTERM, 3.0), (signal.SIGKILL, None)):
        if number is not None:
            os.killpg(process.pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        return
