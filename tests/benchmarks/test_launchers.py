"""Every launcher starts all ranks, with what root and fewer cores than ranks need."""

import json
from pathlib import Path

import pytest

from harness.launchers import Launch, Launcher, Library, launch

PYTHON = Path("/peer/bin/python")


def launched(launcher: Launcher, ranks: int, cores: int = 2) -> Launch:
    library = Library("peer", "a_role", PYTHON, launcher, {"BACKEND": "gloo"})
    return launch(library, ranks, cores, Path("/folder"), Path("/door"))


def test_without_a_launcher_each_rank_gets_its_place() -> None:
    plan = launched("direct", 3)
    assert [command[:5] for command in plan.commands] == [
        [str(PYTHON), "-m", "harness.worker", "a_role", "/door"]
    ] * 3
    places = [json.loads(command[5]) for command in plan.commands]
    assert [place["rank"] for place in places] == [0, 1, 2]
    assert places[0]["size"] == 3
    assert places[0]["options"] == {"BACKEND": "gloo"}
    assert "BACKEND=gloo" in plan.setting


@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_mpirun_is_the_one_of_the_peer_s_environment(launcher: Launcher) -> None:
    (command,) = launched(launcher, 2).commands
    assert command[0] == "/peer/bin/mpirun"
    assert command[command.index("-n") + 1] == "2"


def test_ranks_without_cores_of_their_own_have_to_yield() -> None:
    assert "mpi_yield_when_idle" in launched("openmpi", 4).setting
    assert "mpi_yield_when_idle" not in launched("openmpi", 2).setting
    assert launched("mpich", 4).environment["MPIR_CVAR_POLLS_BEFORE_YIELD"] == "1"
    assert "MPIR_CVAR_POLLS_BEFORE_YIELD" not in launched("mpich", 2).environment


def test_every_rank_computes_with_one_thread() -> None:
    assert launched("direct", 2).environment["OPENBLAS_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("launcher", "module"), [("flrun", "flashlight_py.launch"), ("ray", "harness.on_ray")]
)
def test_our_own_launchers_start_the_program_of_a_rank(launcher: Launcher, module: str) -> None:
    (command,) = launched(launcher, 2).commands
    assert command[:8] == [str(PYTHON), "-m", module, "-n", "2", "-m", "harness.worker", "a_role"]
