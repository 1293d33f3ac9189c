"""Calls that ranks only compare (``Call.compared``), for a library that does not do so itself."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
)
from flashlight_py.errors import MismatchError
from tests.distributed.conformance import on_ranks, ranks_in

ranks = ranks_in(("shm", 4), ("gloo", 3), ("hierarchical", 4))


class OfGpu(SimpleNamespace):
    """Stands for a CuPy array: there is nothing of it but its dtype and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __getitem__(self, rows: slice) -> OfGpu:
        return of_gpu(rows.stop, *self.shape[1:], dtype=self.dtype)


def of_gpu(*shape: int, dtype: Any = np.float32) -> Any:
    sizes = {"ndim": len(shape), "size": math.prod(shape)}
    return OfGpu(dtype=np.dtype(dtype), shape=shape, **sizes)


def compare(call: Call, blocking: bool) -> Any:
    backend = current_world().group.backend()
    return backend.start(replace(call, compared=True, blocking=blocking)).wait()


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Let ``OfGpu`` be what ``cupy.ndarray`` is."""
    with mock.patch.dict(sys.modules, cupy=SimpleNamespace(ndarray=OfGpu)):
        yield


@pytest.mark.parametrize("blocking", [True, False])
@on_ranks()
@stand_in()
def test_nothing_moves_and_shapes_are_known(rank: int, size: int, blocking: bool) -> None:
    x = of_gpu(2 * size, 3)
    rows = [1] * (size - 1) + [size + 1]
    for call in (
        Call(ALL_REDUCE, x, ReduceOp.MAX),
        Call(REDUCE, x, root=1),
        Call(BROADCAST, x),
        Call(REDUCE_SCATTER, x, scale=0.5),
        Call(REDUCE_SCATTER, x, rows=rows),
        Call(ALL_TO_ALL, x),
        Call(BARRIER),
    ):
        assert compare(call, blocking) is None, call
    lengths = [r + 1 for r in range(size)]
    for call in (
        Call(ALL_GATHER, of_gpu(rank + 1, 3)),
        Call(GATHER, of_gpu(rank + 1, 3), root=1),
        Call(ALL_TO_ALL, of_gpu(rank + 1, 3), rows=[rank + 1] + [0] * (size - 1)),
    ):
        assert compare(call, blocking) == lengths, call
    parts = [of_gpu(5, dtype=np.int16)] * size if rank == 1 else None
    assert compare(Call(SCATTER, parts, root=1), blocking) == (np.dtype(np.int16), (5,))
    after, before = (rank + 1) % size, (rank - 1) % size
    backend = current_world().group.backend()
    calls = [Call(SEND, x, peer=after, tag=3), Call(RECV, x, peer=before, tag=3)]
    backend.start_many([replace(c, compared=True, blocking=blocking) for c in calls]).wait()
    send = Call(SEND, x[: rank + 1], peer=after, compared=True, blocking=False)
    sent = backend.start(send)
    got = compare(Call(RECV, x, peer=before, partial=True), blocking=True)
    assert got == Matched(before, before + 1)
    sent.wait()


@on_ranks()
def test_both_ends_of_a_message_know_its_number(rank: int, size: int) -> None:
    """Twenty messages from rank 0 to the last, which are received in several ways."""
    backend, x, numbers = current_world().group.backend(), np.zeros((3, 2)), []
    for i in range(20):
        found: list[int] = []
        call = Call(SEND, x, peer=size - 1)
        if rank == size - 1:
            call = Call(RECV, x, peer=ANY_RANK if i % 2 else 0, partial=i % 5 == 0)
        if rank in (0, size - 1):
            call = replace(call, compared=True, tag=i % 3, blocking=i % 4 > 1, received=found)
            backend.start(call).wait()
        numbers += found
    sent, *others, received = fl.all_gather_object(numbers)
    assert not any(others)
    assert sent == received
    assert len(set(sent)) == 20


@on_ranks()
def test_a_lost_rank_is_known_without_a_call(rank: int, size: int) -> None:
    """Rank 1 leaves two groups: one in order, one as its program raises."""
    groups = [fl.new_group(range(size)) for _ in range(2)]
    left, broken = [group.backend() for group in groups]
    assert left.lost("wait") is broken.lost("wait") is None
    fl.barrier()
    if rank == 1:
        groups[0].close()
        broken.abort("ValueError: of rank 1\nTraceback ...")
    fl.barrier()
    end = time.monotonic() + 10.0
    while rank != 1 and broken.lost("wait") is None and time.monotonic() < end:
        time.sleep(0.01)
    lost, why = str(left.lost("wait")), str(broken.lost("all_reduce"))
    fl.barrier()
    place = f"rank {rank} of {size}"
    if rank == 1:
        assert lost == f"[wait] {place}: the group is closed"
        assert why.startswith(f"[all_reduce] {place}: the group cannot be used any more")
    else:
        assert lost == "None"
        assert why.startswith(f"[all_reduce] {place}: lost rank 1")
        assert "it raised ValueError: of rank 1" in why


@on_ranks()
@stand_in()
def test_every_rank_raises_what_was_called(rank: int, size: int) -> None:
    x = of_gpu(4, 3)
    for theirs, words in (
        (Call(ALL_REDUCE, of_gpu(4, 2)), "all_reduce(cupy float32 (4, 2)"),
        (Call(ALL_REDUCE, np.zeros((4, 3), np.float32)), "called all_reduce(float32 (4, 3)"),
        (Call(ALL_REDUCE, x, ReduceOp.MAX), "op=max"),
        (Call(BROADCAST, x), "broadcast(cupy float32 (4, 3), root=0)"),
    ):
        with pytest.raises(MismatchError) as caught:
            compare(Call(ALL_REDUCE, x) if rank == 0 else theirs, blocking=True)
        assert "rank 0 called all_reduce(cupy float32 (4, 3)" in str(caught.value)
        assert words in str(caught.value)
        compare(Call(ALL_REDUCE, x), blocking=True)  # the group lives on
