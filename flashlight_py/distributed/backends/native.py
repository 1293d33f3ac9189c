"""The base class of backends that call a native library, and operations that the library runs.

A call is passed to the library as a signature and the addresses of its input and output.
"""

import functools
import math
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from flashlight_py._native import codes, optional
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.backend import Backend, Callers, EntryPoints, dropped
from flashlight_py.distributed.backends import native_errors
from flashlight_py.distributed.calls import arrays as call_arrays
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.arrays import check_out_rows, native_code, row_bytes
from flashlight_py.distributed.calls.call import COMPOSED, SHUTDOWN, Call, Matched
from flashlight_py.distributed.calls.journal import NATIVE, Journal, forked, hidden_files
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.verbs import ALL_GATHER, BARRIER, GATHER, SCATTER
from flashlight_py.distributed.work import AllOf, Done, Then, Work, wait_timeout_error
from flashlight_py.errors import DistributedError, GroupClosedError

_ARRAY = object()
SITE_BYTES = codes.SITE_BYTES - 1  # without the terminating zero

_LEAST_RUNNING = 8  # minimum number of tracked operations before ended operations are removed
SLOWER = "small calls take some microseconds longer"
_SEEN = 1024  # Maximum number of dtype names that are remembered
# Maximum seconds of one wait inside the library; signal handlers (Ctrl-C) run between waits.
_SLICE_SECONDS = 0.1

# By name of a composed call: its number in the signatures of its steps. 0: the call is no step.
_STEPS = {"": 0, SHUTDOWN: 0} | {name: number for number, name in enumerate(COMPOSED, 1)}


def signature_of(ffi: Any, call: Call, like: Array | None, code: int, root: int) -> tuple[Any, str]:
    """Return (signature, name) of ``call``, with dtype and shape of ``like``.

    ``name`` is the name of a dtype that the library has no code for, or of the barrier of the
    shutdown; otherwise it is "". The call sends ``name`` in front of its call site. The signature
    has the number of such a dtype after the extents of the shape.
    """
    name, size, dtype = "", (0, 0), call.compared * codes.COMPARED
    if like is None:
        shape: tuple[int, ...] = ()
        ndim = codes.REFUSED if call.refusal else codes.ANY if call.finds_shape else 0
        if call.part_of == SHUTDOWN:
            name = f"{SHUTDOWN}{native_errors.NAMED}"
    else:
        holds, shape = call.holds, like.shape
        kind = native_code(like.dtype) if holds is None or call.verb.reduces else codes.MOVED
        if holds is not None or kind == codes.MOVED:
            dtype_held, shape = holds or (like.dtype, shape)
            number, text = call_arrays.dtype_digest(dtype_held), call_arrays.dtype_name(dtype_held)
            if len(native_errors.dtype_names) >= _SEEN:
                native_errors.dtype_names.clear()
            native_errors.dtype_names[number], name = text, f"{text}{native_errors.NAMED}"
            shape = (*shape, number)
        ndim, dtype = len(shape), dtype | kind
        if call.compared:
            dtype |= is_cupy(like) * codes.ON_GPU
        size = like.size, 0 if call.compared else like.itemsize
    numbers = ndim, *size, code, dtype, call.op, root, _STEPS[call.part_of]
    # 0.0 and -0.0 are equal, so the sign is a key of the cache as well.
    return _signature(ffi, shape, call.scale, math.copysign(1.0, call.scale), *numbers), name


# Cached: setting a field from Python takes 50 ns or more, and programs repeat their calls.
@functools.lru_cache(maxsize=1024)
def _signature(ffi: Any, shape: tuple[int, ...], scale: float, _: float, *numbers: int) -> Any:
    signature = ffi.new("fl_signature *")
    signature.scale = scale
    signature.ndim, signature.count, signature.itemsize, signature.verb, *rest = numbers
    signature.dtype, signature.op, signature.root, signature.part_of = rest
    if len(shape) > codes.DIMENSIONS:  # the last entry is a hash of the remaining extents
        number = 0
        for extent in shape[codes.DIMENSIONS - 1 :]:
            number = number * 1099511628211 + extent
        shape = (*shape[: codes.DIMENSIONS - 1], number & (2**63 - 1))
    signature.shape[0 : len(shape)] = shape
    return signature


def freed_by(ffi: Any, pointer: Any, free: Callable[[Any], object], kept: object = None) -> Any:
    """Return ``pointer``. Its garbage collection calls ``free(pointer)`` and releases ``kept``.

    Only C functions run in the collection. Python code could run a signal handler there, and an
    exception of the handler (Ctrl-C) would be lost.
    """
    destructor: Any = functools.partial(free)
    destructor.kept = kept
    return ffi.gc(pointer, destructor)


def keeping(ffi: Any, pointer: Any, kept: object) -> Any:
    """Return ``pointer``, which keeps ``kept`` alive."""
    return freed_by(ffi, pointer, id, kept)  # ``id`` frees nothing


@functools.cache
def light_work(fast: Any) -> Any:
    """Return the class of the Works that the native module ``fast`` creates."""
    return type("LightWork", (fast.Started, Work), {"__slots__": (), "__module__": __name__})


class NativeWork(Work):
    """A native operation. It keeps the objects in ``kept`` alive.

    ``wait`` returns ``result``, or the received array if ``result`` is a function such as
    ``GATHERED``. ``like``, ``out`` and ``root`` are arguments of the call. ``made`` is None, or an
    array for the result of a gather in which all ranks pass equal row counts.
    """

    id = 0  # entry in the backend's journal; 0: native code recorded no entry

    def __init__(
        self, backend: "NativeBackend", name: str, handle: Any, kept: Any, seconds: float,
        result: Any = None, like: Any = None, out: Any = None, root: int = 0, made: Any = None,
    ) -> None:  # fmt: skip
        self._backend, self._name, self._lib = backend, name, backend.lib
        self._handle = backend.ffi.gc(handle, backend.lib.fl_op_free)
        self._kept, self._seconds = kept, seconds
        self._result, self._like, self._out, self._root = result, like, out, root
        self._made = made
        self.number = backend.count[0]  # number of this collective in the group
        self._forks = journal.forks

    def wait(self, timeout: float | None = None) -> Any:
        if self._forks != journal.forks:
            raise journal.forked(self._name)
        pending = self._lib.FL_PENDING
        seconds = left = math.inf if timeout is None else timeout
        end = time.monotonic() + seconds
        while (status := self._status(min(_SLICE_SECONDS, max(0.0, left)))) == pending:
            left = end - time.monotonic()
            if not left > 0:  # also raise if ``left`` is NaN
                raise wait_timeout_error(f"[{self._name}] {self._backend.name}", seconds)
        self._backend.forget(self)
        if status != self._lib.FL_OK:
            backend, about = self._backend, (self._name, self._seconds, self.number)
            error = native_errors.failure(backend, self._handle, status, *about)
            if self.id and backend.journal is not None:
                backend.journal.record_failure(self.id, error)
                self.id = 0  # record the call once, even if several threads wait
            raise error
        result = self._result  # read once, because another thread may replace it
        if callable(result):
            self._result = result = result(self)
        return result

    def _status(self, seconds: float) -> int:
        group = self._backend.group  # noqa: F841  (keeps it alive: a wait may run the operation)
        return int(self._lib.fl_op_wait(self._handle, seconds))

    def cancel(self) -> None:
        if self._forks == journal.forks and self._lib.fl_op_cancel(self._handle):
            where, reason = f"[cancel] {self._backend.name}", self._backend.reason()
            raise DistributedError(f"{where}: the library failed: {reason}")

    def is_completed(self) -> bool:
        """Return whether the operation has ended; always True in a forked child."""
        if self._forks != journal.forks:
            return True
        return self._status(0.0) != int(self._lib.FL_PENDING)

    def has_ended_well(self) -> bool:
        """Return whether the operation has ended and ``wait`` would raise no error."""
        if self._forks == journal.forks and self._status(0.0) != self._lib.FL_OK:
            return False
        return self._result is not GATHERED or self._out is None or not self._fetched()[0]

    def end_time(self) -> float | None:
        if self._forks != journal.forks:
            return None
        return self._lib.fl_op_ended(self._handle) or None

    def _compared(self) -> Any:
        """Return the result of a comparison; see ``compared`` and ``received`` of ``Call``."""
        size, signatures = self._backend.size, self._signatures()
        if signatures == self._backend.ffi.NULL:
            return None
        verb = signatures[self._backend.rank].verb
        if verb in (codes.SEND, codes.RECV):  # the number of a message is from its sender
            return max(signatures[rank].sequence for rank in range(size))
        if verb == codes.SCATTER:
            return self._sent()
        has_rows = verb in (codes.ALL_GATHER, codes.GATHER, codes.ALL_TO_ALL_UNEVEN)
        return [signatures[rank].shape[0] for rank in range(size)] if has_rows else None

    def _sent(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return dtype and shape of one part that the root of a scatter sent."""
        signature = self._signatures()[self._root]
        code = signature.dtype & ~(codes.COMPARED | codes.ON_GPU)
        if code == codes.MOVED:
            return call_arrays.ENCODED_PART, (signature.count,)
        return call_arrays.dtype_of_code(code), tuple(signature.shape[0 : signature.ndim])

    def _signatures(self) -> Any:
        return self._lib.fl_op_signatures(self._handle)

    def _gathered(self) -> Any:
        """Return the rows of all ranks, in ``out`` or a new array; or see ``gather_small``."""
        backend, result = self._backend, self._made if self._out is None else self._out
        if result is not None and not self._fetched()[0]:
            return result
        signatures = [self._signatures()[rank] for rank in range(backend.size)]
        counts = [signature.shape[0] for signature in signatures]
        if backend.may_withhold and any(map(_is_withheld, signatures)):
            return counts
        rows = sum(counts)
        if result is not None and call_arrays.row_count(result) == rows:  # empty: no bytes arrived
            return result
        if self._out is not None:
            call_arrays.check_out_rows(self._name, self._out, rows, backend.rank, backend.size)
        return self._wrap(self._like.dtype, (rows, *self._like.shape[1:]))

    def _scattered(self) -> Array:
        dtype, shape = self._sent()
        if dtype is call_arrays.ENCODED_PART:
            return call_arrays.decode_part(self._wrap(np.dtype(np.uint8), shape))
        return self._wrap(dtype, shape)

    def _wrap(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return the received bytes as an array without a copy. The array keeps them alive."""
        ffi, (pointer, count) = self._backend.ffi, self._fetched()
        owner = keeping(ffi, ffi.cast("char *", pointer), self._handle)
        array: Array = np.ndarray(shape, dtype, ffi.buffer(owner, count))
        return array

    def _fetched(self) -> tuple[Any, int]:
        """Return address and length of the received bytes. NULL: the result array contains them."""
        count = self._backend.ffi.new("size_t *")
        return self._lib.fl_op_output(self._handle, count), count[0]


# Functions that return a result from received data: rows of all ranks, one part, or calls.
GATHERED, SCATTERED, COMPARED = NativeWork._gathered, NativeWork._scattered, NativeWork._compared


def _is_withheld(signature: Any) -> bool:
    """Return whether the rank that sent ``signature`` has not sent its array."""
    extents = signature.shape[0 : max(0, min(signature.ndim, codes.DIMENSIONS))]
    return signature.verb == codes.ALL_GATHER and not signature.count and all(extents)


class _Withheld(NamedTuple):
    """In a signature, an array that is not sent."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    itemsize: int
    size: int = 0


class Outer(NamedTuple):
    """Arguments of native functions, from their own backend or from a backend on top of it.

    Python handles the calls of ``threads``, and all calls while ``waiting`` has entries. A backend
    over several hosts passes ``most`` for all ranks. Then Python also handles receives from any
    rank, started receives that are ``partial``, and collectives that are started, use memory
    instead of arrays, or have more bytes than ``most[code]``. ``inside`` is a native function of
    the backend of this host's ranks. That backend gets ``ranks``: its number of each rank, or -1.
    """

    ended: Callable[..., Any]
    started: Callable[..., Any]
    threads: set[int]
    waiting: list[Any]
    most: Array | None = None
    inside: Callable[..., Any] | None = None
    ranks: Array | None = None


class NativeBackend(Backend):
    """Backend for the ranks of ``store`` in a native library with the C ABI of ``csrc/common``.

    ``timeout`` (seconds) bounds one operation.
    """

    journal: Journal | None = None  # None until ``bind``
    steps: tuple[str, ...] = ()  # names of C functions that run a call in several steps
    finds_shape = True
    may_withhold = False  # whether a rank may call ``gather_small``
    asks_for_sites = False  # whether the library asks for the call site of a blocking call

    def __init__(self, native: ModuleType, store: Store, timeout: float) -> None:
        self.ffi, self.lib = native.ffi, native.lib
        self.rank, self.size, self.timeout = store.rank, store.size, timeout
        self.processes = store.processes
        # Messages to users name the ranks by these numbers.
        self.numbers = list(store.numbers) or list(range(self.size))
        self.name = f"rank {self.numbers[self.rank]} of {store.total or self.size}"
        # Handle of the group in the library; None after close(). It is freed after its last use.
        self.group: Any = None
        abort.watch(self)
        self._sites: dict[journal.Site, Any] = {}
        self._running: dict[Any, None] = {}  # an ordered set; several threads change it
        self._most_running = _LEAST_RUNNING
        self.callers = Callers(self.name)
        self.unused: list[Any] = []  # garbage-collected shared arrays, which the next call frees
        self._kept: list[Any] = []  # buffers that the library may write until it frees the group

    def bind(self, journal: Journal, outer: Outer | None = None) -> EntryPoints:
        """Return native functions that accept plain NumPy arrays directly; see ``Backend``."""
        if (fast := optional("fast", SLOWER)) is None:
            return super().bind(journal)
        callbacks = self.native_ended, self.native_started
        outer = outer or Outer(*callbacks, self.callers.threads, self.unused)
        self.journal = journal
        journal.open_to_native(fast)
        group = self._open("bind")
        self.callers.native_header = journal.header
        self._kept.append(journal.memory)
        of_op = [f"fl_op_{name}" for name in ("stamp", "wait", "signatures", "output", "free")]
        names = ("fl_run", "fl_exchange", *of_op, *self.steps)
        functions = [self._address_of(self.ffi.addressof(self.lib, name)) for name in names]
        of_group = self._address_of(group), group, self.rank, self.size
        functions_of_group = fast.bind(
            *(*of_group, self.timeout, self.packed_bytes, (outer.most, outer.inside, outer.ranks)),
            (*functions, *((0,) * 5 if not self.steps else ())),
            (outer.ended, outer.started, lambda: self._address_of(self._call_site(1))),
            (AllOf, _raise_forked_error, light_work(fast), self._running),
            *(journal.memory, journal.notes, hidden_files(), outer.threads),
            (outer.waiting, dropped),
        )
        return EntryPoints(*functions_of_group)

    def _owned(self, group: Any) -> Any:
        """Return the handle ``group``, which is freed when no reference to it remains."""
        return freed_by(self.ffi, group, self.lib.fl_free, self._kept)

    def _begin(self, native: ModuleType, group: Any, at_once: bool = False) -> None:
        """Set the handle ``group``. If ``at_once``, a call returns only after all ranks made it."""
        self.group = group
        self._do("call_ranks", group, self.ffi.new("int[]", self.numbers))
        self._do("on_interrupt", group, interrupt_callback(native))
        if at_once:
            self._do("compare_at_once", group)

    def forget(self, work: Work) -> None:
        """Remove the reference to ``work``, which has ended."""
        self._running.pop(work, None)

    def _do(self, name: str, group: Any, *args: Any) -> None:
        """Call a function of the library, unless ``group`` is None (closed)."""
        if group is not None and getattr(self.lib, f"fl_{name}")(group, *args):
            raise DistributedError(f"[{name}] {self.name}: the library failed: {self.reason()}")

    def reason(self) -> str:
        """Return the error message of the last failed call of this thread."""
        text: str = self.ffi.string(self.lib.fl_error()).decode(errors="replace")
        return text

    def _pointer(self, array: Array | None) -> Any:
        return self.ffi.NULL if array is None else self.ffi.from_buffer(array)

    def _address_of(self, pointer: Any) -> int:
        return int(self.ffi.cast("uintptr_t", pointer))

    def native_ended(self, handle: Any, verb: int, x: Any, out: Any, made: Any, *call: Any) -> Any:
        """Finish a blocking call that native code started; return its result or raise its error."""
        root, number = call  # ``number``: entry in the journal
        try:
            if verb == journal.SENDRECV.code:
                arrays, work = (x, out, out), handle
                if not isinstance(work, Work):  # the send and the receive are in the same library
                    work = AllOf([self._wrapped(op, verb, arrays, 0) for op in handle if op])
                    raise_interruption(self.lib, self.ffi.NULL)
                work.wait()
                return out
            raise_interruption(self.lib, self.ffi.cast("fl_op *", handle))
            return self._wrapped(handle, verb, (x, out, made), root).wait()
        except BaseException as error:
            if self.journal is not None:
                self.journal.record_failure(number, error)
            if not isinstance(error, Exception):  # such as Ctrl-C: the other ranks must not wait
                abort.report(error, [self])
            raise

    def native_started(self, handle: int, verb: int, *call: Any) -> Work:
        # ``arrays`` must outlive the operation. ``number`` is the collective's number in the group.
        *arrays, root, peer, entry, number = call
        work: Work = Done(arrays[2])
        if handle:
            work = self._wrapped(handle, verb, arrays, root)
            work.id, work.number = entry, number
        if verb == codes.RECV:
            work.source = peer
        return work

    def _wrapped(self, handle: int, verb: int, arrays: Sequence[Any], root: int) -> NativeWork:
        """Return a Work for the operation at address ``handle``. It keeps ``arrays`` alive."""
        x, out, made, *_ = arrays
        result = made
        if made is None and (NATIVE[verb] in journal.OBJECTS or verb == codes.SCATTER):
            result = GATHERED if NATIVE[verb].ragged else SCATTERED
        elif made is not None and verb in (codes.ALL_GATHER, codes.GATHER):
            result = GATHERED
        name, op = NATIVE[verb].name, self.ffi.cast("fl_op *", handle)
        work = NativeWork(self, name, op, arrays, self.timeout, result, x, out, root, made)
        self._track(work)
        return work

    def call_ahead(self, rank: int) -> str:
        """Return as text a collective that ``rank`` has begun before this rank, or ""."""
        call, group = self.ffi.new("fl_signature *"), self.group
        ahead = group is not None and self.lib.fl_is_ahead(group, rank, call) > 0
        return native_errors.signature_text(call) if ahead else ""

    def _launch(
        self, call: Call, *, like: Array | None = None, root: int | None = None, data: Any = None,
        keep: Any = None, output: Array | None = None, room: Any = None, result: Any = _ARRAY,
    ) -> Work:  # fmt: skip
        """Start ``call`` in the library and return its Work.

        The ranks compare dtype and shape of ``like`` (default: ``call.array``), and ``root``
        (default: ``call.root``, or ``call.tag`` of a message). Pointers ``data`` and ``room``
        replace ``call.array`` and ``output``. The Work keeps ``keep`` alive, and returns ``result``
        (default: ``call.array``).
        """
        group, thread = self._open(call.name), self.callers.check(call.name)
        verb, array = call.verb, call.array
        seconds = self.timeout if call.seconds is None else call.seconds
        if root is None:
            root = call.tag if verb.is_message else call.root
        result = array if result is _ARRAY else result
        if call.compared:
            data = self.ffi.NULL
        source = self._pointer(array) if data is None else data
        target = self._pointer(output) if room is None else room
        code = verb.code if call.rows is None else verb.uneven
        if call.refusal and not verb.is_message:
            code = BARRIER.code
        like = array if like is None else like
        try:
            self.callers.threads.add(thread)
            if self.unused:  # collected shared arrays: free them if no other thread is in a call
                dropped, self.unused[:] = list(self.unused), []
                self.unused += [a for a in dropped if not self.lib.fl_drop_region(group, a)]
            signature, name = signature_of(self.ffi, call, like, code, root)
            if text := call.refusal or name:
                site = self.ffi.new("fl_site *", {"text": journal.text_at_site(text, SITE_BYTES)})
            else:
                asks = self.asks_for_sites and call.blocking and call.peer < 0
                # In a verb with a root and in a scan, this rank may return before another rank asks
                # for its call site.
                runs_ahead = verb.rooted or verb.prefix
                site = self.ffi.NULL if asks and not runs_ahead else self._call_site()
            addresses = source, target, call.peer
            options = seconds, self.lib.FL_AHEAD if call.is_ahead else not call.blocking, site
            handle = self.lib.fl_run(group, signature, *addresses, *options)
            raise_interruption(self.lib, handle)
        finally:
            self.callers.threads.discard(thread)
        if handle == self.ffi.NULL:
            return Done(output if result is GATHERED else None if result is COMPARED else result)
        if call.compared:
            array = None  # the comparison reads no array
        kept, results = (array, output, room, keep), (result, array, output, root)
        work = NativeWork(self, call.name, handle, kept, seconds, *results)
        if not (call.compared or call.refusal):  # otherwise the caller keeps the Work
            self._track(work)
        return work

    # Even after Ctrl-C has ended a blocking wait, the library writes into the arrays.
    def _track(self, work: NativeWork) -> None:
        """Keep ``work`` and its arrays until it has ended, even if the caller drops the Work."""
        self._running[work] = None
        if len(self._running) > self._most_running:
            for other in list(self._running):
                if other.has_ended_well():
                    self.forget(other)
            self._most_running = max(_LEAST_RUNNING, 2 * len(self._running))

    def _open(self, name: str) -> Any:
        if (group := self.group) is None:
            raise GroupClosedError(f"[{name}] {self.name}: the group is closed. Create it again")
        return group

    def _call_site(self, depth: int = 3) -> Any:
        line = journal.caller(depth)
        if (site := self._sites.get(line)) is None:
            text = journal.site_of(line).encode()[-SITE_BYTES:]
            site = self._sites[line] = self.ffi.new("fl_site *", {"text": text})
        return site

    def start(self, call: Call) -> Work:
        if call.refusal:  # send a signature that differs from every other rank's: all ranks raise
            if self.group is None:
                return Done()  # the group is closed, and the other ranks were notified
            return self._launch(replace(call, blocking=False), result=None)
        if call.is_open:
            return self._receive_open(call)
        if call.compared:
            return self._compare(call)
        start = self._reduce_sections if call.verb.reduces else self._swap_sections
        if call.rows is None:
            starts = {ALL_GATHER: self._gather, GATHER: self._gather, SCATTER: self._scatter}
            start = starts.get(call.verb, self._plain)
        return start(call)

    def _compare(self, call: Call) -> Work:
        root = _digest(self._table(call.rows)) if call.rows and call.verb.reduces else None
        work = self._launch(call, like=call.like, root=root, result=COMPARED)
        if not call.verb.is_message:
            return work
        return Then(work, lambda number: _store_number(call, number))

    def _table(self, rows: Sequence[int]) -> Array:
        """Return a matrix of row counts: a row of the matrix for each sender, equal to ``rows``."""
        return np.tile(np.array(rows, np.int64), (self.size, 1))

    def _plain(self, call: Call) -> Work:
        """Start a verb that works in place, or whose result has a shape that this rank knows."""
        if call.verb.writes != "result":
            return self._launch(call, result=SCATTERED if call.finds_shape else _ARRAY)
        out = self._result(call, call.verb.shape(call.array.shape, self.size, None))
        return self._launch(call, output=out, result=out)

    def _result(self, call: Call, shape: Any) -> Array:
        return np.empty(shape, call.array.dtype) if call.out is None else call.out

    def _gather(self, call: Call, like: Any = None) -> Work:
        """Start a gather. The library writes into ``out`` if the received bytes fit exactly."""
        room, out = self.ffi.NULL, call.out
        if out is not None and out.nbytes:  # otherwise ``wait`` checks the number of rows
            room = self.ffi.new("fl_room *", (self._pointer(out), out.nbytes))
        result = GATHERED if call.verb.fills(self.rank, call.root) else None
        return self._launch(call, like=like, output=out, room=room, result=result)

    def gather_small(self, call: Call, most: int) -> Work:
        """Start the all_gather ``call`` of arrays of at most ``most`` bytes.

        If an array of any rank is larger, no array is gathered. The result is then a list with the
        number of rows of each rank.
        """
        x = call.array
        like = x if x.nbytes <= most else _Withheld(x.shape, x.dtype, x.itemsize)
        return self._gather(call, like)

    def _scatter(self, call: Call) -> Work:
        """Start a scatter. The library allocates the part of a rank that passes no ``out``."""
        out = call.out
        if call.array is not None:
            out = self._result(call, call.array.shape[1:])
        return self._launch(call, like=out, output=out, result=SCATTERED if out is None else out)

    def _reduce_sections(self, call: Call) -> Work:
        """Start a reduce_scatter of unequal parts. The ranks compare a digest of the row counts."""
        assert call.rows is not None
        table = self._table(call.rows)
        part = self._result(call, (call.rows[self.rank], *call.array.shape[1:]))
        sections = self._sections(call.array, table)
        return self._launch(call, root=_digest(table), output=part, result=part, **sections)

    def _swap_sections(self, call: Call) -> Work:
        """Start an all_to_all of unequal parts, after an all_gather of the row counts."""
        assert call.rows is not None
        sent_rows = np.array(call.rows, np.int64)
        step = Call(ALL_GATHER, sent_rows, seconds=call.seconds, part_of="all_to_all(rows=...)")
        table = self.start(step).wait().reshape(self.size, self.size)
        count = int(table[:, self.rank].sum())
        if call.received is not None:
            call.received += table[:, self.rank].tolist()
        out, result = call.out, call.room(count)
        work = self._launch(call, output=result, result=result, **self._sections(call.array, table))
        if out is None or result is out:
            return work
        return Then(work, lambda _: check_out_rows(call.name, out, count, self.rank, self.size))

    def _sections(self, array: Array, table: Array) -> dict[str, Any]:
        """Return the arguments ``data`` and ``keep`` for ``_launch``. ``table``: see ``_table``."""
        bytes_of_all = np.ascontiguousarray(table * row_bytes(array))
        table_pointer = self.ffi.cast("int64_t *", bytes_of_all.ctypes.data)
        sections = self.ffi.new("fl_sections *", (self._pointer(array), table_pointer))
        return {"data": sections, "keep": (bytes_of_all, sections)}

    def _receive_open(self, call: Call) -> Work:
        """Start a receive from any rank, or a receive that is ``partial`` (see ``Call``)."""
        match = self.ffi.new("fl_match *", {"source": -1, "partial": call.partial, "patience": -1})
        if call.claim is not None:
            match.claim = self.ffi.cast("int32_t *", call.claim.ctypes.data)
        result = COMPARED if call.compared else None
        work = self._launch(call, room=match, keep=call.claim, result=result)

        def finish(number: int | None) -> Matched | None:
            _store_number(call, number)
            return None if match.source < 0 else Matched(match.source, match.rows)

        return Then(work, finish)

    def synchronize(self) -> None:
        """Wait until all started operations have ended; raises the first failure."""
        for work in list(self._running):
            work.wait()

    def abort(self, cause: str | DistributedError) -> None:
        text = native_errors.error_for_peers(self, cause)
        self._do("give_up", self.group, text.encode(errors="replace"))

    def lost(self, doing: str) -> DistributedError | None:
        if (group := self.group) is None:
            return GroupClosedError(f"[{doing}] {self.name}: the group is closed. Create it again")
        if (handle := self.lib.fl_lost(group)) == self.ffi.NULL:
            return None
        handle = self.ffi.gc(handle, self.lib.fl_op_free)
        status = self.lib.fl_op_wait(handle, 0.0)
        return native_errors.failure(self, handle, status, doing, self.timeout, 0)

    def leave(self) -> None:
        self._do("leave", self.group)

    def is_busy(self) -> bool:
        return any(not work.is_completed() for work in list(self._running))

    def abandon(self) -> None:
        group, self.group = self.group, None
        self._do("abandon", group)

    def close(self) -> None:
        """Fail pending operations and stop the native threads.

        If a signal handler closes the group, the call that it interrupted ends after the handler.
        """
        group, self.group, self._kept = self.group, None, []
        self.unused.clear()
        self._do("close", group)
        self._running.clear()


def _raise_forked_error(code: int) -> None:
    raise forked(NATIVE[code].name)


def _store_number(call: Call, number: int | None) -> None:
    """Append the number of a compared message to ``call.received``, if the caller passed a list."""
    if call.received is not None and number is not None:
        call.received.append(number)


def _digest(table: Array) -> int:
    """Return a positive number of 31 bits that is equal on ranks with the same ``table``."""
    return 1 + zlib.crc32(table.tobytes()) % (2**31 - 1)


# By thread id: the exception that a signal handler raised during a wait in the library.
_exceptions: dict[int, BaseException] = {}


def raise_interruption(lib: Any, handle: Any) -> None:
    """If a signal handler raised an exception during the wait for ``handle``, raise it here."""
    if _exceptions and (raised := _exceptions.pop(threading.get_ident(), None)) is not None:
        lib.fl_op_free(handle)
        raise raised


def _store_exception(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    _exceptions[threading.get_ident()] = error


def call_site_callback(native: ModuleType) -> Any:
    """Return the C callback that reports the current line of user code to native code."""

    @native.ffi.def_extern(name="fl_where", onerror=_store_exception)  # type: ignore[untyped-decorator]
    def write_site(site: Any) -> None:
        site.text = journal.call_site().encode()[-SITE_BYTES:]

    return native.lib.fl_where


def interrupt_callback(native: ModuleType) -> Any:
    """Return a C function. Waiting native calls call it to run Python's signal handlers."""

    @native.ffi.def_extern(name="fl_interrupted", error=1, onerror=_store_exception)  # type: ignore[untyped-decorator]
    def interrupted() -> int:
        return 0  # before this line Python has run the handlers; ``onerror`` stores their exception

    return native.lib.fl_interrupted
