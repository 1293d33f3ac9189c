"""CuPy arrays between the ranks of a group through NCCL.

Every verb is given to the device and the host goes on; see streams.py for the order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl.communicator import FINALIZE_SECONDS, Communicator
from flashlight_py.distributed.backends.nccl.comparing import Comparisons, begins_at_once, compared
from flashlight_py.distributed.backends.nccl.library import version_text
from flashlight_py.distributed.backends.nccl.reduction import BYTES, OPS, ReducedArray
from flashlight_py.distributed.backends.nccl.streams import DeviceFlight, Flights, NcclWatchdog
from flashlight_py.distributed.calls.arrays import require_length, row_bytes
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import MEANINGS, cut
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.verbs import REDUCE, SEND, VERBS, Verb
from flashlight_py.distributed.work import AllOf, Done, Then, Work, limit_passed

_ALONE = contextlib.nullcontext()
# CUDA has no wait with a time limit, and one without would not answer Ctrl-C.
_LOOK_SECONDS = 0.0002


class NcclBackend(Backend):
    """Every rank of ``cpu`` on its GPU, joined by ``communicator``; see joining.py.

    ``cpu`` is the group's backend for NumPy arrays, which stays in use: for barriers, and to
    compare what ranks call. ``device`` is a CUDA device's index.
    """

    kind = DistributedBackend.NCCL

    def __init__(self, cpu: Backend, communicator: Communicator, cupy: Any, device: int) -> None:
        self.rank, self.size, self.device = cpu.rank, cpu.size, device
        self.functions: Any = communicator.lib
        self.path = f"NCCL {version_text(communicator.nccl.version)}, here CUDA device {device}"
        self.communicator, self._cupy = communicator, cupy
        self._ffi = communicator.nccl.ffi
        with self.on_device():
            # Not ordered with the legacy default stream, which would serialise what is to overlap.
            self._stream = cupy.cuda.Stream(non_blocking=True)
            # One event serves every call: a wait is for the record that came last before it.
            self._ready = cupy.cuda.Event(disable_timing=True)
        self._stream_handle = self._ffi.cast("cudaStream_t", int(self._stream.ptr))
        self._flights = Flights()
        self._steps: dict[Verb, Callable[[Call], Work]] = {
            verb: getattr(self, f"_{verb.name}", self._by_meaning)
            for verb in VERBS
            if not verb.is_message
        }
        self._comparisons = Comparisons(cpu, communicator)
        looked_at = communicator, self._flights, self._comparisons
        self._watchdog = NcclWatchdog(cupy, device, *looked_at)
        communicator.who_is_missing = self._comparisons.who_is_missing
        communicator.look = functools.partial(self._watchdog.look, needs_all=True)

    def limit(self, seconds: float) -> None:
        self.communicator.timeout = seconds

    def start(self, call: Call) -> Work:
        """Start ``call``; see ``Backend``.

        The order of a reduction's terms is NCCL's own. Gathers, a scatter, an all_to_all and
        messages block until every rank has called (a message: its peer), even if not ``blocking``:
        the host must know the sizes.
        """
        if call.refusal:
            self._comparisons.refuse(call)
            return Done()
        if call.verb.is_message:
            return Then(self._exchange([call]), lambda arrays: arrays[0])
        if not begins_at_once(call.verb):
            self._require(call)
            return self._steps[call.verb](call)
        with self.communicator.lock:  # NCCL begins calls in the order in which they are compared
            self._require(call)
            self._comparisons.post(call)
            return self._steps[call.verb](call)

    def start_many(self, calls: Sequence[Call]) -> Work:
        """Start several all_reduces, or messages, as one; see ``Backend``."""
        if calls[0].verb.is_message:
            return self._exchange(calls)
        with self.communicator.lock:
            for call in calls:
                self._require(call)
            for call in calls:
                self._comparisons.post(call)
            arrays = [call.array for call in calls]
            pairs = list(zip(arrays, arrays, strict=True))
            return self._reduce_pairs(calls[0], self.functions.ncclAllReduce, pairs, arrays)

    def _require(self, call: Call) -> None:
        """Raise where ``call`` cannot be begun, before anything is sent."""
        given: list[Any] = [array for array in (call.array, call.out) if array is not None]
        for array in given:
            found = array.device.id
            if found != self.device:
                raise ValueError(
                    f"{call.name}: rank {self.rank} of {self.size} is joined to the others through "
                    f"CUDA device {self.device}, and the array is on device {found}; move it "
                    f"(flashlight_py.device.to_device(x, 'cuda:{self.device}'))"
                )
        with self.communicator.lock:
            self.communicator.require(call.name)

    def _all_reduce(self, call: Call) -> Work:
        pair = call.array, call.array
        return self._reduce_pairs(call, self.functions.ncclAllReduce, [pair], call.array)

    def _reduce_scatter(self, call: Call) -> Work:
        """Reduce to this rank's part; unequal ones are reduced one by one."""
        array, mine = call.array, None if call.rows is None else call.rows[self.rank]
        with self.on_device():
            part = call.room(len(array) // self.size if mine is None else mine)
        if call.rows is not None:
            works = list[Work]()
            for root, rows in enumerate(cut(array, call.rows)):
                if root == self.rank:
                    part[...] = rows
                term = part if root == self.rank else rows
                step = Call(REDUCE, term, call.op, call.scale, root, blocking=call.blocking)
                works.append(self._reduce(step))
            return Then(AllOf(works), lambda _: part)
        return self._reduce_pairs(call, self.functions.ncclReduceScatter, [(array, part)], part)

    def _reduce(self, call: Call) -> Work:
        """Reduce in place on the root; the array of every other rank stays as it is."""
        array, root = call.array, call.root
        target = array if self.rank == root else self._empty(array.shape, array)
        return self._reduce_pairs(call, self.functions.ncclReduce, [(array, target)], array, root)

    def _by_meaning(self, call: Call) -> Work:
        """Combine in place what NCCL does not: each GPU gathers all arrays, and does it itself."""
        array, combine = call.array, MEANINGS[call.verb]
        pieces = self._empty((self.size, *array.shape), array)

        def begin() -> None:
            self._gather_rows(array, pieces, dict.fromkeys(range(self.size), array.nbytes))
            if call.verb.fills(self.rank, call.root):
                with self._stream:
                    array[...] = combine(list(pieces), self.rank, call)

        return self._launch(call, begin, [array, pieces], array)

    def _broadcast(self, call: Call) -> Work:
        array, there = call.array, self._pointer(call.array)
        step = self.functions.ncclBroadcast, there, there, array.nbytes, BYTES, call.root
        return self._launch(call, lambda: self._call(call.name, [step]), [array], array)

    def _all_gather(self, call: Call) -> Work:
        array, rows = call.array, self._comparisons.ask(call)
        lengths = _lengths(array, rows)

        def gather(joined: Array) -> Work:
            begin = functools.partial(self._gather_rows, array, joined, lengths)
            return self._launch(call, begin, [array, joined], joined)

        return self._into(call, sum(rows), gather)

    def _gather_rows(self, array: Array, joined: Array, lengths: dict[int, int]) -> None:
        """Gather ``lengths`` bytes from each rank: unequal ones as one broadcast from each."""
        lib, source = self.functions, self._pointer(array)
        if len(set(lengths.values())) == 1:
            steps = [(lib.ncclAllGather, source, self._pointer(joined), array.nbytes, BYTES)]
        else:
            blocks = self._blocks(joined, lengths)
            steps = [(lib.ncclBroadcast, source, *place, BYTES, root) for root, *place in blocks]
        self._call("all_gather", steps)

    def _gather(self, call: Call) -> Work:
        rows = self._comparisons.ask(call)
        sent, lengths = {call.root: call.array.nbytes}, _lengths(call.array, rows)
        if self.rank != call.root:
            return self._swap(call, sent, None, lengths)
        return self._into(call, sum(rows), lambda joined: self._swap(call, sent, joined, lengths))

    def _scatter(self, call: Call) -> Work:
        out = call.out
        if out is None:
            assert call.array is not None  # other ranks know by their out that a GPU is meant
            out = self._empty(call.array.shape[1:], call.array)
        self._comparisons.ask(call)
        sent = dict.fromkeys(range(self.size), out.nbytes)
        return self._swap(call, sent, out, {call.root: out.nbytes})

    def _all_to_all(self, call: Call) -> Work:
        sends = receives = [call.array.shape[0] // self.size] * self.size
        self._comparisons.ask(call)
        if call.rows is not None:
            sends, receives = list(call.rows), self._comparisons.rows_for_this_rank(call)
            if call.received is not None:
                call.received += receives
        sent, received = _lengths(call.array, sends), _lengths(call.array, receives)
        return self._into(call, sum(receives), lambda got: self._swap(call, sent, got, received))

    def _swap(
        self, call: Call, sent: dict[int, int], result: Array | None, received: dict[int, int]
    ) -> Work:
        """Send blocks of the array, if there is one, and fill ``result``, if there is one.

        Of both, so many bytes for each rank, in order. That is for the collectives that NCCL has no
        function for (before 2.28): messages, begun as one. A rank's message to itself is a message
        too, as NCCL allows.
        """
        lib = self.functions
        both = (lib.ncclSend, call.array, sent), (lib.ncclRecv, result, received)
        ways = [(function, array, each) for function, array, each in both if array is not None]
        steps = [
            (function, *place, BYTES, rank)
            for function, array, lengths in ways
            for rank, *place in self._blocks(array, lengths)
        ]
        begin = functools.partial(self._call, call.name, steps, together=True)
        return self._launch(call, begin, [array for _, array, _ in ways], result)

    def _blocks(self, array: Array, lengths: dict[int, int]) -> Iterator[tuple[int, Any, int]]:
        """Yield of each rank that has any of the bytes: it, where they are, and how many."""
        starts = itertools.accumulate(lengths.values(), initial=0)
        for (rank, length), start in zip(lengths.items(), starts, strict=False):
            if length:
                yield rank, self._pointer(array, start), length

    def _into(self, call: Call, rows: int, run: Callable[[Array], Work]) -> Work:
        """Have ``run`` fill where the result of ``call`` goes, of ``rows`` rows.

        Where ``out`` has others, which raises ValueError on this rank, that is a new array: the
        other ranks have begun.
        """
        with self.on_device():
            out, room = call.out, call.room(rows)
        work = run(room)
        if out is None or out is room:
            return work
        return Then(work, lambda _: require_length(call.name, out, rows, self.rank, self.size))

    def _exchange(self, calls: Sequence[Call]) -> Work:
        """Send and receive, begun as one; blocks until the peers do their part."""
        for call in calls:
            self._require(call)
        self._comparisons.meet([compared(call, blocking=True) for call in calls])
        name = calls[0].name if len(calls) == 1 else "exchange"
        # NCCL knows no tags: both ends begin messages in their order.
        lib, arrays = self.functions, [call.array for call in calls]
        steps = [
            (
                lib.ncclSend if call.verb is SEND else lib.ncclRecv,
                *(self._pointer(call.array), call.array.nbytes, BYTES, call.peer),
            )
            for call in sorted(calls, key=lambda call: call.tag)
            if call.array.size
        ]
        return self._launch(calls[0], lambda: self._call(name, steps), arrays, arrays, name)

    def _barrier(self, call: Call) -> Work:
        """Block until this rank's collectives have ended and every rank is here."""
        self.synchronize()
        return Done(self._comparisons.meet([replace(call, blocking=True)]))

    def synchronize(self) -> None:
        """Block the host until every collective that this rank has started has ended."""
        newest = self._flights.newest()
        if newest is not None:
            work = StreamWork(self, newest, None)
            work.block()  # the watchdog sees to it that this ends
            work.wait()
        self._comparisons.finish()  # what differs in its scale ends on the device all the same
        self.communicator.require_unbroken()

    def is_busy(self) -> bool:
        return (self._flights.oldest() or self._comparisons.oldest()) is not None

    def close(self) -> None:
        """End the communicator, cutting off what still runs; may be repeated."""
        self._watchdog.stop()
        with self.on_device(), self.communicator.lock:
            if self._flights.newest() is not None:
                self._comparisons.find_lost("close")  # nothing waits for those who have gone
            if self.communicator.close():  # else nobody waits for this rank
                self._comparisons.finish(FINALIZE_SECONDS)
        self._flights.clear()
        # Else the stream and the events would wait for the collector, which knows no GPU's memory.
        self._steps.clear()
        self.communicator.look = self.communicator.who_is_missing = None

    def _launch(
        self,
        call: Call,
        begin: Callable[[], None],
        arrays: Sequence[Array],
        result: Any,
        name: str = "",
    ) -> Work:
        """Give to the device what ``begin`` calls, unless all ``arrays`` are empty.

        These are all that the device reads or writes. A blocking call's caller's current stream
        waits at once; the host does so in neither case.

        Raises:
            DistributedError: as :meth:`Communicator.call`.
        """
        verb, kept = name or call.name, [array for array in arrays if array.size]
        with self.communicator.lock, self.on_device():
            self.communicator.require(verb)
            if not kept:
                return Done(result)
            # The next work waits for all that the caller's current stream has so far.
            self._ready.record(self.current_stream())
            self._stream.wait_event(self._ready)
            begin()
            done = self._cupy.cuda.Event(disable_timing=True)
            done.record(self._stream)
            flight = DeviceFlight(verb, done, kept, self._comparisons.latest)
            self._flights.add(flight)
            if call.blocking:
                self.current_stream().wait_event(done)
                led = Done(result)
                led.flight = flight
                return led
        return StreamWork(self, flight, result)

    def _call(self, verb: str, steps: Sequence[tuple[Any, ...]], together: bool = False) -> None:
        """Call collectives of NCCL on the communication stream; see ``Communicator.call``.

        Each of ``steps`` is a function and what it takes first; several begin as one.
        """
        where = self.communicator.handle, self._stream_handle
        self.communicator.call(verb, *((*step, *where) for step in steps), together=together)

    def current_stream(self) -> Any:
        """Return the caller's, on this rank's device, which is the current one."""
        return self._cupy.cuda.get_current_stream(self.device)

    def _pointer(self, array: Array, offset: int = 0) -> Any:
        """Return the address of ``array``'s data, ``offset`` bytes on."""
        memory: Any = array.data
        return self._ffi.cast("void *", memory.ptr + offset)

    def _empty(self, shape: tuple[int, ...], like: Array) -> Array:
        """Return a new array of ``like``'s dtype that belongs to the caller's current stream."""
        with self.on_device():
            array: Array = self._cupy.empty(shape, like.dtype)
        return array

    def on_device(self) -> Any:
        """Return a context in which this rank's device is the current one."""
        if self._cupy.cuda.runtime.getDevice() == self.device:
            return _ALONE
        return self._cupy.cuda.Device(self.device)  # a new one: threads must not share it

    def _reduce_pairs(
        self,
        call: Call,
        function: Callable[..., int],
        pairs: Sequence[tuple[Array, Array]],
        result: Any,
        *root: int,
    ) -> Work:
        """Reduce each pair (source, target), several of them begun as one."""
        verb, scaled_sum = call.name, self.communicator.scaled_sum
        full = [pair for pair in pairs if pair[0].size]

        def begin() -> None:
            parts = [ReducedArray(self._stream, *pair, call.op, call.scale) for pair in full]
            steps = []
            for part in parts:
                rule, code = OPS[call.op], part.form.code
                if part.factor != 1.0:
                    rule = scaled_sum(verb, part.factor, part.form.dtype, code)
                there = self._pointer(part.source), self._pointer(part.room)
                steps.append((function, *there, part.count, code, rule, *root))
            self._call(verb, steps)
            for part in parts:
                part.finish()

        arrays = {id(array): array for pair in full for array in pair}
        return self._launch(call, begin, list(arrays.values()), result)


def _lengths(array: Array, rows: Sequence[int]) -> dict[int, int]:
    """Return how many bytes ``rows[r]`` rows are, for each rank r."""
    return {rank: count * row_bytes(array) for rank, count in enumerate(rows)}


class StreamWork(Work):
    """Waiting makes the caller's current stream wait; the host blocks only for a ``timeout``."""

    def __init__(self, backend: NcclBackend, flight: DeviceFlight, result: Any) -> None:
        self._backend, self._result = backend, result
        self.flight: DeviceFlight = flight

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result, which the current stream can use; see ``Work``.

        With ``timeout`` the host blocks, up to so many seconds, until the device is done.
        """
        if timeout is not None:
            self.block(timeout)
        backend, communicator = self._backend, self._backend.communicator
        with communicator.lock:
            if communicator.broken is not None and not self.flight.landed:
                raise communicator.error()
        with backend.on_device():
            backend.current_stream().wait_event(self.flight.event)
        return self._result

    def is_completed(self) -> bool:
        """Return whether the device is done with it, or it failed."""
        with self._backend.communicator.lock:
            return self._backend.communicator.broken is not None or self.flight.ask()

    def end_time(self) -> float | None:
        return self.flight.ended

    def block(self, timeout: float = math.inf) -> None:
        """Block the host until it has ended, well or not, for at most ``timeout`` seconds.

        Raises:
            CollectiveTimeoutError: it has not; it goes on, and can be waited for again.
        """
        end = time.monotonic() + timeout
        while not self.is_completed():
            if not time.monotonic() < end:
                place = f"rank {self._backend.rank} of {self._backend.size}"
                raise limit_passed(f"[{self.flight.verb}] {place}", timeout)
            time.sleep(_LOOK_SECONDS)
