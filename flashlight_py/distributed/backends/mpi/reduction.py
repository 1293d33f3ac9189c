"""Reductions: by the library where it can do them, else combined here, in rank order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.backends.mpi.forms import Form, form_of
from flashlight_py.distributed.backends.mpi.group import Begin, Progress, Steps
from flashlight_py.distributed.backends.mpi.memory import chunks, largest, settle
from flashlight_py.distributed.backends.mpi.movement import Movement
from flashlight_py.distributed.calls.arrays import as_bytes
from flashlight_py.distributed.calls.combining import combined, cut
from flashlight_py.distributed.constants import ReduceOp


class Reduction:
    """Reduces arrays of the ranks of ``comm``."""

    def __init__(self, mpi: Any, comm: Any, progress: Progress, movement: Movement) -> None:
        self._mpi, self._comm, self._progress = mpi, comm, progress
        self._movement = movement
        self._rank, self._size = int(comm.Get_rank()), int(comm.Get_size())

    def all_reduce(self, array: Array, op: ReduceOp, scale: float) -> Steps:
        """Reduce in place."""
        form = form_of(self._mpi, array, op)
        if form is None:
            counts = self._shares(array.size)
            mine = cut(array.reshape(-1), counts)[self._rank]
            yield from self._combine(array, counts, op, scale, mine)
            yield from self._movement.all_gather(None, as_bytes(array), _bytes(counts, array))
            return array
        carrier = form.encode(array.reshape(-1))
        in_place = self._mpi.IN_PLACE
        yield from self._progress.until(
            partial(self._comm.Iallreduce, in_place, [part, part.size, form.type], form.op)
            for part in chunks(carrier)
        )
        _decode(form, carrier, array, scale)
        return array

    def reduce(self, array: Array, op: ReduceOp, scale: float, root: int) -> Steps:
        """Reduce in place on ``root``; the others' stay as they are."""
        form = form_of(self._mpi, array, op)
        if form is None:
            yield from self._reduce_here(array, op, scale, root)
            return array
        carrier = form.encode(array.reshape(-1))
        yield from self._progress.until(self._reduce(part, form, root) for part in chunks(carrier))
        if self._rank == root:
            _decode(form, carrier, array, scale)
        return array

    def _reduce(self, part: Array, form: Form, root: int) -> Begin:
        data = [part, part.size, form.type]
        if self._rank == root:
            return partial(self._comm.Ireduce, self._mpi.IN_PLACE, data, form.op, root)
        return partial(self._comm.Ireduce, data, None, form.op, root)

    def _reduce_here(self, array: Array, op: ReduceOp, scale: float, root: int) -> Steps:
        counts = self._shares(array.size)
        mine = array_module(array).empty(counts[self._rank], array.dtype)
        yield from self._combine(array, counts, op, scale, mine)
        whole = as_bytes(array) if self._rank == root else None
        yield from self._movement.gather(as_bytes(mine), whole, _bytes(counts, array), root)

    def reduce_scatter(
        self,
        array: Array,
        op: ReduceOp,
        scale: float,
        out: Array | None = None,
        rows: Sequence[int] | None = None,
    ) -> Steps:
        """Reduce; the result is ``out`` or a new array: this rank's part of the first dimension."""
        lengths = [array.shape[0] // self._size] * self._size if rows is None else rows
        shape = (lengths[self._rank], *array.shape[1:])
        part: Array = array_module(array).empty(shape, array.dtype) if out is None else out
        form = form_of(self._mpi, array, op) if rows is None else None
        if form is None:
            counts = [length * math.prod(array.shape[1:]) for length in lengths]
            yield from self._combine(array, counts, op, scale, part.reshape(-1))
            return part
        carrier = form.encode(array.reshape(-1))
        in_part = carrier.itemsize == part.itemsize
        reduced = (
            part.reshape(-1).view(carrier.dtype) if in_part else np.empty(part.size, carrier.dtype)
        )
        yield from self._reduce_scatter(carrier.reshape(self._size, -1), reduced, form)
        _decode(form, reduced, part, scale)
        return part

    def _reduce_scatter(self, lanes: Array, reduced: Array, form: Form) -> Steps:
        """Reduce lane r onto rank r; in columns, if all lanes together are too long for a call."""
        step = max(1, largest() // (self._size * lanes.itemsize))
        begins = []
        for start in range(0, max(reduced.size, 1), step):
            columns = np.ascontiguousarray(lanes[:, start : start + step])
            part = reduced[start : start + step]
            given, taken = [columns, part.size, form.type], [part, part.size, form.type]
            begins.append(partial(self._comm.Ireduce_scatter_block, given, taken, form.op))
        yield from self._progress.until(begins)

    def _shares(self, count: int) -> list[int]:
        """Return how many of ``count`` elements each rank combines."""
        ends = [count * i // self._size for i in range(self._size + 1)]
        return [end - start for start, end in itertools.pairwise(ends)]

    def _combine(
        self, array: Array, counts: list[int], op: ReduceOp, scale: float, out: Array
    ) -> Steps:
        """Combine this rank's share of everybody's ``array`` into ``out``, in rank order."""
        pieces = array_module(array).empty((self._size, counts[self._rank]), array.dtype)
        gives, takes = _bytes(counts, array), [pieces[0].nbytes] * self._size
        most = max(array.nbytes, max(counts) * array.itemsize * self._size)
        given, taken = as_bytes(array), as_bytes(pieces)
        yield from self._movement.all_to_all_uneven(given, gives, taken, takes, most)
        out[...] = combined(list(pieces), op, scale)
        settle(out)


def _bytes(counts: list[int], array: Array) -> list[int]:
    return [count * array.itemsize for count in counts]


def _decode(form: Form, carrier: Array, out: Array, scale: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):  # infinities come as they come
        form.decode(carrier, out, scale)
