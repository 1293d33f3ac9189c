"""Failures of spawned ranks: the first cause is reported and nothing is left."""

import atexit
import builtins
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.launch import supervisor
from tests.distributed.conformance import slow


def fail_on_one(rank: int, failure: str) -> Any:
    if rank == 1:
        FAILURES[failure][0]()
    return fl.all_reduce(np.ones(3))


def raise_error() -> None:
    raise ValueError("a bad batch\nof two lines")


def raise_after_leaving() -> None:
    """Raise after the other ranks have detected the loss."""
    fl.distributed.start.world.current_world().group.close()
    time.sleep(0.3)  # time for a long cleanup
    raise KeyError("late")


def raise_while_handling() -> None:
    try:
        raise_error()
    except ValueError as error:
        raise RuntimeError("while handling") from error


def wait_with_a_child() -> None:
    """Die and leave a child that has inherited all descriptors."""
    if os.fork() == 0:
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore SIGINT
    signal.raise_signal(signal.SIGINT)


# What rank 1 does, the reported exit code, and parts of the message.
FAILURES: dict[str, tuple[Callable[[], object], int | None, list[str]]] = {
    "raise while handling": (
        raise_while_handling, None,
        ["raised RuntimeError: while handling", "in raise_error", "a bad batch", "of two lines"],
    ),
    "a child is left": (
        wait_with_a_child, -9, ["killed by SIGKILL (out of memory?", "before it had returned"]),
    "interrupt": (interrupt, None, ["raised KeyboardInterrupt"]),
    "raise after leaving": (raise_after_leaving, None, ["KeyError: 'late'", "in raise_after"]),
    "sys.exit with a text": (
        lambda: sys.exit("no more data"), 1, ["exited with code 1", "SystemExit: no more data"]),
    "sys.exit of nothing": (sys.exit, 0, ["exited with code 0"]),
    "os._exit": (lambda: os._exit(4), 4, ["exited with code 4 before it had returned"]),
}  # fmt: skip
FAST = "raise while handling", "a child is left"


@pytest.mark.parametrize(
    "failure",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAILURES],
)
def test_spawn_raises_the_first_cause(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    _, code, reported = FAILURES[failure]
    monkeypatch.setattr(supervisor, "CAUSE_SECONDS", 30.0)  # even on a busy machine
    with pytest.raises(fl.errors.RankFailedError) as caught:
        fl.spawn(fail_on_one, (failure,), nprocs=3)
    message = str(caught.value)
    assert message.startswith("spawn of fail_on_one: rank 1 of 3 ")
    assert "; the other ranks were ended" in message
    assert [text for text in reported if text not in message] == []
    assert "PeerLostError" not in message
    assert (caught.value.rank, caught.value.exit_code) == (1, code)


def mismatch(rank: int) -> None:
    fl.all_reduce(np.ones(rank + 1))


def leave_the_others(rank: int) -> Any:
    if rank == 1:
        fl.distributed.start.world.current_world().group.close()
        return None
    return fl.all_reduce(np.ones(3))


class Killer:
    """Kills rank 1 before it maps the named memory of rank 0."""

    def __reduce__(self) -> Any:
        return arm, ()


def arm() -> None:
    from flashlight_py.distributed.memory import memory_file

    if os.environ["RANK"] == "1":
        memory_file._attempt = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


class Trap:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def make_trap(rank: int) -> Trap:
    return Trap()


def make_generator(rank: int) -> Any:
    return (letter for letter in "abc")


@pytest.mark.parametrize(
    ("function", "args", "nprocs", "match"),
    [
        (mismatch, (), 2, r"rank [01] of 2 raised .*MismatchError: "),
        (make_generator, (), 1, "rank 0 of 1 raised TypeError: the result, of type generator, can"),
        *slow(
            (leave_the_others, (), 2, "rank 0 of 2 raised .*PeerLostError"),
            (fail_on_one, (Killer(),), 2, "rank 1 of 2 was killed by SIGKILL"),
            (make_trap, (), 1, "rank 0 of 1 cannot be unpickled"),
        ),
    ],
)
def test_spawn_names_the_first_rank_that_fails(
    function: Any, args: tuple[Any, ...], nprocs: int, match: str
) -> None:
    with pytest.raises(fl.errors.RankFailedError, match=match):
        fl.spawn(function, args, nprocs, params={"BACKEND": "shm"})


def test_spawn_raises_value_error_if_nprocs_exceeds_host_limits() -> None:
    with pytest.raises(ValueError, match=r"spawn: nprocs.* got 100000"):
        fl.spawn(make_trap, nprocs=100_000)


def test_spawn_restarts_all_ranks(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert fl.spawn(killed_before, (1, str(tmp_path)), 2, max_restarts=2) == ["1", "1"]
    (record,) = caplog.records
    assert record.message.startswith("spawn of killed_before: rank 1 of 2 was killed by SIGKILL")
    assert record.message.endswith("starting again: 1 of 2")
    assert not [pid.name for pid in tmp_path.iterdir() if Path("/proc", pid.name).exists()]


@pytest.mark.slow
def test_spawn_raises_the_first_cause_of_the_last_attempt(tmp_path: Path) -> None:
    with pytest.raises(fl.errors.RankFailedError, match="rank 1 of 2 exited with code 1"):
        fl.spawn(killed_before, (2, str(tmp_path)), 2, max_restarts=1)


def killed_before(rank: int, restarts: int, folder: str) -> str:
    """Rank 1 is killed in the first attempt and exits in the second, while rank 0 waits."""
    Path(folder, str(os.getpid())).touch()
    fl.barrier()
    count = os.environ["FLASHLIGHT_RESTART_COUNT"]
    if rank == 1 and int(count) < restarts:
        if count == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit("no more data")
    fl.barrier()
    return count


@pytest.mark.slow
def test_spawn_timeout_ends_ranks_that_do_not_return() -> None:
    with pytest.raises(TimeoutError, match=r"spawn of wait: rank\(s\) 0, 1 of 2 did not return"):
        fl.spawn(wait, nprocs=2, timeout=1.0)


def wait(rank: int) -> None:
    while True:
        signal.pause()


class Full(io.StringIO):
    """A replacement of sys.stdout that cannot be written."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_spawn_ends_ranks_if_a_replaced_stdout_cannot_be_written() -> None:
    match = "spawn of print_and_wait: standard output cannot be written: No space left on device"
    with redirect_stdout(Full()), pytest.raises(OSError, match=match):
        fl.spawn(print_and_wait, nprocs=2)


def print_and_wait(rank: int) -> None:
    print("hi")
    wait(rank)


@pytest.mark.slow
def test_spawn_warns_if_a_rank_fails_after_its_result() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"rank 1 of 2 exited with code 5 after it had ret"
    ) as w:
        assert fl.spawn(fail_at_exit, nprocs=2) == [0, 1]
    assert w[0].filename == __file__


def fail_at_exit(rank: int) -> int:
    if rank == 1:
        atexit.register(os._exit, 5)
    return rank


def leave_late(rank: int) -> None:
    """Raise, and receive SIGTERM while exit handlers run."""
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    raise ValueError("bad")


def leave_after_lines(rank: int) -> None:
    """Receive SIGTERM also at each of the last lines of the rank's program."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_globals.get("_is_exiting", True):
            os.kill(os.getpid(), signal.SIGTERM)
        return trace

    frame.f_trace = trace
    sys.settrace(lambda *_: None)
    leave_late(rank)


def test_rank_main_prints_nothing_if_sigterm_arrives_at_exit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(fl.errors.RankFailedError, match="bad"):
        fl.spawn(leave_after_lines, nprocs=1)
    assert capfd.readouterr().err == ""


class ToldToEnd:
    def __del__(self, pid: int = os.getpid(), kill: Any = os.kill) -> None:
        kill(pid, signal.SIGTERM)


def be_told_at_the_end(rank: int) -> None:
    """Receive SIGTERM after Python has restored the signal handlers."""
    builtins.told = ToldToEnd()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_rank_main_ignores_sigterm_after_handlers_are_restored() -> None:
    assert fl.spawn(be_told_at_the_end, nprocs=1) == [None]


def test_spawn_reports_a_deleted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError, match=r"the current folder was deleted"):
        fl.spawn(raise_error, nprocs=1)
