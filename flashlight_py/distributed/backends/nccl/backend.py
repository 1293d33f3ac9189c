"""CuPy arrays between the ranks of a group through NCCL.

Every verb is given to the device and the host goes on; see streams.py for the order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed import last_words
from flashlight_py.distributed.backend import Backend, Message
from flashlight_py.distributed.backends.nccl import collect
from flashlight_py.distributed.backends.nccl.checks import Checks, asks_nobody
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.cpu_side import CpuSide
from flashlight_py.distributed.backends.nccl.dtypes import BYTES, OPS
from flashlight_py.distributed.backends.nccl.library import version_text
from flashlight_py.distributed.backends.nccl.messages import in_order
from flashlight_py.distributed.backends.nccl.reduction import Reduction
from flashlight_py.distributed.backends.nccl.streams import CommunicationStream, Flight, Flights
from flashlight_py.distributed.backends.nccl.watchdog import Watchdog
from flashlight_py.distributed.backends.nccl.work import Led, StreamWork
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.work import Done, Then, Work

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
        self._checks = checks
        self._watchdog = Watchdog(cupy, device, communicator, self._flights, cpu, checks)
        self._cpu = CpuSide(cpu, communicator, self._watchdog.look)
        last_words.listen(self)
        communicator.who_is_missing = self._cpu.who_is_missing
        communicator.look = functools.partial(self._watchdog.look, needs_all=True)

    def _post(self, verb: str, array: Array | None = None, **how: Any) -> None:
        """Let the others see what is called here."""
        if self._checks is not None:
            self._checks.post(verb, array, how)

    def give_up(self, traceback: str) -> None:
        """Report to the others what this rank's program has raised; see ``Backend``."""
        if self._checks is not None:
            self._checks.give_up(traceback)

    def refuse(self, call: str) -> None:
        """Have the others raise; see ``Backend``. What NCCL has begun there ends this group."""
        if self._checks is not None:
            self._checks.refuse(call)
        if self._checks is None or not asks_nobody(call):
            self._cpu.refuse(call)

    def refuse_message(self, call: str, peer: int, tag: int, sends: bool) -> None:
        """Have the peer raise where the two compare what they have; see ``Backend``."""
        self._cpu.refuse_message(call, peer, tag)

    def all_reduce(self, array: Array, op: ReduceOp, scale: float, blocking: bool = False) -> Work:
        """Reduce in place; see ``Backend``. The order of the terms is NCCL's own."""
        self._post("all_reduce", array, op=op, scale=scale)
        return self._all_reduce([array], array, op, scale, blocking)

    def all_reduce_many(
        self, arrays: Sequence[Array], op: ReduceOp, scale: float, blocking: bool = False
    ) -> Work:
        """Reduce all ``arrays`` in place, begun as one; see ``Backend``."""
        for array in arrays:
            self._post("all_reduce", array, op=op, scale=scale)
        return self._all_reduce(arrays, list(arrays), op, scale, blocking)

    def _all_reduce(
        self, arrays: Sequence[Array], result: Any, op: ReduceOp, scale: float, blocking: bool
    ) -> Work:
        pairs = [(array, array) for array in arrays if array.size]
        begin = functools.partial(
            self._reduce, "all_reduce", self.functions.ncclAllReduce, pairs, op, scale
        )
        return self.launch("all_reduce", begin, [array for array, _ in pairs], result, blocking)

    def reduce_scatter(
        self,
        array: Array,
        op: ReduceOp,
        scale: float,
        blocking: bool = False,
        out: Array | None = None,
        rows: Sequence[int] | None = None,
    ) -> Work:
        """Reduce to this rank's part; see ``Backend``. Unequal ones are reduced one by one."""
        if rows is not None:
            mine = self._room(out, rows[self.rank], array)
            return collect.reduce_each(self, array, mine, op, scale, rows, blocking)
        self._post("reduce_scatter", array, op=op, scale=scale)
        part = self._room(out, array.shape[0] // self.size, array)
        pairs = [(array, part)] if array.size else []
        function = self.functions.ncclReduceScatter
        begin = functools.partial(self._reduce, "reduce_scatter", function, pairs, op, scale)
        return self.launch("reduce_scatter", begin, [array, part][: 2 * len(pairs)], part, blocking)

    def reduce(
        self, array: Array, op: ReduceOp, scale: float, root: int, blocking: bool = False
    ) -> Work:
        """Reduce in place on ``root``; the array of every other rank stays as it is."""
        self._post("reduce", array, op=op, scale=scale, root=root)
        target = array if self.rank == root else self.empty(array.shape, array)
        pairs = [(array, target)] if array.size else []
        begin = functools.partial(
            self._reduce, "reduce", self.functions.ncclReduce, pairs, op, scale, root
        )
        return self.launch("reduce", begin, [array, target][: 2 * len(pairs)], array, blocking)

    def broadcast(self, array: Array, root: int, blocking: bool = False) -> Work:
        """Receive ``root``'s array in place; see ``Backend``."""
        self._post("broadcast", array, root=root)

        def begin() -> None:
            there = self.pointer(array)
            function = self.functions.ncclBroadcast
            self.call("broadcast", function, there, there, array.nbytes, BYTES, root)

        return self.launch("broadcast", begin, [array] if array.size else [], array, blocking)

    def all_gather(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Join all ranks' arrays; see ``Backend``.

        Blocks until every rank has called, even if not ``blocking``: the host must know the size.
        """
        self._post("all_gather", array)
        rows = self._cpu.rows_of_all("all_gather", array)
        self._cpu.require_fit("all_gather", out, sum(rows))
        joined = self._room(out, sum(rows), array)
        row = joined.nbytes // max(sum(rows), 1)
        begin = functools.partial(self._gather_rows, array, joined, [row * n for n in rows])
        kept = [array, joined] if joined.size else []
        return self.launch("all_gather", begin, kept, joined, blocking)

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

    def gather(
        self, array: Array, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Join all ranks' arrays on ``root``; blocks until every rank has called."""
        self._post("gather", array, root=root)
        rows = self._cpu.rows_of_all(f"gather(root={root})", array)
        here = self.rank == root
        self._cpu.require_fit("gather", out if here else None, sum(rows))
        joined = self._room(out, sum(rows), array) if here else None
        return collect.gather(self, array, joined, rows, root, blocking)

    def scatter(
        self, array: Array | None, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Give each rank its part; blocks until every rank has called; see ``Backend``."""
        if out is None:
            assert array is not None  # other ranks know by their out that a GPU is meant
            out = self.empty(array.shape[1:], array)
        self._post("scatter", out, root=root)
        self._cpu.rows_of_all(f"scatter(root={root})", out, equal=True)
        return collect.scatter(self, array, out, root, blocking)

    def all_to_all(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Exchange equal parts; blocks until every rank has called; see ``Backend``."""
        self._post("all_to_all", array)
        self._cpu.rows_of_all("all_to_all", array, equal=True)
        rows = [array.shape[0] // self.size] * self.size
        got = self._room(out, array.shape[0], array)
        return collect.all_to_all(self, array, got, rows, rows, blocking)

    def all_to_all_uneven(
        self,
        array: Array,
        rows: Sequence[int],
        blocking: bool = False,
        out: Array | None = None,
        came: list[int] | None = None,
    ) -> Work:
        """Exchange parts of different sizes; blocks until every rank has called."""
        self._post("all_to_all", array)
        self._cpu.rows_of_all("all_to_all", array)
        take = self._cpu.rows_for_this_rank(rows)
        if came is not None:
            came += take
        self._cpu.require_fit("all_to_all", out, sum(take))
        got = self._room(out, sum(take), array)
        return collect.all_to_all(self, array, got, rows, take, blocking)

    def _room(self, out: Array | None, rows: int, like: Array) -> Array:
        return self.empty((rows, *like.shape[1:]), like) if out is None else out

    def send(self, array: Array, dst: int, tag: int, blocking: bool = False) -> Work:
        """Send; blocks until ``dst`` receives under ``tag``; see ``Backend``."""
        return self._one(Message(True, array, dst, tag), blocking)

    def recv(self, array: Array, src: int, tag: int, blocking: bool = False) -> Work:
        """Receive in place; blocks until ``src`` sends under ``tag``; see ``Backend``."""
        return self._one(Message(False, array, src, tag), blocking)

    def _one(self, message: Message, blocking: bool) -> Work:
        verb = "send" if message.sends else "recv"
        return Then(self._exchange(verb, [message], blocking), lambda arrays: arrays[0])

    def exchange(self, messages: Sequence[Message], blocking: bool = False) -> Work:
        """Send and receive, begun as one; blocks until the peers do their part."""
        return self._exchange("exchange", messages, blocking)

    def _exchange(self, verb: str, messages: Sequence[Message], blocking: bool) -> Work:
        self._cpu.agree_on_messages(messages)
        full = [message for message in in_order(messages) if message.array.size]

        def begin() -> None:
            with self.together(verb) if len(full) > 1 else _ALONE:
                for sends, array, peer, _ in full:
                    function = self.functions.ncclSend if sends else self.functions.ncclRecv
                    self.call(verb, function, self.pointer(array), array.nbytes, BYTES, peer)

        arrays = [message.array for message in messages]
        return self.launch(verb, begin, [message.array for message in full], arrays, blocking)

    def barrier(self, timeout: float | None = None) -> Work:
        """Block until this rank's collectives have ended and every rank is here (seconds)."""
        self._post("barrier")
        self._communicator.require("barrier")
        self.synchronize()
        return self._cpu.barrier(timeout)

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
        verb: str,
        begin: Callable[[], None],
        arrays: Sequence[Array],
        result: Any,
        blocking: bool,
    ) -> Work:
        """Give to the device what ``begin`` calls; without ``arrays`` there is nothing to do.

        ``arrays`` are all that the device reads or writes. With ``blocking`` the caller's current
        stream waits at once; the host does so in neither case.

        Raises:
            ValueError: an array is on another device than this rank's.
            DistributedError: as :meth:`Communicator.call`.
        """
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

    def _reduce(
        self,
        verb: str,
        function: Callable[..., int],
        pairs: Sequence[tuple[Array, Array]],
        op: ReduceOp,
        scale: float,
        *root: int,
    ) -> None:
        """Reduce each pair (source, target), several of them begun as one."""
        stream = self._stream.stream
        parts = [Reduction(stream, source, target, op, scale) for source, target in pairs]
        rules = [self._rule(verb, part, op) for part in parts]
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
