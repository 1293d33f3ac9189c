"""A group in a native library: describing a call, starting it, waiting for it, and the end."""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from flashlight_py import _native
from flashlight_py.device import Array
from flashlight_py.distributed import last_words, open_groups
from flashlight_py.distributed.arrays import dtype_code
from flashlight_py.distributed.backend import COMPOSED, Backend
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.describing import Describer
from flashlight_py.distributed.backends.interrupts import SITE_BYTES, raise_interruption
from flashlight_py.distributed.backends.native_errors import words_of, words_of_traceback
from flashlight_py.distributed.backends.native_work import (
    GATHERED,
    SCATTERED,
    NativeWork,
    Received,
    StartedWork,
)
from flashlight_py.distributed.call_site import PACKAGE, Place, caller, site_of, text_at_site
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.recorder.journal import SENDRECV, VERBS, Journal
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.work import AllOf, Done, Work
from flashlight_py.errors import BackendUnavailableError, DistributedError, GroupClosedError

__all__ = ["MESSAGE_BYTES", "NativeGroup"]

MESSAGE_BYTES = 1024
_ARRAY = object()
_NAMES = {**dict(enumerate(VERBS)), SENDRECV: "sendrecv"}

_log = logging.getLogger("flashlight_py")


class NativeGroup(Backend):
    """A backend whose operations run in a library with the C ABI of ``csrc/common``."""

    kind = DistributedBackend.GLOO
    symbols = ""  # what the names of the library's functions begin with
    steps: tuple[str, ...] = ()  # its functions for a collective in steps, if it has them
    journal: Journal | None = None  # of the group that has this backend

    def __init__(self, native: ModuleType, store: Store, timeout: float) -> None:
        self.ffi, self.lib = native.ffi, native.lib
        self.rank, self.size, self.timeout = store.rank, store.size, timeout
        self.people = store.people
        # What users know the ranks as.
        self.numbers = list(store.numbers) or list(range(self.size))
        self.name = f"rank {self.numbers[self.rank]} of {store.total or self.size}"
        last_words.listen(self)
        # The library's handle, which is freed when the last call that has it is done; None once the
        # group is closed.
        self._group: Any = None
        self._sites: dict[Place, Any] = {}
        self._next = Describer(self.ffi, timeout)  # the call that this thread is about to make
        self._pointer = self._next.pointer
        self._callers = Callers(self.name)
        self._running: dict[NativeWork, None] = {}  # in order; threads change it at the same time
        self._first: list[Any] = []  # what is to be done before the next call
        self._free = _Free(getattr(self.lib, f"{self.symbols}_free"))

    def bind(self, journal: Journal) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Let native code read plain arrays by itself; see ``Backend``."""
        try:
            fast = _native.load("fast")
        except BackendUnavailableError as error:
            _log.warning("small calls take some microseconds longer: %s", error)
            return super().bind(journal)
        self.journal = journal
        journal.open_to_native(fast.clocks)
        self._callers.of_native = journal.header
        self._free.kept.append(journal.memory)
        own = [f"{self.symbols}_{name}" for name in ("run", "exchange")]
        of_op = [f"fl_op_{name}" for name in ("stamp", "wait", "signatures", "output", "free")]
        names = (*own, *of_op, *self.steps)
        functions = [self._address_of(self.ffi.addressof(self.lib, name)) for name in names]
        return fast.bind(  # type: ignore[no-any-return]
            *(self._address_of(self._group), self._group, self.rank, self.size, self.timeout),
            (*functions, *((0, 0, 0) if not self.steps else ())),
            (self._native_ended, self._native_started, self._native_here),
            *(journal.memory, journal.notes, PACKAGE, self._callers.threads),
            (self._first, open_groups.dropped),
        )

    def _in_python(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose calls go through Python, which says what they are steps of."""
        return contextlib.nullcontext() if self.journal is None else self.journal.in_python()

    @property
    def group(self) -> Any:
        """The library's handle; None once the group is closed."""
        return self._group

    def _address_of(self, pointer: Any) -> int:
        return int(self.ffi.cast("uintptr_t", pointer))

    def _native_here(self) -> int:
        """Return the address of the site of user code."""
        return self._address_of(self._here(1))

    def _native_ended(
        self, handle: Any, verb: int, x: Any, out: Any, made: Any, root: int, call: int
    ) -> Any:
        """Return the result of a blocking native call that was not simply done, or raise."""
        try:
            if verb == SENDRECV:
                works = [self._wrapped(one, verb, x, out, out, 0) for one in handle if one]
                raise_interruption(self.lib, self.ffi.NULL)
                AllOf(works).wait()
                return out
            raise_interruption(self.lib, self.ffi.cast("fl_op *", handle))
            return self._wrapped(handle, verb, x, out, made, root).wait()
        except BaseException as error:
            if self.journal is not None:
                self.journal.failed(call, error)
            raise

    def _native_started(
        self,
        handle: int,
        verb: int,
        x: Any,
        out: Any,
        made: Any,
        room: Any,
        root: int,
        peer: int,
        call: int,
    ) -> Work:
        """Return the Work of an asynchronous native call; ``room`` must live as long."""
        work: Work = Done(made)
        if handle:
            work = self._wrapped(handle, verb, x, out, made, root, room)
            work.id = call
        if verb == self.lib.FL_RECV:
            work.source = peer
        return work

    def _wrapped(
        self, handle: int, verb: int, x: Any, out: Any, made: Any, root: int, room: Any = None
    ) -> StartedWork:
        """Return the Work of the operation ``handle``, an address."""
        result = made
        if made is None and verb == self.lib.FL_SCATTER:
            result = SCATTERED
        elif made is not None and verb in (self.lib.FL_ALL_GATHER, self.lib.FL_GATHER):
            result = GATHERED
        name = _NAMES[verb]
        received = Received(name, result, x, out, root, made)
        kept, op = (x, out, made, room), self.ffi.cast("fl_op *", handle)
        work = StartedWork(self, name, op, kept, received, self.timeout)
        self._track(work)
        return work

    @abc.abstractmethod
    def _run(
        self,
        group: Any,
        data: Any,
        output: Any,
        peer: int,
        seconds: float,
        blocking: bool,
        site: Any = None,
    ) -> Any:
        """Start what ``self._next`` describes; a handle, or NULL where it has ended well.

        ``site`` is where it was called; None: where user code is.
        """

    def refuse(self, call: str) -> None:
        """Have the others raise; see ``Backend``."""
        self._refuse(call, self.lib.FL_BARRIER)

    def refuse_message(self, call: str, peer: int, tag: int, sends: bool) -> None:
        """Have the peer raise; see ``Backend``."""
        self._refuse(call, self.lib.FL_SEND if sends else self.lib.FL_RECV, peer, tag)

    def _refuse(self, call: str, verb: int, peer: int = -1, tag: int = 0) -> None:
        group, thread = self._group, self._callers.check("refuse")
        if group is None:
            return  # it has ended, which the others know
        site = self.ffi.new("fl_site *", {"text": text_at_site(call, SITE_BYTES)})
        null, seconds = self.ffi.NULL, self._next.seconds
        try:
            self._callers.threads.add(thread)
            self._describe("refuse", verb, None, ReduceOp.SUM, 1.0, tag)
            self._next.signature.ndim = self.lib.FL_REFUSED
            handle = self._run(group, null, null, peer, seconds, blocking=False, site=site)
        finally:
            self._callers.threads.discard(thread)
        self.lib.fl_op_free(handle)  # it goes on; who refused knows how it ends

    @abc.abstractmethod
    def call_ahead(self, rank: int) -> str:
        """Return a collective that ``rank`` has begun and this rank has not, in words, or ""."""

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Bound what is started within by ``seconds``; see ``Backend``."""
        before, self._next.seconds = self._next.seconds, seconds
        try:
            with self._in_python():
                yield
        finally:
            self._next.seconds = before

    @contextlib.contextmanager
    def part_of(self, call: str) -> Iterator[None]:
        """Mark what is started within as steps of ``call``; see ``Backend``."""
        signature = self._next.signature
        before, signature.part_of = signature.part_of, 1 + COMPOSED.index(call)
        try:
            with self._in_python():
                yield
        finally:
            signature.part_of = before

    def _start(
        self,
        name: str,
        verb: int,
        array: Array | None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        root: int = 0,
        peer: int = -1,
        like: Array | None = None,
        data: Any = None,
        keep: Any = None,
        output: Array | None = None,
        room: Any = None,
        result: Any = _ARRAY,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Work:
        """Start ``verb`` on ``array``, described by ``like`` (else itself).

        ``data`` and ``room`` are what the library gets in place of the addresses of array and
        output, ``keep`` what must live as long as the operation, ``result`` what the Work gives
        (else the array).
        """
        group, thread = self._open(name), self._callers.check(name)
        seconds = self._next.seconds if timeout is None else timeout
        result = array if result is _ARRAY else result
        source = self._pointer(array) if data is None else data
        target = self._pointer(output) if room is None else room
        try:
            self._callers.threads.add(thread)
            self._describe(name, verb, array if like is None else like, op, scale, root)
            handle = self._run(group, source, target, peer, seconds, blocking)
        finally:
            self._callers.threads.discard(thread)
        if handle == self.ffi.NULL:
            return Done(output if result is GATHERED else result)
        received = Received(name, result, array, output, root)
        work = NativeWork(self, name, handle, (array, output, room, keep), received, seconds)
        self._track(work)
        return work

    def _track(self, work: NativeWork) -> None:
        """Keep the arrays of ``work``.

        The library writes into them whether or not anybody keeps the Work, also after Ctrl-C has
        ended a blocking wait for it.
        """
        for other in list(self._running):
            if other.is_completed():
                self.forget(other)
        self._running[work] = None

    def is_calling(self) -> bool:
        """Return whether this thread is in the middle of a call; see ``Backend``."""
        return self._callers.has_this()

    def _open(self, name: str) -> Any:
        """Return the library's handle for a call of ``name``."""
        group = self._group
        if group is None:
            raise GroupClosedError(f"[{name}] {self.name}: the group is closed")
        return group

    def _describe(
        self, name: str, verb: int, array: Array | None, op: ReduceOp, scale: float, root: int
    ) -> None:
        if array is not None:
            code = dtype_code(name, array.dtype)
            self._next.describe(array, verb, code, op, scale, root)
            return
        signature = self._next.signature
        signature.verb, signature.op, signature.scale, signature.root = verb, op, scale, root
        signature.dtype = signature.itemsize = signature.count = 0
        signature.ndim = self.lib.FL_ANY if verb == self.lib.FL_SCATTER else 0

    def _here(self, depth: int = 3) -> Any:
        """Return where user code has called, as the library takes it."""
        place = caller(depth)
        site = self._sites.get(place)
        if site is None:
            text = site_of(place).encode()[-SITE_BYTES:]
            site = self._sites[place] = self.ffi.new("fl_site *", {"text": text})
        return site

    def message(self, room: Any) -> str:
        """Return what the library wrote into ``room``."""
        text: str = self.ffi.string(room).decode(errors="replace")
        return text

    def forget(self, work: NativeWork) -> None:
        """Let go of an operation that has ended, and of whose end the caller hears now."""
        self._running.pop(work, None)

    def synchronize(self) -> None:
        """Block until all that was started has ended; raises what the first failure raises."""
        for work in list(self._running):
            work.wait()

    def give_up(self, traceback: str) -> None:
        """Report to the others what this rank's program has raised; see ``Backend``."""
        self._end(words_of_traceback(self, traceback))

    def pass_on(self, error: DistributedError) -> None:
        """End the group, and have the others raise ``error``; see ``Backend``."""
        self._end(words_of(error))

    def _end(self, words: str) -> None:
        group = self._group
        if group is not None:
            self._give_up(group, words.encode(errors="replace"))

    @abc.abstractmethod
    def _give_up(self, group: Any, why: bytes) -> None:
        """Let the library tell the others."""

    def is_busy(self) -> bool:
        """Return whether something runs; see ``Backend``."""
        return any(not work.is_completed() for work in list(self._running))

    def abandon(self) -> None:
        """Close the descriptors, in a forked child; see ``Backend``."""
        group, self._group = self._group, None
        if group is not None:
            self._abandon(group)

    @abc.abstractmethod
    def _abandon(self, group: Any) -> None:
        """Close the descriptors of the library's ``group``."""

    def close(self) -> None:
        """End what runs; the native threads have ended on return.

        What this very thread is in the middle of, as in a signal handler, ends when that goes on.
        """
        group, self._group = self._group, None
        if group is not None:
            self._close(group)
        self._running.clear()

    @abc.abstractmethod
    def _close(self, group: Any) -> None:
        """Close the library's ``group``."""


class _Free:
    """Frees the library's group, and then what it may have written to until then."""

    def __init__(self, free: Callable[[Any], None]) -> None:
        self._free = free
        self.kept: list[Any] = []

    def __call__(self, group: Any) -> None:
        self._free(group)
