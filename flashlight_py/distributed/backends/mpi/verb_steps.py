"""The steps of each verb. MPI reduces arrays if ``_operation`` allows it; else this module does.

Arrays are sent as bytes, by collectives of MPI. Verbs that send different parts to ranks use
messages between pairs of ranks. So do all verbs if data has more than 2 GB or is on a GPU, because
some libraries reject such data in non-blocking collectives. The choice depends only on values that
are equal on all ranks.
"""

import itertools
import math
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.calls import arrays as call_arrays
from flashlight_py.distributed.calls.arrays import as_bytes
from flashlight_py.distributed.calls.call import Call, Matched
from flashlight_py.distributed.calls.combining import RESULTS, combined, split_rows
from flashlight_py.distributed.constants import ReduceOp

# Maximum count of MPI-3. Some libraries lack MPI-4, and chunks of 2 GB cost nothing.
LARGEST_BYTES = 2**31 - 1
# The tag of the messages of a collective, and the largest tag that MPI guarantees.
_COLLECTIVE_TAG, _LARGEST_TAG = 0, 32767
# For verbs that MPI lacks: bytes that one step gathers from all ranks together.
_CHUNK_BYTES = 4 << 20

_BITWISE = {ReduceOp.AND: "BAND", ReduceOp.OR: "BOR", ReduceOp.XOR: "BXOR"}
_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PROD)

Steps: TypeAlias = Generator[None, None, Any]  # yields while it waits; returns the result
Until: TypeAlias = Callable[[Iterable[partial[Any]]], Steps]  # ``Progress.until``


def chunks(flat: Array) -> list[Array]:
    """Cut ``flat`` into chunks for one MPI call each; an empty array is one chunk."""
    step = max(1, LARGEST_BYTES // flat.itemsize)
    return [flat[start : start + step] for start in range(0, max(flat.size, 1), step)]


def settle(array: Array | None) -> None:
    """Wait for the current stream if ``array`` is on a GPU, so that its values are complete."""
    if is_cupy(array):
        array_module(array).cuda.get_current_stream().synchronize()


def on_device(array: Any, steps: Steps) -> Steps:
    """Return ``steps``. During each step, the GPU of ``array`` (if any) is the current device.

    Any thread may run a step, and both MPI and CuPy use the current device of the thread.
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
    """For each verb, the steps that run a call among the ranks of ``comm`` and return its result.

    ``gpu_aware`` means that the MPI library accepts pointers to GPU memory.
    """

    def __init__(self, mpi: Any, comm: Any, until: Until, gpu_aware: bool) -> None:
        self._mpi, self._comm, self._until, self._gpu_aware = mpi, comm, until, gpu_aware
        self._rank, self._size = int(comm.Get_rank()), int(comm.Get_size())

    def steps_of(self, call: Call, outcome: Any) -> Steps:
        """Return the steps of ``call``; ``outcome`` is the result of its comparison."""
        steps: Steps = getattr(self, f"_{call.verb.name}", self._combine_gathered)(call, outcome)
        return steps

    def _barrier(self, call: Call, _: None) -> Steps:
        yield from ()  # the comparison was the barrier

    def _reduce(self, call: Call, _: None) -> Steps:
        """Reduce in place on all ranks, or on the root only (other ranks' arrays do not change)."""
        array, operation = call.array, _operation(self._mpi, call.array, call.op)
        root = call.root if call.verb.rooted else None
        is_filled = call.verb.fills(self._rank, call.root)
        if operation is None:
            counts = self.shares(array.size)
            part = as_bytes((yield from self._combine(call, counts)))
            counts = [count * array.itemsize for count in counts]
            yield from self.gather(part, as_bytes(array) if is_filled else None, counts, root)
            return array
        flat, begins = array.reshape(-1), []
        if array.dtype.kind == "i" and call.op in _ARITHMETIC:
            flat = flat.view(f"u{array.itemsize}")  # unsigned integers wrap around
        for chunk in chunks(flat):
            buffers = (self._mpi.IN_PLACE, chunk) if is_filled else (chunk, None)
            if root is None:
                begins.append(partial(self._comm.Iallreduce, *buffers, operation))
            else:
                begins.append(partial(self._comm.Ireduce, *buffers, operation, root))
        yield from self._until(begins)
        if is_filled:
            call_arrays.scale_in_place(array, call.scale)
        return array

    _all_reduce = _reduce

    def _reduce_scatter(self, call: Call, _: None) -> Steps:
        """Reduce arrays; return this rank's rows of the result in ``out`` or a new array."""
        array, rows = call.array, call.rows or [len(call.array) // self._size] * self._size
        result, width = call.room(rows[self._rank]), math.prod(array.shape[1:])
        operation = _operation(self._mpi, array, call.op) if call.rows is None else None
        if operation is not None and array.nbytes <= LARGEST_BYTES:
            wraps = array.dtype.kind == "i" and call.op in _ARITHMETIC  # as unsigned integers
            kind = f"u{array.itemsize}" if wraps else array.dtype
            buffers = array.reshape(-1).view(kind), result.reshape(-1).view(kind)
            yield from self._until([partial(self._comm.Ireduce_scatter_block, *buffers, operation)])
            call_arrays.scale_in_place(result, call.scale)
            return result
        part = yield from self._combine(call, [count * width for count in rows])
        result[...] = part.reshape(result.shape)
        settle(result)
        return result

    def _combine(self, call: Call, counts: list[int]) -> Steps:
        """Return this rank's part of the reduction; rank r reduces ``counts[r]`` elements."""
        array = call.array
        parts = array_module(array).empty((self._size, counts[self._rank]), array.dtype)
        sends = _by_rank(as_bytes(array), [count * array.itemsize for count in counts])
        yield from self.swap(sends, _by_rank(as_bytes(parts), [parts[0].nbytes] * self._size))
        part = combined(list(parts), call.op, call.scale)
        settle(part)
        return part

    def _combine_gathered(self, call: Call, _: None) -> Steps:
        """Run a verb that MPI lacks: each rank gathers all arrays, in chunks, and combines them."""
        flat, xp, combine = call.array.reshape(-1), array_module(call.array), RESULTS[call.verb]
        step = max(1, _CHUNK_BYTES // (flat.itemsize * self._size))
        for start in range(0, flat.size, step):
            part = flat[start : start + step]
            parts = xp.empty((self._size, part.size), flat.dtype)
            yield from self.gather(as_bytes(part), as_bytes(parts), [part.nbytes] * self._size)
            if call.verb.fills(self._rank, call.root):
                part[...] = combine(list(parts), self._rank, call)
                settle(part)
        return call.array

    def _broadcast(self, call: Call, _: None) -> Steps:
        yield from self.broadcast(as_bytes(call.array), call.root)
        return call.array

    def _gather(self, call: Call, rows: list[int]) -> Steps:
        array, result, target = call.array, None, None
        counts = [count * call_arrays.row_bytes(array) for count in rows]
        if call.verb.fills(self._rank, call.root):
            result = call.room(sum(rows))
            target = as_bytes(result)
        root = call.root if call.verb.rooted else None
        yield from self.gather(as_bytes(array), target, counts, root)
        return result

    _all_gather = _gather

    def _scatter(self, call: Call, kind: tuple[Any, tuple[int, ...]]) -> Steps:
        part, like = call.out, call.like
        library: Any = np if like is None else array_module(like)
        if self._gpu_aware:  # a receiver without ``out`` does not know if the array is on a GPU
            on_gpu = np.array([library is not np], np.uint8)
            yield from self.broadcast(on_gpu, call.root)
            library = sys.modules["cupy"] if on_gpu[0] else np
        if part is None:
            dtype, shape = kind
            part = library.empty(shape, dtype)
        own_part, source = as_bytes(part), None if call.array is None else as_bytes(call.array)
        parts = _by_rank(source, [own_part.size] * self._size)
        yield from self.swap(parts, {call.root: own_part})
        return (
            call_arrays.decode_part(part.view(np.uint8))
            if part.dtype == call_arrays.ENCODED_PART
            else part
        )

    def _all_to_all(self, call: Call, _: Any) -> Steps:
        array, row = call.array, call_arrays.row_bytes(call.array)
        sends = receives = [len(array) // self._size] * self._size
        if call.rows is not None:
            sends, counts = list(call.rows), np.empty(self._size, np.int64)
            own_counts, even = np.array(sends, np.int64), [counts.itemsize] * self._size
            pairs = _by_rank(as_bytes(own_counts), even), _by_rank(as_bytes(counts), even)
            yield from self.swap(*pairs)
            receives = counts.tolist()
            if call.received is not None:
                call.received += receives
        received = call.room(sum(receives))
        sent_parts = _by_rank(as_bytes(array), [count * row for count in sends])
        received_parts = _by_rank(as_bytes(received), [count * row for count in receives])
        yield from self.swap(sent_parts, received_parts)
        return received

    def _send(self, call: Call, _: None) -> Steps:
        assert call.received is not None
        yield from self.swap({call.peer: as_bytes(call.array)}, {}, call.received[0])
        return call.array

    def _recv(self, call: Call, match: Matched | None) -> Steps:
        assert call.received is not None
        array, source = call.array, call.peer if match is None else match.source
        part = array[: match.rows] if match is not None and array.ndim else array
        yield from self.swap({}, {source: as_bytes(part)}, call.received[0])
        return array if match is None else match

    # The methods above use these methods, which send flat arrays of bytes. Counts are in bytes.

    def shares(self, count: int) -> list[int]:
        """Divide ``count`` elements evenly among the ranks; return the number for each rank."""
        ends = [count * i // self._size for i in range(self._size + 1)]
        return [end - start for start, end in itertools.pairwise(ends)]

    def broadcast(self, data: Array, root: int) -> Steps:
        """Overwrite ``data`` with the data of ``root``."""
        if self._needs_pairs(data, 0):
            # Scatter, then all_gather (van de Geijn): each link transfers ``data`` twice in total.
            counts = self.shares(data.size)
            parts = _by_rank(data, counts)
            part = parts[self._rank]
            yield from self.swap(parts if self._rank == root else {}, {root: part})
            yield from self.gather(part, data, counts)
        else:
            yield from self._until(partial(self._comm.Ibcast, c, root) for c in chunks(data))

    def gather(
        self, data: Array, target: Array | None, counts: Sequence[int], root: int | None = None
    ) -> Steps:
        """Write ``counts[r]`` bytes of each rank r to ``target``, on all ranks or on ``root``."""
        if root is not None or self._needs_pairs(data, sum(counts)):
            receivers = range(self._size) if root is None else [root]
            yield from self.swap(dict.fromkeys(receivers, data), _by_rank(target, counts))
        elif len(set(counts)) == 1:
            yield from self._until([partial(self._comm.Iallgather, data, target)])
        else:
            yield from self._until([partial(self._comm.Iallgatherv, data, [target, counts])])

    def swap(
        self, sends: Mapping[int, Array], receives: Mapping[int, Array], number: int | None = None
    ) -> Steps:
        """Send ``sends[r]`` to each rank r and receive ``receives[r]``, all in parallel.

        Messages between two ranks keep their order. ``number`` is the number of the message in a
        send or recv, and None in a collective.
        """
        comm, me = self._comm, self._rank
        tag = _COLLECTIVE_TAG if number is None else 1 + number % _LARGEST_TAG
        if me in sends and me in receives and receives[me] is not sends[me]:
            receives[me][...] = sends[me]
            settle(receives[me])
        yield from self._until(
            partial(method, c, rank, tag)
            for method, parts in ((comm.Irecv, receives), (comm.Isend, sends))
            for rank, part in parts.items()
            if rank != me
            for c in chunks(part)
        )

    def _needs_pairs(self, data: Array, total: int) -> bool:
        return total > LARGEST_BYTES or is_cupy(data)


def _by_rank(data: Array | None, counts: Sequence[int]) -> dict[int, Array]:
    """Cut ``data`` into parts of ``counts[r]`` elements, by rank r; {} if ``data`` is None."""
    return {} if data is None else dict(enumerate(split_rows(data, counts)))


def _operation(mpi: Any, array: Array, op: ReduceOp) -> Any:
    """Return the MPI operation that reduces arrays with the dtype of ``array`` by ``op``.

    Return None if the result could be wrong, or differ between ranks. In MPI, minima and maxima of
    NaN and signed zeros depend on the order of the ranks, and so does the rounding of complex
    products (FMA). Open MPI saturates sums of 8 and 16 bits. Any nonzero byte is a true bool.
    """
    kind, bits, is_arithmetic = array.dtype.kind, array.itemsize * 8, op in _ARITHMETIC
    if kind in "iu":
        is_exact = bits >= 32 or not is_arithmetic
    elif kind == "c":
        is_exact = op is ReduceOp.SUM
    else:
        is_exact = kind == "f" and bits >= 32 and is_arithmetic
    usable = is_exact and not is_cupy(array)
    return getattr(mpi, _BITWISE.get(op, op.name)) if usable else None
