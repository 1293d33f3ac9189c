"""Objects between ranks: what comes is what was given, and what cannot be pickled hurts nobody."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import ranks_in

ranks = ranks_in(("single", 1), ("gloo", 3), ("shm", 3), ("hierarchical", 3), ("mpi", 3))


def some_object(rank: int) -> Any:
    """Of another size on each rank; rank 1 has the smallest there is."""
    return (
        None if rank == 1 else {"rank": rank, "rows": list(range(rank * 5000)), "name": "é" * rank}
    )


def objects_everywhere(rank: int, size: int) -> None:
    own, everyone = some_object(rank), [some_object(r) for r in range(size)]
    for root in range(size):
        assert fl.broadcast_object(own, root) == everyone[root]
        assert fl.broadcast_object(own if rank == root else None, root) == everyone[root]
        assert fl.gather_object(own, root) == (everyone if rank == root else None)
        given = everyone if rank == root else None
        assert fl.scatter_object(given, root) == everyone[rank]
    gathered = fl.all_gather_object(own)
    assert gathered == everyone
    assert gathered[rank] is own


def test_every_verb_of_objects_from_every_root(ranks: Any) -> None:
    ranks.run(objects_everywhere)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("this one stays")


def unpicklable_objects(rank: int, size: int) -> None:
    last = size - 1
    mine = Unpicklable() if rank == last else rank
    calls = [
        lambda: fl.broadcast_object(mine, root=last),
        lambda: fl.all_gather_object(mine),
        lambda: fl.gather_object(mine, root=0),
        lambda: fl.scatter_object([mine] * size, root=last),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"rank {last}: RuntimeError: this one stays") as caught:
            call()
        assert f"rank {rank} of {size}" in str(caught.value)
    assert fl.all_gather_object(rank) == list(range(size))  # the group lives on


def test_an_object_that_cannot_be_pickled_raises_on_every_rank(ranks: Any) -> None:
    ranks.run(unpicklable_objects)


def wrong_arguments(rank: int, size: int) -> None:
    for call in (fl.broadcast_object, fl.gather_object, fl.scatter_object):
        with pytest.raises(ValueError, match=f"0 to {size - 1}; got {size}"):
            call(0, size)
    with pytest.raises(TypeError, match="lock"):
        fl.all_gather_object(threading.Lock())
    fl.barrier()


def test_wrong_roots_are_refused(ranks: Any) -> None:
    ranks.run(wrong_arguments)


def test_a_root_must_have_one_object_for_each_rank() -> None:
    for objs, got in ((None, "None"), ([1, 2], "2")):
        with pytest.raises(ValueError, match=f"one object for each of the 1 ranks, got {got}"):
            fl.scatter_object(objs)


def arrays_as_objects(rank: int, size: int) -> None:
    everyone = fl.all_gather_object({"x": np.full((rank, 2), rank)})
    assert [e["x"].shape for e in everyone] == [(r, 2) for r in range(size)]


def test_arrays_inside_objects(ranks: Any) -> None:
    ranks.run(arrays_as_objects)
