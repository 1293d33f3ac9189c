"""A group over several hosts: shared memory inside each host, another backend between hosts.

A Gloo backend of all ranks compares each call before it changes an array. The messages of the
comparison also contain the data of small arrays. Large arrays are sent afterwards; see
``HostCalls``. A reduction first combines the arrays of each host, and then combines the results of
the hosts in a fixed order. The result therefore has the same bits on every rank, and in every run
with the same placement. A receive from any rank waits for the first message of this host or another
host.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import Any

import numpy as np

from flashlight_py import _native, errors
from flashlight_py._native import codes
from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend, Callers, EntryPoints
from flashlight_py.distributed.backends.gloo import GlooBackend
from flashlight_py.distributed.backends.native import NativeBackend, Outer
from flashlight_py.distributed.calls.arrays import as_bytes, check_out_rows, row_bytes
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched
from flashlight_py.distributed.calls.combining import factors, split_rows, store_each
from flashlight_py.distributed.calls.journal import NATIVE, OBJECTS, Journal, called_at, caller
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.failures.wording import names
from flashlight_py.distributed.memory.memory_file import shared_array
from flashlight_py.distributed.verbs import ALL_GATHER, ALL_REDUCE, BROADCAST, VERBS
from flashlight_py.distributed.work import FAILURES, Done, Then, Work, wait_for, wait_timeout_error

# Maximum bytes that a rank sends with a comparison: more bytes need less time if each host sends
# them only once. In an all_gather, each rank can always send ``_SHORT_BYTES``.
_FLAT_BYTES = 65 << 10
_SHORT_BYTES = 1 << 10

# Arrays up to this number of bytes are sent by one leader: sections would need more messages.
_SMALL_BYTES = 64 << 10

# Longer arrays (bytes) are cut into chunks: a chunk is reduced inside a host during the transfer of
# another chunk between hosts.
_CHUNK_BYTES = 16 << 20

_DONE: Work = Done()


class HostCalls:
    """The collectives of rank ``rank`` in ``hosts``.

    The leaders of a host are its first ranks; every host has the same number of leaders. A large
    array is first reduced or collected inside each host, and cut into one section for each leader.
    Leader i of each host then exchanges section i with leader i of every other host, so all leaders
    send in parallel. Finally, each leader broadcasts its section inside its host.

    ``inside`` and ``between``: see ``HierarchicalBackend``. ``far`` is the timeout between hosts in
    seconds. All ranks have made the same call before a method runs.
    """

    far: float

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], inside: Backend, between: Backend | None
    ) -> None:
        self._rank, self._hosts, self._inside, self._between = rank, hosts, inside, between
        self._order = [r for host in hosts for r in host]
        self._in_order, self._size = self._order == sorted(self._order), len(self._order)
        self._host_of = {r: h for h, host in enumerate(hosts) for r in host}
        self._home = self._host_of[rank]
        self._leaders, largest = min(map(len, hosts)), max(map(len, hosts))
        # If True, each rank is a leader, and its section is its own data.
        self._even = self._leaders == largest

    def all_reduce(self, call: Call) -> Any:
        """Reduce inside each host and then between hosts. Copy the result to all ranks."""
        first, last = factors(call.array.dtype, call.op, call.scale)
        inside, between = (Call(call.verb, None, call.op, scale) for scale in (first, last))
        self._exchange(call.array, inside, between)
        return call.array

    def broadcast(self, call: Call) -> Any:
        """Send the root's array to the leaders of its host, then to the other hosts."""
        home, inside = self._host_of[call.root], None
        if self._home == home:
            inside = Call(call.verb, root=self._hosts[home].index(call.root))
        self._exchange(call.array, inside, Call(call.verb, root=home))
        return call.array

    def _exchange(self, x: Array, inside: Call | None, between: Call, share: bool = True) -> None:
        """Run the calls ``inside`` and then ``between`` (on leaders only) for each chunk of
        ``x``; then ``_share`` the chunk, if ``share``."""
        flat, index = x.reshape(-1), self._inside.rank
        before: tuple[Sequence[Array], Work] = (), _DONE
        for chunk in cut_evenly(flat, max(1, x.nbytes // _CHUNK_BYTES)):
            if inside is not None:
                self._inside.start(replace(inside, array=chunk)).wait()
            work: Work = _DONE
            parts = cut_evenly(chunk, 1 if chunk.nbytes <= _SMALL_BYTES else self._leaders)
            if self._between is not None and index < len(parts):
                options = {"seconds": self.far, "blocking": chunk.size == x.size}
                work = self._between.start(replace(between, array=parts[index], **options))
            self._share(*before)
            before = parts if share else (), work
        self._share(*before)

    def _share(self, sections: Sequence[Array], work: Work = _DONE) -> None:
        """Wait for ``work``, then broadcast each ``sections[i]`` from leader i inside this host."""
        work.wait()
        # A leader may itself wait for other hosts, so the ranks of its host wait longer.
        patience = between_hosts(self.far)
        for leader, part in enumerate(sections):
            self._inside.start(Call(BROADCAST, part, root=leader, seconds=patience)).wait()

    def reduce(self, call: Call) -> Any:
        """Reduce inside each host, then between hosts to the host of the root."""
        first, last = factors(call.array.dtype, call.op, call.scale)
        home, inside = self._host_of[call.root], Call(ALL_REDUCE, None, call.op, first)
        array = call.array if self._rank == call.root else call.array.copy()
        between = Call(call.verb, None, call.op, last, home)
        self._exchange(array, inside, between, share=self._home == home)
        return call.array

    def all_gather(self, call: Call, rows_of_ranks: Sequence[int]) -> Any:
        """Gather the arrays of all ranks, which have ``rows_of_ranks`` rows."""
        rows = [rows_of_ranks[rank] for rank in self._order]
        gathered = (call if self._in_order else replace(call, out=None)).room(sum(rows))
        data, index = as_bytes(call.array), self._inside.rank
        sizes = [count * row_bytes(call.array) for count in rows]
        counts = split_rows(sizes, [len(host) for host in self._hosts])
        regions = split_rows(as_bytes(gathered), list(map(sum, counts)))  # one for each host
        # Each region has a section for each leader.
        sections = [
            split_rows(region, of_host) if self._even else cut_evenly(region, self._leaders)
            for region, of_host in zip(regions, counts, strict=True)
        ]
        work, step = _DONE, Call(ALL_GATHER, data, blocking=False, seconds=self.far)
        if self._between is not None and self._even:  # the section is this rank's data
            work = self._between.start(step)
        self._inside.start(Call(ALL_GATHER, data, out=regions[self._home])).wait()
        if self._between is not None and not self._even:
            step = replace(step, array=sections[self._home][index], blocking=True)
            work = self._between.start(step)
        if (received := work.wait()) is not None:
            targets = [of_host[index] for of_host in sections]
            store_each(targets, split_rows(received, list(map(len, targets))))
        for host, of_host in enumerate(sections):
            if host != self._home:
                self._share(of_host)
        return self._in_rank_order(call, gathered, rows, not self._in_order)

    def reduce_scatter(self, call: Call) -> Array:
        """Reduce inside hosts, then between hosts; return this rank's part of the result."""
        own_rows, index = self._rows_of(call, self._rank), self._inside.rank
        result = call.room(own_rows.stop - own_rows.start)
        first, last = factors(call.array.dtype, call.op, call.scale)
        parts = [call.array[self._rows_of(call, rank)] for rank in self._order]
        flat = (call.array if self._in_order else np.concatenate(parts)).reshape(-1)
        counts = split_rows([part.size for part in parts], [len(host) for host in self._hosts])
        sections = counts  # numbers of elements that each rank reduces, for each host
        if not self._even:
            cuts = [cut_evenly(range(sum(of_host)), self._leaders) for of_host in counts]
            sections = [[*map(len, cut), *[0] * self._size][: self._inside.size] for cut in cuts]
        lengths = [of_host[index] for of_host in sections]
        reduced = np.empty(sum(lengths), flat.dtype)
        arrays = split_rows(flat, list(map(sum, counts))), split_rows(reduced, lengths)
        for array, out, rows in zip(*arrays, sections, strict=True):
            step = Call(call.verb, array, call.op, first, rows=rows, out=out)
            self._inside.start(step).wait()
        part, of_ranks = result.reshape(-1), counts[self._home]
        region = np.empty(0 if self._even else sum(of_ranks), flat.dtype)
        shares = [] if self._even else split_rows(region, sections[self._home])[: self._leaders]
        step = Call(call.verb, reduced, call.op, last, seconds=self.far, rows=lengths)
        if self._between is not None:
            self._between.start(replace(step, out=shares[index] if shares else part)).wait()
        if shares:
            self._share(shares)
            part[...] = split_rows(region, of_ranks)[index]
        return result

    def _rows_of(self, call: Call, rank: int) -> slice:
        """Return the rows that ``rank`` receives in a reduce_scatter."""
        rows = call.rows or [len(call.array) // self._size] * self._size
        begin = sum(rows[:rank])
        return slice(begin, begin + rows[rank])

    def _in_rank_order(self, call: Call, x: Array, rows: Sequence[int], copies: bool = True) -> Any:
        """Return the rows of ``x`` in rank order. In ``x`` they are sorted by host.

        Raises ValueError if ``call.out`` has a wrong number of rows.
        """
        if call.out is not None:
            check_out_rows(call.name, call.out, sum(rows), self._rank, self._size)
        if not copies:
            return x
        parts = sorted(zip(self._order, split_rows(x, rows), strict=True), key=itemgetter(0))
        return np.concatenate([part for _, part in parts], out=call.room(sum(rows)))


def cut_evenly(flat: Any, count: int) -> list[Any]:
    """Cut ``flat`` into ``count`` consecutive parts. Their lengths differ by at most one."""
    size = len(flat)
    return [flat[size * i // count : size * (i + 1) // count] for i in range(count)]


def between_hosts(seconds: float, times: int = 1) -> float:
    """Return the timeout between hosts if the timeout inside a host is ``seconds``.

    If a rank is late, its host must time out first, because only this host can name the rank. If
    ``times`` ranks wait for each other in a chain, the timeout is increased once for each rank.
    """
    for _ in range(times):
        seconds += min(2.0, 0.2 * seconds)
    return seconds


# Verbs that ``HostCalls`` runs faster if arrays are large.
_BY_HOSTS = [verb for verb in VERBS if hasattr(HostCalls, verb.name)]

# For a receive from any rank: maximum seconds of one poll, and of the wait between two polls.
_LOOK_SECONDS, _SLICE_SECONDS = 1e-5, 0.02

_NEVER = 1e9  # seconds; stands for no timeout


class HierarchicalBackend(Backend):
    """Backend for the ranks of ``hosts``, each a list of ranks that share memory.

    Args:
        rank: Rank of this process.
        hosts: Ranks of each host. Every rank is in exactly one list.
        inside: Backend for the ranks of this host, in the order of their list in ``hosts``.
        between: Backend for the ranks that have the same position in their lists as this rank; None
            if some list has no such position.
        flat: Backend for all ranks. It compares calls, and runs the calls that the hierarchy would
            not make faster.
        timeout: Seconds for each operation inside a host. Operations between hosts get more time.
        checked: If True, ranks compare calls before data moves. If False, a mismatch of large
            arrays breaks the group, immediately or after the timeout.
    """

    kind = DistributedBackend.GLOO
    path = "shared memory inside hosts, Gloo between them"
    finds_shape, object_bytes = True, _FLAT_BYTES

    def __init__(
        self, rank: int, hosts: Sequence[Sequence[int]], inside: Backend, between: Backend | None,
        flat: GlooBackend, timeout: float, checked: bool = True,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, flat.size
        self.hosts = [list(host) for host in hosts]
        self._host = next(host for host in self.hosts if rank in host)
        self._inside, self._between, self._flat = inside, between, flat
        self.network = flat.network
        if inside.memory is not None:
            memory_ranks = dict(zip(self._host, inside.memory_ranks, strict=True))
            self.memory = inside.memory
            self.memory_ranks = [memory_ranks.get(rank, -1) for rank in range(self.size)]
        self.parts = [part for part in (inside, between, flat) if part is not None]
        composite = object()
        for part in self.parts:
            part.composite = composite
            if isinstance(part, NativeBackend):
                flat.propagate_host_loss(part)
        flat.sum_by_hosts(self.hosts)
        flat.object_bytes, flat.may_withhold = self.object_bytes, True
        self._checked = checked
        self._calls = HostCalls(rank, hosts, inside, between)
        # Maximum bytes of an array that a rank sends in ``flat``.
        self._most = dict.fromkeys(_BY_HOSTS, _FLAT_BYTES)
        self._most[ALL_REDUCE] = _FLAT_BYTES // (self.size - 1)
        self._most[ALL_GATHER] = max(_SHORT_BYTES, self._most[ALL_REDUCE])
        self.limit(timeout)
        self.callers = Callers(f"rank {rank} of {flat.size}", self.parts)
        self._thread: futures.ThreadPoolExecutor | None = None
        self._running: list[FutureWork] = []
        self._failed: list[FutureWork] = []  # failed; ``synchronize`` raises their errors
        self._receives: list[Then] = []
        self._beginning = threading.RLock()  # reentrant, because a signal handler may need it
        self._notified: list[Backend] = []  # backends aborted because another one was lost
        self._is_closed = False

    def bind(self, journal: Journal) -> EntryPoints:
        """Return the native functions of ``flat`` and, for messages on this host, ``inside``."""
        most, ranks = np.full(codes.VERBS, 1 << 62), np.full(self.size, -1, np.int32)
        for verb, limit in self._most.items():
            most[verb.code] = limit
        inside = None
        if isinstance(part := self._inside, NativeBackend):
            ranks[self._host] = range(part.size)
            inside = part.bind(journal, self._outer(part, part.unused, ranks=ranks)).collective
        outer = self._outer(self._flat, self._running, most=most, inside=inside)
        return self._flat.bind(journal, outer)

    def _outer(self, part: NativeBackend, waiting: list[Any], **options: Any) -> Outer:
        callbacks = partial(self._native_ended, part), partial(self._native_started, part)
        return Outer(*callbacks, self.callers.threads, waiting, **options)

    def _native_started(self, part: NativeBackend, handle: int, verb: int, *call: Any) -> Work:
        work = PartWork(self, Call(NATIVE[verb]), [(part.native_started(handle, verb, *call), ())])
        if work.is_completed():
            with suppress(*FAILURES):  # a failure ends the other backends; the caller waits again
                work.wait()
        return work

    def _native_ended(
        self, part: NativeBackend, handle: Any, verb: int, x: Any, out: Any, *call: Any
    ) -> Any:
        """Finish a call of ``part`` that native code started; see ``NativeBackend``."""
        part.count = self.count
        ended = partial(part.native_ended, handle, verb, x, out, *call)
        result = self._guarded_or_end(NATIVE[verb].name, ended)
        if type(result) is not list:
            return result
        part_of = NATIVE[verb].name if NATIVE[verb] in OBJECTS else ""
        large = Call(ALL_GATHER, x, out=out, part_of=part_of)
        run = partial(self._calls.all_gather, large, result)
        try:
            return self._in_call(large.name, lambda: self._run(large, self.count[0], run))
        except BaseException as error:
            assert part.journal is not None
            part.journal.record_failure(call[-1], error)
            raise

    def limit(self, seconds: float) -> None:
        self.timeout = seconds
        # A peer of this host may wait for another host. It must time out first: its error names the
        # late rank.
        self._calls.far = between_hosts(seconds)
        for part in self.parts:
            part.limit(self._calls.far if part is self._between else seconds)

    def start(self, call: Call) -> Work:
        begin = self._message if call.verb.is_message else self._collective
        work: Work = self._in_call("refuse" if call.refusal else call.name, lambda: begin(call))
        return work

    def _in_call(self, name: str, begin: Callable[[], Any]) -> Any:
        """Return ``begin()``. Meanwhile, a signal handler of this thread cannot start a call."""
        thread = self.callers.check(name)
        try:
            self.callers.threads.add(thread)
            return begin()
        finally:
            self.callers.threads.discard(thread)

    def _collective(self, call: Call) -> Work:
        if call.refusal and not self._checked:  # no comparison would notify other ranks
            self.end(errors.MismatchError(f"{names([self.rank])} called {call}"))
            return Done()
        if not self._is_flat(call):
            return self._start(call, lambda: self._run_by_hosts(call))
        # A started all_to_all of unequal parts first waits for the numbers of rows.
        waits = call.rows is not None and not (call.blocking or call.verb.reduces or call.compared)
        if not (waits or self._is_pending()):
            self._flat.count = self.count
            work = self._guarded_or_end(call.name, lambda: self._flat.start(call))
            return work if isinstance(work, Done) else PartWork(self, call, [(work, ())])
        blocking = replace(call, blocking=True)
        work = self._start(call, lambda: self._flat.start(blocking).wait())
        work.is_settled |= bool(call.refusal) or call.compared  # the caller handles its error
        return work

    def _is_flat(self, call: Call) -> bool:
        """Return whether ``flat`` runs ``call``: the hierarchy would not make it faster."""
        if call.refusal or call.compared or call.verb not in _BY_HOSTS or call.finds_shape:
            return True
        # In an all_gather, other ranks may pass larger arrays.
        return call.verb is not ALL_GATHER and call.array.nbytes <= self._most[call.verb]

    def _run_by_hosts(self, call: Call) -> Any:
        """Compare the call, and let ``HostCalls`` run it. A small all_gather needs no more step."""
        if call.verb is ALL_GATHER:
            most = self._most[ALL_GATHER]
            result = self._flat.gather_small(replace(call, blocking=True), most).wait()
            return self._calls.all_gather(call, result) if type(result) is list else result
        if self._checked:
            self._flat.start(replace(call, compared=True, blocking=True, out=None)).wait()
        try:
            return getattr(self._calls, call.verb.name)(call)
        except errors.MismatchError as error:
            error.group_lives = False  # other ranks may still be inside the call
            raise

    def _is_pending(self) -> bool:
        """Return whether a call has not ended on the thread, so that later calls must wait."""
        ended = list(takewhile(FutureWork.is_completed, self._running))  # operations end in order
        for work in ended:
            with suppress(ValueError):  # another thread has removed it
                self._running.remove(work)
                self._failed = [other for other in (*self._failed, work) if not other.is_settled]
        return bool(self._running)

    def _message(self, call: Call) -> Work:
        if call.peer == ANY_RANK:
            return self._receive_open(call)
        is_inside = call.peer in self._host
        ranks: Sequence[int] = self._host if is_inside else range(self.size)
        part = self._inside if is_inside else self._flat
        work = part.start(replace(call, peer=ranks.index(call.peer)))
        return PartWork(self, call, [(work, ranks)])

    def _receive_open(self, call: Call) -> Work:
        claim = np.zeros(1, np.int32)
        limit = self.timeout if call.seconds is None else call.seconds
        # Backends with their ranks and a timeout in seconds. The timeout of ``flat``, the last
        # backend, ends the whole receive.
        parts: list[tuple[Backend, Sequence[int], float]] = [(self._flat, range(self.size), limit)]
        if self._inside.size > 1:
            parts.insert(0, (self._inside, self._host, _NEVER))
        with self._beginning:  # receives start in the same order in both backends
            works = [
                (part.start(replace(call, blocking=False, claim=claim, seconds=seconds)), ranks)
                for part, ranks, seconds in parts
            ]
            receive = PartWork(self, call, works, claim)
            if not call.blocking:
                self._receives = [other for other in self._receives if not other.is_settled]
                self._receives.append(work := Then(receive, lambda match: match))
        return Done(receive.wait()) if call.blocking else work

    def shared_by_all(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
        """Return a list with one array in memory that the ranks of this host share."""
        like: Array = np.broadcast_to(np.zeros((), dtype), shape)
        call = Call(BROADCAST, like, part_of="shared_empty", compared=True)

        def inside() -> Array | MemoryError:
            self._flat.start(call).wait()
            try:
                return shared_array(self._inside, shape, dtype)
            except MemoryError as error:  # not raised here, because that would end the group
                return error

        work = self._in_call(call.name, lambda: self._start(call, inside))
        array: Array | MemoryError = work.wait()
        if isinstance(array, MemoryError):
            raise array
        return [array]

    def _start(self, call: Call, run: Callable[[], Any]) -> Work:
        """Run ``call`` here if it blocks and no call is pending; else queue it for the thread."""
        number = self.count[0]
        if call.blocking and not self._is_pending():
            return Done(self._run(call, number, run))
        if self._thread is None:
            self._thread = futures.ThreadPoolExecutor(1, "flashlight_py hierarchical")
        run_here = called_at(caller())(self._run)
        work = FutureWork(self._thread.submit(run_here, call, number, run))
        self._running.append(work)
        return work

    def _run(self, call: Call, number: int, run: Callable[[], Any]) -> Any:
        """Return ``run()``, which makes call ``number``. If a backend breaks, end all of them."""
        for part in self.parts:
            part.count = (number,)  # errors name the call by this number
        try:
            return self._guarded_or_end(call.name, run)
        except (errors.PeerLostError, errors.CollectiveTimeoutError) as error:
            raise type(error)(f"in {call.steps}: {error}") from error

    def _guarded_or_end(self, name: str, run: Callable[[], Any]) -> Any:
        """Return ``guarded(name, run)``. After another exception, such as Ctrl-C, end the group."""
        try:
            return self.guarded(name, run)
        except (errors.DistributedError, ValueError):
            raise  # ValueError: this rank's ``out`` has a wrong size, and the group is intact
        except BaseException as error:
            abort.report(error, self.parts)
            self._close_backends()
            raise

    def guarded(self, doing: str, wait: Callable[[], Any]) -> Any:
        """Return ``wait()``. If its error breaks one backend, end the other backends too."""
        try:
            return wait()
        except errors.DistributedError as error:
            was_closed = isinstance(error, errors.GroupClosedError)
            if self._is_closed and not was_closed:  # other ranks reacted before this call ended
                text = f"[{doing}] {self._flat.name}: the group is closed. Create it again"
                raise errors.GroupClosedError(text) from error
            group_lives = isinstance(error, errors.MismatchError) and error.group_lives
            if group_lives or error.goes_on or self._is_closed:
                raise
            # A connection between hosts may close before it delivers the reason of a loss. A rank
            # of this host may have received the reason. A lost host closes the flat group.
            loss = None
            if was_closed or isinstance(error, errors.PeerLostError):
                loss = (self._flat if was_closed else self._inside).lost(doing)
            cause = loss if isinstance(loss, errors.PeerLostError) else error
            self.end(cause)
            if cause is error:
                raise
            raise cause from error

    def synchronize(self) -> None:
        # Copy the lists, because a rejected call that still runs changes them.
        wait_for([*self._failed, *self._running, *self._receives])
        for part in self.parts:  # wait for messages
            self.guarded("sync_distributed", part.synchronize)

    def end(self, error: errors.DistributedError) -> None:
        """End all backends, because ``error`` occurred in one of them."""
        self.abort(error)
        self._close_backends()

    def lost(self, doing: str) -> errors.DistributedError | None:
        """See ``Backend``. After a loss, abort the backends that have not detected it."""
        losses = {part: part.lost(doing) for part in self.parts if part not in self._notified}
        cause = next(filter(None, losses.values()), None)
        if isinstance(cause, errors.PeerLostError):
            for part in (part for part, loss in losses.items() if loss is None):
                self._notified.append(part)
                part.abort(cause)
        return cause

    def is_busy(self) -> bool:
        is_idle = all(work.is_completed() for work in (*self._running, *self._receives))
        return not is_idle or super().is_busy()

    def close(self) -> None:
        """Close the backends, so that pending operations end. Then stop this backend's thread."""
        self._is_closed = True
        self._close_backends()
        thread, self._thread = self._thread, None
        # Do not wait for the thread: code that a signal interrupted may hold the queue's lock.
        if thread is not None and not self.callers.contains_this_thread():
            thread.shutdown(cancel_futures=True)

    def _close_backends(self) -> None:
        for backend in self.parts:
            backend.close()


class FutureWork(Work):
    """An operation on the thread of a hierarchical backend."""

    def __init__(self, future: futures.Future[Any]) -> None:
        self._future = future
        future.add_done_callback(self._end)

    def _end(self, future: futures.Future[Any]) -> None:
        self._end_time = time.monotonic()
        self.is_settled |= future.cancelled() or not isinstance(future.exception(), FAILURES)

    def wait(self, timeout: float | None = None) -> Any:
        limit = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        if timeout is not None and not futures.wait([self._future], limit).done:
            raise wait_timeout_error("an operation over several hosts", timeout)
        try:
            return self._future.result()
        except futures.CancelledError:  # by ``close``, before the thread had begun it
            raise errors.GroupClosedError("the group is closed. Create it again") from None
        except FAILURES:
            self.is_settled = True
            raise

    def is_completed(self) -> bool:
        return self._future.done()


class PartWork(Work):
    """A send or receive ``call`` in one backend, or a receive from any rank in two backends.

    ``works`` has for each backend an operation, and the backend's ranks as numbered in this group.
    A receive from any rank has a ``claim`` (see ``Call``). If ``call`` fails, all backends end.
    """

    def __init__(
        self, owner: HierarchicalBackend, call: Call, works: Sequence[tuple[Work, Sequence[int]]],
        claim: Array | None = None,
    ) -> None:  # fmt: skip
        self._owner, self._call, self._works, self._claim = owner, call, works, claim

    def wait(self, timeout: float | None = None) -> Any:
        seconds = math.inf if timeout is None else timeout
        end, flat = time.monotonic() + seconds, self._works[-1][0]
        while not self._is_decided():
            if (left := end - time.monotonic()) <= 0:
                who = f"rank {self._owner.rank} of {self._owner.size}"
                raise wait_timeout_error(f"[{self._call.name}] {who}", seconds)
            with suppress(errors.DistributedError):  # ``_result`` raises the error
                flat.wait(min(left, _LOOK_SECONDS))  # notify the library that a thread waits
            if self._claim is not None and not self._is_decided():
                native = _native.load_extension("gloo")
                claim = native.ffi.cast("int32_t *", self._claim.ctypes.data)
                native.lib.fl_claim_wait(claim, min(left, _SLICE_SECONDS))
        self._cancel()
        rest = None if timeout is None else max(0.0, end - time.monotonic())
        return self._owner.guarded(self._call.name, lambda: self._result(rest))

    def _result(self, timeout: float | None) -> Any:
        for work, ranks in self._works:
            result = work.wait(timeout)
            if isinstance(result, Matched):
                return Matched(ranks[result.source], result.rows)
            if self._claim is None:
                return result
        return None  # no message arrived

    def _is_decided(self) -> bool:
        """Return whether a backend has the message, or has failed."""
        if self._claim is None or self._claim[0]:
            return True
        return any(work.is_completed() for work, _ in self._works)

    def _cancel(self) -> None:
        """Cancel the operations that have no message."""
        for work, _ in self._works if self._claim is not None else ():
            work.cancel()

    def is_completed(self) -> bool:
        if not self._is_decided():
            return False
        self._cancel()
        return all(work.is_completed() for work, _ in self._works)

    def end_time(self) -> float | None:
        return max(filter(None, [work.end_time() for work, _ in self._works]), default=None)
