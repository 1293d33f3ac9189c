"""The MPI backend beyond what every backend must do; started by mpirun."""

import itertools
import os
import subprocess
import sys
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashlight_py.distributed.backends.mpi import joining
from flashlight_py.distributed.backends.mpi.backend import Progress
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.errors import UnavailableEverywhereError
from tests.distributed import mpi_mix, mpi_ranks
from tests.distributed.harness import run_ranks
from tests.distributed.programs import every_verb

pytest.importorskip("mpi4py")

WORLD: dict[str, Any] = {"init": "mpi", "params": {"BACKEND": "mpi"}}


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest, pool: Any) -> Any:
    return pool(request.param, **WORLD)


@pytest.mark.slow
def test_arrays_that_are_too_large_for_one_call_go_in_pieces(ranks: Any) -> None:
    """With a limit of 50 or 10,000 bytes in place of 2 GB."""
    for limit, dtype in itertools.product((50, 10_000), ("float32", "int8", "longdouble")):
        program = every_verb(ranks.size, dtype, (1, 25, 1000))
        ranks.run(mpi_ranks.verbs_in_small_pieces, program, limit)


def test_messages_are_matched_by_tag_and_keep_their_order(ranks: Any) -> None:
    for count in (1, 100_000):
        ranks.run(mpi_ranks.messages_by_tag, count)
        ranks.run(mpi_ranks.ring, count)


def test_a_rank_that_waits_in_a_collective_receives_messages(ranks: Any) -> None:
    ranks.run(mpi_ranks.message_beside_a_collective)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_everything_at_once_in_any_order_of_waiting(ranks: Any, seed: int) -> None:
    ranks.run(mpi_mix.mix, seed, 150)


@pytest.mark.slow
def test_an_operation_goes_on_while_its_rank_does_something_else(pool: Any) -> None:
    seconds = pool(2, **WORLD).run(mpi_ranks.goes_on_in_the_background)
    assert seconds[0] >= 2.0
    assert seconds[1] < 1.5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "longdouble"])
def test_extremes_of_nan_and_signed_zeros_are_the_same_everywhere(ranks: Any, dtype: str) -> None:
    bits = ranks.run(mpi_ranks.extremes, dtype)
    assert all(other == bits[0] for other in bits)


def test_some_ranks_are_a_group_of_their_own(pool: Any) -> None:
    got = pool(3, **WORLD).run(mpi_ranks.half_of_the_world)
    assert got == [([2.0] * 3, [2, 0]), None, ([2.0] * 3, [2, 0])]


def test_a_group_that_all_have_left_is_freed(pool: Any) -> None:
    assert max(pool(2, **WORLD).run(mpi_ranks.open_and_close, 20)) <= 2


def test_the_world_can_be_made_again() -> None:
    assert max(run_ranks(mpi_ranks.world_again, 2, 10, **WORLD)) < 4


def test_it_says_which_library_it_is(pool: Any) -> None:
    for text, kind in pool(2, **WORLD).run(mpi_ranks.describe):
        assert kind == "MPI"
        assert "NumPy arrays: MPI (" in text
        assert "mpi4py 4" in text
        assert "BACKEND is mpi" in text


def test_without_checks_the_verbs_work() -> None:
    run_ranks(mpi_ranks.unchecked, 2, **WORLD, env={"FLASHLIGHT_CHECKS": "0"})


def test_where_one_thread_may_call_mpi_operations_advance_in_waits() -> None:
    world = {**WORLD, "env": {"MPI4PY_RC_THREAD_LEVEL": "funneled"}}
    for text, threads in run_ranks(mpi_ranks.one_thread, 2, **world):
        assert "one thread" in text
        assert threads == 1


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (joining.MpiCard(1, 2, gpu_aware=True), "MPI_CUDA_AWARE is not the same"),
        (joining.MpiCard(problem="no libmpi"), "rank 1: no libmpi"),
    ],
)
def test_cards_that_do_not_fit_are_rejected(other: joining.MpiCard, told: str) -> None:
    with pytest.raises(UnavailableEverywhereError, match=told):
        joining._check([joining.MpiCard(0, 2), other])


def test_awareness_is_a_flag() -> None:
    assert Settings.from_params({"MPI_CUDA_AWARE": "1"}).mpi_cuda_aware
    assert not Settings.from_params({"MPI_CUDA_AWARE": False}).mpi_cuda_aware
    with pytest.raises(ValueError, match="MPI_CUDA_AWARE"):
        Settings.from_params({"MPI_CUDA_AWARE": "yes"})


def test_ranks_that_mpi_did_not_start_together_are_refused_on_all(tmp_path: Any) -> None:
    path = str(tmp_path / "meet")
    for message in run_ranks(mpi_ranks.meet_as_strangers, 2, path, init=None):
        assert "the 2 ranks were not started together by MPI" in message
        assert "0 of 1, 0 of 1" in message
        assert "start them by one mpirun" in message
    assert list(tmp_path.iterdir()) == []


class FakeMpi:
    """Stands in for MPI where the real Abort would end the tests themselves."""

    Request = SimpleNamespace(Testall=None)

    def __init__(self) -> None:
        self.COMM_WORLD = self
        self.aborted: list[int] = []

    def Is_finalized(self) -> bool:
        return False

    def Abort(self, code: int) -> None:
        self.aborted.append(code)


def test_the_hook_prints_first_and_is_gone_when_the_last_group_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    before, mpi = sys.excepthook, FakeMpi()
    progress, (one, other) = Progress(mpi, threaded=False), (SimpleNamespace() for _ in range(2))
    progress.add(one)
    progress.add(other)
    progress.remove(one, healthy=False)
    for group in progress._groups:  # nobody is waited for
        group.leaving = SimpleNamespace(leave=lambda moved: None, have_all_left=lambda: True)
    error = ValueError("uncaught")
    guard = sys.excepthook
    guard(ValueError, error, None)
    assert (printed, mpi.aborted) == ([error], [1])
    progress.remove(other, healthy=False)
    guard(ValueError, error, None)  # somebody wrapped it, and still calls it
    assert (printed, mpi.aborted) == ([error, error], [1])
    abort.uninstall()
    assert sys.excepthook is before


# A program whose Abort tells what nobody has read of its output by then: mpirun loses that.
ABORTING = """
import fcntl, os, sys, termios
from flashlight_py.distributed.backends.mpi import leaving
from flashlight_py.distributed.failures import abort

class FakeMpi:
    def Is_finalized(self):
        return False

    def Abort(self, code):
        unread = fcntl.ioctl(2, termios.FIONREAD, b"    ")
        print(int.from_bytes(unread, sys.byteorder), flush=True)
        os._exit(code)

FakeMpi.COMM_WORLD = FakeMpi()
leaving._LINGER_SECONDS = 30.0
abort.install()
abort.afterwards.append(lambda: leaving.end_the_job(FakeMpi(), lambda end: None))
raise ValueError("no such file")
"""


def test_the_job_is_ended_when_what_was_printed_has_been_read() -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", ABORTING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing) as process:
        os.close(writing)
        with pytest.raises(subprocess.TimeoutExpired):  # nobody reads, so it does not end
            process.wait(0.3)
        text = b""
        while not text.endswith(b"ValueError: no such file\n"):
            text += os.read(reading, 1 << 16)
        assert process.stdout.read() == b"0\n"
    assert process.returncode == 1
    os.close(reading)


def test_a_prompt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before, progress, group = sys.excepthook, Progress(FakeMpi(), threaded=False), SimpleNamespace()
    progress.add(group)
    assert sys.excepthook is before
    progress.remove(group, healthy=False)


def test_the_arrays_of_an_operation_that_broke_are_kept() -> None:
    """Requests of mpi4py do not keep them all, and MPI goes on to write."""
    mpi = SimpleNamespace(Request=SimpleNamespace(Testall=lambda requests: False))
    array = np.ones(3)
    is_alive = weakref.ref(array)
    steps = Progress(mpi, threaded=False).until([partial(id, array)])
    next(steps)
    steps.close()  # as an operation does that failed
    del array, steps
    assert is_alive() is not None
