"""Ranks on the hosts of a cluster that run a program of ``member.py`` until an event."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tests.cluster.hosts import Cluster, Host
from tests.distributed import launched
from tests.distributed.harness import ONE_THREAD

DEADLINE = 60.0


class Members:
    """``counts`` ranks on each host of ``cluster``; a context manager that ends them.

    ``env`` is added to their environment: one mapping for all, or one for each rank. The context
    begins after all ranks have been initialised, unless ``all_meet`` is False.
    """

    def __init__(
        self,
        cluster: Cluster,
        counts: Sequence[int],
        program: str,
        all_meet: bool = True,
        **env: str | Sequence[str],
    ) -> None:
        self._cluster, self._counts, self._all_meet = cluster, counts, all_meet
        self._program, self._env = program, env
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Members":
        counted = zip(self._cluster, self._counts, strict=False)
        hosts = [host for host, count in counted for _ in range(count)]
        self.processes = [self._start(rank, hosts) for rank in range(len(hosts))]
        if self._all_meet:
            self._await_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        self._stack.close()

    def _start(self, rank: int, hosts: Sequence[Host]) -> subprocess.Popen[str]:
        changed = {
            k: value if isinstance(value, str) else value[rank] for k, value in self._env.items()
        }
        env = {**launched.of_job(rank, hosts, self._cluster.folder), **ONE_THREAD, **changed}
        command = [sys.executable, "-m", "tests.cluster.member", self._program]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return self._stack.enter_context(hosts[rank].popen(command, env=env, **pipes))

    def tell(self, ranks: Iterable[int]) -> None:
        """Send ``ranks`` the command to continue."""
        for rank in ranks:
            stdin = self.processes[rank].stdin
            stdin.write("\n")
            stdin.flush()

    def ends(self, ranks: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Return the reports of ``ranks`` (None: all) at their end: kind, message and time."""
        chosen = range(len(self.processes)) if ranks is None else ranks
        return [self._end(self.processes[rank]) for rank in chosen]

    def all_end_well(self, ranks: Iterable[int] = ()) -> None:
        """Send ``ranks`` the command, and check that no rank has raised an error."""
        self.tell(ranks)
        assert [end["kind"] for end in self.ends()] == [""] * len(self.processes)

    def _await_ready(self) -> None:
        try:
            for process in self.processes:
                line = process.stdout.readline()
                assert "ready" in line, line
        except BaseException:
            self.__exit__()
            raise

    def _end(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        line = process.stdout.readline()
        assert line, process.wait(DEADLINE)
        report: dict[str, Any] = json.loads(line)
        return report

    def stop(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGSTOP)

    def pause(self, rank: int, seconds: float) -> None:
        self.stop(rank)
        time.sleep(seconds)
        self.processes[rank].send_signal(signal.SIGCONT)
