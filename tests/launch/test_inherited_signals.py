"""Signals that the parent process ignores or blocks do not disturb flrun and spawn."""

import signal
import sys
from pathlib import Path

import pytest

from tests.launch.launcher import begin, launch, run, write

SPAWN = """
import os, signal, sys
import flashlight_py as fl

def job(rank):
    fl.barrier()
    if rank == 1:
        os._exit(7)

def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

if __name__ == "__main__":
    if sys.argv[1] == "reaped":
        signal.signal(signal.SIGCHLD, reap)
    try:
        fl.spawn(job, nprocs=2)
    except fl.errors.RankFailedError as error:
        print(error.rank, error.exit_code)
    try:  # what spawn found is as it was
        os.waitpid(os.posix_spawnp("true", ["true"], os.environ), 0)
        print("kept")
    except ChildProcessError:
        print("ignored")
"""
RANKS = "import os, sys, time; time.sleep(0.2); sys.exit(7 * int(os.environ['RANK']))"


def ignore() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@pytest.mark.slow
def test_flrun_returns_codes_without_sigchld(tmp_path: Path) -> None:
    done = launch("-n", 2, write(tmp_path, RANKS), preexec_fn=ignore, code=7)
    assert "rank 1 of 2" in done.stderr


def test_flrun_and_its_ranks_end_on_signals_that_the_parent_blocked(tmp_path: Path) -> None:
    program = write(tmp_path, "import signal; print('here', flush=True); signal.pause()")
    with begin("-n", 1, "--grace", 60, program, preexec_fn=block) as process:
        assert process.stdout is not None
        assert "here" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM


BLOCKED = """
import os, signal, flashlight_py as fl

def job(rank):
    os.kill(os.getpid(), signal.SIGTERM)
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    try:
        print(fl.spawn(job, nprocs=2))
    except fl.errors.RankFailedError as error:
        print("ended", error.exit_code)
"""


@pytest.mark.slow
def test_spawned_ranks_end_on_signals_that_the_parent_blocked(tmp_path: Path) -> None:
    done = run([sys.executable, write(tmp_path, BLOCKED)], preexec_fn=block)
    assert done.stdout.startswith("ended"), done.stdout + done.stderr


@pytest.mark.parametrize("handling", ["ignored", pytest.param("reaped", marks=pytest.mark.slow)])
def test_spawn_returns_exit_codes_if_sigchld_is_handled(handling: str, tmp_path: Path) -> None:
    before = ignore if handling == "ignored" else None
    done = run([sys.executable, write(tmp_path, SPAWN), handling], preexec_fn=before)
    if handling == "reaped":
        assert done.stdout.startswith(("1 7\n", "1 None\n")), done.stderr
    else:
        assert done.stdout == "1 7\nignored\n", done.stderr
