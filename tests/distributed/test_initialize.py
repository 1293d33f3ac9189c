"""Every way to start, with real launchers and by hand."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.failures import flight_record
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings
from tests.distributed.harness import mpirun_command, run_ranks
from tests.distributed.jobs import free_port

MAIN = Path(__file__).with_name("start_main.py")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "MPI_LOCAL", "SLURM_")


def clean_environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return {**kept, **extra}


def start(*args: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(MAIN), *args],
        env=clean_environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    results = [process.communicate(timeout=60) for process in processes]
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    return [out.strip() for out, _ in results]


def expected(size: int) -> set[str]:
    total = float(sum(range(1, size + 1)))
    return {f"({r}, {size}, {r}, {size}) {[total] * 3} SHM" for r in range(size)}


@pytest.mark.parametrize("method", ["auto", "mpi"])
@pytest.mark.parametrize("size", [2, 4])
def test_mpirun(method: str, size: int) -> None:
    command = [*mpirun_command(size), sys.executable, str(MAIN), method]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == expected(size)


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
    assert "MPI says 1" in errors


def test_mpi_without_mpi4py_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py here')\n")
    errors = error_of(start("mpi", PYTHONPATH=str(tmp_path)))
    assert "BackendUnavailableError" in errors
    assert "pip install 'flashlight-py[mpi]'" in errors


def test_a_size_without_a_place_to_meet_says_so() -> None:
    assert "MASTER_ADDR" in error_of(start("env", RANK="0", WORLD_SIZE="2"))


def error_of(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    return errors


def held() -> tuple[int, int, Any, bool]:
    """Descriptors, threads, the hook of exceptions, and whether SIGUSR1 is handled: a world's."""
    descriptors = len(os.listdir("/proc/self/fd"))
    handles = flight_record._handler(signal.SIGUSR1) > signal.SIG_IGN
    return descriptors, threading.active_count(), sys.excepthook, handles


def start_watching_without_descriptors(*args: Any) -> None:
    """Watch the world, at a moment when the process may open no more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        watch(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


watch = initialize._watch


def fail_at_the_end_of_the_start(rank: int, size: int, folder: str) -> str:
    params = {"FILE_PATH": f"{folder}/meet", "BACKEND": "gloo", "TRACE_DIR": f"{folder}/records"}
    place = fl.DistributedInit.FILE_SYSTEM, rank, size, params
    reported, before = "", held()
    if rank == 1:
        initialize._watch = start_watching_without_descriptors
        with pytest.raises(OSError, match="Too many open files"):
            fl.distributed_init(*place)
        initialize._watch = watch
    else:
        fl.distributed_init(*place)
        with pytest.raises(fl.errors.PeerLostError) as caught:
            fl.barrier()
        reported = str(caught.value)
        fl.distributed_shutdown()
    assert not fl.is_distributed_init()
    assert held() == before
    fl.distributed_init(*place)
    assert np.all(fl.all_reduce(np.ones(3)) == size)
    fl.distributed_shutdown()
    return reported


def test_a_start_that_fails_at_its_end_leaves_nothing_and_is_reported(tmp_path: Path) -> None:
    reported, _ = run_ranks(fail_at_the_end_of_the_start, 2, str(tmp_path), init=None)
    assert "lost rank 1" in reported
    assert "it raised OSError: [Errno 24] Too many open files" in reported


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
