"""The collectives that NCCL has no function for (before 2.28): messages, begun as one.

Each moves bytes, one block per rank. A rank's message to itself is a message too, as NCCL allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flashlight_py.device import Array
from flashlight_py.distributed.backends.nccl.dtypes import BYTES
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.verbs import REDUCE
from flashlight_py.distributed.work import AllOf, Then, Work

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.nccl.backend import NcclBackend


def reduce_each(reduce: Callable[[Call], Work], call: Call, mine: Array, rank: int) -> Work:
    """Reduce the first ``rows[0]`` rows of the array onto rank 0, and so on; ``mine`` here."""
    assert call.rows is not None
    works, end = list[Work](), 0
    for root, count in enumerate(call.rows):
        part = call.array[end : end + count]
        end += count
        if root == rank:
            mine[...] = part
            part = mine
        step = Call(REDUCE, part, call.op, call.scale, root, blocking=call.blocking)
        works.append(reduce(step))
    return Then(AllOf(works), lambda _: mine)


def gather(backend: NcclBackend, call: Call, joined: Array | None, rows: Sequence[int]) -> Work:
    """Fill ``joined``, which only the root has, with the arrays of all ranks, of ``rows`` rows."""
    array = call.array
    sent = {call.root: array.nbytes}
    return _launch(backend, call, (array, sent), (joined, _lengths(array, rows)), joined)


def scatter(backend: NcclBackend, call: Call, part: Array) -> Work:
    """Fill ``part`` with this rank's part of the array that only the root has, in rank order."""
    sent = dict.fromkeys(range(backend.size), part.nbytes)
    return _launch(backend, call, (call.array, sent), (part, {call.root: part.nbytes}), part)


def all_to_all(
    backend: NcclBackend, call: Call, got: Array, sends: Sequence[int], receives: Sequence[int]
) -> Work:
    """Send ``sends[r]`` rows to rank r and fill ``got`` with ``receives[r]`` rows of rank r."""
    array = call.array
    sent, received = _lengths(array, sends), _lengths(array, receives)
    return _launch(backend, call, (array, sent), (got, received), got)


def _lengths(array: Array, rows: Sequence[int]) -> dict[int, int]:
    """Return how many bytes ``rows[r]`` rows are, for each rank r."""
    row = array.dtype.itemsize * math.prod(array.shape[1:])
    return {rank: count * row for rank, count in enumerate(rows)}


def _launch(
    backend: NcclBackend,
    call: Call,
    sent: tuple[Array | None, dict[int, int]],
    received: tuple[Array | None, dict[int, int]],
    result: Array | None,
) -> Work:
    """Exchange blocks: of each array, if there is one, so many bytes for each rank, in order."""
    functions = backend.functions.ncclSend, backend.functions.ncclRecv
    ways = [
        (function, array, lengths)
        for function, (array, lengths) in zip(functions, (sent, received), strict=True)
        if array is not None
    ]

    def begin() -> None:
        with backend.together(call.name):
            for function, array, lengths in ways:
                start = 0
                for rank, length in lengths.items():
                    if length:
                        there = backend.pointer(array, start)
                        backend.call(call.name, function, there, length, BYTES, rank)
                    start += length

    kept = [array for _, array, _ in ways if array.size]
    return backend.launch(call, begin, kept, result)
