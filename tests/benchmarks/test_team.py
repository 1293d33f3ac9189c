"""Peers and their ranks: installation, command lines, answers of teams, and failures."""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import install
from harness.environments import PEERS, Peer, environment_of, libraries_of, python_of
from harness.launchers import Launch, Launcher, Library, launch
from harness.roles.verbs import Builder, CollectiveRole, elements
from harness.team import Team, TeamFailed

PEER = Peer("a peer", "a-peer", (), ("a-distribution",), packages=("libopenmpi3",))


def test_install_reports_missing_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    reason = install.install(PEER, tmp_path)
    assert reason == "could not be installed: needs libopenmpi3, but no apt-get here"
    assert python_of(PEER, tmp_path) == reason


def test_libraries_of_a_peer_are_inside_its_environment(tmp_path: Path) -> None:
    peer = PEERS["pytagi"]
    environment = environment_of(peer, tmp_path)
    python = environment / "bin/python"
    assert libraries_of(peer, python) == ""
    folder = environment / "debian/usr/lib/some-triplet"
    folder.mkdir(parents=True)
    assert libraries_of(peer, python) == str(folder)
    assert libraries_of(PEER, python) == ""


PYTHON = Path("/peer/bin/python")


def launched(launcher: Launcher, ranks: int, cores: int = 2) -> Launch:
    library = Library("peer", "a_role", PYTHON, launcher, {"BACKEND": "gloo"})
    return launch(library, ranks, cores, Path("/folder"), Path("/door"))


def test_direct_launch_passes_a_place_to_each_rank() -> None:
    plan = launched("direct", 3)
    assert [command[:5] for command in plan.commands] == [
        [str(PYTHON), "-m", "harness.worker", "a_role", "/door"]
    ] * 3
    places = [json.loads(command[5]) for command in plan.commands]
    assert [setup["rank"] for setup in places] == [0, 1, 2]
    assert places[0]["size"] == 3
    assert places[0]["options"] == {"BACKEND": "gloo"}
    assert "BACKEND=gloo" in plan.setting
    assert plan.environment["OPENBLAS_NUM_THREADS"] == "1"


def test_launch_uses_mpirun_of_the_peer_and_makes_ranks_yield_if_they_share_cores() -> None:
    (command,) = launched("openmpi", 2).commands
    assert command[0] == "/peer/bin/mpirun"
    assert command[command.index("-n") + 1] == "2"
    assert "mpi_yield_when_idle" in launched("openmpi", 4).setting
    assert "mpi_yield_when_idle" not in launched("openmpi", 2).setting
    assert launched("mpich", 4).environment["MPIR_CVAR_POLLS_BEFORE_YIELD"] == "1"
    assert "MPIR_CVAR_POLLS_BEFORE_YIELD" not in launched("mpich", 2).environment


@pytest.mark.parametrize(
    ("launcher", "module"), [("flrun", "flashlight_py.launch"), ("ray", "harness.on_ray")]
)
def test_launch_starts_the_worker_with_flrun_and_ray(launcher: Launcher, module: str) -> None:
    (command,) = launched(launcher, 2).commands
    assert command[:8] == [str(PYTHON), "-m", module, "-n", "2", "-m", "harness.worker", "a_role"]


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
