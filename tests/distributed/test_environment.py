"""Launchers in the environment: variables of one or several launchers, incomplete or stale ones."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flashlight_py.distributed.rendezvous import environment


def variables(text: str) -> dict[str, str]:
    """Return an environment from a shell assignment: "NAME=value NAME=value"."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500 "
    "TORCHELASTIC_RUN_ID=none"
)
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=4"
)
HYDRA = variables("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=4")
BATCH_SHELL = variables(
    "SLURM_JOB_ID=77 SLURM_NTASKS=6 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "
    "SLURM_TASKS_PER_NODE=3(x2)"
)
STEP = BATCH_SHELL | variables(
    "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=2(x2),1 "
    "SLURM_STEP_NODELIST=gpu[03-05,9] SLURM_PROCID=4 SLURM_LOCALID=0 SLURM_NODEID=2 "
    "SLURM_LAUNCH_NODE_IPADDR=10.0.0.1"
)
# Kubeflow's Trainer sets these, in addition to an indexed Job.
TRAINJOB = variables(
    "PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=1 PET_MASTER_ADDR=train-node-0-0.train "
    "PET_MASTER_PORT=29400 JOB_COMPLETION_INDEX=1"
)
# Hydra starts its proxies by srun, so Slurm numbers the nodes.
HYDRA_BY_SRUN = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **HYDRA}
FLUX = variables("FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1")
JSM = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
JSRUN = {f"JSM_NAMESPACE_{name}": value for name, value in JSM.items()}
KUBEFLOW = variables("RANK=1 WORLD_SIZE=2 PET_NNODES=2 PET_NODE_RANK=1")
# The manifest has the number of pods and the first pod, Kubernetes the index.
POD = variables("JOB_COMPLETION_INDEX=2 HOSTNAME=train-workers-0-2")
POD_MEETING = variables("MASTER_ADDR=train-workers-0-0.train MASTER_PORT=29500")


def detect_fields(environ: Mapping[str, str]) -> environment.LaunchEnvironment:
    launch = environment.detect(environ)
    assert launch is not None
    return launch


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, ("launcher", 3, 4, 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "2", "FLASHLIGHT_FILE": "/x"}, ("launcher", 0, 2, None, None)),
        (OPEN_MPI, ("openmpi", 1, 4, 1, 4)),
        (HYDRA, ("pmi", 2, 4, 2, 4)),
        (variables("MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2"), ("mvapich", 0, 2, None, None)),
        (FLUX, ("flux", 3, 4, 1, None)),
        (JSRUN, ("jsm", 1, 2, 0, 1)),
        ({**STEP, **FLUX}, ("flux", 3, 4, 1, None)),  # its broker was started by srun
        ({**JSRUN, **OPEN_MPI}, ("openmpi", 1, 4, 1, 4)),  # the MPI of jsrun
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "1"}, ("launcher", 1, 2, None, None)),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "auto"}, ("launcher", 1, 2, None, None)),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "2", **TORCHRUN}, ("launcher", 3, 4, 1, 2)),
        (TRAINJOB, ("kubeflow", 1, 2, None, None)),
        ({**TRAINJOB, "PET_NODE_RANK": "0", "PET_NNODES": "1"}, ("kubeflow", 0, 1, None, None)),
        ({**TRAINJOB, **TORCHRUN}, ("launcher", 3, 4, 1, 2)),
        ({**TRAINJOB, **OPEN_MPI}, ("openmpi", 1, 4, 1, 4)),
        ({**POD, "WORLD_SIZE": "4", **POD_MEETING}, ("kubernetes", 2, 4, None, None)),
        ({**POD, **POD_MEETING, "RANK": "5", "WORLD_SIZE": "8"}, ("launcher", 5, 8, None, None)),
        (STEP, ("slurm", 4, 5, 0, 1)),
        (HYDRA_BY_SRUN, ("pmi", 2, 4, 2, 4)),
        ({**STEP, **TORCHRUN}, ("launcher", 3, 4, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4", **OPEN_MPI}, ("launcher", 1, 4, None, None)),
    ],
)
def test_detect_uses_inner_launcher(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    launch = detect_fields(environ)
    where = launch.rank, launch.size, launch.local_rank, launch.local_size
    assert (launch.launcher, *where) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"PATH": "/bin", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {**TRAINJOB, "PET_NPROC_PER_NODE": "2"},
        {**TRAINJOB, "PET_NPROC_PER_NODE": "auto"},
        {**TRAINJOB, "PET_NNODES": "1:2"},
        POD,
        BATCH_SHELL,
        {**BATCH_SHELL, "SLURM_STEP_ID": str(0xFFFFFFFB)},
    ],
)
def test_detect_returns_none_without_a_launcher(environ: dict[str, str]) -> None:
    assert environment.detect(environ) is None


@pytest.mark.parametrize(
    ("environ", "address", "port"),
    [
        (TORCHRUN, "node1", 29500),
        (TRAINJOB, "train-node-0-0.train", 29400),
        ({**POD, "WORLD_SIZE": "4", **POD_MEETING}, "train-workers-0-0.train", 29500),
        ({**STEP, "MASTER_ADDR": "chosen", "MASTER_PORT": "5"}, "chosen", 5),
        (HYDRA_BY_SRUN, None, None),
        ({"RANK": "0", "WORLD_SIZE": "2", "FLASHLIGHT_FILE": "/x"}, None, None),
    ],
)
def test_detect_returns_the_rendezvous_of_the_launcher(
    environ: dict[str, str], address: str | None, port: int | None
) -> None:
    launch = detect_fields(environ)
    assert (launch.master_address, launch.master_port) == (address, port)
    assert launch.file == environ.get("FLASHLIGHT_FILE")


def test_detect_names_the_variables_that_it_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_fields(TRAINJOB).source == "PET_NODE_RANK, PET_NNODES"
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    launch = environment.detect()  # reads os.environ
    assert launch == detect_fields(TORCHRUN)
    assert launch.source == "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"


@pytest.mark.parametrize(
    ("change", "port", "addresses"),
    [
        ({}, 40001, ("10.0.0.1", "fd00::1")),
        ({"MASTER_PORT": "40002"}, 40002, ()),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "40002"}, 40002, ()),
        ({"MASTER_ADDR": "127.0.0.1"}, 40000, ()),
        ({"FLASHLIGHT_PORT": ""}, 40000, ("10.0.0.1", "fd00::1")),
        ({"FLASHLIGHT_ADDRESSES": ""}, 40000, ()),
    ],
)
def test_detect_uses_flrun_addresses_only_if_master_addr_and_port_are_unchanged(
    change: dict[str, str], port: int, addresses: tuple[str, ...]
) -> None:
    """An inner launcher sets another address on the same host, and inherits the variables of
    flrun."""
    ours = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "40000"}
    meeting = {"FLASHLIGHT_PORT": "40001:40000", "FLASHLIGHT_ADDRESSES": "10.0.0.1,fd00::1"}
    launch = detect_fields({**ours, **meeting, **change})
    assert (launch.master_port, launch.addresses) == (port, addresses)


def test_derived_port_differs_from_the_port_of_the_torchrun_agent() -> None:
    assert all(12_000 <= environment.derived_port(port, 1) < 32_000 for port in range(1, 65536))
    assert not any(environment.derived_port(port, 1) == port for port in range(1, 65536))


def test_detect_prefers_flrun_inside_a_step_of_another_launcher() -> None:
    """The mark of flrun shows that RANK and WORLD_SIZE are not left over from an earlier launch."""
    inner = {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    with pytest.raises(ValueError, match="contradict OMPI_COMM_WORLD_RANK"):
        environment.detect(inner)
    launch = detect_fields({**inner, "FLASHLIGHT_RESTART_COUNT": "0"})
    assert (launch.launcher, launch.rank, launch.size) == ("launcher", 0, 2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        *(("n1", "n1"), ("a,b", "a"), ("gpu[03-05,9]", "gpu03")),
        *(("gpu[3-5]-ib,x", "gpu3-ib"), ("rack1-n[007]", "rack1-n007")),
    ],
)
def test_detect_uses_the_first_host_of_a_slurm_step_as_master(nodes: str, first: str) -> None:
    launch = detect_fields({**STEP, "SLURM_STEP_NODELIST": nodes})
    assert launch.master_address == first
    assert launch.master_port is not None
    assert 12_000 <= launch.master_port < 32_000


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"WORLD_SIZE": "2", **OPEN_MPI}, "call `unset WORLD_SIZE`. Otherwise set RANK as well"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is set and PMI_RANK is not"),
        ({"RANK": "two", "WORLD_SIZE": "2"}, "RANK must be an integer, got 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "WORLD_SIZE must be at most WORLD_SIZE=4.*got 8"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "1"}, "MASTER_ADDR mu"),
        ({**STEP, "SLURM_PROCID": "9"}, "SLURM_PROCID=9"),
        ({**POD, "WORLD_SIZE": "2", **POD_MEETING}, "JOB_COMPLETION_INDEX=2 and WORLD_SIZE=2"),
        # Left over in the shell of an mpirun.
        ({"RANK": "0", "WORLD_SIZE": "1", **OPEN_MPI}, "=1 contradict .*OMPI_COMM_WORLD_SIZE=4"),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "2"}, "RANK=1 is the number of the pod.*by torchrun, "),
    ],
)
def test_detect_names_contradictory_variables(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        environment.detect(environ)


class Asked(dict[str, str]):
    """An environment that records which variables are read."""

    read: ClassVar[set[str]] = set()

    def get(self, name: str, *default: Any) -> Any:
        self.read.add(name)
        return super().get(name, *default)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)


def test_detect_reads_every_variable_in_the_documentation() -> None:
    page = Path(__file__).parents[2].joinpath("docs/starting-jobs.md").read_text()
    table = page.partition("### More than 64 hosts")[2].partition("\n## ")[0]
    named = {name for name in re.findall(r"`([A-Z_]+)`", table) if "_" in name}
    for set_ in (TORCHRUN, OPEN_MPI, HYDRA, STEP, TRAINJOB, {"JOB_COMPLETION_INDEX": "0"}):
        environment.detect(Asked(set_))
    environment.detect(Asked({"SLURM_NTASKS_PER_NODE": "3", "SLURM_STEP_ID": "0", **BATCH_SHELL}))
    environment.agent_port(Asked())
    assert len(named) > 20
    assert named <= Asked.read
