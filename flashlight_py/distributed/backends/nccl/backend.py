"""Collectives on CuPy arrays with NCCL. Most of them do not block the host.

The ranks exchange NCCL's data over the CPU backend. NCCL therefore works with every kind of
rendezvous, and a missing rank is named before a call would wait for it inside NCCL.
"""

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flashlight_py import errors
from flashlight_py.device import Array, cuda
from flashlight_py.distributed.backend import Backend, exchange_bytes
from flashlight_py.distributed.backends.nccl import library, streams
from flashlight_py.distributed.backends.nccl.communicator import (
    FINALIZE_SECONDS,
    LOOK_SECONDS,
    Communicator,
    poll,
)
from flashlight_py.distributed.backends.nccl.library import BYTES, Step, load_nccl
from flashlight_py.distributed.calls.arrays import check_out_rows, row_bytes, scale_in_place
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import RESULTS, split_rows
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.memory.topology import DeviceRule, gpu_identity
from flashlight_py.distributed.verbs import REDUCE, SEND
from flashlight_py.distributed.work import AllOf, Done, Then, Work, wait_timeout_error
from flashlight_py.structure import thread_state

_ALONE = contextlib.nullcontext()


class NcclBackend(Backend):
    """Backend for the GPUs of the ranks of ``cpu``, connected by ``communicator``.

    ``cpu`` is the group's backend for NumPy arrays. It runs barriers and compares the calls of the
    ranks. ``device`` is the index of a CUDA device.
    """

    kind = DistributedBackend.NCCL

    def __init__(self, cpu: Backend, communicator: Communicator, cupy: Any, device: int) -> None:
        self.rank, self.size, self.device = cpu.rank, cpu.size, device
        nccl = communicator.nccl
        self.path = f"NCCL {library.version_text(nccl.version)}, here CUDA device {device}"
        if not communicator.child:
            self.path += f"; calls start on a thread of NCCL, 150 us later: {nccl.slow_reason}"
        self.communicator, self._cupy = communicator, cupy
        with self.on_device():
            # This stream does not wait for the legacy default stream, so both can overlap.
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._make_event = functools.partial(cupy.cuda.Event, disable_timing=True)
            # All calls share this event: a wait uses the event's latest record before the wait.
            self._ready = self._make_event()
            self._flights = streams.Flights(self._make_event() for _ in range(streams.MAX_PENDING))
        self._launcher = library.Launcher(nccl, int(self._stream.ptr), int(self._ready.ptr))
        # Existing connections for messages: (library.SEND or library.RECV, peer rank).
        self._connected: set[tuple[int, int]] = set()
        self._bytes = self._empty((2,), cupy.uint8)
        self._comparisons = streams.Comparisons(cpu, communicator)
        self._watchdog = streams.NcclWatchdog(cupy.cuda, device, self._flights, self._comparisons)
        communicator.find_missing = self._comparisons.find_missing
        communicator.on_wait = functools.partial(self._watchdog.check, needs_all=True)

    def limit(self, seconds: float) -> None:
        self.communicator.timeout = seconds

    def start(self, call: Call) -> Work:
        """See ``Backend``. NCCL chooses the order in which a reduction adds the ranks.

        Gathers, scatter, all_to_all and messages block until every rank (or the peer) has called,
        even if ``call.blocking`` is False: the host must first know sizes and peers.
        """
        if call.refusal:
            self._comparing.refuse(call)
            return Done()
        if call.verb.is_message:
            return Then(self._exchange([call]), lambda arrays: arrays[0])
        run: Callable[[Call], Work] = getattr(self, f"_{call.verb.name}", self._combine_gathered)
        if not streams.begins_at_once(call.verb):
            self._require(call)
            return run(call)
        with self.communicator.lock:  # NCCL must start calls in the order of their comparison
            self._require(call)
            self._comparing.post(call)
            return run(call)

    def start_many(self, calls: Sequence[Call]) -> Work:
        """Start several all_reduces or messages as one operation; see ``Backend``."""
        if calls[0].verb.is_message:
            return self._exchange(calls)
        with self.communicator.lock:
            for call in calls:
                self._require(call)
            for call in calls:
                self._comparing.post(call)
            arrays = [call.array for call in calls]
            pairs = list(zip(arrays, arrays, strict=True))
            return self._reduce_pairs(calls[0], library.ALL_REDUCE, pairs, arrays)

    @property
    def _comparing(self) -> Any:
        """The object that compares calls or, while CUDA captures a graph, records them."""
        return thread_state.recorder or self._comparisons

    def _require(self, call: Call) -> None:
        """Raise if ``call`` has an array on another device, or the communicator is unusable."""
        arrays: tuple[Any, ...] = call.array, call.out
        for array in arrays:
            if array is not None and (device := array.device.id) != self.device:
                raise ValueError(
                    f"{call.name}: rank {self.rank} of {self.size}: expected an array on CUDA "
                    f"device {self.device}, got one on device {device}. Move the array with "
                    f"flashlight_py.device.to_device(x, 'cuda:{self.device}')"
                )
        self.communicator.require(call.name)

    def _all_reduce(self, call: Call) -> Work:
        array = call.array
        return self._reduce_pairs(call, library.ALL_REDUCE, [(array, array)], array)

    def _reduce_scatter(self, call: Call) -> Work:
        """Reduce arrays; each rank gets its part. Unequal parts are reduced one after another."""
        array, rows = call.array, call.rows or [len(call.array) // self.size] * self.size
        with self.on_device():
            part = call.room(rows[self.rank])
        if call.rows is None:
            return self._reduce_pairs(call, library.REDUCE_SCATTER, [(array, part)], part)
        terms = split_rows(array, rows)
        part[...] = terms[self.rank]
        terms[self.rank] = part
        steps = [
            Call(REDUCE, term, call.op, call.scale, root, blocking=call.blocking)
            for root, term in enumerate(terms)
        ]
        return Then(AllOf(list(map(self._reduce, steps))), lambda _: part)

    def _reduce(self, call: Call) -> Work:
        """Reduce in place on the root. The arrays of the other ranks do not change."""
        array, root = call.array, call.root
        target = array if self.rank == root else self._empty(array.shape, array.dtype)
        return self._reduce_pairs(call, library.REDUCE, [(array, target)], array, root)

    def _combine_gathered(self, call: Call) -> Work:
        """Run a verb that NCCL lacks: each GPU gathers all arrays and combines them itself."""
        array = call.array
        pieces = self._empty((self.size, *array.shape), array.dtype)

        def finish() -> None:
            if call.verb.fills(self.rank, call.root):
                with self._stream:
                    array[...] = RESULTS[call.verb](list(pieces), self.rank, call)

        steps = self._gathering(array, pieces, dict.fromkeys(range(self.size), array.nbytes))
        return self._launch(call, steps, [array, pieces], array, finish=finish)

    def _broadcast(self, call: Call) -> Work:
        array = call.array
        step = _moving(library.BROADCAST, call.root, _address(array), array.nbytes)
        return self._launch(call, [step], [array], array)

    def _all_gather(self, call: Call) -> Work:
        array, rows = call.array, self._comparing.compare(call)
        lengths = _lengths(array, rows)

        def gather(joined: Array) -> Work:
            steps = self._gathering(array, joined, lengths)
            return self._launch(call, steps, [array, joined], joined)

        return self._into(call, sum(rows), gather)

    def _gathering(self, array: Array, joined: Array, lengths: dict[int, int]) -> list[Step]:
        """Return the steps that gather ``lengths[r]`` bytes from each rank r."""
        source = _address(array)
        if len(set(lengths.values())) == 1:
            return [(library.ALL_GATHER, source, _address(joined), array.nbytes, BYTES, 0, 0)]
        blocks = _blocks(joined, lengths)
        return [(library.BROADCAST, source, at, n, BYTES, 0, root) for root, at, n in blocks]

    def _gather(self, call: Call) -> Work:
        rows = self._comparing.compare(call)
        sent, lengths = {call.root: call.array.nbytes}, _lengths(call.array, rows)
        if self.rank != call.root:
            return self._swap(call, sent, None, lengths)
        return self._into(call, sum(rows), lambda joined: self._swap(call, sent, joined, lengths))

    def _scatter(self, call: Call) -> Work:
        out = call.out
        if out is None:
            assert call.array is not None  # a call of this backend has ``out`` or ``array``
            out = self._empty(call.array.shape[1:], call.array.dtype)
        self._comparing.compare(call)
        sent = dict.fromkeys(range(self.size), out.nbytes)
        return self._swap(call, sent, out, {call.root: out.nbytes})

    def _all_to_all(self, call: Call) -> Work:
        sends = receives = [call.array.shape[0] // self.size] * self.size
        self._comparing.compare(call)
        if call.rows is not None:
            sends, receives = list(call.rows), self._comparing.rows_for_this_rank(call)
            if call.received is not None:
                call.received += receives
        sent, received = _lengths(call.array, sends), _lengths(call.array, receives)
        return self._into(call, sum(receives), lambda out: self._swap(call, sent, out, received))

    def _swap(
        self, call: Call, sent: dict[int, int], result: Array | None, received: dict[int, int]
    ) -> Work:
        """Send ``sent[r]`` bytes to rank r; write ``received[r]`` bytes of rank r to ``result``.

        All messages, including a message of this rank to itself, are one operation: NCCL before
        2.28 has no function for a gather, scatter or all_to_all.
        """
        moves: list[Any] = [(library.SEND, call.array, sent), (library.RECV, result, received)]
        moves = [move for move in moves if move[1] is not None]
        steps = [
            _moving(kind, *block) for kind, array, sizes in moves for block in _blocks(array, sizes)
        ]
        return self._launch(call, steps, [array for _, array, _ in moves], result, together=True)

    def _into(self, call: Call, rows: int, run: Callable[[Array], Work]) -> Work:
        """Call ``run`` with ``out`` or a new array. ``wait`` raises if ``out`` has a wrong size."""
        with self.on_device():
            out, room = call.out, call.room(rows)
        work = run(room)
        if out is None or out is room:
            return work
        return Then(work, lambda _: check_out_rows(call.name, out, rows, self.rank, self.size))

    def _exchange(self, calls: Sequence[Call]) -> Work:
        """Wait until the peers make the matching calls. Then start all messages in one launch."""
        for call in calls:
            self._require(call)
        self._comparing.run([streams.compared(call, blocking=True) for call in calls])
        name = calls[0].name if len(calls) == 1 else "exchange"
        # NCCL has no tags. Both ends start messages in the order of their tags.
        arrays = [call.array for call in calls]
        steps = [
            _moving(
                library.SEND if call.verb is SEND else library.RECV,
                *(call.peer, _address(call.array), call.array.nbytes),
            )
            for call in sorted(calls, key=lambda call: call.tag)
            if call.array.size
        ]
        return self._launch(calls[0], steps, arrays, arrays, name)

    def _barrier(self, call: Call) -> Work:
        """Block until this rank's collectives have ended and every rank has called."""
        self.synchronize()
        return Done(self._comparing.run([replace(call, blocking=True)]))

    def synchronize(self) -> None:
        """Block the host until every collective that this rank started has ended."""
        if (newest := self._flights.newest()) is not None:
            work = StreamWork(self, newest, None)
            work.block()  # the watchdog aborts a late collective
            work.wait()
        self._comparisons.finish()  # find mismatches that kernels do not detect
        self.communicator.require_unbroken()

    def is_busy(self) -> bool:
        return (self._flights.oldest() or self._comparisons.oldest()) is not None

    def close(self) -> None:
        """Close the communicator, and abort running collectives; idempotent."""
        self._watchdog.stop()
        with self.on_device(), self.communicator.lock:
            if self._flights.newest() is not None:
                self._comparisons.find_lost("close")  # do not wait for ranks that have ended
            seconds = min(FINALIZE_SECONDS, self.communicator.timeout)
            if self.communicator.close(poll(self._is_over, seconds)):
                self._comparisons.finish(FINALIZE_SECONDS)  # skip after an abort: ranks may be lost
        self._flights.clear()
        # Break reference cycles: the garbage collector would free stream and events late.
        self.communicator.on_wait = self.communicator.find_missing = None

    def _is_over(self) -> bool:
        return self._flights.oldest() is None or self.communicator.broken is not None

    def _launch(
        self, call: Call, steps: Sequence[Step], arrays: Sequence[Array], result: Any,
        name: str = "", together: bool = False, prepare: Callable[[], Sequence[Step]] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:  # fmt: skip
        """Launch ``steps`` on the device as one operation, unless all ``arrays`` are empty.

        ``arrays`` are all arrays that the device reads or writes. If some rank may have several
        steps, set ``together`` on every rank. ``prepare`` runs on the communication stream and
        returns the steps; ``finish`` runs after the steps. A blocking call blocks the caller's
        current stream, never the host. Raises the errors of :meth:`Communicator.call`.
        """
        verb, kept = name or call.name, [array for array in arrays if array.size]
        communicator, launcher = self.communicator, self._launcher
        with communicator.lock, self.on_device():
            communicator.require(verb)
            if not kept:
                return Done(result)
            caller, recorder = int(self.current_stream().ptr), thread_state.recorder
            # During a capture no event reports its end and becomes free, so create a new event.
            event = self._free_event(verb) if recorder is None else self._make_event()
            by_one_call = communicator.child and prepare is None and finish is None
            if not by_one_call:
                launcher.wait_for(caller)
            if prepare is not None:
                steps = prepare()
            if communicator.child and steps and steps[0][0] >= library.SEND:
                self._connect(verb, steps)
            is_group, packed = together or len(steps) > 1, launcher.steps(steps)
            if by_one_call:
                options = is_group, packed, caller, int(event.ptr), call.blocking
                communicator.call(verb, lambda comm: launcher.launch(comm, *options))
            else:
                communicator.call(verb, lambda comm: launcher.call(comm, is_group, packed))
                if finish is not None:
                    finish()
                event.record(self._stream)
                if call.blocking:
                    self.current_stream().wait_event(event)
            flight = streams.DeviceFlight(verb, event, kept, self._comparisons.latest)
            done = Done(result)
            if recorder is not None:
                recorder.keep(event, kept, packed)
            else:
                self._flights.add(flight)
                done.flight = flight
            if call.blocking:
                return done
        return StreamWork(self, flight, result)

    def capture_problem(self) -> str:
        """Return why CUDA graphs cannot contain collectives of this group, or ""."""
        if self.communicator.child:
            return ""
        return f"NCCL launches collectives on its own threads: {self.communicator.nccl.slow_reason}"

    def add_captured(self, captured: Any) -> None:
        """Let this group call ``captured.release()`` before it ends; keep only a weak reference."""
        self.communicator.captured.add(captured)

    def launch_captured(self, name: str, launch: Callable[[int], None]) -> None:
        """Call ``launch(event)``, which launches a CUDA graph and records ``event`` at its end."""
        communicator = self.communicator
        with communicator.lock, self.on_device():
            communicator.require(name)
            event = self._free_event(name)

            def begin(_: Any) -> int:
                launch(int(event.ptr))
                return int(communicator.lib.ncclSuccess)

            communicator.call(name, begin)
            self._flights.add(streams.DeviceFlight(name, event, ()))

    def _connect(self, verb: str, steps: Iterable[Step]) -> None:
        """Exchange one byte with each peer in ``steps`` that has no connection yet."""
        ends = {(kind, peer) for kind, *_, peer in steps if peer != self.rank}
        first, call = sorted(ends - self._connected), self._launcher.call
        if first:
            sent = _address(self._bytes)
            exchanges = [(kind, sent, sent + 1, 1, BYTES, 0, peer) for kind, peer in first]
            packed = self._launcher.steps(exchanges)
            self.communicator.call(verb, lambda comm: call(comm, True, packed), connects=True)
            self._connected |= ends

    def _free_event(self, verb: str) -> Any:
        """Return an unused event; blocks while all events are in use."""
        while (event := self._flights.free_event()) is None:
            self.communicator.require(verb)  # the watchdog ends a collective that is late
            time.sleep(LOOK_SECONDS)
        return event

    def current_stream(self) -> Any:
        """Return the caller's current stream. The current device must be ``self.device``."""
        return self._cupy.cuda.get_current_stream(self.device)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array whose memory belongs to the caller's current stream."""
        with self.on_device():
            array: Array = self._cupy.empty(shape, dtype)
        return array

    def on_device(self) -> Any:
        """Return a context manager that makes this rank's device the current device."""
        if self._cupy.cuda.runtime.getDevice() == self.device:
            return _ALONE
        return self._cupy.cuda.Device(self.device)  # a new object: threads must not share one

    def _reduce_pairs(
        self, call: Call, kind: int, pairs: Sequence[tuple[Array, Array]], result: Any,
        root: int = 0,
    ) -> Work:  # fmt: skip
        """Reduce each pair (source, target); several pairs are one operation."""
        pairs = [pair for pair in pairs if pair[0].size]
        forms = [library.form_of(source.dtype, call.op) for source, _ in pairs]
        arrays = list({id(array): array for pair in pairs for array in pair}.values())
        # NCCL can scale the terms of a sum, but no other reduction.
        scale, rest = (call.scale, 1.0) if call.op is ReduceOp.SUM else (1.0, call.scale)

        def steps(used: Sequence[tuple[Array, Array]]) -> list[Step]:
            calls = list[Step]()
            for (source, target), form in zip(used, forms, strict=True):
                rule, count = library.OPS[call.op], target.size * form.parts
                if scale != 1.0:
                    rule = self.communicator.scaled_sum(call.name, scale, form.dtype, form.code)
                ends = _address(source), _address(target)
                calls.append((kind, *ends, count, form.code, rule, root))
            return calls

        if rest == 1.0 and not any(form.widened for form in forms):
            return self._launch(call, steps(pairs), arrays, result)
        cast = list[tuple[Array, Array]]()  # converted arrays, in use until ``finish``

        def prepare() -> list[Step]:
            with self._stream:  # the converted arrays belong to this stream
                cast.extend(form.convert(*pair) for form, pair in zip(forms, pairs, strict=True))
            return steps(cast)

        def finish() -> None:
            with self._stream:
                for (_, target), (_, reduced) in zip(pairs, cast, strict=True):
                    if reduced is not target:
                        target[...] = reduced
                    scale_in_place(target, rest)

        return self._launch(call, (), arrays, result, prepare=prepare, finish=finish)


def _address(array: Array) -> int:
    memory: Any = array.data
    return int(memory.ptr)


def _moving(kind: int, peer: int, start: int, nbytes: int) -> Step:
    """Return the step that sends, receives or broadcasts (``kind``) the bytes at ``start``."""
    return kind, start, start, nbytes, BYTES, 0, peer


def _blocks(array: Array, lengths: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, address, bytes) of each rank's block in ``array``, if it is not empty."""
    start = _address(array)
    for rank, length in lengths.items():
        if length:
            yield rank, start, length
        start += length


def _lengths(array: Array, rows: Sequence[int]) -> dict[int, int]:
    return {rank: count * row_bytes(array) for rank, count in enumerate(rows)}


class StreamWork(Work):
    """A collective on the device. ``wait`` blocks the caller's current stream, not the host."""

    def __init__(self, backend: NcclBackend, flight: streams.DeviceFlight, result: Any) -> None:
        self._backend, self._result = backend, result
        self.flight: streams.DeviceFlight = flight

    def wait(self, timeout: float | None = None) -> Any:
        """Block the current stream; return the result. With ``timeout``, block the host first."""
        if timeout is not None:
            self.block(timeout)
        backend, communicator = self._backend, self._backend.communicator
        with communicator.lock:
            if communicator.broken is not None and not self.flight.has_ended:
                raise communicator.error()
        if not self.flight.has_ended:  # otherwise another collective uses the event
            with backend.on_device():
                backend.current_stream().wait_event(self.flight.event)
        return self._result

    def is_completed(self) -> bool:
        """Return whether the device has ended the collective, or the collective has failed."""
        return self._backend.communicator.broken is not None or self.flight.check()

    def end_time(self) -> float | None:
        return self.flight.ended

    def block(self, timeout: float = math.inf) -> None:
        """Block the host until the collective ends, but raise after ``timeout`` seconds."""
        if not poll(self.is_completed, timeout):
            raise wait_timeout_error(self._backend.communicator.doing(self.flight.verb), timeout)


class NcclCard(NamedTuple):
    """A rank's report: NCCL version and GPU, or a ``problem`` that prevents the use of NCCL.

    ``unique_id`` (hexadecimal) identifies the communicator; only rank 0 sends it. For
    ``slow_reason`` see ``NcclLibrary``.
    """

    problem: str = ""
    version: int = 0
    gpu: str = ""
    unique_id: str = ""
    slow_reason: str = ""


def connect_gpus(rule: DeviceRule, timeout: float, joining: float, cpu: Backend) -> NcclBackend:
    """Connect the ranks of ``cpu``, each on the GPU that ``rule`` selects. Collective, blocking.

    ``timeout`` (seconds) bounds each collective, and ``joining`` each step of the connection.
    Raises on every rank UnavailableEverywhereError if a rank lacks NCCL, CuPy or a GPU of its own.
    Raises DistributedError if NCCL fails, or a rank (named) does not join.
    """
    tools, card = _tools(rule, first=cpu.rank == 0)
    unique_id, slow_reason = exchange_cards(cpu, card, joining)
    assert tools is not None  # otherwise exchange_cards has raised an error
    nccl, cupy, index = tools
    nccl = replace(nccl, slow_reason=slow_reason)
    with cupy.cuda.Device(index):
        communicator = _communicator(cpu, nccl, unique_id, joining)
    communicator.timeout = timeout
    return NcclBackend(cpu, communicator, cupy, index)


def _tools(
    rule: DeviceRule, first: bool
) -> tuple[tuple[library.NcclLibrary, Any, int] | None, NcclCard]:
    """Return (tools, card). Tools are NCCL, CuPy and the device index; None after an error."""
    try:
        if os.environ.get("NCCL_COMM_BLOCKING", "") == "1":
            raise errors.BackendUnavailableError(
                "NCCL_COMM_BLOCKING must be unset, got 1: NCCL would ignore timeouts, and wait "
                "forever for a rank that does not join. Unset NCCL_COMM_BLOCKING"
            )
        nccl = load_nccl()
        cupy, count = cuda()
        index = rule.index(count)
        identity = nccl.unique_id().hex() if first else ""
    except errors.DistributedError as error:
        return None, NcclCard(problem=str(error))
    gpu = gpu_identity(cupy, index)
    return (nccl, cupy, index), NcclCard("", nccl.version, gpu, identity, nccl.slow_reason)


def exchange_cards(cpu: Backend, card: NcclCard, seconds: float | None = None) -> tuple[bytes, str]:
    """Exchange ``card``; return the communicator's unique id, and why calls are slow, or "".

    Raises on every rank UnavailableEverywhereError if a rank has a problem, NCCL versions differ,
    or two ranks use one GPU. Raises DistributedError like ``Work.wait``; it names a missing rank.
    """
    texts = exchange_bytes(cpu, json.dumps(card).encode(), seconds=seconds)
    cards = [NcclCard(*json.loads(text)) for text in texts]
    if problem := _first_problem(cards):
        raise errors.UnavailableEverywhereError(f"rank {cpu.rank} of {cpu.size}: {problem}")
    slow = next((f"rank {n}: {c.slow_reason}" for n, c in enumerate(cards) if c.slow_reason), "")
    return bytes.fromhex(cards[0].unique_id), slow


def _first_problem(cards: Sequence[NcclCard]) -> str:
    problems = [f"rank {rank}: {card.problem}" for rank, card in enumerate(cards) if card.problem]
    if problems:
        others = "" if len(problems) == 1 else f" ({len(problems)} ranks have a problem)"
        return f"CuPy arrays cannot be sent between these ranks. {problems[0]}{others}"
    if len({card.version for card in cards}) > 1:
        versions = ", ".join(
            f"{rank}: {library.version_text(c.version)}" for rank, c in enumerate(cards)
        )
        return f"the ranks have different NCCL versions ({versions}). Install the same everywhere"
    owners: dict[str, int] = {}
    for rank, card in enumerate(cards):
        owner = owners.setdefault(card.gpu, rank)
        if card.gpu and owner != rank:
            return (
                f"ranks {owner} and {rank} are on the same GPU, but NCCL needs one GPU per rank. "
                "Start one rank per GPU. For tests, set a different NCCL_HOSTID for each rank (or "
                "NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer)"
            )
    return ""


def _communicator(
    cpu: Backend, nccl: library.NcclLibrary, unique_id: bytes, joining: float
) -> Communicator:
    """Create the communicator on every rank, or raise on every rank. Collective, blocking."""
    try:
        communicator = Communicator(nccl, unique_id, cpu.rank, cpu.size, joining)
    except errors.DistributedError as error:
        exchange_bytes(cpu, str(error).encode(), seconds=joining)
        raise
    try:
        answers = exchange_bytes(cpu, b"", seconds=joining)
        failed = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(answers) if text]
        if failed:
            raise errors.DistributedError(
                f"rank {cpu.rank} of {cpu.size}: NCCL connected this rank, but not all ranks: "
                f"{failed[0]}"
            )
    except errors.DistributedError:
        communicator.close()
        raise
    return communicator
