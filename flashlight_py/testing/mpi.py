"""The plugin under ``mpirun -n 4 pytest``: the processes of MPI run the same session in step."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from traceback import format_exc
from typing import Any

import pytest

import flashlight_py as fl
from flashlight_py.testing.ranks import Outcome, RankStuckError
from flashlight_py.testing.session import FOREVER, GRACE_SECONDS, ForkedRanks, Mark, leave_world


class MpiRanks(ForkedRanks):
    """Runs a test on the first processes of MPI. A test without the mark runs on rank 0."""

    def connect(self) -> None:
        from mpi4py import MPI

        self.world: Any = MPI.COMM_WORLD
        self.comms = {self.world.size: self.world}
        self.stderr = os.dup(2)  # pytest replaces descriptor 2 during tests
        ForkedRanks.here = self
        if self.world.rank > 0:
            self.config.get_terminal_writer().flush()
            self.config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
        if len(set(map(tuple, self.world.allgather(list(self.items))))) > 1:
            raise pytest.UsageError(
                f"expected the same tests on all {self.world.size} ranks of MPI, got other ones "
                f"on rank {self.world.rank}. Select and order them without randomness"
            )
        for name, item in self.items.items():
            mark = self.marks.setdefault(name, Mark(1, FOREVER))
            if mark.n > self.world.size:
                reason = f"needs {mark.n} ranks: mpirun -n {mark.n} python -m pytest"
                item.add_marker(pytest.mark.skip(reason=reason))
                self.marks[name] = mark._replace(n=1)
        pairs = itertools.pairwise(self.items)
        self.following = {a: b for a, b in pairs if self.marks[a].n == self.marks[b].n}
        self.share_folders()

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.exit.Exception):  # all ranks raise it
            self.world.Abort(pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(trylast=True)  # after the report of the error
    def pytest_internalerror(self, excrepr: object) -> None:
        sys.stdout.flush()
        if self.world.rank > 0:
            os.write(self.stderr, f"rank {self.world.rank}:\n{excrepr}\n".encode())
        self.world.Abort(pytest.ExitCode.INTERNAL_ERROR)  # the other ranks wait for this one

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        if self.rank:  # rank 0 prints its own warnings already
            super().pytest_warning_recorded(warning_message)

    def comm_of(self, name: str) -> Any:
        return self.comms[self.marks[name].n]

    def outcomes(self, item: pytest.Item, mark: Mark) -> list[Outcome]:
        rank, n = self.world.rank, mark.n
        folder = self.world.bcast(self.new_folder("ranks") if rank == 0 else None)
        if n not in self.comms:
            self.comms[n] = self.world.Split(int(rank >= n), rank)
        if self.size != n:
            self.leave()
        outcome = None
        if rank < n:
            with limited(rank, mark.timeout, self.stderr):
                following = self.following.get(item.nodeid)
                outcome = Outcome(rank, self.run_here(rank, n, item.nodeid, following, folder))
            self.rank = None
        self.size = n
        outcomes: list[Any] = self.world.allgather(outcome)[:n]
        if any(one.value.failed for one in outcomes):
            self.leave()
        return outcomes

    def leave(self) -> None:
        if self.world.rank < self.size:
            try:
                with contextlib.suppress(fl.errors.DistributedError):  # after a failed test
                    leave_world(self.world.rank)
            except Exception:  # noqa: BLE001 - of a fixture of earlier tests
                os.write(self.stderr, f"rank {self.world.rank}:\n{format_exc()}".encode())
        self.size = 0


@contextlib.contextmanager
def limited(rank: int, seconds: float, stderr: int) -> Iterator[None]:
    """Raise RankStuckError after ``seconds``. If it has no effect, print the stacks and exit."""

    def stop(*_: object) -> None:
        raise RankStuckError(rank)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
