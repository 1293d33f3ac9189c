"""A group in a native library: describing a call, starting it, waiting for it, and the end.

Calls go there as the library takes them: a signature, addresses to read and to write.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py._native import codes
from flashlight_py._native.codes import MOVED
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.callers import (
    SITE_BYTES,
    Callers,
    answer_to_interrupts,
    raise_interruption,
)
from flashlight_py.distributed.backends.native_errors import (
    NAMED,
    call_in_words,
    failure,
    names_seen,
    words_of,
    words_of_traceback,
)
from flashlight_py.distributed.backends.native_work import (
    COMPARED,
    GATHERED,
    SCATTERED,
    NativeWork,
    freed_by,
    light_work,
)
from flashlight_py.distributed.calls.arrays import (
    check_out_rows,
    dtype_digest,
    dtype_name,
    native_code,
    row_bytes,
)
from flashlight_py.distributed.calls.call import COMPOSED, SHUTDOWN, Call, Matched
from flashlight_py.distributed.calls.call_site import (
    Site,
    caller,
    hidden_files,
    site_of,
    text_at_site,
)
from flashlight_py.distributed.calls.fast_path import EntryPoints, FastPath, dropped
from flashlight_py.distributed.calls.journal import NATIVE, OBJECTS, SENDRECV, Journal, Ring, forked
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.verbs import ALL_GATHER, BARRIER, GATHER, SCATTER, VERBS, Verb
from flashlight_py.distributed.work import AllOf, Done, Then, Work
from flashlight_py.errors import DistributedError, GroupClosedError

_ARRAY = object()

_LEAST_RUNNING = 8  # operations, before it is looked which have ended
SLOWER = "small calls take some microseconds longer"
_SEEN = 1024  # dtypes whose names are remembered
# The numbers of the calls that others are steps of; 0: a call by itself.
_STEPS = {"": 0, SHUTDOWN: 0} | {name: number for number, name in enumerate(COMPOSED, 1)}

# What csrc/fast/plain.h wants to know of each verb, by its code.
_flags = bytearray(codes.VERBS)
for _verb in VERBS:
    _flags[_verb.code] = (
        codes.VERB_KNOWN
        | _verb.rooted * codes.VERB_ROOTED
        | _verb.in_place * codes.VERB_IN_PLACE
        | _verb.reduces * codes.VERB_REDUCES
        | _verb.prefix * codes.VERB_PREFIX
    )
FLAGS = bytes(_flags)


def described(ffi: Any, call: Call, like: Array | None, code: int, root: int) -> tuple[Any, str]:
    """Return the signature of ``call``; ``like`` has its dtype and shape.

    The number of a dtype that the library does not know follows the dimensions. Also return the
    name of such a dtype, or of a barrier, which precedes the line of the call; else "".
    """
    name, size, dtype = "", (0, 0), call.compared * codes.COMPARED
    if like is None:
        shape: tuple[int, ...] = ()
        ndim = codes.REFUSED if call.refusal else codes.ANY if call.finds_shape else 0
        if call.part_of == SHUTDOWN:
            name = f"{SHUTDOWN}{NAMED}"
    else:
        holds, shape = call.holds, like.shape
        kind = native_code(like.dtype) if holds is None or call.verb.reduces else MOVED
        if holds is not None or kind == MOVED:
            held, shape = holds or (like.dtype, shape)
            number, text = dtype_digest(held), dtype_name(held)
            if len(names_seen) >= _SEEN:
                names_seen.clear()
            names_seen[number], name = text, f"{text}{NAMED}"
            shape = (*shape, number)
        ndim, dtype = len(shape), dtype | kind
        if call.compared:
            dtype |= is_cupy(like) * codes.ON_GPU
        size = like.size, 0 if call.compared else like.itemsize
    numbers = ndim, *size, code, dtype, call.op, root, _STEPS[call.part_of]
    # Of two zeros, which are equal, each has its own signature.
    return _signature(ffi, shape, call.scale, math.copysign(1.0, call.scale), *numbers), name


# From Python each field takes 50 ns or more, and a program calls the same again and again.
@functools.lru_cache(maxsize=1024)
def _signature(ffi: Any, shape: tuple[int, ...], scale: float, _: float, *numbers: int) -> Any:
    made = ffi.new("fl_signature *")
    made.ndim, made.count, made.itemsize, made.verb, made.dtype, *rest = numbers
    made.scale, (made.op, made.root, made.part_of) = scale, rest
    if len(shape) > codes.DIMENSIONS:  # the last is a hash of all from there on
        number = 0
        for extent in shape[codes.DIMENSIONS - 1 :]:
            number = number * 1099511628211 + extent
        shape = (*shape[: codes.DIMENSIONS - 1], number & (2**63 - 1))
    made.shape[0 : len(shape)] = shape
    return made


class NativeBackend(Backend):
    """The ranks of ``store`` in the library of ``native``, whose C ABI is ``csrc/common``'s.

    ``timeout`` is in seconds.
    """

    journal: Journal | None = None  # of the group that has this backend
    steps: tuple[str, ...] = ()  # its functions for calls in steps, if it has them
    finds_shape = True
    asks_for_sites = False  # whether it asks by itself where a blocking collective was called

    def __init__(self, native: ModuleType, store: Store, timeout: float) -> None:
        self.ffi, self.lib = native.ffi, native.lib
        self.rank, self.size, self.timeout = store.rank, store.size, timeout
        self.processes = store.processes
        # What users know the ranks as.
        self.numbers = list(store.numbers) or list(range(self.size))
        self.name = f"rank {self.numbers[self.rank]} of {store.total or self.size}"
        # The library's handle, which is freed when the last call that has it is done; None once the
        # group is closed.
        self.group: Any = None
        abort.watch(self)
        self._sites: dict[Site, Any] = {}
        self._running: dict[Any, None] = {}  # in order; threads change it at the same time
        self._most_running = _LEAST_RUNNING
        self._callers = Callers(self.name)
        self._first: list[Any] = []  # collected arrays, to be forgotten before the next call
        self._step: EntryPoints | None = None  # native code for steps of calls
        self._kept: list[Any] = []  # what the library may write to until its group is freed

    def bind(self, journal: Journal) -> FastPath:
        """Let native code read plain arrays by itself; see ``Backend``."""
        if (fast := _native.optional("fast", SLOWER)) is None:
            return super().bind(journal)
        self.journal = journal
        journal.open_to_native(fast.clocks)
        return self._bound(fast, journal)

    def step(self, verb: Verb, array: Array, seconds: float) -> Any:
        """Let native code make a step of a call; see ``Backend``. Nothing is recorded."""
        if (path := self._step) is None:
            fast = _native.optional("fast", SLOWER)
            path = self._step = EntryPoints() if fast is None else self._bound(fast, Ring())
        result = path.collective(verb.code, array, None, "sum", 1.0, 0, 0, False, seconds)
        return super().step(verb, array, seconds) if result is NotImplemented else result

    def _bound(self, fast: Any, ring: Ring) -> EntryPoints:
        fast.verbs(FLAGS)
        group = self._open("bind")
        self._callers.of_native = ring.header
        self._kept.append(ring.memory)
        of_op = [f"fl_op_{name}" for name in ("stamp", "wait", "signatures", "output", "free")]
        names = ("fl_run", "fl_exchange", *of_op, *self.steps)
        functions = [self._address_of(self.ffi.addressof(self.lib, name)) for name in names]
        of_group = self._address_of(group), group, self.rank, self.size
        functions_of_group = fast.bind(
            *(*of_group, self.timeout, self.packed_bytes),
            (*functions, *((0,) * 5 if not self.steps else ())),
            (self._native_ended, self._native_started, self._native_here),
            (AllOf, _raise_forked, light_work(fast), self._running),
            *(ring.memory, ring.notes, hidden_files(), self._callers.threads),
            (self._first, dropped),
        )
        return EntryPoints(*functions_of_group)

    def _owned(self, group: Any) -> Any:
        """Return ``group`` of the library, which is freed when nothing refers to it any more."""
        return freed_by(self.ffi, group, self.lib.fl_free, self._kept)

    def _begin(self, native: ModuleType, group: Any, at_once: bool = False) -> None:
        """Have calls go to ``group`` from now on."""
        self.group = group
        self._do("call_ranks", group, self.ffi.new("int[]", self.numbers))
        self._do("on_interrupt", group, answer_to_interrupts(native))
        if at_once:
            self._do("compare_at_once", group)

    def forget(self, work: Work) -> None:
        """Let go of an operation that has ended, and of whose end the caller learns now."""
        self._running.pop(work, None)

    def _do(self, name: str, group: Any, *args: Any) -> None:
        """Call a function of the library; raise DistributedError if it fails."""
        if getattr(self.lib, f"fl_{name}")(group, *args):
            raise DistributedError(f"[{name}] {self.name}: the library has failed: {self.reason()}")

    def reason(self) -> str:
        """Return the message of the last call of this thread that failed."""
        text: str = self.ffi.string(self.lib.fl_error()).decode(errors="replace")
        return text

    def _pointer(self, array: Array | None) -> Any:
        """Return the address of the elements, NULL where there is no array."""
        return self.ffi.NULL if array is None else self.ffi.from_buffer(array)

    def _address_of(self, pointer: Any) -> int:
        return int(self.ffi.cast("uintptr_t", pointer))

    def _native_here(self) -> int:
        """Return the address of the site of user code."""
        return self._address_of(self._here(1))

    def _native_ended(self, handle: Any, verb: int, x: Any, out: Any, made: Any, *call: Any) -> Any:
        """Return the result of a blocking native call that was not simply done, or raise."""
        root, number, limit = call  # the second: in the journal; the last: its time, in seconds
        try:
            if verb == SENDRECV.code:
                arrays = x, out, out
                works = [self._wrapped(one, verb, arrays, 0, limit) for one in handle if one]
                raise_interruption(self.lib, self.ffi.NULL)
                AllOf(works).wait()
                return out
            raise_interruption(self.lib, self.ffi.cast("fl_op *", handle))
            return self._wrapped(handle, verb, (x, out, made), root, limit).wait()
        except BaseException as error:
            if self.journal is not None:
                self.journal.record_failure(number, error)
            if not isinstance(error, Exception):  # of a call that was queued the rest would go on
                abort.report(error, [self])
            raise

    def _native_started(self, handle: int, verb: int, *call: Any) -> Work:
        """Return the Work of an asynchronous native call."""
        # Array, out, result and room, which must live as long; place in the journal; collectives.
        *arrays, root, peer, place, number = call
        work: Work = Done(arrays[2])
        if handle:
            work = self._wrapped(handle, verb, arrays, root, self.timeout)
            work.id, work.number = place, number
        if verb == codes.RECV:
            work.source = peer
        return work

    def _wrapped(
        self, handle: int, verb: int, arrays: Sequence[Any], root: int, seconds: float
    ) -> NativeWork:
        """Return the Work of the operation ``handle``, an address; it needs all of ``arrays``."""
        x, out, made, *_ = arrays
        result = made
        if made is None and (NATIVE[verb] in OBJECTS or verb == codes.SCATTER):
            result = GATHERED if NATIVE[verb].ragged else SCATTERED
        elif made is not None and verb in (codes.ALL_GATHER, codes.GATHER):
            result = GATHERED
        name, op = NATIVE[verb].name, self.ffi.cast("fl_op *", handle)
        work = NativeWork(self, name, op, arrays, seconds, result, x, out, root, made)
        self._track(work)
        return work

    def _refuse(self, call: Call) -> Work:
        """Join ``call`` as one that equals no other's; other ranks, and the Work, raise that."""
        if self.group is None:
            return Done()  # it has ended, which the others know
        return self._launch(replace(call, blocking=False), result=None)

    def call_ahead(self, rank: int) -> str:
        """Return a collective that ``rank`` has begun and this rank has not, in words, or ""."""
        call, group = self.ffi.new("fl_signature *"), self.group
        ahead = group is not None and self.lib.fl_is_ahead(group, rank, call) > 0
        return call_in_words(call) if ahead else ""

    def _launch(
        self,
        call: Call,
        *,
        like: Array | None = None,
        root: int | None = None,
        data: Any = None,
        keep: Any = None,
        output: Array | None = None,
        room: Any = None,
        result: Any = _ARRAY,
    ) -> Work:
        """Have the library run ``call``, described by ``like`` (default: its array).

        The ranks compare ``root`` (default: the root's rank, or the tag). ``data`` and ``room``
        replace the addresses of array and output. ``keep`` lives as long as the operation. The Work
        returns ``result`` (default: the array).
        """
        group, thread = self._open(call.name), self._callers.check(call.name)
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
            self._callers.threads.add(thread)
            if self._first:
                self._forget_collected(group)
            signature, name = described(self.ffi, call, like, code, root)
            if text := call.refusal or name:
                site = self.ffi.new("fl_site *", {"text": text_at_site(text, SITE_BYTES)})
            else:
                asks = self.asks_for_sites and call.blocking and call.peer < 0
                # A rank may be done with these before anybody could ask.
                runs_ahead = verb.rooted or verb.prefix
                site = self.ffi.NULL if asks and not runs_ahead else self._here()
            where = source, target, call.peer
            how = seconds, self.lib.FL_AHEAD if call.is_ahead else not call.blocking, site
            handle = self.lib.fl_run(group, signature, *where, *how)
            raise_interruption(self.lib, handle)
        finally:
            self._callers.threads.discard(thread)
        if handle == self.ffi.NULL:
            return Done(output if result is GATHERED else None if result is COMPARED else result)
        if call.compared:
            array = None  # nobody reads it
        kept, made_of = (array, output, room, keep), (result, array, output, root)
        work = NativeWork(self, call.name, handle, kept, seconds, *made_of)
        if not (call.compared or call.refusal):  # else whoever compares keeps the Work
            self._track(work)
        return work

    def _forget_collected(self, group: Any) -> None:
        """Let the library forget the arrays of ``_first``, unless another thread is in a call."""
        dropped, self._first[:] = list(self._first), []
        self._first += [array for array in dropped if not self.lib.fl_drop_region(group, array)]

    # The library writes into them also after Ctrl-C has ended a blocking wait.
    def _track(self, work: NativeWork) -> None:
        """Keep the arrays of ``work``, whether or not somebody keeps the Work."""
        self._running[work] = None
        if len(self._running) > self._most_running:
            for other in list(self._running):
                if other.has_ended_well():
                    self.forget(other)
            self._most_running = max(_LEAST_RUNNING, 2 * len(self._running))

    def is_calling(self) -> bool:
        return self._callers.has_this()

    def _open(self, name: str) -> Any:
        """Return the library's handle for a call of ``name``."""
        if (group := self.group) is None:
            raise GroupClosedError(f"[{name}] {self.name}: the group is closed")
        return group

    def _here(self, depth: int = 3) -> Any:
        """Return where user code has called, as the library takes it."""
        place = caller(depth)
        if (site := self._sites.get(place)) is None:
            text = site_of(place).encode()[-SITE_BYTES:]
            site = self._sites[place] = self.ffi.new("fl_site *", {"text": text})
        return site

    def start(self, call: Call) -> Work:
        if call.refusal:
            return self._refuse(call)
        if call.is_open:
            return self._receive_open(call)
        if call.compared:
            return self._compare(call)
        form = self._reduce_sections if call.verb.reduces else self._swap_sections
        if call.rows is None:
            forms = {ALL_GATHER: self._gather, GATHER: self._gather, SCATTER: self._scatter}
            form = forms.get(call.verb, self._plain)
        return form(call)

    def _compare(self, call: Call) -> Work:
        """Start comparing what ranks call; see ``Call.compared``."""
        rows = call.rows if call.verb.reduces else None
        root = None if rows is None else _digest(self._table(rows))
        work = self._launch(call, like=call.like, root=root, result=COMPARED)
        return Then(work, lambda number: _keep(call, number)) if call.verb.is_message else work

    def _table(self, rows: Sequence[int]) -> Array:
        """Return ``rows`` as what each rank (first index) has for each."""
        return np.tile(np.array(rows, np.int64), (self.size, 1))

    def _plain(self, call: Call) -> Work:
        """Start a verb that works in place, or whose result has a size that is known here."""
        if call.verb.writes != "result":
            return self._launch(call, result=SCATTERED if call.finds_shape else _ARRAY)
        out = self._result(call, call.verb.shape(call.array.shape, self.size, None))
        return self._launch(call, output=out, result=out)

    def _result(self, call: Call, shape: Any) -> Array:
        """Return where the result of ``call`` goes: a new array of ``shape`` unless it says so."""
        return np.empty(shape, call.array.dtype) if call.out is None else call.out

    def _gather(self, call: Call) -> Work:
        """Start a gather; the library fills ``out`` if what arrives has its size."""
        room, out = self.ffi.NULL, call.out
        if out is not None and out.nbytes:  # else whoever waits counts the rows
            room = self.ffi.new("fl_room *", (self._pointer(out), out.nbytes))
        wanted = call.verb.fills(self.rank, call.root)
        return self._launch(call, output=out, room=room, result=GATHERED if wanted else None)

    def _scatter(self, call: Call) -> Work:
        """Start a scatter: without ``out`` elsewhere than on the root, the library has the part."""
        out = call.out
        if call.array is not None:
            out = self._result(call, call.array.shape[1:])
        return self._launch(call, like=out, output=out, result=SCATTERED if out is None else out)

    def _reduce_sections(self, call: Call) -> Work:
        """Start a reduce_scatter of unequal parts; ranks compare a digest of them."""
        assert call.rows is not None
        table = self._table(call.rows)
        part = self._result(call, (call.rows[self.rank], *call.array.shape[1:]))
        sections = self._sections(call.array, table)
        return self._launch(call, root=_digest(table), output=part, result=part, **sections)

    def _swap_sections(self, call: Call) -> Work:
        """Start an all_to_all of unequal parts, of which the ranks first notify each other."""
        assert call.rows is not None
        mine = np.array(call.rows, np.int64)
        step = Call(ALL_GATHER, mine, seconds=call.seconds, part_of="all_to_all(rows=...)")
        table = self.start(step).wait().reshape(self.size, self.size)
        arrive = int(table[:, self.rank].sum())
        if call.received is not None:
            call.received += table[:, self.rank].tolist()
        out, got = call.out, call.room(arrive)
        work = self._launch(call, output=got, result=got, **self._sections(call.array, table))
        if out is None or got is out:
            return work
        return Then(work, lambda _: check_out_rows(call.name, out, arrive, self.rank, self.size))

    def _sections(self, array: Array, table: Array) -> dict[str, Any]:
        """Return ``data`` and ``keep`` of a call: ``table`` has the rows of each rank for each."""
        bytes_of_all = np.ascontiguousarray(table * row_bytes(array))
        table_pointer = self.ffi.cast("int64_t *", bytes_of_all.ctypes.data)
        sections = self.ffi.new("fl_sections *", (self._pointer(array), table_pointer))
        return {"data": sections, "keep": (bytes_of_all, sections)}

    def _receive_open(self, call: Call) -> Work:
        """Receive what is found."""
        how: dict[str, Any] = {"partial": call.partial, "patience": call.patience}
        if call.claim is not None:
            how["claim"] = self.ffi.cast("int32_t *", call.claim.ctypes.data)
        match = self.ffi.new("fl_match *", {"source": -1, **how})
        result = COMPARED if call.compared else None
        work = self._launch(call, room=match, keep=call.claim, result=result)

        def found(number: int | None) -> Matched | None:
            _keep(call, number)
            return None if match.source < 0 else Matched(match.source, match.rows)

        return Then(work, found)

    def synchronize(self) -> None:
        """Block until all that was started has ended; raises what the first failure raises."""
        for work in list(self._running):
            work.wait()

    def abort(self, cause: str | DistributedError) -> None:
        if (group := self.group) is not None:
            words = words_of_traceback(self, cause) if isinstance(cause, str) else words_of(cause)
            self._do("give_up", group, words.encode(errors="replace"))

    def lost(self, doing: str) -> DistributedError | None:
        if (group := self.group) is None:
            return GroupClosedError(f"[{doing}] {self.name}: the group is closed")
        if (handle := self.lib.fl_lost(group)) == self.ffi.NULL:
            return None
        handle = self.ffi.gc(handle, self.lib.fl_op_free)
        return failure(self, handle, self.lib.fl_op_wait(handle, 0.0), doing, self.timeout, 0)

    def leave(self) -> None:
        if (group := self.group) is not None:
            self._do("leave", group)

    def is_busy(self) -> bool:
        return any(not work.is_completed() for work in list(self._running))

    def abandon(self) -> None:
        group, self.group, self._step = self.group, None, None
        if group is not None:
            self._do("abandon", group)

    def close(self) -> None:
        """End what runs; the native threads have ended on return.

        A call that this very thread is in, as in a signal handler, ends when that goes on.
        """
        group, self.group, self._step, self._kept = self.group, None, None, []
        if group is not None:
            self._first.clear()
            self._do("close", group)
        self._running.clear()


def _raise_forked(code: int) -> None:
    raise forked(NATIVE[code].name)


def _keep(call: Call, number: int | None) -> None:
    """Keep the number of a message that was compared, for the one who asks for it."""
    if call.received is not None and number is not None:
        call.received.append(number)


def _digest(table: Array) -> int:
    """Return a positive number of 31 bits that ranks with the same ``table`` have in common."""
    return 1 + zlib.crc32(table.tobytes()) % (2**31 - 1)
