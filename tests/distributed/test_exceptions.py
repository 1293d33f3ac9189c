"""If the program of a rank raises, the other ranks raise soon, with its traceback."""

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.failures import abort
from flashlight_py.doctor import mpirun_command
from tests.distributed import conformance
from tests.distributed.conformance import on_ranks, slow
from tests.distributed.processes import finish, start

PROGRAM = """
import os, sys, threading
import numpy as np
import flashlight_py as fl

def train():
    if fl.get_world_rank() == 1:
        {how}
    for _ in range(3):
        fl.all_reduce(np.zeros(3))

if {rank} < 0:
    fl.distributed_init(fl.DistributedInit.MPI, params={params})
else:
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, {rank}, {size}, params={params})
if "ERRORS" in os.environ:  # mpirun may mix the outputs of ranks
    sys.stderr = open(os.environ["ERRORS"] + str(fl.get_world_rank()), "w")
fl.barrier()
train()
fl.distributed_shutdown()
"""
# File names may not be valid text.
RAISE = "raise ValueError('no such file' + chr(10) + 'of that name: caf' + chr(0xDCE9))"
IN_A_THREAD = (
    "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join(); sys.exit(0)"
)


def start_ranks(path: Path, statement: str, size: int = 2, env: Any = None, **params: Any) -> Any:
    params["FILE_PATH"] = str(path / "meet")
    ranks = []
    for rank in range(size):
        program = PROGRAM.format(how=statement, rank=rank, size=size, params=params)
        ranks.append(start([sys.executable, "-c", program], env and env(rank)))
    return [finish(rank) for rank in ranks]


@pytest.mark.parametrize(
    ("size", "world"),
    [(2, {"BACKEND": "shm"}), *slow((2, {"BACKEND": "gloo"}), (3, {"env": conformance.two_hosts}))],
)
def test_other_ranks_raise_with_the_traceback(tmp_path: Path, size: int, world: Any) -> None:
    started = time.monotonic()
    outcomes = start_ranks(tmp_path, RAISE, size, **world)
    assert time.monotonic() - started < 15
    words = "PeerLostError: ", "lost rank 1, which is process ", r"of that name: caf\udce9"
    words += ("it raised ValueError: no such file. This group cannot be used",)
    words += ("The traceback of rank 1:\n  Traceback (most recent call last):",)
    for rank, (code, output) in enumerate(outcomes):
        assert code == 1
        assert rank == 1 or all(word in output for word in words), output


def test_exception_of_a_thread_is_reported_when_the_process_ends(tmp_path: Path) -> None:
    (code, output), (other, _) = start_ranks(tmp_path, IN_A_THREAD, BACKEND="shm")
    assert (code, other) == (1, 0)
    assert "it raised ZeroDivisionError: division by zero" in output


@pytest.mark.parametrize("params", [{"BACKEND": "mpi"}, *slow({})])
def test_uncaught_exception_raises_on_other_ranks_under_mpirun(tmp_path: Path, params: Any) -> None:
    pytest.importorskip("mpi4py")
    program = PROGRAM.format(how=RAISE, rank=-1, size=-1, params=params)
    command = [*mpirun_command(2), sys.executable, "-c", program]
    code, _ = finish(start(command, {"ERRORS": str(tmp_path / "rank")}))
    assert code != 0
    output = (tmp_path / "rank0").read_text()
    assert "PeerLostError: [all_reduce] rank 0 of 2: lost rank 1, which is process " in output
    assert "it raised ValueError: no such file. This group cannot be used" in output
    assert "The traceback of rank 1:" in output


def fail(rank: int, reported: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # spawn ends the other ranks by SIGTERM
    fl.barrier()
    if rank == 1:
        raise ValueError("no such file")
    try:
        fl.all_reduce(np.zeros(3))
    except fl.errors.PeerLostError as error:
        Path(reported).write_text(str(error))
        raise


def test_uncaught_exception_raises_on_other_ranks_of_spawn(tmp_path: Path) -> None:
    reported = tmp_path / "reported"
    with pytest.raises(fl.errors.RankFailedError, match="rank 1 of 2 raised ValueError"):
        fl.spawn(fail, (str(reported),), nprocs=2, params={"BACKEND": "gloo"})
    message = reported.read_text()
    assert "it raised ValueError: no such file" in message
    assert "The traceback of rank 1:\n  Traceback (most recent call last):" in message
    assert ", in fail\n" in message


def deep(depth: int) -> None:
    if depth == 0:
        raise ValueError("first line\nsecond line")
    if depth % 2:  # otherwise the traceback would collapse repeated lines
        return deep(depth - 1)
    return deep(depth - 1)


def test_report_contains_the_end_of_a_long_traceback() -> None:
    try:
        deep(300)
    except ValueError as error:
        words = abort._report_text(error)
    summary, _, rest = words.partition("\n")
    assert summary == "ValueError: first line"
    assert len(words.encode()) < 4000
    assert rest.endswith("second line")


def test_hooks_are_not_installed_at_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before = sys.excepthook
    abort.install_hooks()
    assert sys.excepthook is before


@fl.abort_on_exception()
def train(batch: Any) -> Any:
    """Run a user function whose exceptions are reported."""
    with fl.abort_on_exception():  # nested: the innermost block reports
        if batch is None:
            raise ValueError("a bad batch")
        if isinstance(batch, BaseException):
            raise batch
    return fl.all_reduce(np.zeros(3))


def catch(fn: Any, *args: Any) -> str:
    """Call ``fn``, catch its exception, and continue, like a host program."""
    try:
        fn(*args)
    except BaseException as error:  # noqa: BLE001 - like host programs
        return f"{type(error).__name__}: {error}"
    return ""


WORLDS = ("shm", 2), ("gloo", 2), ("hierarchical", 3), ("mpi", 2)


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        *((world, None, "ValueError: a bad batch") for world in WORLDS),
        (WORLDS[0], KeyboardInterrupt(), "KeyboardInterrupt"),
        (WORLDS[0], SystemExit(3), "SystemExit"),
    ],
    indirect=["ranks"],
)
@on_ranks(fresh=True)
def test_abort_on_exception_raises_on_other_ranks_while_the_host_program_continues(
    rank: int, size: int, error: BaseException | None, message: str
) -> None:
    fl.barrier()
    error_text = catch(train, error if rank == 1 else np.zeros(3))
    if rank == 1:
        assert error_text.startswith(message)
        return
    assert error_text.startswith("PeerLostError: ")
    assert f"it raised {message}" in error_text
    assert "in train\n" in error_text
    fl.distributed_shutdown()  # does not wait, because the group is closed


@on_ranks(("shm", 3), ("gloo", 3), fresh=True)
def test_abort_on_exception_reports_while_another_thread_waits(rank: int, size: int) -> None:
    """Rank 1 waits in a call that no rank joins, and raises on another thread."""
    fl.barrier()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(train, None) if rank == 1 else None
        x = np.zeros(3)
        message = catch(fl.recv, x, 1) if rank == 2 else catch(fl.all_reduce, x)
    if future is None:
        assert "PeerLostError" in message
    else:
        assert message.startswith(("GroupClosedError", "PeerLostError"))  # whichever is first
        assert repr(future.exception()) == "ValueError('a bad batch')"


@on_ranks(("shm", 2))
def test_abort_on_exception_ignores_planned_exits(rank: int, size: int) -> None:
    for end in (SystemExit(0), SystemExit()):
        assert catch(train, end).startswith("SystemExit")
    assert fl.all_reduce(np.array(rank)) == 1


def test_abort_on_exception_has_no_effect_without_other_ranks() -> None:
    assert catch(train, None) == "ValueError: a bad batch"
    assert catch(train, np.zeros(3)) == ""


def test_abort_on_exception_rejects_coroutine_and_generator_functions() -> None:
    async def later() -> None:
        """Do nothing."""

    with pytest.raises(TypeError, match=r"expected a plain function, got .*later"):
        fl.abort_on_exception()(later)
