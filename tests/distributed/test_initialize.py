"""The start of a world: launchers, environments and invalid arguments."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.rendezvous import environment
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings, read_init_method
from flashlight_py.doctor import mpirun_command
from tests.distributed import processes
from tests.distributed.conformance import on_ranks, slow
from tests.distributed.harness import run_ranks
from tests.distributed.processes import free_port, limit_descriptors, process_state

# A user program that initialises, reduces, and prints its rank.
PROGRAM = """
import sys
import numpy as np
import flashlight_py as fl

method = sys.argv[1]
fl.distributed_init(None if method == "auto" else fl.DistributedInit[method.upper()])
x = fl.all_reduce(np.full(3, fl.get_world_rank() + 1.0))
place = fl.get_world_rank(), fl.get_world_size(), fl.get_local_rank(), fl.get_local_size()
# One write: the lines of ranks that share a pipe must not be mixed.
sys.stdout.write(f"{place} {x.tolist()} {fl.distributed_backend().name}\\n")
"""
MAIN = [sys.executable, "-c", PROGRAM]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "MPI_LOCAL", "SLURM_")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)


def start(method: str, **variables: str) -> subprocess.Popen[str]:
    return processes.start([*MAIN, method], variables)


def start_two(method: str, **variables: str) -> list[subprocess.Popen[str]]:
    return [start(method, RANK=str(rank), WORLD_SIZE="2", **variables) for rank in range(2)]


def finish(started: list[subprocess.Popen[str]]) -> list[str]:
    results = [processes.finish(process) for process in started]
    assert all(code == 0 for code, _ in results), results
    return [out.strip() for _, out in results]


def expected(size: int) -> set[str]:
    total = float(sum(range(1, size + 1)))
    return {f"({r}, {size}, {r}, {size}) {[total] * 3} SHM" for r in range(size)}


@pytest.mark.parametrize(("method", "size"), [("auto", 2), *slow(("mpi", 4))])
def test_distributed_init_works_under_mpirun(method: str, size: int) -> None:
    (output,) = finish([processes.start([*mpirun_command(size), *MAIN, method])])
    assert set(output.splitlines()) == expected(size)


@pytest.mark.parametrize("method", ["auto", *slow("env")])
def test_distributed_init_reads_the_variables_of_torchrun(method: str) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert set(finish(start_two(method, **where))) == expected(2)


@pytest.mark.parametrize("has_one_host", [True, *slow(False)])
def test_init_avoids_the_port_of_the_torchrun_agent(tmp_path: Path, has_one_host: bool) -> None:
    """The ranks meet in the user's folder, or at another port."""
    with socket.create_server(("127.0.0.1", 0)) as agent:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.getsockname()[1])}
        where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "XDG_RUNTIME_DIR": str(tmp_path)}
        where |= {"LOCAL_WORLD_SIZE": "2"} if has_one_host else {}
        got = finish(start_two("auto", **where))
    assert set(got) == expected(2)
    left = [] if has_one_host else ["flashlight-secret"]
    assert [path.name for path in tmp_path.iterdir()] == left


@pytest.mark.slow
def test_distributed_init_combines_variables_with_a_file(tmp_path: Path) -> None:
    got = finish(start_two("env", FLASHLIGHT_FILE=str(tmp_path / "meet")))
    assert set(got) == expected(2)
    assert list(tmp_path.iterdir()) == []


def test_distributed_init_creates_a_world_of_one_without_a_launcher() -> None:
    assert finish([start("auto")]) == ["(0, 1, 0, 1) [1.0, 1.0, 1.0] SINGLE"]


def test_distributed_init_names_the_missing_part_of_the_environment(tmp_path: Path) -> None:
    """For example if the mpirun of one MPI starts a program whose mpi4py uses another MPI."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py here')\n")
    started = {
        start("mpi", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="4"): (
            *("RendezvousError", "says rank 1 of 4 (OMPI_COMM_WORLD_RANK, ", "but MPI has 1 rank"),
        ),
        start("mpi", PYTHONPATH=str(tmp_path)): (
            *("BackendUnavailableError", "pip install 'flashlight-py[mpi]'"),
        ),
        start("env", RANK="0", WORLD_SIZE="2"): ("MASTER_ADDR",),
    }
    for process, words in started.items():
        code, errors = processes.finish(process)
        assert code == 1
        assert all(word in errors for word in words), errors


def start_watchdog_without_descriptors(*args: Any) -> None:
    """Start the watchdog of the world while the process may open no more files."""
    with limit_descriptors(0):
        watch(*args)


watch = initialize._watch


@on_ranks(("shm", 2), fresh=True, init=None)
def test_init_releases_resources_if_a_step_fails(rank: int, size: int, tmp_path: Path) -> None:
    folders = {"FILE_PATH": str(tmp_path / "meet"), "TRACE_DIR": str(tmp_path / "records")}
    init_args = fl.DistributedInit.FILE_SYSTEM, rank, size, {**folders, "BACKEND": "gloo"}
    before = process_state()
    if rank == 1:
        initialize._watch = start_watchdog_without_descriptors
        with pytest.raises(OSError, match="Too many open files"):
            fl.distributed_init(*init_args)
        initialize._watch = watch
    else:
        fl.distributed_init(*init_args)
        why = r"lost rank 1\b.*it raised OSError: \[Errno 24\] Too many open files"
        with pytest.raises(fl.errors.PeerLostError, match=why):
            fl.barrier()
        fl.distributed_shutdown()
    assert not fl.is_distributed_init()
    assert process_state() == before
    fl.distributed_init(*init_args)
    assert np.all(fl.all_reduce(np.ones(3)) == size)
    fl.distributed_shutdown()


def test_init_notifies_ranks_if_its_cleanup_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if Ctrl-C arrives while a failed start closes its connections."""
    reasons: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt("again")

    def fail(new: initialize.NewWorld) -> None:
        new.undo.callback(interrupt)
        raise OSError("a full disk")

    monkeypatch.setattr(initialize, "STEPS", (fail,))
    store: Any = SimpleNamespace(abort=reasons.append)
    before = process_state()
    with pytest.raises(KeyboardInterrupt, match="again"):
        initialize.create_world(lambda: store, Settings())
    assert reasons == ["KeyboardInterrupt: again"]
    assert process_state() == before


ENV, FILE = fl.DistributedInit.ENV, fl.DistributedInit.FILE_SYSTEM
ADDRESS = {"MASTER_ADDR": "node1"}
MEETING = {**ADDRESS, "MASTER_PORT": 29500}


@pytest.mark.parametrize(
    ("passed", "params", "result"),
    [
        (None, None, (None, None)),
        (fl.DistributedInit.MPI, None, (fl.DistributedInit.MPI, None)),
        ("env://", {"TIMEOUT": 9}, (ENV, {"TIMEOUT": 9})),
        ("file:///shared/meet", None, (FILE, {"FILE_PATH": "/shared/meet"})),
        ("tcp://node1:29500", None, (ENV, MEETING)),
        ("tcp://[::1]:29500", None, (ENV, {"MASTER_ADDR": "::1", "MASTER_PORT": 29500})),
        ("gloo", {"TIMEOUT": 9}, (None, {"TIMEOUT": 9, "BACKEND": "gloo"})),
        ("mpi", {"BACKEND": "mpi"}, (None, {"BACKEND": "mpi"})),
        (fl.DistributedBackend.NCCL, None, (None, {"BACKEND": "nccl"})),
        ("tcp://node1:29500", {**MEETING, "MASTER_PORT": "29500"}, (ENV, MEETING)),
        ("tcp://node1:29500", ADDRESS, (ENV, MEETING)),
    ],
)
def test_read_init_method_translates_names_of_torch(passed: Any, params: Any, result: Any) -> None:
    assert read_init_method(passed, params) == result


@pytest.mark.parametrize(
    ("passed", "params", "message"),
    [
        ("MPI", None, "DistributedInit.MPI, .*, got 'MPI'"),
        ("env://?rank=0", None, "'file://PATH', 'tcp://HOST:PORT' or a backend .nccl, gloo"),
        ("file://", None, "got 'file://'"),
        ("tcp://node1", None, "expected init_method tcp://HOST:PORT of rank 0, got 'tcp://node1'"),
        ("tcp://node1:70000", None, "expected init_method tcp://HOST:PORT"),
        ("tcp://node1:1?rank=0", None, "rank and size as world_rank and world_size"),
        ("cpu:gloo,cuda:nccl", None, "got 'cpu:gloo,cuda:nccl'"),
        (fl.DistributedBackend.SINGLE, None, "got 'single'"),
        (7, None, "got 7"),
        ("nccl", {"BACKEND": "gloo"}, "must be 'nccl' as in init_method, got 'gloo'"),
        ("file:///a", {"FILE_PATH": "/b"}, "must be '/a' as in init_method, got '/b'"),
        ("tcp://a:1", {"FILE_PATH": "/b"}, "expected one rendezvous"),
        (None, {"FILE_PATH": "/b", **MEETING}, "expected one rendezvous"),
        ("tcp://a:1", MEETING, "must be 'a' as in init_method, got 'node1'"),
        (FILE, MEETING, "must be DistributedInit.ENV or None, got FILE_SYSTEM"),
        (None, ADDRESS, "params has MASTER_ADDR. Pass MASTER_PORT"),
        (None, {"MASTER_PORT": 1}, "params has MASTER_PORT. Pass MASTER_ADDR"),
        (None, {**ADDRESS, "MASTER_PORT": "http"}, "must be a TCP port in .*, got 'http'"),
        (None, {**MEETING, "MASTER_ADDR": ""}, "must be a name or an address, got ''"),
        (None, None, "need init_method=DistributedInit.FILE_SYSTEM"),
        (FILE, None, "FILE_PATH"),
        (FILE, {"FILE_PATH": ""}, "FILE_PATH"),
        (None, {"TIMOUT": 3}, "Did you mean 'TIMEOUT'"),
        (None, {"file_path": "x"}, "Did you mean 'FILE_PATH'"),
        (None, {"TIMEOUT": "soon"}, "positive number of seconds"),
        (None, {"TIMEOUT": -1}, "positive number of seconds"),
        (None, {"TIMEOUT": 3e6}, "at most 1000000"),
        *(
            (None, {"HOST_TIMEOUT": value}, r"\['HOST_TIMEOUT'\] must be .* 1 to 100000, or 0")
            for value in (0.5, 2e5, -1, float("nan"), "inf", "soon")
        ),
        (None, {"BACKEND": "smoke"}, "must be one of"),
        (None, {"MAX_DEVICE_PER_NODE": "0"}, "whole number"),
    ],
)
def test_distributed_init_rejects_invalid_params_before_it_creates_anything(
    passed: Any, params: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        fl.distributed_init(passed, 0, 2, params)
    assert not fl.is_distributed_init()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (-1, 2, "world_rank must be from 0 to 1"),
        (2, 2, "world_rank must be from 0 to 1"),
        (0, 0, "world_size must be at least 1"),
        (0, "2", "must be an integer"),
    ],
)
def test_distributed_init_rejects_invalid_rank_and_size(rank: int, size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fl.distributed_init(FILE, rank, size, {"FILE_PATH": "/nowhere/meet"})
    assert not fl.is_distributed_init()


def test_distributed_init_raises_os_error_for_trace_dir_in_a_removed_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        fl.distributed_init(params={"TRACE_DIR": "records"})
    assert not fl.is_distributed_init()


def test_init_rejects_params_and_an_environment_without_ranks() -> None:
    with pytest.raises(TypeError, match="dict"):
        fl.distributed_init(params=["FILE_PATH"])  # type: ignore[arg-type]
    with pytest.raises(fl.errors.RendezvousError, match="RANK, WORLD_SIZE"):
        fl.distributed_init(fl.DistributedInit.ENV)


def test_second_distributed_init_warns_and_returns() -> None:
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, 0, 1, {"FILE_PATH": "unused"})
    try:
        with pytest.warns(RuntimeWarning, match="called again"):
            fl.distributed_init()
        assert fl.is_distributed_init()
    finally:
        fl.distributed_shutdown()
    assert not fl.is_distributed_init()
    fl.distributed_shutdown()  # no effect


def test_init_rejects_a_rank_unlike_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got world_rank=1 and world_size=2"):
        fl.distributed_init("env://", 1, 2)


def join_worlds(rank: int, size: int, ports: list[int], path: str) -> list[int]:
    results: list[int] = []

    def join(init_method: str | None, *rank_and_size: int, **params: str) -> None:
        fl.distributed_init(init_method, *rank_and_size, {"TIMEOUT": "30", **params})
        results.append(int(fl.all_reduce(np.array([rank + 1]))[0]))
        fl.distributed_shutdown()

    os.environ |= {"MASTER_ADDR": "nowhere", "MASTER_PORT": str(ports[2])}
    join(f"tcp://localhost:{ports[0]}", rank, size)
    join(f"file://{path}", rank, size)
    join(None, rank, size, MASTER_ADDR="localhost")  # the port is in the environment
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    join(f"tcp://localhost:{ports[1]}", -1, -1)
    return results


def test_distributed_init_combines_init_methods_params_and_the_environment(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    results = run_ranks(join_worlds, 2, ports, f"{tmp_path / 'meet'}", init=None)
    assert results == [[3] * 4] * 2


@pytest.mark.parametrize(("key", "usual"), [("TIMEOUT", 300.0), ("HOST_TIMEOUT", 5.0)])
def test_settings_read_timeouts(key: str, usual: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(Settings.from_params({}), key.lower()) == usual
    monkeypatch.setenv(f"FLASHLIGHT_{key}", "60")
    assert getattr(Settings.from_params({}), key.lower()) == 60.0
    assert getattr(Settings.from_params({key: 2}), key.lower()) == 2.0
    monkeypatch.setenv(f"FLASHLIGHT_{key}", "long")
    with pytest.raises(ValueError, match=f"FLASHLIGHT_{key} must be"):
        Settings.from_params({})


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
