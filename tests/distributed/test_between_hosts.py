"""Worlds of several hosts: arrays of every size equal the sums of the hosts, added in order."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.gloo import GlooBackend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import split_rows
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.verbs import REDUCE_SCATTER
from flashlight_py.distributed.work import Work
from tests.distributed.conformance import (
    assert_equal,
    combine_by_hosts,
    dtype_of,
    first_error,
    hosts_by_letter,
    on_ranks,
    slow,
    values,
)
from tests.distributed.harness import run_ranks, run_survivors
from tests.distributed.processes import await_file
from tests.tables import pairs

# Host of each rank, as a letter.
PLACES = {
    "2 x 2": "aabb",
    "3 + 1": "aaab",
    "2 x 2, in turns": "abab",
    "3 + 1, in turns": "abaa",
    "3 hosts": "aabbc",
}
FAST = "3 + 1, in turns"
# Numbers of elements: sent with the call; reduced by one leader; reduced by all leaders.
COUNTS = (1, 1000, 30_000, 100_003)


def hosts_of(places: str) -> list[list[int]]:
    return [[r for r, p in enumerate(places) if p == host] for host in sorted(set(places))]


def in_order(arrays: Sequence[Any], places: str, op: str = "sum", scale: float = 1.0) -> Any:
    hosts = hosts_of(places)
    by_host = [arrays[rank] for host in hosts for rank in host]
    return combine_by_hosts(by_host, ReduceOp[op.upper()], scale, [len(host) for host in hosts])


def fractions(name: str) -> list[tuple[str, float]]:
    return [] if dtype_of(name).kind in "iu" else [("sum", 0.25), ("avg", 1.0)]


def reductions(rank: int, size: int, places: str, name: str) -> None:
    for count in COUNTS:
        everyone = [values(r, (count,), name) for r in range(size)]
        for op, scale in (("sum", 1.0), ("sum", 3.0), ("max", 1.0), *fractions(name)):
            expected = in_order(everyone, places, op, scale)
            case = f"{op} of {count} {name}, scale={scale}"
            assert_equal(fl.all_reduce(everyone[rank].copy(), scale, op=op), expected, case)
            x = everyone[rank].copy()
            fl.reduce(x, root=size - 1, scale=scale, op=op)
            assert_equal(x, expected if rank == size - 1 else everyone[rank], f"reduced {case}")


def parts(rank: int, size: int, places: str, name: str) -> None:
    for rows in (1, 500, 20_000):
        for uneven in (None, [rows * (1 + r % 3) for r in range(size)], [0] * (size - 1) + [rows]):
            many = uneven or [rows] * size
            everyone = [values(r, (sum(many), 2), name) for r in range(size)]
            own_parts = [list(split_rows(array, many))[rank] for array in everyone]
            for scale in {1.0, *(scale for _, scale in fractions(name))}:
                expected = in_order(own_parts, places, "sum", scale)
                case = f"{many} rows of {name}, scale={scale}"
                part = fl.reduce_scatter(everyone[rank], scale=scale, rows=uneven)
                assert_equal(part, expected, case)
                out = np.empty_like(expected)
                assert fl.reduce_scatter(everyone[rank], scale=scale, out=out, rows=uneven) is out
                assert_equal(out, expected, case)


def gathered(rank: int, size: int, places: str, name: str) -> None:
    for rows in (0, 3, 700, 40_000):
        for many in ([rows] * size, [rows * (r % 3) for r in range(size)]):
            everyone = [values(r, (many[r], 2), name) for r in range(size)]
            expected = np.concatenate(everyone)
            assert_equal(fl.all_gather(everyone[rank]), expected, f"{many} rows of {name}")
            out = np.empty_like(expected)
            assert fl.all_gather(everyone[rank], out=out) is out
            assert_equal(out, expected, f"{many} rows of {name} into out")
            root = size // 2
            joined = fl.gather(everyone[rank], root)
            assert (joined is None) == (rank != root)
            if joined is not None:
                assert_equal(joined, expected, f"{many} rows of {name} on the root")
    wrong = np.zeros((7 + 80_000 * size, 2), dtype_of(name))
    for rows in (1, 40_000):
        if rank == 1:
            with pytest.raises(ValueError, match=f"expected out with {rows * size} rows"):
                fl.all_gather(values(rank, (rows, 2), name), out=wrong)
            assert not wrong.any()
        else:
            fl.all_gather(values(rank, (rows, 2), name))


def broadcasts(rank: int, size: int, places: str, name: str) -> None:
    for count in COUNTS:
        for root in range(size):
            x = values(rank, (count,), name).copy()
            assert_equal(fl.broadcast(x, root), values(root, (count,), name), f"{count} {name}")


@pytest.fixture(scope="module", params=[FAST, *slow(*(p for p in PLACES if p != FAST))])
def world(request: pytest.FixtureRequest, pool: Any) -> Any:
    places = PLACES[request.param]
    return places, pool(len(places), env=hosts_by_letter(places))


VERBS = reductions, parts, gathered, broadcasts


@pytest.mark.parametrize(
    ("world", "verb", "name"),
    [
        *((FAST, verb, "float32") for verb in VERBS),
        *slow(*pairs([*PLACES], VERBS, ("bfloat16", "int8", "float32"))),
    ],
    indirect=["world"],
)
def test_verbs_match_numpy_for_every_size_between_hosts(world: Any, verb: Any, name: str) -> None:
    places, ranks = world
    ranks.run(verb, places, name)


def means_of_large_halves(rank: int, size: int) -> None:
    for count in (5, 100_000):  # sent with the call, and after the call
        x = np.full(count, 60_000, np.float16)
        assert np.all(fl.all_reduce(x, op="avg") == 60_000)
        reduced = fl.reduce_scatter(np.full(count * size, 60_000, np.float16), op="avg")
        assert np.all(reduced == 60_000)


def test_all_reduce_rounds_float16_once_per_host_and_means_do_not_overflow(world: Any) -> None:
    places, ranks = world
    ranks.run(reductions, places, "float16")
    ranks.run(parts, places, "float16")
    ranks.run(means_of_large_halves)


def several_pieces(rank: int, size: int) -> None:
    count = (40 << 20) // 4 + 7
    x = np.arange(count, dtype=np.int32) * (rank + 1)
    fl.all_reduce(x)
    assert np.array_equal(x, np.arange(count, dtype=np.int32) * (size * (size + 1) // 2))
    y = np.arange(count, dtype=np.int32) * (rank == 1)
    assert np.array_equal(fl.broadcast(y, 1), np.arange(count, dtype=np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("world", ["2 x 2", "3 hosts"], indirect=True)
def test_all_reduce_splits_long_arrays_into_chunks(world: Any) -> None:
    world[1].run(several_pieces)


def on_two_hosts(timeout: float = 1) -> Any:
    return on_ranks(("hierarchical", 4), fresh=True, params={"TIMEOUT": timeout})


def before_reduce_scatter(wait: Callable[[GlooBackend], None]) -> None:
    real = GlooBackend.start

    def late(self: GlooBackend, call: Call) -> Work:
        if call.verb is REDUCE_SCATTER:
            wait(self)
        return real(self, call)

    GlooBackend.start = late  # type: ignore[method-assign]


@pytest.mark.slow
@on_two_hosts(timeout=1.5)
def test_timeout_names_no_rank_that_waits_for_another_host(rank: int, size: int) -> None:
    """Ranks 1 and 3 have not ended the reduce_scatter when rank 0 calls the next verb."""
    if rank == size - 1:
        before_reduce_scatter(lambda _: time.sleep(4))
    error = first_error(lambda: fl.reduce_scatter(np.ones(200_000)), fl.barrier)
    assert rank == size - 1 or "rank 3 did not join" in error


def late_after_all_to_all(rank: int, size: int, timeout: float | None) -> str:
    fl.all_to_all(np.ones((size, 1)))
    if rank == 1:
        time.sleep(3)
    return first_error(lambda: fl.barrier(timeout))


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "timeout"), [(1, None), (30, 0.5)])
def test_timeout_names_the_late_rank_after_every_verb(limit: float, timeout: float | None) -> None:
    """Regression: rank 0 waited longer for rank 1 than the other host for rank 0, and was named."""
    world = {"env": hosts_by_letter("aabb"), "params": {"TIMEOUT": limit}}
    texts = run_ranks(late_after_all_to_all, 4, timeout, **world)
    for rank in (0, 2, 3):
        assert "rank 1 did not join within" in texts[rank], texts[rank]


@pytest.mark.slow
@on_two_hosts()
def test_late_rank_reports_itself_after_another_host_declared_it_lost(rank: int, size: int) -> None:
    """Regression: rank 0 reported the loss of rank 2, which had waited for rank 0."""

    def until_lost(backend: GlooBackend) -> None:
        while backend.lost("reduce_scatter") is None:
            time.sleep(0.01)

    if rank == 0:
        before_reduce_scatter(until_lost)
    error = first_error(lambda: fl.reduce_scatter(np.ones(200_000)), fl.barrier)
    if rank == 0:
        assert "it gave up waiting for this rank" in error
    else:
        assert "rank 0 did not join" in error
        assert "lost rank 2" not in error


# Calls by the method of Gloo that fails: after all ranks have sent, and before a rank sends.
CALLS: dict[str, Callable[[int], Any]] = {
    "native_ended": lambda rank: fl.all_gather(np.ones(rank)),
    "start": lambda rank: fl.all_reduce(np.ones(3), async_op=True).wait(),
}


@pytest.mark.parametrize("method", CALLS)
@on_two_hosts(timeout=10)
def test_memory_error_of_a_rank_raises_on_other_ranks(rank: int, size: int, method: str) -> None:
    call = partial(CALLS[method], rank)
    if rank == 1:
        failing = patch.object(GlooBackend, method, side_effect=MemoryError("on purpose"))
        with failing, pytest.raises(MemoryError, match="on purpose"):
            call()
    else:
        error = first_error(call, fl.barrier)
        assert "lost rank 1" in error
        assert "MemoryError: on purpose" in error


@on_two_hosts(timeout=10)
def test_started_all_to_all_of_unequal_parts_does_not_block(
    rank: int, size: int, tmp_path: Path
) -> None:
    rows = [rank + 1] * size
    if rank:
        await_file(tmp_path / "started")
    work = fl.all_to_all(np.full(sum(rows), rank), rows=rows, async_op=True)
    (tmp_path / "started").touch()
    assert work.wait().tolist() == [r for r in range(size) for _ in range(r + 1)]


# Each sends ``x`` to rank ``to``, and receives ``out`` from rank ``source``.
SHIFTS: dict[str, Callable[..., Any]] = {
    "sendrecv": lambda x, to, source, out: fl.sendrecv(x, to, src=source, out=out),
    "isend, recv": lambda x, to, source, out: (fl.isend(x, to), fl.recv(out, source))[0].wait(),
}


def shift_in_ring(rank: int, size: int, folder: Path, name: str) -> str:
    """Each rank has one neighbour on its own host, and one on the other host."""
    to, source = (rank + 1) % size, (rank - 1) % size
    for count in (1, 1000, 100_000):
        out = np.zeros(count, int)
        SHIFTS[name](np.full(count, rank + 1), to, source, out)
        assert (out == source + 1).all()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    again = partial(SHIFTS[name], np.ones(100_000), to, source, np.ones(100_000))
    return first_error(*[again] * size)  # a rank without a lost neighbour ends its first call


def receive_from_both_hosts(rank: int, size: int, folder: Path) -> str:
    """Rank 2 sends nothing until rank 0, which waits for it, has raised."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank:
        await_file(folder / "ended")
        return first_error(fl.barrier)
    ops = [fl.P2POp("recv", np.ones(3), source) for source in (2, 1)]
    error = first_error(fl.batch_isend_irecv(ops).wait)
    (folder / "ended").touch()
    return error


@pytest.mark.parametrize(
    ("fn", "args"), [(receive_from_both_hosts, ()), *((shift_in_ring, (n,)) for n in SHIFTS)]
)
def test_messages_over_two_hosts_name_a_killed_rank(fn: Any, args: Any, tmp_path: Path) -> None:
    world = {"env": hosts_by_letter("aabb"), "params": {"TIMEOUT": 10}}
    for text in run_survivors(fn, 4, 1, tmp_path, *args, **world):
        assert "lost rank 1" in text
        assert args != ("sendrecv",) or text.startswith("[sendrecv]"), text
