"""The steps of each verb: reductions by the library (``_form_of``), or here in rank order.

Arrays move as bytes, by the library's collectives or by pairs of messages. Pairs move more than
2 GB, and memory of a GPU, which not all libraries take in non-blocking collectives. All ranks
choose by numbers that all of them know.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.calls.arrays import (
    ENCODED_PART,
    as_bytes,
    decode_part,
    row_bytes,
    scale_in_place,
)
from flashlight_py.distributed.calls.call import Call, Matched
from flashlight_py.distributed.calls.combining import RESULTS, combined, split_rows
from flashlight_py.distributed.constants import ReduceOp

# The largest count of MPI-3's functions. MPI-4 has larger ones, not every library has MPI-4, and
# pieces of 2 GB cost nothing.
LARGEST_BYTES = 2**31 - 1
# The tag of the parts of collectives, below those of messages, and the largest that MPI promises.
_OF_PARTS, _LARGEST_TAG = 0, 32767
# Of all ranks together, of which a verb that the library lacks makes its result at a time.
_PIECE_BYTES = 4 << 20

_BITWISE = {ReduceOp.AND: "BAND", ReduceOp.OR: "BOR", ReduceOp.XOR: "BXOR"}

Steps: TypeAlias = Generator[None, None, Any]  # of an operation, between which it has to wait
Until: TypeAlias = Callable[[Iterable[partial[Any]]], Steps]  # ``Progress.until``


def chunks(flat: Array) -> list[Array]:
    """Cut ``flat`` into pieces that one MPI call each can move; an empty array is one piece."""
    step = max(1, LARGEST_BYTES // flat.itemsize)
    return [flat[start : start + step] for start in range(0, max(flat.size, 1), step)]


def settle(array: Array | None) -> None:
    """Wait until ``array``, if it is on a GPU, holds what the current stream computes."""
    if is_cupy(array):
        array_module(array).cuda.get_current_stream().synchronize()


def on_device(array: Any, steps: Steps) -> Steps:
    """Return ``steps``, each taken with the GPU of ``array``, if it is on one, as the current one.

    Any thread may take a step: MPI and CuPy both go by the thread's current device.
    """
    if not is_cupy(array):
        return (yield from steps)
    device = array_module(array).cuda.Device(array.device.id)
    try:
        while True:
            with device:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
            yield
    finally:
        steps.close()


class VerbSteps:
    """The steps of a call between the ranks of ``comm``, by verb; their result is the call's.

    ``gpu_aware`` says that the library takes pointers to a GPU's memory.
    """

    def __init__(self, mpi: Any, comm: Any, until: Until, gpu_aware: bool) -> None:
        self._mpi, self._comm, self._until, self._gpu_aware = mpi, comm, until, gpu_aware
        self._rank, self._size = int(comm.Get_rank()), int(comm.Get_size())

    def of(self, call: Call, found: Any) -> Steps:
        """Return the steps of ``call``; ``found`` is what the ranks have found by comparing it."""
        steps: Steps = getattr(self, f"_{call.verb.name}", self._by_meaning)(call, found)
        return steps

    def _barrier(self, call: Call, _: None) -> Steps:
        yield from ()  # to have compared it is to have arrived

    def _reduce(self, call: Call, _: None) -> Steps:
        """Reduce in place, on all ranks or on the root alone: the others' stay as they are."""
        array, form = call.array, _form_of(self._mpi, call.array, call.op)
        root = call.root if call.verb.rooted else None
        is_filled = call.verb.fills(self._rank, call.root)
        if form is None:
            counts = self.shares(array.size)
            mine = as_bytes((yield from self._combine(call, counts)))
            counts = [count * array.itemsize for count in counts]
            whole = as_bytes(array) if is_filled else None
            yield from self.gather(mine, whole, counts, root)
            return array
        carrier, begins = form.encode(array.reshape(-1)), []
        for part in chunks(carrier):
            buffers = (self._mpi.IN_PLACE, part) if is_filled else (part, None)
            if root is None:
                begins.append(partial(self._comm.Iallreduce, *buffers, form.op))
            else:
                begins.append(partial(self._comm.Ireduce, *buffers, form.op, root))
        yield from self._until(begins)
        if is_filled:
            _decode(form, carrier, array, call.scale)
        return array

    _all_reduce = _reduce

    def _reduce_scatter(self, call: Call, _: None) -> Steps:
        """Reduce; the result is ``out`` or a new array: this rank's part of the first dimension."""
        array, rows, size = call.array, call.rows, self._size
        lengths = [array.shape[0] // size] * size if rows is None else rows
        shape = (lengths[self._rank], *array.shape[1:])
        part = array_module(array).empty(shape, array.dtype) if call.out is None else call.out
        form = _form_of(self._mpi, array, call.op) if rows is None else None
        flat = array.reshape(-1)
        if form is None or (carrier := form.encode(flat)).nbytes > LARGEST_BYTES:
            counts = [length * math.prod(array.shape[1:]) for length in lengths]
            mine = yield from self._combine(call, counts)
            part[...] = mine.reshape(shape)
            settle(part)
            return part
        room, is_alike = part.reshape(-1), carrier.itemsize == part.itemsize
        reduced = room.view(carrier.dtype) if is_alike else np.empty(room.size, carrier.dtype)
        begin = partial(self._comm.Ireduce_scatter_block, carrier, reduced, form.op)
        yield from self._until([begin])
        _decode(form, reduced, part, call.scale)
        return part

    def _combine(self, call: Call, counts: list[int]) -> Steps:
        """Combine this rank's share of everybody's array, in rank order: a new array."""
        array = call.array
        pieces = array_module(array).empty((self._size, counts[self._rank]), array.dtype)
        gives, takes = [n * array.itemsize for n in counts], [pieces[0].nbytes] * self._size
        buffers, most = (as_bytes(array), as_bytes(pieces)), max(gives) * self._size
        yield from self.all_to_all(*buffers, gives, takes, most)
        share = combined(list(pieces), call.op, call.scale)
        settle(share)
        return share

    def _by_meaning(self, call: Call, _: None) -> Steps:
        """Combine in place what the library does not: every rank receives all arrays, in pieces."""
        flat, xp, combine = call.array.reshape(-1), array_module(call.array), RESULTS[call.verb]
        step = max(1, _PIECE_BYTES // (flat.itemsize * self._size))
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            pieces = xp.empty((self._size, part.size), flat.dtype)
            counts = [part.nbytes] * self._size
            yield from self.gather(as_bytes(part), as_bytes(pieces), counts)
            if call.verb.fills(self._rank, call.root):
                part[...] = combine(list(pieces), self._rank, call)
                settle(part)
        return call.array

    def _broadcast(self, call: Call, _: None) -> Steps:
        yield from self.broadcast(as_bytes(call.array), call.root)
        return call.array

    def _gather(self, call: Call, rows: list[int]) -> Steps:
        """Join all arrays, on all ranks or on the root alone."""
        array, whole, room = call.array, None, None
        counts = [count * row_bytes(array) for count in rows]
        if call.verb.fills(self._rank, call.root):
            whole = call.room(sum(rows))
            room = as_bytes(whole)
        root = call.root if call.verb.rooted else None
        yield from self.gather(as_bytes(array), room, counts, root)
        return whole

    _all_gather = _gather

    def _scatter(self, call: Call, kind: tuple[Any, tuple[int, ...]]) -> Steps:
        mine, like = call.out, call.like
        library: Any = np if like is None else array_module(like)
        if self._gpu_aware:  # who receives may not know which memory the root's is
            on_gpu = np.array([library is not np], np.uint8)
            yield from self.broadcast(on_gpu, call.root)
            library = sys.modules["cupy"] if on_gpu[0] else np
        if mine is None:
            dtype, shape = kind
            mine = library.empty(shape, dtype)
        whole = None if call.array is None else as_bytes(call.array)
        yield from self.scatter(whole, as_bytes(mine), call.root)
        return decode_part(mine.view(np.uint8)) if mine.dtype == ENCODED_PART else mine

    def _all_to_all(self, call: Call, totals: list[int]) -> Steps:
        array = call.array
        if call.rows is None:
            received = array_module(array).empty_like(array) if call.out is None else call.out
            yield from self.all_to_all(as_bytes(array), as_bytes(received))
            return received
        sends = [int(count) for count in call.rows]
        counted = np.empty(self._size, np.int64)
        yield from self.all_to_all(as_bytes(np.array(sends, np.int64)), as_bytes(counted))
        receives = counted.tolist()
        if call.received is not None:
            call.received.extend(receives)
        received, row = call.room(sum(receives)), row_bytes(array)
        gives, takes = ([count * row for count in counts] for counts in (sends, receives))
        buffers, most = (as_bytes(array), as_bytes(received)), sum(totals) * row
        yield from self.all_to_all(*buffers, gives, takes, most)
        return received

    def _send(self, call: Call, _: None) -> Steps:
        assert call.received is not None
        yield from self.swap({call.peer: as_bytes(call.array)}, {}, call.received[0])
        return call.array

    def _recv(self, call: Call, found: Matched | None) -> Steps:
        if found is None and call.is_open:
            return None  # nothing has arrived in time
        assert call.received is not None
        array, source = call.array, call.peer if found is None else found.source
        part = array[: found.rows] if found is not None and array.ndim else array
        yield from self.swap({}, {source: as_bytes(part)}, call.received[0])
        return array if found is None else found

    # What the verbs are made of: it moves flat arrays of bytes, and counts are in bytes.

    def shares(self, count: int) -> list[int]:
        """Return how many of ``count`` elements each rank gets, or combines."""
        ends = [count * i // self._size for i in range(self._size + 1)]
        return [end - start for start, end in itertools.pairwise(ends)]

    def broadcast(self, data: Array, root: int) -> Steps:
        """Make ``data`` equal to ``root``'s."""
        if self._needs_pairs(data, 0):
            # Each rank gets a part, then joins the parts (van de Geijn): 2 sizes on every link.
            counts = self.shares(data.size)
            parts = _by_rank(data, counts)
            mine = parts[self._rank]
            yield from self.swap(parts if self._rank == root else {}, {root: mine})
            yield from self.gather(mine, data, counts)
        else:
            yield from self._until(partial(self._comm.Ibcast, c, root) for c in chunks(data))

    def gather(
        self, mine: Array, whole: Array | None, counts: Sequence[int], root: int | None = None
    ) -> Steps:
        """Fill ``whole`` with every rank's ``mine``: on all of them, or on ``root`` alone."""
        comm, taken = self._comm, None if whole is None else [whole, counts]
        if self._needs_pairs(mine, sum(counts)):
            takers = range(self._size) if root is None else [root]
            yield from self.swap(dict.fromkeys(takers, mine), _by_rank(whole, counts))
        elif root is not None:
            yield from self._until([partial(comm.Igatherv, mine, taken, root)])
        elif len(set(counts)) == 1:
            yield from self._until([partial(comm.Iallgather, mine, whole)])
        else:
            yield from self._until([partial(comm.Iallgatherv, mine, taken)])

    def scatter(self, whole: Array | None, part: Array, root: int) -> Steps:
        """Fill ``part`` with this rank's equal part of ``whole``, which ``root`` alone has."""
        if self._needs_pairs(part, part.size * self._size):
            gives = _by_rank(whole, [part.size] * self._size)
            yield from self.swap(gives, {root: part})
        else:
            yield from self._until([partial(self._comm.Iscatter, whole, part, root)])

    def all_to_all(
        self,
        given: Array,
        taken: Array,
        gives: Sequence[int] | None = None,
        takes: Sequence[int] | None = None,
        most: int = 0,
    ) -> Steps:
        """Give ``gives[r]`` bytes of ``given`` to rank r, and take ``takes[r]`` from it.

        Without them it is an equal part. Else no rank's bytes exceed ``most``, either way, a number
        that all ranks know.
        """
        if self._needs_pairs(given, most or given.size):
            even = [given.size // self._size] * self._size
            yield from self.swap(_by_rank(given, gives or even), _by_rank(taken, takes or even))
        elif gives is None:
            yield from self._until([partial(self._comm.Ialltoall, given, taken)])
        else:
            both = [given, gives], [taken, takes]
            yield from self._until([partial(self._comm.Ialltoallv, *both)])

    def swap(
        self, gives: Mapping[int, Array], takes: Mapping[int, Array], number: int | None = None
    ) -> Steps:
        """Send and receive the parts of each rank, all at once; copy this rank's own.

        Messages between two ranks keep their order. ``number`` is that of a message of users.
        """
        comm, me = self._comm, self._rank
        tag = _OF_PARTS if number is None else 1 + number % _LARGEST_TAG
        if me in gives and me in takes and takes[me] is not gives[me]:
            takes[me][...] = gives[me]
            settle(takes[me])
        yield from self._until(
            partial(method, c, rank, tag)
            for method, parts in ((comm.Irecv, takes), (comm.Isend, gives))
            for rank, part in parts.items()
            if rank != me
            for c in chunks(part)
        )

    def _needs_pairs(self, data: Array, total: int) -> bool:
        return total > LARGEST_BYTES or is_cupy(data)


def _by_rank(data: Array | None, counts: Sequence[int]) -> dict[int, Array]:
    """Return the part of each rank; none where there is nothing."""
    return {} if data is None else dict(enumerate(split_rows(data, counts)))


class MpiForm(NamedTuple):
    """An operation of MPI, and the form in which the library can reduce arrays of a dtype by it.

    ``encode(array)`` returns what MPI reduces: the array's own memory, or a new array.
    ``decode(carrier)`` returns the numbers that MPI has made of it: of the dtype, or of a wider
    float; in the memory of ``carrier``, or new.
    """

    op: Any
    encode: Callable[[Array], Array]
    decode: Callable[[Array], Array]


def _decode(form: MpiForm, carrier: Array, out: Array, scale: float) -> None:
    """Write ``scale`` times the numbers of ``carrier`` into ``out``, which it may lie in."""
    values = form.decode(carrier)
    with np.errstate(all="ignore"):  # infinities come as they come
        scale_in_place(values, scale)
        if not np.may_share_memory(values, out):
            out[...] = values.reshape(out.shape)


def _form_of(mpi: Any, array: Array, op: ReduceOp) -> MpiForm | None:
    """Return the form for reducing arrays like ``array`` by ``op``, if there is one.

    None if ranks would get different bits. Minima and maxima of floats travel as integers in the
    same order, because MPI's result for NaN and signed zeros depends on the order of the ranks.
    16-bit floats are summed as float32 and rounded once.
    """
    if is_cupy(array):
        return None
    does, kind, bits = getattr(mpi, _BITWISE.get(op, op.name)), array.dtype.kind, array.itemsize * 8
    carrier, plain = array.dtype, op in (ReduceOp.SUM, ReduceOp.PROD)
    if kind in "biu":
        if plain:  # unsigned, which wraps around; some libraries (Open MPI, by AVX) saturate 8 and
            carrier = np.dtype(f"uint{max(bits, 32)}")  # 16 bits: they go as 32
        elif kind == "b":  # any byte but 0 is true
            return MpiForm(does, _truth, lambda carrier: carrier.view(np.bool_))
    elif op in (ReduceOp.MIN, ReduceOp.MAX):
        return _extreme_form(does, op, array.dtype) if bits <= 64 else None
    elif bits == 16:
        return MpiForm(does, lambda a: a.astype(np.float32), lambda wide: wide)
    elif kind == "c" and op is ReduceOp.PROD:
        return None  # the library may round a * b and b * a differently, where it fuses them

    def seen_as(dtype: np.dtype[Any]) -> Callable[[Array], Array]:
        same = array.itemsize == carrier.itemsize
        return lambda values: values.view(dtype) if same else values.astype(dtype)

    return MpiForm(does, seen_as(carrier), seen_as(array.dtype))


def _truth(array: Array) -> Array:
    """Return 1 for each element that is true, else 0, as bytes."""
    truth: Array = (array.view(np.uint8) != 0).view(np.uint8)
    return truth


def _extreme_form(does: Any, op: ReduceOp, dtype: np.dtype[Any]) -> MpiForm:
    signed = np.dtype(f"int{dtype.itemsize * 8}")
    limits = np.iinfo(signed)
    nan = limits.min if op is ReduceOp.MIN else limits.max  # a NaN wins

    def encode(array: Array) -> Array:
        keys = _mirrored(array.view(signed))
        keys[np.isnan(array)] = nan
        return keys

    def decode(carrier: Array) -> Array:
        return _mirrored(carrier).view(dtype)

    return MpiForm(does, encode, decode)


def _mirrored(integers: Array) -> Array:
    """Turn the bits of IEEE floats into integers of the same order, and back."""
    last = integers.itemsize * 8 - 1
    flipped: Array = integers ^ ((integers >> last) & np.iinfo(integers.dtype).max)
    return flipped
