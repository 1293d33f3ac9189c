"""Small arrays between hosts: they travel with the comparison of the calls, in its one exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array
from flashlight_py.distributed.calls.arrays import as_bytes, dtype_code, require_length
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import cut, factors
from flashlight_py.distributed.failures.agreement import NO_LOAD, Load, Message
from flashlight_py.distributed.verbs import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
)

# What a host sends each other one: no more than travels with a call of Gloo's, and some numbers.
_MOST_BYTES = 63 << 10

_GATHERS = (ALL_GATHER, GATHER)
_MOVED = (ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST)


class SmallCalls:
    """The calls of rank ``rank`` of ``hosts`` whose data travels with them."""

    def __init__(self, rank: int, hosts: Sequence[Sequence[int]]) -> None:
        self._rank, self._hosts, self._size = rank, hosts, sum(map(len, hosts))
        self._native = _native.load("gloo")
        self._most = _MOST_BYTES // (len(hosts) - 1)
        self._most_of_each = self._most // max(map(len, hosts))

    def load(self, call: Call) -> Load:
        """Return what this rank gives with ``call``; of a large array no data."""
        if call.compared or call.refusal or call.array is None:
            return NO_LOAD
        array: Array = call.array
        if call.verb in _GATHERS:
            few = self._are_few(call, len(array))
            return Load(len(array), as_bytes(array) if few else NO_LOAD.data)
        if array.nbytes > self._most or call.verb not in _MOVED:
            return NO_LOAD
        if call.verb is BROADCAST:
            return Load(0, as_bytes(array)) if self._rank == call.root else NO_LOAD
        first, last = factors(array.dtype, call.op, call.scale)
        kind = call.name, array.dtype, call.op
        made = partial(self._combined, *kind, first), partial(self._combined, *kind, last)
        return Load(0, as_bytes(array), *made)

    def _are_few(self, call: Call, rows: int) -> bool:
        return rows * row_bytes(call.array) <= self._most_of_each

    def has(self, call: Call, found: Message) -> bool:
        """Return whether ``found``, what the ranks have agreed with, has the result of ``call``."""
        if call.compared or call.array is None:
            return False
        if call.verb in _GATHERS:
            return all(self._are_few(call, rows) for rows in found.lengths)
        return call.verb in _MOVED and call.array.nbytes <= self._most

    def take(self, call: Call, found: Message) -> Any:
        """Return the result of ``call``, which ``found`` has; writes what the verb writes."""
        array: Array = call.array
        if not call.verb.fills(self._rank, call.root):
            return array if call.verb.in_place else None
        if call.verb is BROADCAST and self._rank == call.root:
            return array  # which may be read-only
        if call.verb in _GATHERS:
            return self._gathered(call, found)
        if call.verb.in_place:
            array[...] = np.ndarray(array.shape, array.dtype, found.data)
            return array
        mine = rows_of(call, self._rank, self._size)
        whole = np.ndarray(array.shape, array.dtype, found.data)
        result = room_for(call, mine.stop - mine.start)
        result[...] = whole[mine]
        return result

    def _gathered(self, call: Call, found: Message) -> Array:
        """Return the rows of all ranks, which have come host by host."""
        rows = sum(found.lengths)
        whole = np.ndarray((rows, *call.array.shape[1:]), call.array.dtype, found.data)
        require_room(call, rows, self._rank, self._size)
        result = room_for(call, rows)
        np.concatenate(in_rank_order(whole, self._hosts, found.lengths), out=result)
        return result

    def _combined(
        self, name: str, dtype: np.dtype[Any], op: int, scale: float, parts: Sequence[Array]
    ) -> Array:
        """Return ``parts``, bytes of ``dtype``, combined in their order as large arrays are."""
        ffi, count = self._native.ffi, parts[0].size // dtype.itemsize
        result = np.empty_like(parts[0])
        where = ffi.from_buffer("char[]", result, require_writable=True)
        sources = ffi.new("const void *[]", [ffi.from_buffer(part) for part in parts])
        code = dtype_code(name, dtype)
        self._native.lib.fl_reduce(code, op, scale, where, sources, len(parts), count)
        return result


def row_bytes(array: Array) -> int:
    """Return the bytes of one row of ``array``."""
    return array.itemsize * math.prod(array.shape[1:])


def rows_of(call: Call, rank: int, size: int) -> slice:
    """Return the rows of a reduce_scatter that are for ``rank``."""
    rows = call.rows or [len(call.array) // size] * size
    begin = sum(rows[:rank])
    return slice(begin, begin + rows[rank])


def room_for(call: Call, rows: int) -> Array:
    """Return where the result of ``call`` goes: a new array of ``rows`` unless it says so."""
    if call.out is not None:
        return call.out
    return np.empty((rows, *call.array.shape[1:]), call.array.dtype)


def require_room(call: Call, rows: int, rank: int, size: int) -> None:
    """Raise ValueError where ``call`` says where its result goes, and that has not ``rows``."""
    if call.out is not None:
        require_length(call.name, call.out, rows, rank, size)


def in_rank_order(whole: Array, hosts: Sequence[Sequence[int]], rows: Sequence[int]) -> list[Array]:
    """Cut ``whole``, the ``rows`` of each rank of each host in turn, and sort the parts by rank.

    Example:
        >>> [part.tolist() for part in in_rank_order(np.arange(4), [[0, 2], [1]], [1, 2, 1])]
        [[0], [3], [1, 2]]
    """
    order = [rank for host in hosts for rank in host]
    return [
        part for _, part in sorted(zip(order, cut(whole, rows), strict=True), key=itemgetter(0))
    ]
