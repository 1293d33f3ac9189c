"""Who started us: one launcher's variables, several at once, half of them, or leftovers."""

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flashlight_py.distributed.rendezvous.environment import (
    LaunchEnvironment,
    agent_port,
    derived_port,
    detect,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}
BATCH_SHELL = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "3(x2)",
}
STEP = {
    **BATCH_SHELL,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
TRAINJOB = {  # as Kubeflow's Trainer sets them, beside an indexed Job's own
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
}


def place(found: LaunchEnvironment | None) -> tuple[object, ...]:
    return found.launcher, found.rank, found.size, found.local_rank, found.local_size


def test_nobody_started_us() -> None:
    assert (
        detect({"PATH": "/bin", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None
    )


def test_os_environ_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert place(detect())[:3] == ("launcher", 3, 4)


def test_torchrun_with_the_place_to_meet() -> None:
    found = detect(TORCHRUN)
    assert place(found) == ("launcher", 3, 4, 1, 2)
    assert (found.master_address, found.master_port, found.file) == ("node1", 29500, None)
    assert found.variables == ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def test_our_launcher_with_a_file() -> None:
    found = detect({"RANK": "0", "WORLD_SIZE": "2", "FLASHLIGHT_FILE": "/shared/meet"})
    assert place(found) == ("launcher", 0, 2, None, None)
    assert found.file == "/shared/meet"


@pytest.mark.parametrize(
    ("change", "port", "addresses"),
    [
        ({}, 40001, ("10.0.0.1", "fd00::1")),
        ({"MASTER_PORT": "40002"}, 40002, ()),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40002"}, 40002, ()),
    ],
)
def test_our_port_counts_while_master_port_is_the_one_set_with_it(
    change: dict[str, str], port: int, addresses: tuple[str, ...]
) -> None:
    """An inner launcher sets another one, on the same host, and inherits ours."""
    ours = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "40000"}
    meeting = {"FLASHLIGHT_PORT": "40001:40000", "FLASHLIGHT_ADDRESSES": "10.0.0.1,fd00::1"}
    found = detect({**ours, **meeting, **change})
    assert (found.master_port, found.addresses) == (port, addresses)


def test_a_port_beside_that_of_torchruns_agent_is_never_the_same() -> None:
    assert all(12_000 <= derived_port(port, 1) < 32_000 for port in range(1, 65536))
    assert not any(derived_port(port, 1) == port for port in range(1, 65536))


def test_our_launcher_inside_a_step_of_another_one() -> None:
    """Its mark says that RANK and WORLD_SIZE were not left behind by an earlier launch."""
    inner = {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    with pytest.raises(ValueError, match="contradict OMPI_COMM_WORLD_RANK"):
        detect(inner)
    assert place(detect({**inner, "FLASHLIGHT_RESTART_COUNT": "0"}))[:3] == ("launcher", 0, 2)


def test_open_mpi_and_hydra() -> None:
    assert place(detect(OPEN_MPI)) == ("openmpi", 1, 4, 1, 4)
    assert place(detect(HYDRA)) == ("pmi", 2, 4, 2, 4)
    mvapich = {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}
    assert place(detect(mvapich)) == ("mvapich", 0, 2, None, None)


def test_flux_and_jsrun() -> None:
    flux = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}
    assert place(detect(flux)) == ("flux", 3, 4, 1, None)
    jsm = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    jsrun = {f"JSM_NAMESPACE_{name}": value for name, value in jsm.items()}
    assert place(detect(jsrun)) == ("jsm", 1, 2, 0, 1)
    assert place(detect({**STEP, **flux}))[:3] == ("flux", 3, 4)  # its broker was started by srun
    assert place(detect({**jsrun, **OPEN_MPI}))[0] == "openmpi"  # jsrun's MPI


def test_a_pod_of_kubeflow() -> None:
    pod = {"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NODE_RANK": "1"}
    for ranks in ("1", "auto"):
        assert place(detect({**pod, "PET_NPROC_PER_NODE": ranks}))[:3] == ("launcher", 1, 2)
    of_four = {**pod, "WORLD_SIZE": "4", "PET_NPROC_PER_NODE": "2"}
    with pytest.raises(ValueError, match=r"RANK=1 is the pod's number.*by torchrun, which reads"):
        detect(of_four)
    assert place(detect({**of_four, **TORCHRUN})) == ("launcher", 3, 4, 1, 2)


def test_a_pod_of_a_trainjob_that_is_one_rank() -> None:
    found = detect(TRAINJOB)
    assert place(found) == ("kubeflow", 1, 2, None, None)
    assert (found.master_address, found.master_port) == ("train-node-0-0.train", 29400)
    assert found.said_by == "PET_NODE_RANK, PET_NNODES"
    assert place(detect({**TRAINJOB, "PET_NODE_RANK": "0", "PET_NNODES": "1"}))[:3] == (
        "kubeflow",
        0,
        1,
    )
    assert place(detect({**TRAINJOB, **TORCHRUN})) == ("launcher", 3, 4, 1, 2)
    assert place(detect({**TRAINJOB, **OPEN_MPI}))[:3] == ("openmpi", 1, 4)


@pytest.mark.parametrize(
    "change", [{"PET_NPROC_PER_NODE": "2"}, {"PET_NPROC_PER_NODE": "auto"}, {"PET_NNODES": "1:2"}]
)
def test_a_pod_of_a_trainjob_for_a_launcher_is_no_rank(change: dict[str, str]) -> None:
    assert detect({**TRAINJOB, **change}) is None


def test_a_pod_of_an_indexed_job() -> None:
    """The manifest says how many pods there are and where the first is, Kubernetes which it is."""
    pod = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-workers-0-2"}
    assert detect(pod) is None
    meeting = {"MASTER_ADDR": "train-workers-0-0.train", "MASTER_PORT": "29500"}
    found = detect({**pod, "WORLD_SIZE": "4", **meeting})
    assert place(found) == ("kubernetes", 2, 4, None, None)
    assert (found.master_address, found.master_port) == ("train-workers-0-0.train", 29500)
    ours = {**pod, **meeting, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert place(detect(ours))[:4] == ("launcher", 5, 8, 1)
    with pytest.raises(ValueError, match="JOB_COMPLETION_INDEX=2 and WORLD_SIZE=2"):
        detect({**pod, "WORLD_SIZE": "2", **meeting})


def test_a_slurm_step_with_its_first_host() -> None:
    found = detect(STEP)
    assert place(found) == ("slurm", 4, 5, 0, 1)
    assert found.master_address == "gpu03"
    assert found.master_port is not None
    assert 12_000 <= found.master_port < 32_000


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("a,b", "a"), ("gpu[3-5]-ib,x", "gpu3-ib"), ("rack1-n[007]", "rack1-n007")],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    found = detect({**STEP, "SLURM_STEP_NODELIST": nodes})
    assert found.master_address == first


def test_a_master_address_given_goes_before_slurms() -> None:
    found = detect({**STEP, "MASTER_ADDR": "chosen", "MASTER_PORT": "5"})
    assert (found.master_address, found.master_port) == ("chosen", 5)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": str(0xFFFFFFFB)}])
def test_a_slurm_shell_without_srun_is_no_task(step: dict[str, str]) -> None:
    assert detect({**BATCH_SHELL, **step}) is None


def test_an_mpirun_inside_a_slurm_step_counts_before_slurm() -> None:
    """Hydra starts its proxies by srun: Slurm's numbers are then those of the nodes."""
    found = detect({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **HYDRA})
    assert place(found) == ("pmi", 2, 4, 2, 4)
    assert found.master_address is None


def test_torchrun_inside_a_slurm_step_counts_before_slurm() -> None:
    assert place(detect({**STEP, **TORCHRUN})) == ("launcher", 3, 4, 1, 2)


def test_variables_left_in_the_shell_of_an_mpirun_are_refused() -> None:
    leftover = {"RANK": "0", "WORLD_SIZE": "1", **OPEN_MPI}
    with pytest.raises(ValueError, match=r"WORLD_SIZE=1 contradict .*OMPI_COMM_WORLD_SIZE=4"):
        detect(leftover)


def test_variables_that_agree_with_mpirun_are_fine() -> None:
    assert place(detect({"RANK": "1", "WORLD_SIZE": "4", **OPEN_MPI}))[:3] == ("launcher", 1, 4)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"WORLD_SIZE": "2", **OPEN_MPI}, "then `unset WORLD_SIZE`; else set RANK as well"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is set and PMI_RANK is not"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK must be an integer, got 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "1"}, "MASTER_ADDR mu"),
        ({**STEP, "SLURM_PROCID": "9"}, "SLURM_PROCID=9"),
    ],
)
def test_half_set_or_contradictory_variables_are_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        detect(environ)


class Asked(dict[str, str]):
    """An environment that remembers the variables that were read."""

    read: ClassVar[set[str]] = set()

    def get(self, name: str, *default: Any) -> Any:
        self.read.add(name)
        return super().get(name, *default)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)


def test_variables_that_the_page_on_starting_jobs_names_are_read() -> None:
    page = Path(__file__).parents[2].joinpath("docs/starting-jobs.md").read_text()
    table = page.partition("### More than 64 hosts")[2].partition("\n## ")[0]
    named = {name for name in re.findall(r"`([A-Z_]+)`", table) if "_" in name}
    for set_ in (TORCHRUN, OPEN_MPI, HYDRA, STEP, TRAINJOB, {"JOB_COMPLETION_INDEX": "0"}):
        detect(Asked(set_))
    plain = {"SLURM_NTASKS_PER_NODE": "3", "SLURM_STEP_ID": "0", **BATCH_SHELL}
    detect(Asked(plain))
    agent_port(Asked())
    assert len(named) > 20
    assert named <= Asked.read
