"""The collectives that NCCL has no function for (before 2.28): messages, begun as one.

Each moves bytes, one block per rank. A rank's message to itself is a message too, as NCCL allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flashlight_py.device import Array
from flashlight_py.distributed.backends.nccl.dtypes import BYTES
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.work import AllOf, Then, Work

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.nccl.backend import NcclBackend

__all__ = ["all_to_all", "gather", "reduce_each", "scatter"]


def reduce_each(
    backend: NcclBackend,
    array: Array,
    mine: Array,
    op: ReduceOp,
    scale: float,
    rows: Sequence[int],
    blocking: bool,
) -> Work:
    """Reduce the first ``rows[0]`` rows of ``array`` onto rank 0, and so on; ``mine`` here."""
    works, end = list[Work](), 0
    for root, count in enumerate(rows):
        part = array[end : end + count]
        end += count
        if root == backend.rank:
            mine[...] = part
            part = mine
        works.append(backend.reduce(part, op, scale, root, blocking))
    return Then(AllOf(works), lambda _: mine)


def gather(
    backend: NcclBackend,
    array: Array,
    joined: Array | None,
    rows: Sequence[int],
    root: int,
    blocking: bool,
) -> Work:
    """Fill ``joined``, which only ``root`` has, with the arrays of all ranks, of ``rows`` rows."""
    lengths = [n * _row(array) for n in rows]

    def messages() -> None:
        _send(backend, "gather", array, 0, array.nbytes, root)
        if joined is not None:
            _receive_all(backend, "gather", joined, lengths)

    return _launch(backend, "gather", messages, [array, joined], joined, blocking)


def scatter(
    backend: NcclBackend, array: Array | None, part: Array, root: int, blocking: bool
) -> Work:
    """Fill ``part`` with this rank's part of ``array``, which only ``root`` has, in rank order."""

    def messages() -> None:
        if array is not None:
            _send_all(backend, "scatter", array, [part.nbytes] * backend.size)
        _receive(backend, "scatter", part, 0, part.nbytes, root)

    return _launch(backend, "scatter", messages, [part, array], part, blocking)


def all_to_all(
    backend: NcclBackend,
    array: Array,
    got: Array,
    give: Sequence[int],
    take: Sequence[int],
    blocking: bool,
) -> Work:
    """Give rank r ``give[r]`` rows and fill ``got`` with ``take[r]`` rows of rank r."""
    row = _row(array)

    def messages() -> None:
        _send_all(backend, "all_to_all", array, [n * row for n in give])
        _receive_all(backend, "all_to_all", got, [n * row for n in take])

    return _launch(backend, "all_to_all", messages, [array, got], got, blocking)


def _row(array: Array) -> int:
    """Return the bytes of one row."""
    row = array.dtype.itemsize
    for extent in array.shape[1:]:
        row *= extent
    return row


def _launch(
    backend: NcclBackend,
    verb: str,
    messages: Callable[[], None],
    arrays: list[Array | None],
    result: Array | None,
    blocking: bool,
) -> Work:
    def begin() -> None:
        with backend.together(verb):
            messages()

    kept = [array for array in arrays if array is not None and array.size]
    return backend.launch(verb, begin, kept, result, blocking)


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
