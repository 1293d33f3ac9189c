"""Verbs of Python objects. An object that cannot be pickled raises on every rank."""

import threading
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.start.world import current_world
from tests.distributed.conformance import mismatch_now_or_later, on_ranks, ranks_in

ranks = ranks_in(*(("single", 1), ("gloo", 3), ("shm", 3)), slow=[("hierarchical", 3), ("mpi", 3)])


def some_object(rank: int) -> Any:
    """Return an object whose size differs between ranks; that of rank 1 is minimal."""
    return (
        None if rank == 1 else {"rank": rank, "rows": list(range(rank * 5000)), "name": "é" * rank}
    )


def objects_everywhere(rank: int, size: int) -> None:
    obj, everyone = some_object(rank), [some_object(r) for r in range(size)]
    for root in range(size):
        assert fl.broadcast_object(obj, root) == everyone[root]
        assert fl.broadcast_object(obj if rank == root else None, root) == everyone[root]
        assert fl.gather_object(obj, root) == (everyone if rank == root else None)
        objects = everyone if rank == root else None
        assert fl.scatter_object(objects, root) == everyone[rank]
    gathered = fl.all_gather_object(obj)
    assert gathered == everyone
    assert gathered[rank] is obj


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("this one stays")


@on_ranks()
def test_object_that_cannot_be_pickled_raises_on_every_rank(rank: int, size: int) -> None:
    last = size - 1
    obj = Unpicklable() if rank == last else rank
    calls = [
        lambda: fl.broadcast_object(obj, root=last),
        lambda: fl.all_gather_object(obj),
        lambda: fl.gather_object(obj, root=0),
        lambda: fl.scatter_object([obj] * size, root=last),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"rank {last}: RuntimeError: this one stays") as caught:
            call()
        assert f"rank {rank} of {size}" in str(caught.value)
    assert fl.all_gather_object(rank) == list(range(size))  # the group remains usable


@on_ranks()
def test_object_verbs_raise_mismatch_error_if_roots_differ(rank: int, size: int) -> None:
    """With each pair of roots, both ranks, one rank or no rank has an object."""
    for one, other in ((0, 1), (1, 0), (2, 1)) if size > 1 else ():
        root, long = one if rank == 0 else other, [f"{r}" * 2000 for r in range(size)]
        for verb, obj, expected in [
            (fl.broadcast_object, [rank], [other]),
            (fl.gather_object, rank, [*range(size)] if rank == other else None),
            (fl.gather_object, long[rank], long if rank == other else None),
            (fl.scatter_object, [*range(size)], rank),
        ]:
            text = mismatch_now_or_later(lambda root=root, verb=verb, obj=obj: verb(obj, root))
            for differing in (one, other):
                assert f"called {verb.__name__}(root={differing})" in text, text
            assert verb(obj, other) == expected


def test_scatter_object_needs_one_object_per_rank() -> None:
    for objs, got in ((None, "None"), ([1, 2], "2")):
        with pytest.raises(ValueError, match=f"1 objects, one for each rank, .* got {got}"):
            fl.scatter_object(objs)


@on_ranks()
def test_object_verbs_send_large_arrays_inside_objects(rank: int, size: int) -> None:
    """The arrays are writable if those of the sender are."""
    x = np.arange(3000.0).reshape(60, 50) + rank
    fixed = x.copy()
    fixed.flags.writeable = False
    obj = {
        "rows": x,
        "columns": np.asfortranarray(x),
        "fixed": fixed,
        "bits": x[:, ::2],
        "few": x[0],
    }
    for root in range(size):
        came = [fl.broadcast_object(obj, root), fl.all_gather_object(obj)[root]]
        came.append(fl.scatter_object([obj] * size, root))
        for result in came:
            assert all(np.array_equal(result[name], obj[name] - rank + root) for name in obj)
            assert result["columns"].flags.f_contiguous
            writeable = {name for name, array in result.items() if array.flags.writeable}
            assert writeable == {*obj} - {"fixed"}
            assert all(array.ctypes.data % 16 == 0 for array in result.values())


@on_ranks()
def test_object_verbs_send_objects_of_all_lengths(rank: int, size: int) -> None:
    """Lengths around every threshold between methods of transfer."""
    for length in (0, 900, 1100, 16_000, 17_000, 70_000, 300_000):
        for root in range(size):
            objects = [b"x" * (length if r == rank else r) for r in range(size)]
            expected = b"x" * (length if root == rank else rank)
            assert fl.scatter_object(objects, root) == expected
            assert fl.broadcast_object(b"y" * length, root) == b"y" * length
            lengths = [len(b"z") * r * length for r in range(size)]
            came = fl.gather_object("z" * (rank * length), root)
            assert came is None if rank != root else [*map(len, came or ())] == lengths
            assert [*map(len, fl.all_gather_object("z" * (rank * length)))] == lengths


# A pending call of another test would prevent it.
@on_ranks(("shm", 3), ("gloo", 3), fresh=True, native=True)
def test_object_verbs_use_the_fast_path(rank: int, size: int) -> None:
    """One native call runs each verb, and the flight record shows it."""
    group = current_world().group
    objects = [None, NotImplemented, ..., [], (1, 2)]  # also results of the fast path itself
    for verb, obj, expected in [
        (journal.BROADCAST_OBJECT, objects, [objects]),
        (journal.ALL_GATHER_OBJECT, rank, [*range(size)]),
        (journal.GATHER_OBJECT, rank, [*range(size)] if rank == 0 else None),
        (journal.SCATTER_OBJECT, [*range(size)], [rank]),
    ]:
        assert group.fast.objects(verb.code, obj, 0) == expected
        record = group.journal.records()[-1].as_dict()
        assert record["verb"] == verb.name
        assert record.get("root") == (0 if verb.rooted else None)
        assert record["bytes"] > 0 or verb is journal.SCATTER_OBJECT
        assert record["ended"] >= record["started"]
    for item in objects:
        assert fl.broadcast_object(item) == item
        assert fl.all_gather_object(item) == [item] * size
    assert group.fast.objects(33, 1, size) is NotImplemented
    with pytest.raises(TypeError):
        group.fast.objects(33, 1)


class Interrupted:
    """Raises KeyboardInterrupt when it is pickled on rank 1."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


@on_ranks(("shm", 2), ("gloo", 2), fresh=True)
def test_interrupt_during_pickling_ends_the_group(rank: int, size: int) -> None:
    with pytest.raises(KeyboardInterrupt if rank else fl.errors.PeerLostError):
        fl.all_gather_object(Interrupted() if rank else 0)


@on_ranks(("shm", 3), ("gloo", 3))
def test_object_verbs_work_if_only_some_ranks_use_the_fast_path(rank: int, size: int) -> None:
    """On one rank, Python records the calls."""
    group, large = current_world().group, np.arange(50_000.0)
    for off in range(size):
        group.journal.header[2] = rank == off
        objects_everywhere(rank, size)
        assert np.array_equal(fl.broadcast_object(large, off), large)
        assert all(
            np.array_equal(x, large + r) for r, x in enumerate(fl.all_gather_object(large + rank))
        )
    group.journal.header[2] = 0


class Silent(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class Refusing:
    def __reduce__(self) -> str:
        raise Silent


@on_ranks()
def test_send_object_and_recv_object_keep_their_order(rank: int, size: int) -> None:
    objects: list[Any] = [{"rank": 0}, np.arange(100), list(range(5000)), "é"]
    if size == 1:
        with pytest.raises(ValueError, match="must be another rank"):
            fl.send_object(1, 0)
        return
    if rank == 0:
        for obj in objects:
            fl.send_object(obj, 1, tag=3)
        fl.send(np.arange(2), 1, tag=3)
        with pytest.raises(TypeError, match=r"expected a picklable object on the sender"):
            fl.send_object(Unpicklable(), 1)
        assert sorted(fl.recv_object(None) for _ in range(size - 1)) == list(range(1, size))
    else:
        if rank == 1:
            for obj in objects:
                assert np.array_equal(fl.recv_object(0, tag=3), obj)
            x = np.zeros(2, int)
            assert fl.recv(x, 0, tag=3).tolist() == [0, 1]
            with pytest.raises(
                TypeError, match=r"picklable object on the sender: .*this one stays"
            ):
                fl.recv_object(0)
        fl.send_object(rank, 0)
    for wrong in (size, -1, None, True):
        with pytest.raises(ValueError, match="send_object: dst must be a rank"):
            fl.send_object(1, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Silent: \(its str\(\) raises ZeroDivisionError\)"):
        fl.broadcast_object(Refusing() if rank == 0 else None)
    fl.barrier()


@on_ranks(("shm", 3))
def test_threads_send_and_receive_long_objects(rank: int, size: int) -> None:
    got: list[int] = []

    def work() -> None:
        for i in range(20):
            if rank:
                fl.send_object([rank] * (i * 1000), 0)
            else:
                got.append(len(fl.recv_object(None)))

    threads = [threading.Thread(target=work) for _ in range(2 if rank else 2 * (size - 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fl.barrier()
    assert rank or sorted(got) == sorted(4 * [i * 1000 for i in range(20)])
