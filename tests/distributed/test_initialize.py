"""Every way to start, with real launchers, by hand and by torch's words for how ranks meet."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.rendezvous import environment
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings, read_init_method
from tests.distributed import jobs
from tests.distributed.conformance import on_ranks
from tests.distributed.harness import mpirun_command, run_ranks
from tests.distributed.jobs import free_port
from tests.distributed.processes import descriptors_below, held

# A program as a user writes it: initialise, reduce, print what this process became.
PROGRAM = """
import sys
import numpy as np
import flashlight_py as fl

method, *rest = sys.argv[1:]
if method == "file":
    file, rank, size = rest[0], int(rest[1]), int(rest[2])
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, {"FILE_PATH": file})
else:
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


def start(*args: str, **variables: str) -> subprocess.Popen[str]:
    return jobs.start([*MAIN, *args], variables)


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    results = [jobs.ended(process) for process in processes]
    assert all(code == 0 for code, _ in results), results
    return [out.strip() for _, out in results]


def expected(size: int) -> set[str]:
    total = float(sum(range(1, size + 1)))
    return {f"({r}, {size}, {r}, {size}) {[total] * 3} SHM" for r in range(size)}


@pytest.mark.parametrize("method", ["auto", "mpi"])
@pytest.mark.parametrize("size", [2, 4])
def test_mpirun(method: str, size: int) -> None:
    command = [*mpirun_command(size), *MAIN, method]
    (said,) = finish([jobs.start(command)])
    assert set(said.splitlines()) == expected(size)


def test_a_shared_file(tmp_path: Path) -> None:
    path = str(tmp_path / "meet")
    got = finish([start("file", path, str(rank), "3") for rank in range(3)])
    assert set(got) == expected(3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["auto", "env"])
def test_the_variables_of_torchrun(method: str) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    got = finish([start(method, RANK=str(rank), **where) for rank in range(3)])
    assert set(got) == expected(3)


@pytest.mark.parametrize("has_one_host", [True, False])
def test_where_torchruns_agent_listens_at_master_port(tmp_path: Path, has_one_host: bool) -> None:
    """In the user's folder, or at a port of their own."""
    with socket.create_server(("127.0.0.1", 0)) as agent:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.getsockname()[1])}
        where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "XDG_RUNTIME_DIR": str(tmp_path)}
        where |= {"WORLD_SIZE": "3", **({"LOCAL_WORLD_SIZE": "3"} if has_one_host else {})}
        got = finish([start("auto", RANK=str(rank), **where) for rank in range(3)])
    assert set(got) == expected(3)
    left = [] if has_one_host else ["flashlight-secret"]
    assert [path.name for path in tmp_path.iterdir()] == left


def test_variables_and_a_file(tmp_path: Path) -> None:
    where = {"FLASHLIGHT_FILE": str(tmp_path / "meet"), "WORLD_SIZE": "2"}
    got = finish([start("env", RANK=str(rank), **where) for rank in range(2)])
    assert set(got) == expected(2)
    assert list(tmp_path.iterdir()) == []


def test_alone_without_a_launcher() -> None:
    assert finish([start("auto")]) == ["(0, 1, 0, 1) [1.0, 1.0, 1.0] SINGLE"]


def test_a_rank_that_would_believe_it_is_alone_refuses() -> None:
    """As when the mpirun of one MPI starts a program whose mpi4py has loaded another."""
    errors = error_of(start("mpi", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="4"))
    assert "RendezvousError" in errors
    assert "the environment says rank 1 of 4" in errors
    assert "MPI has 1 rank" in errors


def test_mpi_without_mpi4py_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py here')\n")
    errors = error_of(start("mpi", PYTHONPATH=str(tmp_path)))
    assert "BackendUnavailableError" in errors
    assert "pip install 'flashlight-py[mpi]'" in errors


def test_a_size_without_a_place_to_meet_says_so() -> None:
    assert "MASTER_ADDR" in error_of(start("env", RANK="0", WORLD_SIZE="2"))


def error_of(process: subprocess.Popen[str]) -> str:
    code, errors = jobs.ended(process)
    assert code == 1
    return errors


def start_watching_without_descriptors(*args: Any) -> None:
    """Watch the world, at a moment when the process may open no more files."""
    with descriptors_below(0):
        watch(*args)


watch = initialize._watch


@on_ranks(("shm", 2), fresh=True, init=None)
def test_a_start_that_fails_at_its_end_leaves_nothing_and_is_reported(
    rank: int, size: int, tmp_path: Path
) -> None:
    folders = {"FILE_PATH": str(tmp_path / "meet"), "TRACE_DIR": str(tmp_path / "records")}
    place = fl.DistributedInit.FILE_SYSTEM, rank, size, {**folders, "BACKEND": "gloo"}
    before = held()
    if rank == 1:
        initialize._watch = start_watching_without_descriptors
        with pytest.raises(OSError, match="Too many open files"):
            fl.distributed_init(*place)
        initialize._watch = watch
    else:
        fl.distributed_init(*place)
        why = r"lost rank 1\b.*it raised OSError: \[Errno 24\] Too many open files"
        with pytest.raises(fl.errors.PeerLostError, match=why):
            fl.barrier()
        fl.distributed_shutdown()
    assert not fl.is_distributed_init()
    assert held() == before
    fl.distributed_init(*place)
    assert np.all(fl.all_reduce(np.ones(3)) == size)
    fl.distributed_shutdown()


def test_ranks_are_notified_if_a_failed_start_cannot_be_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where Ctrl-C arrives while the connections of a start that has failed are closed."""
    reasons: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt("again")

    def fail(new: initialize.NewWorld) -> None:
        new.undo.callback(interrupt)
        raise OSError("a full disk")

    monkeypatch.setattr(initialize, "STEPS", (fail,))
    store: Any = SimpleNamespace(abort=reasons.append)
    before = held()
    with pytest.raises(KeyboardInterrupt, match="again"):
        initialize.meet(lambda: store, Settings())
    assert reasons == ["KeyboardInterrupt: again"]
    assert held() == before


# torch's words are translated, or refused with the translation ------------------------------------


ENV, FILE = fl.DistributedInit.ENV, fl.DistributedInit.FILE_SYSTEM
ADDRESS = {"MASTER_ADDR": "node1"}
MEETING = {**ADDRESS, "MASTER_PORT": 29500}


@pytest.mark.parametrize(
    ("given", "params", "asked"),
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
def test_words_are_translated(given: Any, params: Any, asked: Any) -> None:
    assert read_init_method(given, params) == asked


@pytest.mark.parametrize(
    ("given", "params", "message"),
    [
        ("MPI", None, "one of DistributedInit.MPI, .*; got 'MPI'"),
        ("env://?rank=0", None, "'env://', 'file://PATH', 'tcp://HOST:PORT' and nccl, gloo"),
        ("file://", None, "got 'file://'"),
        ("tcp://node1", None, "expected tcp://HOST:PORT of rank 0, got 'tcp://node1'"),
        ("tcp://node1:70000", None, "expected tcp://HOST:PORT"),
        ("tcp://node1:1?rank=0", None, "rank and size are world_rank and world_size"),
        ("cpu:gloo,cuda:nccl", None, "got 'cpu:gloo,cuda:nccl'"),
        (fl.DistributedBackend.SINGLE, None, "got 'single'"),
        (7, None, "got 7"),
        ("nccl", {"BACKEND": "gloo"}, "asks for BACKEND 'nccl', and params say 'gloo'"),
        ("file:///a", {"FILE_PATH": "/b"}, "asks for FILE_PATH '/a', and params say '/b'"),
        ("tcp://a:1", {"FILE_PATH": "/b"}, "two places to meet"),
        (None, {"FILE_PATH": "/b", **MEETING}, "two places to meet"),
        ("tcp://a:1", MEETING, "asks for MASTER_ADDR 'a', and params say 'node1'"),
        (FILE, MEETING, "are for DistributedInit.ENV or None, not for FILE_SYSTEM"),
        (None, ADDRESS, "params have MASTER_ADDR and no MASTER_PORT"),
        (None, {"MASTER_PORT": 1}, "params have MASTER_PORT and no MASTER_ADDR"),
        (None, {**ADDRESS, "MASTER_PORT": "http"}, "must be a TCP port in .*, got 'http'"),
        (None, {**MEETING, "MASTER_ADDR": ""}, "must be a name or an address, got ''"),
        (None, None, "belong to DistributedInit.FILE_SYSTEM"),
        (FILE, None, "FILE_PATH"),
        (FILE, {"FILE_PATH": ""}, "FILE_PATH"),
        (None, {"TIMOUT": 3}, "did you mean 'TIMEOUT'"),
        (None, {"file_path": "x"}, "did you mean 'FILE_PATH'"),
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
def test_params_are_refused_before_anything_is_created(
    given: Any, params: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        fl.distributed_init(given, 0, 2, params)
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
def test_a_place_that_is_none_is_refused(rank: int, size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fl.distributed_init(FILE, rank, size, {"FILE_PATH": "/nowhere/meet"})
    assert not fl.is_distributed_init()


def test_a_folder_in_a_working_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        fl.distributed_init(params={"TRACE_DIR": "records"})
    assert not fl.is_distributed_init()


def test_params_must_be_a_mapping() -> None:
    with pytest.raises(TypeError, match="dict"):
        fl.distributed_init(params=["FILE_PATH"])  # type: ignore[arg-type]


def test_env_without_a_launcher_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "detect", lambda: None)
    with pytest.raises(fl.errors.RendezvousError, match="RANK, WORLD_SIZE"):
        fl.distributed_init(fl.DistributedInit.ENV)


def test_a_second_init_warns_and_returns() -> None:
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, 0, 1, {"FILE_PATH": "unused"})
    try:
        with pytest.warns(RuntimeWarning, match="called again"):
            fl.distributed_init()
        assert fl.is_distributed_init()
    finally:
        fl.distributed_shutdown()
    assert not fl.is_distributed_init()
    fl.distributed_shutdown()  # nothing to do


def test_a_rank_beside_an_environment_that_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="world_rank=1 and world_size=2 are passed"):
        fl.distributed_init("env://", 1, 2)


def meet(rank: int, size: int, init_method: str | None, is_told: bool, **params: Any) -> Any:
    given = (rank, size) if is_told else (-1, -1)
    fl.distributed_init(init_method, *given, {"TIMEOUT": "30", **params})
    x = fl.all_reduce(np.array([rank + 1]))
    fl.distributed_shutdown()
    return int(x[0])


def test_ranks_meet_by_torchs_words(tmp_path: Path) -> None:
    for word in (f"tcp://localhost:{free_port()}", f"file://{tmp_path / 'meet'}"):
        assert run_ranks(meet, 2, word, True, init=None) == [3, 3]


def variables(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2"}


def test_an_address_beside_an_environment_that_says_rank_and_size() -> None:
    word = f"tcp://localhost:{free_port()}"
    assert run_ranks(meet, 2, word, False, init=None, env=variables) == [3, 3]


def join_by_params(rank: int, size: int) -> Any:
    return meet(rank, size, None, True, MASTER_ADDR="localhost")


def test_params_say_where_rank_0_is() -> None:
    """Before the environment, which says what they leave out."""
    environ = {"MASTER_ADDR": "nowhere", "MASTER_PORT": str(free_port())}
    assert run_ranks(join_by_params, 2, init=None, env=lambda _: environ) == [3, 3]


@pytest.mark.parametrize(("key", "usual"), [("TIMEOUT", 300.0), ("HOST_TIMEOUT", 5.0)])
def test_timeouts_may_come_from_the_environment(
    key: str, usual: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(Settings.from_params({}), key.lower()) == usual
    monkeypatch.setenv(f"FLASHLIGHT_{key}", "60")
    assert getattr(Settings.from_params({}), key.lower()) == 60.0
    assert getattr(Settings.from_params({key: 2}), key.lower()) == 2.0
    monkeypatch.setenv(f"FLASHLIGHT_{key}", "long")
    with pytest.raises(ValueError, match=f"FLASHLIGHT_{key} must be"):
        Settings.from_params({})
