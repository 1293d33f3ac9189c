"""CuPy arrays between the ranks of a group through NCCL; the host waits for no verb."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl import launching
from flashlight_py.distributed.backends.nccl.communicator import (
    FINALIZE_SECONDS,
    LOOK_SECONDS,
    Communicator,
    poll,
)
from flashlight_py.distributed.backends.nccl.comparing import Comparisons, begins_at_once, compared
from flashlight_py.distributed.backends.nccl.launching import Launcher, Step
from flashlight_py.distributed.backends.nccl.library import version_text
from flashlight_py.distributed.backends.nccl.reduction import BYTES, OPS, form_of
from flashlight_py.distributed.backends.nccl.streams import (
    MOST_UNFINISHED,
    DeviceFlight,
    Flights,
    NcclWatchdog,
)
from flashlight_py.distributed.calls.arrays import require_length, row_bytes, scale_in_place
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import MEANINGS, cut
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.verbs import REDUCE, SEND
from flashlight_py.distributed.work import AllOf, Done, Then, Work, limit_passed
from flashlight_py.structure import thread_state

_ALONE = contextlib.nullcontext()


class NcclBackend(Backend):
    """Every rank of ``cpu`` on its GPU, joined by ``communicator``; see joining.py.

    ``cpu`` is the group's backend for NumPy arrays, which stays in use: for barriers, and to
    compare what ranks call. ``device`` is a CUDA device's index.
    """

    kind = DistributedBackend.NCCL

    def __init__(self, cpu: Backend, communicator: Communicator, cupy: Any, device: int) -> None:
        self.rank, self.size, self.device = cpu.rank, cpu.size, device
        nccl = communicator.nccl
        self.path = f"NCCL {version_text(nccl.version)}, here CUDA device {device}"
        if not communicator.child:
            self.path += f"; calls begin on a thread of NCCL, 150 us later: {nccl.slow_because}"
        self.communicator, self._cupy = communicator, cupy
        with self.on_device():
            # Not ordered with the legacy default stream, which would serialise what is to overlap.
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._make_event = functools.partial(cupy.cuda.Event, disable_timing=True)
            # One event serves every call: a wait is for the record that came last before it.
            self._ready = self._make_event()
            self._flights = Flights(self._make_event() for _ in range(MOST_UNFINISHED))
        self._launcher = Launcher(nccl, int(self._stream.ptr), int(self._ready.ptr))
        # Messages whose two ends are connected: the function, and the other rank.
        self._connected: set[tuple[int, int]] = set()
        self._bytes = self._empty((2,), cupy.uint8)
        self._comparisons = Comparisons(cpu, communicator)
        self._watchdog = NcclWatchdog(cupy.cuda, device, self._flights, self._comparisons)
        communicator.who_is_missing = self._comparisons.who_is_missing
        communicator.look = functools.partial(self._watchdog.look, needs_all=True)

    def limit(self, seconds: float) -> None:
        self.communicator.timeout = seconds

    def start(self, call: Call) -> Work:
        """See ``Backend``. NCCL chooses the order of a reduction's terms.

        The host must know sizes and peers, so gathers, scatter, all_to_all and messages block until
        every rank (a message: its peer) has called, even if not ``blocking``.
        """
        if call.refusal:
            self._comparing.refuse(call)
            return Done()
        if call.verb.is_message:
            return Then(self._exchange([call]), lambda arrays: arrays[0])
        run: Callable[[Call], Work] = getattr(self, f"_{call.verb.name}", self._by_meaning)
        if not begins_at_once(call.verb):
            self._require(call)
            return run(call)
        with self.communicator.lock:  # NCCL begins calls in the order in which they are compared
            self._require(call)
            self._comparing.post(call)
            return run(call)

    def start_many(self, calls: Sequence[Call]) -> Work:
        """Start several all_reduces, or messages, as one; see ``Backend``."""
        if calls[0].verb.is_message:
            return self._exchange(calls)
        with self.communicator.lock:
            for call in calls:
                self._require(call)
            for call in calls:
                self._comparing.post(call)
            arrays = [call.array for call in calls]
            pairs = list(zip(arrays, arrays, strict=True))
            return self._reduce_pairs(calls[0], launching.ALL_REDUCE, pairs, arrays)

    @property
    def _comparing(self) -> Any:
        """The comparisons of calls; during a capture by CUDA, the recorder that notes the calls."""
        return thread_state.recorder or self._comparisons

    def _require(self, call: Call) -> None:
        """Raise where ``call`` cannot be begun, before anything is sent."""
        given: tuple[Any, ...] = call.array, call.out
        for array in given:
            if array is not None and (found := array.device.id) != self.device:
                raise ValueError(
                    f"{call.name}: rank {self.rank} of {self.size} is joined to the others through "
                    f"CUDA device {self.device}, and the array is on device {found}; move it "
                    f"(flashlight_py.device.to_device(x, 'cuda:{self.device}'))"
                )
        self.communicator.require(call.name)

    def _all_reduce(self, call: Call) -> Work:
        array = call.array
        return self._reduce_pairs(call, launching.ALL_REDUCE, [(array, array)], array)

    def _reduce_scatter(self, call: Call) -> Work:
        """Reduce to this rank's part; unequal ones are reduced one by one."""
        array, rows = call.array, call.rows or [len(call.array) // self.size] * self.size
        with self.on_device():
            part = call.room(rows[self.rank])
        if call.rows is None:
            return self._reduce_pairs(call, launching.REDUCE_SCATTER, [(array, part)], part)
        terms = cut(array, rows)
        part[...] = terms[self.rank]
        terms[self.rank] = part
        steps = [
            Call(REDUCE, term, call.op, call.scale, root, blocking=call.blocking)
            for root, term in enumerate(terms)
        ]
        return Then(AllOf(list(map(self._reduce, steps))), lambda _: part)

    def _reduce(self, call: Call) -> Work:
        """Reduce in place on the root; the array of every other rank stays as it is."""
        array, root = call.array, call.root
        target = array if self.rank == root else self._empty(array.shape, array.dtype)
        return self._reduce_pairs(call, launching.REDUCE, [(array, target)], array, root)

    def _by_meaning(self, call: Call) -> Work:
        """Combine in place what NCCL does not: each GPU gathers all arrays, and does it itself."""
        array = call.array
        pieces = self._empty((self.size, *array.shape), array.dtype)

        def finish() -> None:
            if call.verb.fills(self.rank, call.root):
                with self._stream:
                    array[...] = MEANINGS[call.verb](list(pieces), self.rank, call)

        steps = self._gathering(array, pieces, dict.fromkeys(range(self.size), array.nbytes))
        return self._launch(call, steps, [array, pieces], array, finish=finish)

    def _broadcast(self, call: Call) -> Work:
        array = call.array
        step = _moving(launching.BROADCAST, call.root, _address(array), array.nbytes)
        return self._launch(call, [step], [array], array)

    def _all_gather(self, call: Call) -> Work:
        array, rows = call.array, self._comparing.ask(call)
        lengths = _lengths(array, rows)

        def gather(joined: Array) -> Work:
            steps = self._gathering(array, joined, lengths)
            return self._launch(call, steps, [array, joined], joined)

        return self._into(call, sum(rows), gather)

    def _gathering(self, array: Array, joined: Array, lengths: dict[int, int]) -> list[Step]:
        """Return the steps that gather ``lengths`` bytes: unequal ones by a broadcast of each."""
        source = _address(array)
        if len(set(lengths.values())) == 1:
            return [(launching.ALL_GATHER, source, _address(joined), array.nbytes, BYTES, 0, 0)]
        blocks = _blocks(joined, lengths)
        return [(launching.BROADCAST, source, at, n, BYTES, 0, root) for root, at, n in blocks]

    def _gather(self, call: Call) -> Work:
        rows = self._comparing.ask(call)
        sent, lengths = {call.root: call.array.nbytes}, _lengths(call.array, rows)
        if self.rank != call.root:
            return self._swap(call, sent, None, lengths)
        return self._into(call, sum(rows), lambda joined: self._swap(call, sent, joined, lengths))

    def _scatter(self, call: Call) -> Work:
        out = call.out
        if out is None:
            assert call.array is not None  # other ranks know by their out that a GPU is meant
            out = self._empty(call.array.shape[1:], call.array.dtype)
        self._comparing.ask(call)
        sent = dict.fromkeys(range(self.size), out.nbytes)
        return self._swap(call, sent, out, {call.root: out.nbytes})

    def _all_to_all(self, call: Call) -> Work:
        sends = receives = [call.array.shape[0] // self.size] * self.size
        self._comparing.ask(call)
        if call.rows is not None:
            sends, receives = list(call.rows), self._comparing.rows_for_this_rank(call)
            if call.received is not None:
                call.received += receives
        sent, received = _lengths(call.array, sends), _lengths(call.array, receives)
        return self._into(call, sum(receives), lambda got: self._swap(call, sent, got, received))

    def _swap(
        self, call: Call, sent: dict[int, int], result: Array | None, received: dict[int, int]
    ) -> Work:
        """Send ``sent`` bytes of the array to each rank; fill ``result`` with ``received`` bytes.

        The messages, also that of this rank to itself, are begun as one: NCCL before 2.28 has no
        function for these collectives.
        """
        ways: list[Any] = [(launching.SEND, call.array, sent), (launching.RECV, result, received)]
        moved = [way for way in ways if way[1] is not None]
        steps = [
            _moving(kind, *block) for kind, array, sizes in moved for block in _blocks(array, sizes)
        ]
        arrays = [array for _, array, _ in moved]
        return self._launch(call, steps, arrays, result, together=True)

    def _into(self, call: Call, rows: int, run: Callable[[Array], Work]) -> Work:
        """Let ``run`` fill ``out``, or a new array: ValueError after the call if rows differ."""
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
        self._comparing.meet([compared(call, blocking=True) for call in calls])
        name = calls[0].name if len(calls) == 1 else "exchange"
        # NCCL knows no tags: both ends begin messages in their order.
        arrays = [call.array for call in calls]
        steps = [
            _moving(
                launching.SEND if call.verb is SEND else launching.RECV,
                *(call.peer, _address(call.array), call.array.nbytes),
            )
            for call in sorted(calls, key=lambda call: call.tag)
            if call.array.size
        ]
        return self._launch(calls[0], steps, arrays, arrays, name)

    def _barrier(self, call: Call) -> Work:
        """Block until this rank's collectives have ended and every rank is here."""
        self.synchronize()
        return Done(self._comparing.meet([replace(call, blocking=True)]))

    def synchronize(self) -> None:
        """Block the host until every collective that this rank has started has ended."""
        if (newest := self._flights.newest()) is not None:
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
            seconds = min(FINALIZE_SECONDS, self.communicator.timeout)
            if self.communicator.close(poll(self._is_over, seconds)):
                self._comparisons.finish(FINALIZE_SECONDS)  # else nobody waits for this rank
        self._flights.clear()
        # Else the stream and the events would wait for the collector, which knows no GPU's memory.
        self.communicator.look = self.communicator.who_is_missing = None

    def _is_over(self) -> bool:
        """Return whether the device has ended all collectives, well or not."""
        return self._flights.oldest() is None or self.communicator.broken is not None

    def _launch(
        self,
        call: Call,
        steps: Sequence[Step],
        arrays: Sequence[Array],
        result: Any,
        name: str = "",
        together: bool = False,
        prepare: Callable[[], Sequence[Step]] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Launch ``steps`` on the device, several as one, unless all ``arrays`` are empty.

        These are all that the device reads or writes. ``together``: as one with the steps of other
        ranks. ``prepare`` computes on the communication stream before, and returns the steps;
        ``finish`` computes there afterwards. If the call blocks, the caller's current stream waits
        at once; the host never waits. Raises as :meth:`Communicator.call`.
        """
        verb, kept = name or call.name, [array for array in arrays if array.size]
        communicator, launcher = self.communicator, self._launcher
        with communicator.lock, self.on_device():
            communicator.require(verb)
            if not kept:
                return Done(result)
            caller, recorder = int(self.current_stream().ptr), thread_state.recorder
            # An event that a graph has noted never ends for the host.
            event = self._free_event(verb) if recorder is None else self._make_event()
            by_one_call = communicator.child and prepare is None and finish is None
            if not by_one_call:
                launcher.wait_for(caller)
            if prepare is not None:
                steps = prepare()
            if communicator.child and steps and steps[0][0] >= launching.SEND:
                self._connect(verb, steps)
            is_group, packed = together or len(steps) > 1, launcher.steps(steps)
            if by_one_call:
                how = is_group, packed, caller, int(event.ptr), call.blocking
                communicator.call(verb, lambda comm: launcher.launch(comm, *how))
            else:
                communicator.call(verb, lambda comm: launcher.call(comm, is_group, packed))
                if finish is not None:
                    finish()
                event.record(self._stream)
                if call.blocking:
                    self.current_stream().wait_event(event)
            flight = DeviceFlight(verb, event, kept, self._comparisons.latest)
            led = Done(result)
            if recorder is not None:
                recorder.keep(event, kept, packed)
            else:
                self._flights.add(flight)
                led.flight = flight
            if call.blocking:
                return led
        return StreamWork(self, flight, result)

    def why_not_captured(self) -> str:
        """Return why CUDA graphs cannot have collectives of this group; empty: they can."""
        if self.communicator.child:
            return ""
        return f"NCCL launches on threads of its own here: {self.communicator.nccl.slow_because}"

    def hold(self, captured: Any) -> None:
        """Release ``captured``, weakly held, with a CUDA graph of this group before that ends."""
        self.communicator.captured.add(captured)

    def launch_captured(self, name: str, launch: Callable[[int], None]) -> None:
        """Call ``launch`` of a graph, with an event to record; raise if the group has failed."""
        communicator = self.communicator
        with communicator.lock, self.on_device():
            communicator.require(name)
            event = self._free_event(name)

            def begin(_: Any) -> int:
                launch(int(event.ptr))
                return int(communicator.lib.ncclSuccess)

            communicator.call(name, begin)
            self._flights.add(DeviceFlight(name, event, ()))

    def _connect(self, verb: str, steps: Iterable[Step]) -> None:
        """Exchange a byte with each rank to which ``steps`` have the first message: it connects."""
        ends = {(kind, peer) for kind, *_, peer in steps if peer != self.rank}
        first, call = sorted(ends - self._connected), self._launcher.call
        if first:
            sent = _address(self._bytes)
            each = [(kind, sent, sent + 1, 1, BYTES, 0, peer) for kind, peer in first]
            packed = self._launcher.steps(each)
            self.communicator.call(verb, lambda comm: call(comm, True, packed), connects=True)
            self._connected |= ends

    def _free_event(self, verb: str) -> Any:
        """Return an event that no collective uses; blocks while the device has too many of them."""
        while (event := self._flights.free_event()) is None:
            self.communicator.require(verb)  # the watchdog ends what takes too long
            time.sleep(LOOK_SECONDS)
        return event

    def current_stream(self) -> Any:
        """Return the caller's, on this rank's device, which is the current one."""
        return self._cupy.cuda.get_current_stream(self.device)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array that belongs to the caller's current stream."""
        with self.on_device():
            array: Array = self._cupy.empty(shape, dtype)
        return array

    def on_device(self) -> Any:
        """Return a context in which this rank's device is the current one."""
        if self._cupy.cuda.runtime.getDevice() == self.device:
            return _ALONE
        return self._cupy.cuda.Device(self.device)  # a new one: threads must not share it

    def _reduce_pairs(
        self,
        call: Call,
        kind: int,
        pairs: Sequence[tuple[Array, Array]],
        result: Any,
        root: int = 0,
    ) -> Work:
        """Reduce each pair (source, target), several of them begun as one."""
        pairs = [pair for pair in pairs if pair[0].size]
        forms = [form_of(source.dtype, call.op) for source, _ in pairs]
        arrays = list({id(array): array for pair in pairs for array in pair}.values())
        # NCCL multiplies the terms of a sum on their way, and nothing else.
        scale, rest = (call.scale, 1.0) if call.op is ReduceOp.SUM else (1.0, call.scale)

        def steps(seen: Sequence[tuple[Array, Array]]) -> list[Step]:
            made = list[Step]()
            for (source, target), form in zip(seen, forms, strict=True):
                rule, count = OPS[call.op], target.size * form.parts
                if scale != 1.0:
                    rule = self.communicator.scaled_sum(call.name, scale, form.dtype, form.code)
                ends = _address(source), _address(target)
                made.append((kind, *ends, count, form.code, rule, root))
            return made

        if rest == 1.0 and not any(form.widened for form in forms):
            return self._launch(call, steps(pairs), arrays, result)
        seen = list[tuple[Array, Array]]()  # which NCCL uses until ``finish``

        def prepare() -> list[Step]:
            with self._stream:  # to which converted arrays belong
                seen.extend(form.seen(*pair) for form, pair in zip(forms, pairs, strict=True))
            return steps(seen)

        def finish() -> None:
            with self._stream:
                for (_, target), (_, room) in zip(pairs, seen, strict=True):
                    if room is not target:
                        target[...] = room
                    scale_in_place(target, rest)

        return self._launch(call, (), arrays, result, prepare=prepare, finish=finish)


def _address(array: Array) -> int:
    """Return where the data of ``array`` begin on the device."""
    memory: Any = array.data
    return int(memory.ptr)


def _moving(kind: int, peer: int, start: int, nbytes: int) -> Step:
    """Return the step that sends or receives these bytes, or broadcasts them from ``peer``."""
    return kind, start, start, nbytes, BYTES, 0, peer


def _blocks(array: Array, lengths: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield for each rank that has any of the bytes: the rank, their address and their number."""
    start = _address(array)
    for rank, length in lengths.items():
        if length:
            yield rank, start, length
        start += length


def _lengths(array: Array, rows: Sequence[int]) -> dict[int, int]:
    """Return how many bytes ``rows[r]`` rows are, for each rank r."""
    return {rank: count * row_bytes(array) for rank, count in enumerate(rows)}


class StreamWork(Work):
    """Waiting makes the caller's current stream wait; the host blocks only for a ``timeout``."""

    def __init__(self, backend: NcclBackend, flight: DeviceFlight, result: Any) -> None:
        self._backend, self._result = backend, result
        self.flight: DeviceFlight = flight

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result for the current stream; with ``timeout`` (seconds) the host waits."""
        if timeout is not None:
            self.block(timeout)
        backend, communicator = self._backend, self._backend.communicator
        with communicator.lock:
            if communicator.broken is not None and not self.flight.landed:
                raise communicator.error()
        if not self.flight.landed:  # else its event may serve another one
            with backend.on_device():
                backend.current_stream().wait_event(self.flight.event)
        return self._result

    def is_completed(self) -> bool:
        """Return whether the device is done with it, or it failed."""
        return self._backend.communicator.broken is not None or self.flight.ask()

    def end_time(self) -> float | None:
        return self.flight.ended

    def block(self, timeout: float = math.inf) -> None:
        """Block the host until it has ended, well or not; CollectiveTimeoutError: not in time."""
        if not poll(self.is_completed, timeout):
            raise limit_passed(self._backend.communicator.doing(self.flight.verb), timeout)
