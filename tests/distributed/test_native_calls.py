"""The native entry: the calls it takes, what it returns and records, who ends what it starts."""

import contextlib
import gc
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py._native.codes import DTYPES
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.journal import Record
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import VERBS
from flashlight_py.distributed.work import Work
from flashlight_py.errors import CollectiveTimeoutError, GroupClosedError, MismatchError
from tests.distributed import conformance
from tests.distributed.conformance import on_ranks

in_both = on_ranks(("shm", 2), ("gloo", 2))
CODES = {verb.name: verb.code for verb in (*VERBS, journal.SENDRECV)}


def settle() -> None:
    """Let go of what other tests have left in these ranks: until then calls are left to Python."""
    gc.collect()
    fl.barrier()


def native(group: ProcessGroup, verb: str, x: Any = None, **given: Any) -> Any:
    """Call the native entry; the result of what is asynchronous is waited for."""
    names = ("out", "op", "scale", "peer", "tag", "async_op")
    op = False if verb in ("send", "recv") else "sum"  # of a receive: whether fewer rows may come
    defaults = {"out": None, "op": op, "scale": 1.0, "peer": 0, "tag": 0, "async_op": False}
    arguments = {**defaults, **given}
    got = group.fast.collective(CODES[verb], x, *(arguments[name] for name in names))
    return got.wait() if isinstance(got, Work) else got


@in_both
def test_what_is_not_plain_is_left_to_python(rank: int, size: int) -> None:
    settle()
    group = current_world().group
    x, ints = np.zeros(4), np.zeros(4, int)
    locked, shared = np.zeros(4), np.zeros(8)
    locked.flags.writeable = False
    for verb, given in [
        ("all_reduce", {"x": [1.0]}),
        ("all_reduce", {"x": x[::2]}),
        ("all_reduce", {"x": x.astype(">f8")}),
        ("all_reduce", {"x": locked}),
        ("all_reduce", {"x": x, "op": "land"}),
        ("all_reduce", {"x": x, "op": "and"}),
        ("all_reduce", {"x": x, "scale": float("nan")}),
        ("all_reduce", {"x": ints, "op": "avg"}),
        ("all_reduce", {"x": ints, "scale": 0.5}),
        ("all_reduce", {"x": x.astype(bool)}),
        ("all_reduce", {"x": x.astype(complex), "op": "max"}),
        ("all_reduce", {"x": np.zeros(3, "M8[s]")}),
        ("broadcast", {"x": x, "peer": size}),
        ("broadcast", {"x": x, "peer": -1}),
        ("broadcast", {"x": x, "peer": True}),
        ("reduce_scatter", {"x": np.zeros(2 * size + 1)}),
        ("reduce_scatter", {"x": np.zeros(2 * size), "op": [2] * size}),
        ("all_to_all", {"x": np.zeros(())}),
        ("all_to_all", {"x": shared, "out": shared}),
        ("all_to_all", {"x": shared, "out": np.zeros(8, int)}),
        ("all_gather", {"x": shared[:4], "out": shared}),
        ("send", {"x": x, "peer": rank}),
        ("recv", {"x": locked, "peer": 1 - rank}),
        ("recv", {"x": x, "peer": 1 - rank, "op": 1}),
        ("recv", {"x": np.zeros(()), "peer": None, "op": True}),
        ("send", {"x": x, "peer": None}),
        ("send", {"x": x, "peer": 1 - rank, "tag": -1}),
    ]:
        assert native(group, verb, **given) is NotImplemented, (verb, given)
    assert group.fast.sendrecv(shared[:4], 1 - rank, shared[2:6], 1 - rank, 0, 0) is NotImplemented
    for dtype in map(conformance.dtype_of, DTYPES):
        assert native(group, "broadcast", np.zeros(3, dtype)) is not NotImplemented


@in_both
def test_both_describe_arrays_alike(rank: int, size: int) -> None:
    """Native code describes a plain array, Python one of the other byte order, in the same way."""
    for shape in [(), (0,), (3, 0, 2), (2, 3, 4), (1,) * 7 + (2, 3, 4), (2,) * 12]:
        x = np.full(shape, rank, np.dtype("f8" if rank else ">f8"))
        assert np.all(fl.all_reduce(x, 0.5, op="max") == 0.5)
        assert np.all(fl.broadcast(np.full(shape, rank, x.dtype)) == 0)


def record_of(group: ProcessGroup) -> Record:
    return group.journal.records(1)[-1]


@pytest.mark.parametrize("count", [1, 100_000])
@in_both
def test_an_end_is_recorded_where_nobody_waits(rank: int, size: int, count: int) -> None:
    """What nobody waits for ends all the same, and its end is recorded."""
    settle()
    group = current_world().group
    x = np.full(count, 1.0)
    group.fast.collective(CODES["all_reduce"], x, None, "sum", 1.0, 0, 0, True)
    until = time.monotonic() + 10
    while not record_of(group).ended:
        assert time.monotonic() < until
        time.sleep(0.001)
    group.synchronize()
    assert np.all(x == size)


@in_both
def test_started_and_blocking_calls_keep_their_order(rank: int, size: int) -> None:
    """Small ones that were started, large ones and blocking ones keep their order."""
    settle()
    group = current_world().group
    for start in range(200):
        arrays = [np.full(1 + (start * 7 + i) % 5000, float(i + rank)) for i in range(5)]
        works = [
            group.fast.collective(CODES["all_reduce"], x, None, "sum", 1.0, 0, 0, True)
            for x in arrays[:3]
        ]
        group.all_reduce(arrays[3])
        if start % 2:
            for work in works:
                work.wait()
        works.append(group.all_reduce(arrays[4], async_op=True))
        group.barrier()
        assert all(work.is_completed() for work in works)
        for i, x in enumerate(arrays):
            assert np.all(x == size * i + size * (size - 1) / 2)
        assert works[0].wait() is arrays[0]


@in_both
def test_closing_ends_what_was_started(rank: int, size: int) -> None:
    """One that waits for the others ends when its group is closed, by whatever thread."""
    settle()
    world = current_world().group
    group = world.new_group(range(size))
    if rank == 0:
        work = group.fast.collective(CODES["all_reduce"], np.zeros(3), None, "sum", 1.0, 0, 0, True)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(work.wait)
            group.close()
            with pytest.raises(GroupClosedError):
                waiting.result()
        assert group.fast.collective(CODES["barrier"], *[None] * 4, 0, 0, False) is NotImplemented
    world.barrier()
    group.close()


@on_ranks(("shm", 2))
def test_rows_of_an_all_to_all_are_compared_and_checked(rank: int, size: int) -> None:
    """Lists of rows are read natively, arrays by Python: both are the same call."""
    settle()
    group = current_world().group
    rows, x = [[3, 3], [2, 4]][rank], np.arange(12.0).reshape(6, 2)
    wanted = np.concatenate([x[:3], x[:2]] if rank == 0 else [x[3:], x[2:]])
    for given in ((rows,) * 2, (tuple(rows), np.array(rows))):
        assert np.array_equal(fl.all_to_all(x, rows=given[rank]), wanted)
    assert "all_to_all" in record_of(group).what
    with pytest.raises(MismatchError, match=r"all_to_all\(float32 \(6, 2\), rows=\.\.\.\)"):
        fl.all_to_all(x.astype(np.float32) if rank == 0 else x, rows=rows)
    with pytest.raises(MismatchError, match=r"rank 1 called all_to_all\(rows=\.\.\.\)"):
        fl.barrier() if rank == 0 else fl.all_to_all(x, rows=rows)
    for refused in ([6], [7, -1], [3, 4], [True, 5], [2.0, 4], []):
        given = CODES["all_to_all"], x, None, refused, 1, 0, 0, False
        assert group.fast.collective(*given) is NotImplemented


@in_both
def test_several_messages_are_native(rank: int, size: int) -> None:
    """A batch is begun natively where all of it is plain, and recorded message by message."""
    settle()
    group, peer = current_world().group, 1 - rank
    for count in (3, 3000, 300_000):
        x, out = np.full(count, rank + 1.0), np.zeros((2, count))
        ops = [fl.P2POp("recv", out[0], peer, 5), fl.P2POp("recv", out[1], peer, 6)]
        ops += [fl.P2POp("send", x, peer, 5), fl.P2POp("send", x, peer, 6)]
        work = group.fast.sendrecv(ops)
        assert isinstance(work, Work)
        assert all(given is one.x for given, one in zip(work.wait(), ops, strict=True))
        assert work.is_completed()
        assert work.source is None
        assert np.all(out == peer + 1)
        out[:] = 0
        assert fl.batch_isend_irecv(ops).wait()[0] is ops[0].x
        assert np.all(out == peer + 1)
    for refused in (
        [fl.P2POp("recv", out[0], peer), fl.P2POp("recv", out[0][:3], peer)],
        [fl.P2POp("send", [1, 2], peer)],
        [fl.P2POp("send", x, peer, partial=True)],
        [object()],
        (),
    ):
        assert group.fast.sendrecv(refused) is NotImplemented
    ops = [fl.P2POp("send", np.zeros(30_000 + rank), peer)]
    ops += [fl.P2POp("recv", np.zeros(30_002), peer)]
    with pytest.raises(MismatchError, match="float64"):
        fl.batch_isend_irecv(ops).wait()
    sent = [record for record in group.journal.records() if record.what[2] == "send"]
    assert rank or len(sent) >= 13


@in_both
def test_receives_of_any_rank_are_native(rank: int, size: int) -> None:
    """Each is given in turn what the other rank has sent, however it asks for that."""
    settle()
    group, peer = current_world().group, 1 - rank
    recv, x = CODES["recv"], np.arange(6.0).reshape(3, 2)

    def sent(rows: int, after: float = 0) -> None:
        """Rank 1 sends so many rows, once rank 0 has had ``after`` seconds to ask for them."""
        fl.barrier()
        time.sleep(after)
        if rank == 1:
            fl.send(x[:rows], 0, 7)

    for count, after in ((3, 0.0), (1, 0.0), (3, 0.02), (1, 0.02), (0, 0.0)):
        for peer_given, partial in ((None, count < 3), (peer, True)):
            if rank == 1:
                for _ in range(4):
                    sent(count, after)
                continue
            room = np.zeros((3, 2))

            def check(
                part: Any, room: Any = room, n: int = count, whole: bool = not partial
            ) -> None:
                assert part is room if whole else part.base is room
                np.testing.assert_array_equal(part, x[:n])
                room[:] = 0

            arguments = recv, room, None, partial, None, peer_given, 7
            sent(count)
            check(group.fast.collective(*arguments, False))
            work = group.fast.collective(*arguments, True)
            sent(count)
            check(work.wait())
            assert work.source == peer
            assert work.wait() is work.wait()
            work = group.fast.collective(*arguments, True)
            with pytest.raises(CollectiveTimeoutError, match="still running"):
                work.wait(timeout=0)  # Python takes over
            assert peer_given is not None or work.source is None
            sent(count)
            check(work.wait())
            assert work.source == peer
            work = group.fast.collective(*arguments, True)
            sent(count)
            until = time.monotonic() + 10
            while not work.is_completed():
                assert time.monotonic() < until
            check(work.wait(timeout=1))
            assert work.source == peer
    if rank == 0:
        records = [record for record in group.journal.records() if record.what[2] == "recv"]
        assert {record.what[7] for record in records} == {-1, peer}
        assert all((record.what[1], record.what[8]) == (0, 7) for record in records[-8:])
        assert all(record.as_dict()["ended"] for record in records)


@on_ranks(("shm", 2))
def test_batches_with_nobody_are_native(rank: int, size: int) -> None:
    """Of messages to or from nobody the array keeps its place, whole or in part."""
    settle()
    group, peer = current_world().group, 1 - rank
    rooms = [np.zeros((4, 2)) for _ in range(5)]
    given = [(None, False), (peer, True), (None, True), (peer, False), (peer, True)]
    ops = [
        fl.P2POp("recv", x, src, 3, partial=partial)
        for x, (src, partial) in zip(rooms, given, strict=True)
    ]
    ops.insert(2, fl.P2POp("send", rooms[1], None))  # nobody reads what is being filled
    for python in (False, True):
        work = group.fast.sendrecv(ops)
        assert isinstance(work, Work)
        if python:
            with pytest.raises(CollectiveTimeoutError, match="still running"):
                work.wait(timeout=0)
        fl.barrier()
        for i, rows in enumerate((3, 4, 2)):
            fl.send(np.full((rows, 2), i + 1.0), peer, 3)
        for _ in range(2):
            parts = work.wait()
            assert [len(part) for part in parts] == [4, 3, 4, 4, 4, 2]
            assert [part[0, 0] for part in parts] == [0, 1, 1, 0, 2, 3]
            assert parts[0] is rooms[0]
            assert parts[1].base is rooms[1]
            assert parts[3] is rooms[2]
        written = [record.what for record in group.journal.records() if record.what[2] == "recv"]
        assert [what[7] for what in written][-3:] == [peer] * 3
        fl.barrier()
    nobody = [fl.P2POp("send", rooms[0], None), fl.P2POp("recv", rooms[1], None)]
    count = len(group.journal.records())
    work = group.fast.sendrecv(nobody)
    assert work.is_completed()
    assert [given is got for given, got in zip(rooms, work.wait(), strict=False)] == [True] * 2
    assert len(group.journal.records()) == count


@in_both
def test_half_a_sendrecv_is_native(rank: int, size: int) -> None:
    """One half of a sendrecv, or none."""
    settle()
    group, x, out = current_world().group, np.full(3, rank + 1.0), np.zeros(3)
    assert group.fast.sendrecv(x, None, out, None, 0, 0) is out
    assert not out.any()
    ends: list[tuple[int | None, int | None]] = [(1 - rank, None), (None, 1 - rank)]
    for dst, src in ends if rank == 0 else ends[::-1]:
        assert group.fast.sendrecv(x, dst, out, src, 4, 4) is out
    assert out.tolist() == [2.0 - rank] * 3
    assert [record.what[2] for record in group.journal.records()][-2:] == (
        ["send", "recv"] if rank == 0 else ["recv", "send"]
    )
    fl.barrier()


@in_both
def test_a_rank_without_rows_receives_those_of_others(rank: int, size: int) -> None:
    """One that has nothing to give, and is given something."""
    settle()
    for width in (3, 5000):
        x = np.arange(4.0 * width).reshape(4, width)
        mine, rows = (x[:0], [0, 0]) if rank == 0 else (x, [3, 1])
        for out in (None, None, np.full((3, width) if rank == 0 else (1, width), -1.0)):
            got = fl.all_to_all(mine, rows=rows, out=out)
            assert np.array_equal(got, x[:3] if rank == 0 else x[3:])


class Alarm(Exception):
    """What a signal handler raises."""


@on_ranks(("shm", 2), fresh=True)
def test_an_interrupted_batch_raises_what_the_handler_has_raised(rank: int, size: int) -> None:
    """A handler raises at any moment while messages are started; all of them end later."""

    def handler(number: int, frame: Any) -> None:
        raise Alarm

    began, kept = 0, []
    if rank == 0:
        before = signal.signal(signal.SIGALRM, handler)
        for _ in range(60):
            arrays = [np.zeros(3) for _ in range(6)]
            ops = [fl.P2POp("recv", x, 1, tag=began + i) for i, x in enumerate(arrays)]
            with contextlib.suppress(Alarm):  # also one that arrives while the timer is stopped
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0002)
                    kept.append(fl.batch_isend_irecv(ops))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            began += 6
        signal.signal(signal.SIGALRM, before)


@in_both
def test_numbers_are_native(rank: int, size: int) -> None:
    settle()
    group = current_world().group
    for number in (1.5, 3, -7, np.float32(0.5), np.int16(-2), np.float64(4.0)):
        for verb, op, wanted in [
            ("all_reduce", "sum", number * size),
            ("all_reduce", "min", number),
            ("scan", "sum", number * (rank + 1)),
            ("broadcast", None, number),
            ("reduce", "sum", number * size if rank == 0 else number),
        ]:
            got = group.fast.collective(CODES[verb], number, None, op, 1.0, 0, 0, False)
            assert got == wanted, (verb, number)
            assert type(got) is type(number)
    before = [*group.journal.header]
    for number, verb, op, asynchronous in [
        (2**31, "all_reduce", "sum", False),
        (3, "all_reduce", "prod", False),
        (3, "all_reduce", ReduceOp.SUM, False),
        (True, "all_reduce", "and", False),
        (1.5, "all_reduce", "sum", True),
        (1.5, "all_reduce", "xor", False),
        (1.5, "recv", None, False),
        (1.5, "all_gather", None, False),
    ]:
        given = CODES[verb], number, None, op, 1.0, 1 - rank, 0, asynchronous
        assert group.fast.collective(*given) is NotImplemented, (number, verb, op)
    assert [*group.journal.header] == before  # nothing has happened
