"""The test harness: order of results, tracebacks, deadlines, cleanup."""

import os
import signal
import subprocess
import sys
import threading
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.conftest import Pools
from tests.distributed import harness, leftovers
from tests.distributed.processes import is_alive
from tests.tables import pairs

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def describe(rank: int, size: int, *args: object) -> tuple[object, ...]:
    return (rank, size, *args, os.environ["MY_RANK"])


def process_id(rank: int, size: int) -> int:
    return os.getpid()


def raise_on(rank: int, size: int, culprit: int) -> None:
    if rank == culprit:
        print("some words before the end")
        raise ValueError(f"rank {rank} does not like this")


def hang_on(rank: int, size: int, culprit: int) -> None:
    if rank == culprit:
        threading.Event().wait()


def leave(rank: int, size: int, culprit: int, status: int) -> str:
    if rank == culprit:
        os._exit(status)
    return "stayed"


def be_killed(rank: int, size: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)


def return_unpicklable(rank: int, size: int) -> object:
    return lambda: None


def start_child(rank: int, size: int, own_session: bool) -> int:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    return subprocess.Popen(command, start_new_session=own_session).pid


def start_child_and_hang(rank: int, size: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(start_child(rank, size, False)))
    threading.Event().wait()


def interrupt_and_hang(rank: int, size: int, pid: int) -> None:
    if rank == 0:
        os.kill(pid, signal.SIGINT)
    threading.Event().wait()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_are_in_rank_order_and_the_environment_may_depend_on_the_rank(size: int) -> None:
    expected = [(rank, size, "a", 2, f"r{rank}") for rank in range(size)]
    env = lambda rank: {"MY_RANK": f"r{rank}"}  # noqa: E731
    assert harness.run_ranks(describe, size, "a", 2, init=None, env=env) == expected


def test_error_shows_the_traceback_and_the_output_of_the_rank() -> None:
    with pytest.raises(harness.RanksFailedError) as failure:
        harness.run_ranks(raise_on, 2, 1, init=None)
    text = str(failure.value)
    assert "rank 0: returned" in text
    assert "rank 1: raised ValueError: rank 1 does not like this" in text
    assert "in raise_on" in text
    assert "some words before the end" in text


def test_deadline_shows_where_a_rank_hangs_and_kills_it_with_its_children(tmp_path: Path) -> None:
    with harness.RankPool(2, init=None) as pool:
        pids = pool.run(process_id)
        with pytest.raises(
            harness.RanksFailedError, match="did not answer before the deadline"
        ) as failure:
            pool.run(start_child_and_hang, str(tmp_path), deadline=1.0)
        assert "in start_child_and_hang" in str(failure.value)
        pids += [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
        assert not any(is_alive(pid) for pid in pids)


@pytest.mark.usefixtures("ctrl_c_is_raised")
def test_ranks_are_killed_when_the_caller_is_interrupted() -> None:
    pool = harness.RankPool(2, init=None)
    pids = pool.run(process_id)
    with pytest.raises(KeyboardInterrupt):
        pool.run(interrupt_and_hang, os.getpid())
    assert not any(is_alive(pid) for pid in pids)


def test_ranks_die_with_a_killed_harness(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from tests.distributed.harness import RankPool\n"
        "from tests.test_harness import process_id\n"
        "pids = RankPool(2, init=None).run(process_id)\n"
        "print(*pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program]
    env, root = {**os.environ, "TMPDIR": str(tmp_path)}, Path(__file__).parent.parent
    pipe = subprocess.PIPE
    done = subprocess.run(command, cwd=root, env=env, stdout=pipe, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 2
    assert leftovers.end_processes() == {}


def test_outcomes_distinguish_results_exceptions_exits_and_signals() -> None:
    raised = harness.run_outcomes(raise_on, 2, 1, init=None)
    assert [outcome.kind for outcome in raised] == ["returned", "raised"]
    assert raised[1].error_type == "ValueError"
    assert raised[1].error_classes[1] == "Exception"
    assert raised[1].message == "rank 1 does not like this"

    left = harness.run_outcomes(leave, 2, 0, 3, init=None)
    assert (left[0].kind, left[0].exit_code, left[0].signal) == ("exited", 3, None)
    assert left[1].value == "stayed"

    killed = harness.run_outcomes(be_killed, 2, 0, init=None)
    assert killed[0].signal == signal.SIGKILL
    assert killed[1].ok


def test_survivors_excludes_the_killed_rank() -> None:
    assert harness.run_survivors(be_killed, 2, 0, 0, init=None) == [None]
    with pytest.raises(harness.RanksFailedError, match="rank 1 does not like this"):
        harness.run_survivors(raise_on, 2, 0, 1, init=None)


def test_outcomes_never_accept_a_stuck_rank() -> None:
    with pytest.raises(harness.RanksFailedError, match="did not answer"):
        harness.run_outcomes(hang_on, 2, 1, init=None, deadline=0.5)


def test_unpicklable_result_is_an_error_of_the_rank() -> None:
    with pytest.raises(harness.RanksFailedError, match=r"raised .*lambda"):
        harness.run_ranks(return_unpicklable, 1, init=None)


def test_pool_keeps_its_processes_between_calls_and_replaces_broken_ones() -> None:
    with harness.RankPool(2, init=None) as pool:
        first = pool.run(process_id)
        assert pool.run(process_id) == first
        assert set(first) <= harness.living_processes()
        with pytest.raises(harness.RanksFailedError):
            pool.run(raise_on, 0)
        second = pool.run(process_id)
        assert not set(second) & set(first)
    assert not any(is_alive(pid) for pid in first + second)


def test_pools_of_the_session_are_shared_by_world(pool: Pools) -> None:
    assert pool(1, init=None) is pool(1, init=None)
    assert pool(1, init=None) is not pool(1, init=None, env={"A": "1"})


def test_leftover_process_is_found_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have left its process group and lost its parent."""
    monkeypatch.setattr(leftovers, "ENDING_SECONDS", 0.1)
    (pid,) = harness.run_ranks(start_child, 1, True, init=None)
    assert list(leftovers.end_processes()) == [pid]
    assert not is_alive(pid)


def test_leftover_segment_is_found_only_if_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "JOINING_SECONDS", 0.2)
    segment = Path("/dev/shm") / f"test-flashlight-{os.getpid()}"
    segment.write_bytes(b"x" * 4096)
    try:
        assert leftovers.unmapped_files(leftovers.segments()) >= {segment}
    finally:
        segment.unlink()
    assert segment not in leftovers.segments()


@pytest.mark.parametrize(("sizes", "most"), [((4, 3, 2), 12), ((3, 3, 3, 3), 10), ((2,) * 6, 8)])
def test_pairs_contain_any_two_values_of_two_lists(sizes: tuple[int, ...], most: int) -> None:
    rows = pairs(*map(range, sizes))
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(rows) <= most
