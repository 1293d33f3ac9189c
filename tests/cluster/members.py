"""Ranks on the hosts of a cluster that run a program of ``member.py`` until something happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tests.cluster.hosts import Cluster

DEADLINE = 60.0
PORT = "29411"


class Members:
    """``counts`` ranks on each host of ``cluster``; a context, which ends them.

    ``env`` is added to their environment: a text for all, or one for each rank.
    """

    def __init__(
        self, cluster: Cluster, counts: Sequence[int], program: str, **env: str | Sequence[str]
    ) -> None:
        self._cluster, self._counts = cluster, counts
        self._program, self._env = program, env
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Members:
        homes = [host for host, count in enumerate(self._counts) for _ in range(count)]
        self.processes = [self._start(rank, home) for rank, home in enumerate(homes)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        self._stack.close()

    def _start(self, rank: int, home: int) -> subprocess.Popen[str]:
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(sum(self._counts)),
            "LOCAL_RANK": str(rank - sum(self._counts[:home])),
            "LOCAL_WORLD_SIZE": str(self._counts[home]),
            "MASTER_ADDR": str(self._cluster[0].address),
            "MASTER_PORT": PORT,
            "FLASHLIGHT_SECRET": "of these tests, and long enough",
            "OPENBLAS_NUM_THREADS": "1",
            **{k: each if isinstance(each, str) else each[rank] for k, each in self._env.items()},
        }
        command = [sys.executable, "-m", "tests.cluster.member", self._program]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = self._cluster[home].popen(command, env=env, **pipes)
        return self._stack.enter_context(process)

    def await_ready(self) -> None:
        """Return when every rank has been initialised."""
        for process in self.processes:
            assert process.stdout
            line = process.stdout.readline()
            assert "ready" in line, line

    def tell(self, ranks: Iterable[int]) -> None:
        """Tell ``ranks`` to go on."""
        for rank in ranks:
            stdin = self.processes[rank].stdin
            assert stdin
            stdin.write("\n")
            stdin.flush()

    def ends(self, ranks: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Return what ``ranks`` (None: all) have reported at the end: kind, words and when."""
        chosen = range(len(self.processes)) if ranks is None else ranks
        return [self._end(self.processes[rank]) for rank in chosen]

    def _end(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout
        line = process.stdout.readline()
        assert line, process.wait(DEADLINE)
        report: dict[str, Any] = json.loads(line)
        return report

    def stop(self, rank: int, *, is_stopped: bool = True) -> None:
        """Stop one rank as a debugger does, or let it go on."""
        os.kill(self.processes[rank].pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)
