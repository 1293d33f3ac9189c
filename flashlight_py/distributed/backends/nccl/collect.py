"""The collectives that NCCL has no function for (before 2.28): messages, begun as one.

Each moves bytes, one block per rank. A rank's message to itself is a message too, as NCCL allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flashlight_py.device import Array
from flashlight_py.distributed.backends.nccl.dtypes import BYTES
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.verbs import REDUCE
from flashlight_py.distributed.work import AllOf, Then, Work

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.nccl.backend import NcclBackend

__all__ = ["all_to_all", "gather", "reduce_each", "scatter"]


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
    lengths = [n * _row(array) for n in rows]

    def messages() -> None:
        _send(backend, "gather", array, 0, array.nbytes, call.root)
        if joined is not None:
            _receive_all(backend, "gather", joined, lengths)

    return _launch(backend, call, messages, [array, joined], joined)


def scatter(backend: NcclBackend, call: Call, part: Array) -> Work:
    """Fill ``part`` with this rank's part of the array that only the root has, in rank order."""
    array = call.array

    def messages() -> None:
        if array is not None:
            _send_all(backend, "scatter", array, [part.nbytes] * backend.size)
        _receive(backend, "scatter", part, 0, part.nbytes, call.root)

    return _launch(backend, call, messages, [part, array], part)


def all_to_all(
    backend: NcclBackend, call: Call, got: Array, sends: Sequence[int], receives: Sequence[int]
) -> Work:
    """Send ``sends[r]`` rows to rank r and fill ``got`` with ``receives[r]`` rows of rank r."""
    array, row = call.array, _row(call.array)

    def messages() -> None:
        _send_all(backend, "all_to_all", array, [n * row for n in sends])
        _receive_all(backend, "all_to_all", got, [n * row for n in receives])

    return _launch(backend, call, messages, [array, got], got)


def _row(array: Array) -> int:
    """Return the bytes of one row."""
    row = array.dtype.itemsize
    for extent in array.shape[1:]:
        row *= extent
    return row


def _launch(
    backend: NcclBackend,
    call: Call,
    messages: Callable[[], None],
    arrays: list[Array | None],
    result: Array | None,
) -> Work:
    def begin() -> None:
        with backend.together(call.name):
            messages()

    kept = [array for array in arrays if array is not None and array.size]
    return backend.launch(call, begin, kept, result)


def _send_all(backend: NcclBackend, verb: str, array: Array, lengths: Sequence[int]) -> None:
    start = 0
    for rank, length in enumerate(lengths):
        _send(backend, verb, array, start, length, rank)
        start += length


def _receive_all(backend: NcclBackend, verb: str, array: Array, lengths: Sequence[int]) -> None:
    start = 0
    for rank, length in enumerate(lengths):
        _receive(backend, verb, array, start, length, rank)
        start += length


def _send(
    backend: NcclBackend, verb: str, array: Array, offset: int, length: int, peer: int
) -> None:
    if length:
        function = backend.functions.ncclSend
        backend.call(verb, function, backend.pointer(array, offset), length, BYTES, peer)


def _receive(
    backend: NcclBackend, verb: str, array: Array, offset: int, length: int, peer: int
) -> None:
    if length:
        function = backend.functions.ncclRecv
        backend.call(verb, function, backend.pointer(array, offset), length, BYTES, peer)
