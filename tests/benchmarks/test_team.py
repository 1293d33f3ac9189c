"""Teams: answers in rank order, idle ranks, reports of failures."""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.environments import PEERS, python_of
from harness.launchers import Library
from harness.roles.verbs import Builder, CollectiveRole, elements
from harness.team import Team, TeamFailed


class SumOfTwo(CollectiveRole):
    """Rank 0 of 2, whose sum with rank 1 is correct only in the first calls."""

    rank, size = 0, 2

    def __init__(self, forgetful_after: int) -> None:
        self._right = forgetful_after

    def facts(self) -> dict[str, str]:
        return {}

    def barrier(self) -> None:
        """Return, because rank 1 does not exist."""

    def array(self, nbytes: int, dtype: str, parts: int, kind: str) -> Any:
        return np.empty(elements(nbytes, np.dtype(dtype).itemsize, parts), dtype)

    @property
    def builders(self) -> Mapping[str, Builder]:
        return {"all_reduce": lambda x: (lambda: self._all_reduce(x), x)}

    def _all_reduce(self, x: Any) -> None:
        self._right -= 1
        if self._right >= 0:
            x += 2


def library(role: str, python: Path = Path(sys.executable)) -> Library:
    return Library("a peer", role, python)


@pytest.mark.usefixtures("leaves_nothing")
def test_team_measures_a_prepared_call_until_it_is_forgotten() -> None:
    team = Team(library("copy"), 1, cores=1)
    try:
        assert team.ask("prepare", "key", {"nbytes": 1 << 20}) == [("ready", None)]
        assert 0 < team.seconds_per_call("key", 3, 1) < 1
        assert team.ask("forget") == [None]
        with pytest.raises(TeamFailed, match="KeyError: 'key'"):
            team.seconds_per_call("key", 3, 1)
        with pytest.raises(TeamFailed, match="KeyError: 'key'"):  # it is not asked again
            team.ask("forget")
    finally:
        team.close()


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing", "ctrl_c_is_raised")
def test_team_closes_if_ctrl_c_interrupts_a_command() -> None:
    """The finished rounds remain available, and closing waits for no answer."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    team = Team(library("copy"), 1, cores=1)
    team.ask("prepare", "key", {"nbytes": 1 << 20})
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            team.ask("measure", "key", 10**9, 0)
    finally:
        interrupt.join()
        signal.signal(signal.SIGINT, before)
    assert team.failure.startswith("interrupted")
    team.close()


@pytest.mark.usefixtures("leaves_nothing")
def test_team_reports_the_output_of_a_role_that_cannot_start() -> None:
    with pytest.raises(TeamFailed, match=r"ended while starting.*No module named"):
        Team(library("no_such_role"), 1, cores=1)


def test_absent_peer_has_a_reason_and_a_remedy(tmp_path: Path) -> None:
    reason = python_of(PEERS["torch"], tmp_path)
    assert isinstance(reason, str)
    assert reason.startswith("not installed")
    assert reason.endswith("python -m harness.install torch")


def test_conductor_checks_results_before_and_after_the_rounds() -> None:
    role = SumOfTwo(forgetful_after=2)
    prepared = role.prepare({"verb": "all_reduce", "nbytes": 8, "dtype": "float32"})
    prepared.call()
    with pytest.raises(RuntimeError, match=r"expected Expected\(length=1, first=3, last=3\)"):
        prepared.check()


@pytest.mark.parametrize(("nbytes", "parts", "count"), [(4, 1, 1), (4, 2, 2), (64, 3, 15)])
def test_elements_are_divisible_into_equal_parts(nbytes: int, parts: int, count: int) -> None:
    assert elements(nbytes, 4, parts) == count
