"""CuPy arrays between the ranks of a group through NCCL.

Every verb is given to the device and the host goes on; see streams.py for the order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl import collect
from flashlight_py.distributed.backends.nccl.checks import Checks, asks
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.cpu_side import CpuSide
from flashlight_py.distributed.backends.nccl.dtypes import BYTES, OPS
from flashlight_py.distributed.backends.nccl.library import version_text
from flashlight_py.distributed.backends.nccl.messages import in_order
from flashlight_py.distributed.backends.nccl.reduction import Reduction
from flashlight_py.distributed.backends.nccl.streams import CommunicationStream, Flight, Flights
from flashlight_py.distributed.backends.nccl.watchdog import Watchdog
from flashlight_py.distributed.backends.nccl.work import Led, StreamWork
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.control import abort
from flashlight_py.distributed.verbs import SEND, VERBS, Verb
from flashlight_py.distributed.work import Done, Then, Work
from flashlight_py.errors import DistributedError

__all__ = ["NcclBackend"]

_ALONE = contextlib.nullcontext()


class NcclBackend(Backend):
    """Every rank of ``cpu`` on its GPU, joined by ``communicator``; see joining.py.

    ``cpu`` is the group's backend for NumPy arrays, which stays in use: for barriers, for the
    sizes of unequal gathers, for agreeing on messages. ``device`` is a CUDA device's index,
    ``checks`` where ranks post what they call; None: nobody compares it.
    """

    kind = DistributedBackend.NCCL

    def __init__(
        self,
        cpu: Backend,
        communicator: Communicator,
        cupy: Any,
        device: int,
        checks: Checks | None = None,
    ) -> None:
        self.rank, self.size, self.device = cpu.rank, cpu.size, device
        self.functions: Any = communicator.lib
        self.path = f"NCCL {version_text(communicator.nccl.version)}, here CUDA device {device}"
        self._communicator, self._cupy = communicator, cupy
        self._ffi = communicator.nccl.ffi
        with self._on_device():
            self._stream = CommunicationStream(cupy, device)
        self._stream_handle = self._ffi.cast("cudaStream_t", self._stream.pointer)
        self._flights = Flights()
        self._steps: dict[Verb, Callable[[Call], Work]] = {
            verb: getattr(self, f"_{verb.name}", self._by_meaning)
            for verb in VERBS
            if not verb.is_message
        }
        self._checks = checks
        self._watchdog = Watchdog(cupy, device, communicator, self._flights, cpu, checks)
        self._cpu = CpuSide(cpu, communicator, self._watchdog.look)
        abort.watch(self)
        communicator.who_is_missing = self._cpu.who_is_missing
        communicator.look = functools.partial(self._watchdog.look, needs_all=True)

    def start(self, call: Call) -> Work:
        """Start ``call``; see ``Backend``.

        The order of a reduction's terms is NCCL's own. Gathers, a scatter, an all_to_all and
        messages block until every rank has called (a message: its peer), even if not ``blocking``:
        the host must know the sizes.
        """
        if call.refusal:
            self._refuse(call)
            return Done()
        if call.verb.is_message:
            return Then(self._exchange([call]), lambda arrays: arrays[0])
        if call.rows is None or not call.verb.reduces:
            self._post(call)
        return self._steps[call.verb](call)

    def start_many(self, calls: Sequence[Call]) -> Work:
        """Start several all_reduces, or messages, as one; see ``Backend``."""
        if calls[0].verb.is_message:
            return self._exchange(calls)
        for call in calls:
            self._post(call)
        return self._all_reduce_together(calls, [call.array for call in calls])

    def _post(self, call: Call) -> None:
        """Let the others see what is called here."""
        if self._checks is not None:
            self._checks.post(call)

    def _refuse(self, call: Call) -> None:
        """Have the others raise. What NCCL has begun there ends this group.

        Of a message the peer raises where the two compare what they have.
        """
        if call.verb.is_message:
            self._cpu.refuse_message(call)
            return
        if self._checks is not None:
            self._checks.post(call)
        if self._checks is None or asks(call):
            self._cpu.refuse(call)

    def abort(self, cause: str | DistributedError) -> None:
        """Report to the others what this rank's program has raised; see ``Backend``."""
        if self._checks is not None and isinstance(cause, str):
            self._checks.give_up(cause)

    def _all_reduce(self, call: Call) -> Work:
        return self._all_reduce_together([call], call.array)

    def _all_reduce_together(self, calls: Sequence[Call], result: Any) -> Work:
        pairs = [(call.array, call.array) for call in calls if call.array.size]
        begin = functools.partial(self._reduce_pairs, calls[0], self.functions.ncclAllReduce, pairs)
        return self.launch(calls[0], begin, [array for array, _ in pairs], result)

    def _reduce_scatter(self, call: Call) -> Work:
        """Reduce to this rank's part; unequal ones are reduced one by one."""
        array, mine = call.array, None if call.rows is None else call.rows[self.rank]
        part = self._room(call, call.verb.shape(array.shape, self.size, mine)[0])
        if call.rows is not None:
            return collect.reduce_each(self, call, part)
        pairs = [(array, part)] if array.size else []
        begin = functools.partial(self._reduce_pairs, call, self.functions.ncclReduceScatter, pairs)
        return self.launch(call, begin, [array, part][: 2 * len(pairs)], part)

    def _reduce(self, call: Call) -> Work:
        """Reduce in place on the root; the array of every other rank stays as it is."""
        array, root = call.array, call.root
        target = array if self.rank == root else self.empty(array.shape, array)
        pairs = [(array, target)] if array.size else []
        begin = functools.partial(self._reduce_pairs, call, self.functions.ncclReduce, pairs, root)
        return self.launch(call, begin, [array, target][: 2 * len(pairs)], array)

    def _by_meaning(self, call: Call) -> Work:
        """Combine in place what NCCL does not: each GPU gathers all arrays, and does it itself."""
        array, combine = call.array, call.verb.meaning
        assert combine is not None
        pieces = self.empty((self.size, *array.shape), array)

        def begin() -> None:
            self._gather_rows(array, pieces, [array.nbytes] * self.size)
            if call.verb.fills(self.rank, call.root):
                with self._stream.stream:
                    array[...] = combine(list(pieces), self.rank, call)

        return self.launch(call, begin, [array, pieces] if array.size else [], array)

    def _broadcast(self, call: Call) -> Work:
        array = call.array

        def begin() -> None:
            there = self.pointer(array)
            function = self.functions.ncclBroadcast
            self.call(call.name, function, there, there, array.nbytes, BYTES, call.root)

        return self.launch(call, begin, [array] if array.size else [], array)

    def _all_gather(self, call: Call) -> Work:
        array, rows = call.array, self._cpu.rows_of_all(call)
        self._cpu.require_fit(call, call.out, sum(rows))
        joined = self._room(call, sum(rows))
        row = joined.nbytes // max(sum(rows), 1)
        begin = functools.partial(self._gather_rows, array, joined, [row * n for n in rows])
        return self.launch(call, begin, [array, joined] if joined.size else [], joined)

    def _gather_rows(self, array: Array, joined: Array, lengths: Sequence[int]) -> None:
        """Gather ``lengths`` bytes from each rank: unequal ones as one broadcast from each."""
        lib, source = self.functions, self.pointer(array)
        if len(set(lengths)) == 1:
            there = self.pointer(joined)
            self.call("all_gather", lib.ncclAllGather, source, there, array.nbytes, BYTES)
            return
        start = 0
        with self._communicator.together("all_gather"):
            for root, length in enumerate(lengths):
                if length:
                    there = self.pointer(joined, start)
                    self.call("all_gather", lib.ncclBroadcast, source, there, length, BYTES, root)
                start += length

    def _gather(self, call: Call) -> Work:
        rows, here = self._cpu.rows_of_all(call), self.rank == call.root
        self._cpu.require_fit(call, call.out if here else None, sum(rows))
        return collect.gather(self, call, self._room(call, sum(rows)) if here else None, rows)

    def _scatter(self, call: Call) -> Work:
        out = call.out
        if out is None:
            assert call.array is not None  # other ranks know by their out that a GPU is meant
            out = self.empty(call.array.shape[1:], call.array)
        self._cpu.rows_of_all(call, equal=True)
        return collect.scatter(self, call, out)

    def _all_to_all(self, call: Call) -> Work:
        sends = receives = [call.array.shape[0] // self.size] * self.size
        self._cpu.rows_of_all(call, equal=call.rows is None)
        if call.rows is not None:
            sends, receives = list(call.rows), self._cpu.rows_for_this_rank(call)
            self._cpu.require_fit(call, call.out, sum(receives))
            if call.received is not None:
                call.received += receives
        return collect.all_to_all(self, call, self._room(call, sum(receives)), sends, receives)

    def _room(self, call: Call, rows: Any) -> Array:
        """Return where the result of ``call`` goes, of ``rows`` rows."""
        return (
            self.empty((rows, *call.array.shape[1:]), call.array) if call.out is None else call.out
        )

    def _exchange(self, calls: Sequence[Call]) -> Work:
        """Send and receive, begun as one; blocks until the peers do their part."""
        self._cpu.agree_on_messages(calls)
        name = calls[0].name if len(calls) == 1 else "exchange"
        full = [call for call in in_order(calls) if call.array.size]

        def begin() -> None:
            with self.together(name) if len(full) > 1 else _ALONE:
                for call in full:
                    lib, array = self.functions, call.array
                    function = lib.ncclSend if call.verb is SEND else lib.ncclRecv
                    there = self.pointer(array)
                    self.call(name, function, there, array.nbytes, BYTES, call.peer)

        arrays = [call.array for call in calls]
        return self.launch(calls[0], begin, [call.array for call in full], arrays, name)

    def _barrier(self, call: Call) -> Work:
        """Block until this rank's collectives have ended and every rank is here."""
        self._communicator.require("barrier")
        self.synchronize()
        return self._cpu.barrier(call)

    def synchronize(self) -> None:
        """Block the host until every collective that this rank has started has ended."""
        newest = self._flights.newest()
        if newest is not None:
            work = StreamWork(self, newest, None)
            work.block()  # the watchdog sees to it that this ends
            work.wait()

    def is_busy(self) -> bool:
        """Return whether a collective is on its way; see ``Backend``."""
        return self._flights.oldest() is not None

    def close(self) -> None:
        """End the communicator, cutting off what still runs; may be repeated."""
        self._watchdog.stop()
        with self._on_device():
            self._communicator.close()
        if self._checks is not None:
            self._checks.close()
        self._flights.clear()

    def launch(
        self,
        call: Call,
        begin: Callable[[], None],
        arrays: Sequence[Array],
        result: Any,
        name: str = "",
    ) -> Work:
        """Give to the device what ``begin`` calls; without ``arrays`` there is nothing to do.

        ``arrays`` are all that the device reads or writes. A blocking call's caller's current
        stream waits at once; the host does so in neither case.

        Raises:
            ValueError: an array is on another device than this rank's.
            DistributedError: as :meth:`Communicator.call`.
        """
        verb, blocking = name or call.name, call.blocking
        self._check_device(verb, arrays)
        with self._communicator.lock, self._on_device():
            self._communicator.require(verb)
            if not arrays:
                return Done(result)
            self._stream.follow()
            begin()
            flight = Flight(verb, self._stream.mark(), arrays)
            self._flights.add(flight)
            if blocking:
                self._stream.lead(flight.event)
                return Led(flight, result)
        return StreamWork(self, flight, result)

    def call(self, verb: str, function: Callable[..., int], *arguments: Any) -> None:
        """Call a collective of NCCL on the communication stream; see ``Communicator.call``."""
        communicator, stream = self._communicator, self._stream_handle
        communicator.call(verb, function, *arguments, communicator.handle, stream)

    def together(self, verb: str) -> contextlib.AbstractContextManager[None]:
        """Have the calls within begin as one; see ``Communicator.together``."""
        return self._communicator.together(verb)

    def pointer(self, array: Array, offset: int = 0) -> Any:
        """Return the address of ``array``'s data, ``offset`` bytes on."""
        memory: Any = array.data
        return self._ffi.cast("void *", memory.ptr + offset)

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        """Return a new array of ``like``'s dtype that belongs to the caller's current stream."""
        with self._on_device():
            array: Array = self._cupy.empty(shape, like.dtype)
        return array

    def join(self, flight: Flight) -> None:
        """Have the current stream wait for ``flight``.

        Raises:
            DistributedError: the communicator broke while it was on its way.
        """
        with self._communicator.lock:
            if self._communicator.broken is not None and not flight.landed:
                raise self._communicator.error()
        with self._on_device():
            self._stream.lead(flight.event)

    def has_ended(self, flight: Flight) -> bool:
        """Return whether ``flight`` has ended, or never will because the communicator broke."""
        with self._communicator.lock:
            return self._communicator.broken is not None or flight.ask()

    def _on_device(self) -> Any:
        """Return a context in which this rank's device is the current one."""
        if self._cupy.cuda.runtime.getDevice() == self.device:
            return _ALONE
        return self._cupy.cuda.Device(self.device)  # a new one: threads must not share it

    def _check_device(self, verb: str, arrays: Sequence[Array]) -> None:
        for array in arrays:
            found = array.device.id  # type: ignore[attr-defined]
            if found != self.device:
                raise ValueError(
                    f"{verb}: rank {self.rank} of {self.size} is joined to the others through "
                    f"CUDA device {self.device}, and the array is on device {found}; move it "
                    f"(flashlight_py.device.to_device(x, 'cuda:{self.device}'))"
                )

    def _reduce_pairs(
        self,
        call: Call,
        function: Callable[..., int],
        pairs: Sequence[tuple[Array, Array]],
        *root: int,
    ) -> None:
        """Reduce each pair (source, target), several of them begun as one."""
        verb, stream = call.name, self._stream.stream
        parts = [Reduction(stream, source, target, call.op, call.scale) for source, target in pairs]
        rules = [self._rule(verb, part, call.op) for part in parts]
        with self.together(verb) if len(parts) > 1 else _ALONE:
            for part, rule in zip(parts, rules, strict=True):
                there = self.pointer(part.source), self.pointer(part.room)
                self.call(verb, function, *there, part.count, part.form.code, rule, *root)
        for part in parts:
            part.finish()

    def _rule(self, verb: str, part: Reduction, op: ReduceOp) -> int:
        """Return NCCL's number of ``op``, with the factor in it."""
        if part.factor == 1.0:
            return OPS[op]
        return self._communicator.scaled_sum(verb, part.factor, part.form.dtype, part.form.code)
