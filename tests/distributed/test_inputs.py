"""Unusual but valid arguments: out overlaps the input, read-only inputs, NumPy integers."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import hosts_by_letter, on_ranks, ranks_in, slow

ranks = ranks_in(("gloo", 4), ("shm", 4), ("hierarchical", 5), slow=[("mpi", 4)])


def numbers(rank: int, rows: int) -> np.ndarray:
    return np.arange(float(rows)) + 1e6 * rank


def same(result: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(result, expected)


def gathers_over_their_input(rank: int, size: int, n: int) -> None:
    everything = np.concatenate([numbers(r, n) for r in range(size)])
    for start in (rank * n, n // 2):  # its own part, and across two other parts
        room = np.zeros(size * n)
        room[start : start + n] = numbers(rank, n)
        same(fl.all_gather(room[start : start + n], out=room), everything)
    room = np.zeros(size * n)
    room[-n:] = numbers(rank, n)
    if fl.gather(room[-n:], root=1, out=room) is room:
        same(room, everything)


def exchanges_over_their_input(rank: int, size: int, n: int) -> None:
    got = np.concatenate([numbers(r, size * n)[rank * n : (rank + 1) * n] for r in range(size)])
    for rows in (None, [n] * size):
        x = numbers(rank, size * n)
        assert fl.all_to_all(x, rows=rows, out=x) is x
        same(x, got)


def parts_over_their_input(rank: int, size: int, n: int) -> None:
    total = np.sum([numbers(r, size * n) for r in range(size)], axis=0)
    for part in (0, rank):  # the part of rank 0, and its own
        x = numbers(rank, size * n)
        same(fl.reduce_scatter(x, out=x[part * n :][:n]), total[rank * n :][:n])
    x = numbers(0, size * n)
    out = x[:n] if rank == 1 else np.zeros(n)
    same(
        fl.scatter(x if rank == 1 else None, root=1, out=out), numbers(0, size * n)[rank * n :][:n]
    )


@pytest.mark.parametrize("n", [3, 100_000])
def test_out_may_overlap_the_input(ranks: Any, n: int) -> None:
    for check in (gathers_over_their_input, exchanges_over_their_input, parts_over_their_input):
        ranks.run(check, n)


@on_ranks()
def test_verbs_accept_read_only_arrays_that_they_only_read(rank: int, size: int) -> None:
    x = np.full(size, float(rank))
    x.flags.writeable = False
    right, left = (rank + 1) % size, (rank - 1) % size
    got = np.zeros(size)
    assert fl.sendrecv(x, right, out=got, src=left) is got
    same(got, np.full(size, float(left)))
    work = fl.isend(x, right)
    same(fl.recv(got, left), np.full(size, float(left)))
    work.wait()
    same(fl.all_gather(x), np.repeat(np.arange(float(size)), size))
    same(fl.all_to_all(x), np.arange(float(size)))
    same(fl.reduce_scatter(x), [sum(range(size))])
    same(fl.scatter(x if rank == 1 else None, root=1), [1.0])
    same(fl.all_gather(np.float32(rank)), np.arange(size))  # NumPy scalars are immutable
    with pytest.raises(ValueError, match=r"sendrecv.* read-only"):
        fl.sendrecv(got, right, out=x, src=left)
    with pytest.raises(ValueError, match="dst must be a rank"):
        fl.sendrecv(got, size, out=got, src=left)


@on_ranks()
def test_ranks_tags_and_colors_may_be_numpy_integers(rank: int, size: int) -> None:
    last = np.arange(size)[-1]
    same(fl.broadcast(np.array([rank]), root=last), [last])
    same(fl.reduce(np.array([rank]), root=last), [sum(range(size)) if rank == last else rank])
    assert fl.broadcast_object(rank, root=last) == last
    assert fl.synchronize([rank], root=last) == [last]
    box = np.zeros(1, int)
    right, left = np.int32((rank + 1) % size), np.uint8((rank - 1) % size)
    same(fl.sendrecv(np.array([rank]), right, out=box, src=left, tag=np.int64(5)), [left])
    ops = [fl.P2POp("send", np.array([rank]), right), fl.P2POp("recv", box, left)]
    fl.batch_isend_irecv(ops).wait()
    same(box, [left])
    with fl.split(np.int64(0), key=np.int64(-rank)) as group:
        assert group.ranks == tuple(range(size))[::-1]
    with pytest.raises(ValueError, match=r"must be a rank of this group.*got 1\.0"):
        fl.broadcast(box, root=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be a rank of this group.*got 0\.5"):
        fl.new_group([0.5, 1])  # type: ignore[list-item]


@pytest.mark.parametrize("is_reported", [True, False])
@on_ranks()
def test_wrong_rows_raise_once_and_keep_results(rank: int, size: int, is_reported: bool) -> None:
    """Start a call with a wrong ``out``, and another call with a strided array."""
    x, gaps = np.ones((rank + 1, 2)), np.ones((3, 4))[:, ::2]
    out = np.zeros((1, 4))[:, ::2] if is_reported else np.zeros((1, 2))
    work = fl.all_gather(x, out=out, async_op=True)
    fl.all_reduce(gaps, async_op=True)  # its result is copied into the strided array
    with pytest.raises(ValueError, match="expected out with"):
        work.wait() if is_reported else fl.sync_distributed()
    fl.sync_distributed()
    same(gaps, np.full((3, 2), size))


def test_work_raises_in_every_wait_if_its_result_cannot_be_stored() -> None:
    columns = np.ones((4, 4))[:, ::2]
    fl.barrier()  # the first call takes no fast path, and later ones copy no sum
    work = fl.all_reduce(columns, op="lor", async_op=True)
    columns.flags.writeable = False  # not allowed during the operation
    for _ in range(2):
        with pytest.raises(ValueError, match="read-only"):
            work.wait()


class Unreadable:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@on_ranks()
def test_unpickling_error_names_the_rank_of_the_object(rank: int, size: int) -> None:
    if rank == 1:
        fl.broadcast_object(Unreadable(), root=1)
    else:
        with pytest.raises(ValueError, match="no number") as caught:
            fl.broadcast_object(root=1)
        assert f"rank {rank} of {size}: the object from rank 1" in "".join(caught.value.__notes__)
    assert fl.all_gather_object(rank) == list(range(size))  # all ranks are in step


SHORT: dict[str, Any] = {"params": {"TIMEOUT": 1}}
# The last rank is on the host of rank 0.
SAME_HOST: dict[str, Any] = {"env": hosts_by_letter("aba")}
TAGGED: list[Any] = [
    *((("shm", 2, SHORT), True), (("mpi", 2, SHORT), False), (("gloo", 2, SHORT), False)),
    *((("hierarchical", 3, SHORT, SAME_HOST), True), (("hierarchical", 3, SHORT), False)),
]


@pytest.mark.parametrize(
    ("ranks", "sends"), [(("gloo", 2, SHORT), True), *slow(*TAGGED)], indirect=["ranks"]
)
@on_ranks(fresh=True)
def test_timeout_error_names_both_tags_if_they_differ(rank: int, size: int, sends: bool) -> None:
    last, x = size - 1, np.zeros(20_000)
    first, second = (fl.send, fl.recv) if sends else (fl.recv, fl.send)
    calls = {0: lambda: first(x, last, tag=3), last: lambda: second(x, 0, tag=7)}
    late = fl.errors.CollectiveTimeoutError, fl.errors.PeerLostError
    with pytest.raises(late, match=r"(?s)(?=.*with tag 3).*with tag 7"):
        calls.get(rank, lambda: fl.barrier(timeout=20))()  # until the ranks are notified


@pytest.mark.parametrize("kind", ["rows", "calls", "calls with gaps", "messages"])
@on_ranks()
def test_sync_distributed_raises_failures_without_wait(rank: int, size: int, kind: str) -> None:
    """Start failing calls and successful calls, keep no Work, and then synchronise."""
    x, last = np.ones(3), size - 1  # on another host than rank 0
    for _ in range(3):
        if kind == "rows":
            fl.all_gather(np.ones((rank + 1, 2)), out=np.zeros((1, 2)), async_op=True)
        elif kind == "calls":
            fl.all_reduce(np.ones(3 + rank), async_op=True)
        elif kind == "calls with gaps":
            fl.all_reduce(np.ones((4, 2 * size + 2 * rank))[:, ::2], async_op=True)
        elif rank == 0:
            fl.irecv(np.ones(3), None)
        elif rank == last:
            fl.isend(np.ones(1 << 19), 0)  # too large to be sent before the receive
    for work in [fl.all_reduce(x, async_op=True) for _ in range(30)]:
        work.wait()
    error = ValueError if kind == "rows" else fl.errors.MismatchError
    for _ in range(3 if kind != "messages" or rank in (0, last) else 0):
        with pytest.raises(error):
            fl.sync_distributed()
    fl.sync_distributed()


@on_ranks()
def test_sync_distributed_in_a_thread_removes_no_result(rank: int, size: int) -> None:
    """All works end successfully, whichever thread removes them from the lists."""
    is_done = threading.Event()

    def synchronize() -> None:
        while not is_done.is_set():
            fl.sync_distributed()

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(synchronize)
        try:
            for _ in range(50):
                [fl.all_reduce(np.ones(3), async_op=True) for _ in range(4)][-1].wait()
        finally:
            is_done.set()
        other.result()


@on_ranks()
def test_raised_failures_are_not_repeated_and_are_freed(rank: int, size: int) -> None:
    for _ in range(20):
        work = fl.all_gather(np.ones((rank + 1, 2)), out=np.zeros((1, 2)), async_op=True)
        fl.all_reduce(np.ones(3), async_op=True).wait()
        with pytest.raises(ValueError, match="out"):
            work.wait()
    late = fl.all_reduce(np.ones((4, 2 * size + 2 * rank))[:, ::2], async_op=True)
    for _ in range(2):
        with pytest.raises(fl.errors.MismatchError, match="made different calls"):
            late.wait()
    fl.sync_distributed()  # wait() has raised all of them
    gc.collect()
    errors = [one for one in gc.get_objects() if isinstance(one, ValueError)]
    assert len(errors) < 10, errors


@on_ranks()
def test_reductions_accept_bools_with_any_byte(rank: int, size: int) -> None:
    """Files and C code create bools whose byte is neither 0 nor 1. For floats only 0 is false."""
    everyone = [np.array([r + 2, 255 * (r == 0), 0, 7 - r] * 9, np.uint8) for r in range(size)]
    truth = [array != 0 for array in everyone]
    ops = {"and land min": np.logical_and, "or lor max": np.logical_or, "xor lxor": np.logical_xor}
    for names, op in ops.items():
        for name in names.split():
            same(fl.all_reduce(everyone[rank].view(bool).copy(), op=name), op.reduce(truth))
    same(fl.all_reduce(np.array([2.5, 0.0, np.nan, -1.0]), op="land"), np.array([1, 0, 1, 1]))


@on_ranks()
def test_verbs_accept_unaligned_arrays(rank: int, size: int) -> None:
    for count in (size, 30_000 * size):
        odd = np.zeros(8 * count + 1, np.uint8)[1:].view("f8")
        odd[:] = rank
        same(fl.all_reduce(odd.copy(), op="avg"), fl.all_reduce(odd, op="avg"))
        same(fl.all_gather(odd[:1]), [(size - 1) / 2] * size)
        fl.broadcast(odd, root=1)
        same(fl.reduce_scatter(odd)[:1], [size * odd[0]])


@on_ranks()
def test_verbs_ignore_np_seterr(rank: int, size: int) -> None:
    with np.errstate(all="raise" if rank == 1 else "ignore"):
        for dtype in ("f2", "f4", "f8", "c8", "g"):
            large, small = np.finfo(dtype).max, np.finfo(dtype).tiny
            assert np.isinf(fl.all_reduce(np.full(3, large, dtype), scale=2.0).real).all(), dtype
            fl.all_reduce(np.full(3, small, dtype), scale=1e-3)
            fl.all_reduce(np.full(3, np.inf if rank else -np.inf, dtype))


@on_ranks()
def test_verbs_return_arrays_for_arrays_without_dimensions(rank: int, size: int) -> None:
    """They stay arrays of their dtype, although indexing would return NumPy scalars."""
    for value in ("abc", 3.0, 1j, np.datetime64(7, "s")):
        x = np.asarray(value)
        for out in (None, np.zeros_like(x)):
            for async_op in (False, True):
                parts = [x] * size if rank == 0 else None
                done: Any = fl.scatter(parts, out=out, async_op=async_op)
                part = done.wait() if async_op else done
                assert type(part) is np.ndarray
                assert part.dtype == x.dtype
                same(part, x)
        assert [array.shape for array in fl.all_gather([x, x])] == [(size,)] * 2
        assert type(fl.broadcast_object([x])[0]) is np.ndarray
    assert type(fl.all_reduce_multiple(np.ones((2, 3)))) is list  # Regression on several hosts


@on_ranks()
def test_verbs_keep_the_dimensions_of_np_matrix(rank: int, size: int) -> None:
    """Two dimensions stay two for any indexing."""
    for async_op in (False, True):
        xs = [
            np.array([[1.0, 2.0], [3.0, rank]]).view(np.matrix),
            np.array([[rank]]).view(np.matrix),
        ]
        done: Any = fl.all_reduce_multiple(xs, contiguous=True, async_op=async_op)
        assert (done.wait() if async_op else done)[0] is xs[0]
        same(xs[0], [[size, 2 * size], [3 * size, size * (size - 1) / 2]])
        same(xs[1], [[size * (size - 1) / 2]])
    values, ranks = fl.all_reduce_location(np.array([[rank, -rank]]).view(np.matrix))
    same(values, [[0, 1 - size]])
    same(ranks, [[0, size - 1]])
