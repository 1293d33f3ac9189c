"""The collectives that NCCL has no function for (before 2.28): messages, begun as one.

Each moves bytes, blocks of equal size, one per rank; blocks of unequal size are for the caller to
cut. A rank's message to itself is a message too, as NCCL allows.
"""

from __future__ import annotations

from collections.abc import Callable

from flashlight_py.device import Array
from flashlight_py.distributed.backends.nccl.backend import NcclBackend
from flashlight_py.distributed.backends.nccl.dtypes import BYTES
from flashlight_py.distributed.work import Work

__all__ = ["all_to_all", "gather", "scatter"]


def gather(backend: NcclBackend, array: Array, root: int, blocking: bool = False) -> Work:
    """Join the arrays of all ranks, of one shape, along the first dimension on ``root``.

    The result is a new array there, None elsewhere.
    """
    here = backend.rank == root
    joined = _blocks(backend, array) if here else None

    def messages() -> None:
        _send(backend, "gather", array, 0, array.nbytes, root)
        if joined is not None:
            _receive_all(backend, "gather", joined)

    return _launch(backend, "gather", messages, [array, joined], joined, blocking)


def scatter(
    backend: NcclBackend, source: Array | None, part: Array, root: int, blocking: bool = False
) -> Work:
    """Fill ``part`` with this rank's part of ``source``, which only ``root`` has, in rank order."""
    whole = source if backend.rank == root else None

    def messages() -> None:
        if whole is not None:
            _send_all(backend, "scatter", whole)
        _receive(backend, "scatter", part, 0, part.nbytes, root)

    return _launch(backend, "scatter", messages, [part, whole], part, blocking)


def all_to_all(backend: NcclBackend, array: Array, blocking: bool = False) -> Work:
    """Give each rank its equal part of ``array``; the result is a new one of the parts got."""
    got = backend.empty(array.shape, array)

    def messages() -> None:
        _send_all(backend, "all_to_all", array)
        _receive_all(backend, "all_to_all", got)

    return _launch(backend, "all_to_all", messages, [array, got], got, blocking)


def _blocks(backend: NcclBackend, array: Array) -> Array:
    return backend.empty((array.shape[0] * backend.size, *array.shape[1:]), array)


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


def _send_all(backend: NcclBackend, verb: str, array: Array) -> None:
    length = array.nbytes // backend.size
    for rank in range(backend.size):
        _send(backend, verb, array, rank * length, length, rank)


def _receive_all(backend: NcclBackend, verb: str, array: Array) -> None:
    length = array.nbytes // backend.size
    for rank in range(backend.size):
        _receive(backend, verb, array, rank * length, length, rank)


def _send(
    backend: NcclBackend, verb: str, array: Array, offset: int, length: int, peer: int
) -> None:
    function = backend.functions.ncclSend
    backend.call(verb, function, backend.pointer(array, offset), length, BYTES, peer)


def _receive(
    backend: NcclBackend, verb: str, array: Array, offset: int, length: int, peer: int
) -> None:
    function = backend.functions.ncclRecv
    backend.call(verb, function, backend.pointer(array, offset), length, BYTES, peer)
