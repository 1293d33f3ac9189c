"""Command lines that start ranks, as root and with fewer cores than ranks."""

import json
from pathlib import Path

import pytest

from harness.launchers import Launch, Launcher, Library, launch

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
