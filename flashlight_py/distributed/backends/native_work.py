"""A native operation in flight, and the array that it receives."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backends.native_errors import failure
from flashlight_py.distributed.backends.native_group import NativeGroup
from flashlight_py.distributed.calls.arrays import (
    MOVED,
    WITH_TEXT,
    dtype_of_code,
    of_bytes,
    require_length,
)
from flashlight_py.distributed.failures import journal
from flashlight_py.distributed.verbs import SCATTER, VERBS
from flashlight_py.distributed.work import Work, limit_passed

# How long a wait stays inside the library: signal handlers (Ctrl-C) run in between.
_SLICE_SECONDS = 0.1

# In the place of a result: it is what the library received, the rows of all ranks or one part.
GATHERED, SCATTERED = object(), object()
# It is what the ranks have found when they compared their calls; of these verbs they want to know.
COMPARED = object()
_WITH_SHAPES = {
    code
    for verb in VERBS
    for code, wanted in ((verb.code, verb.ragged or verb is SCATTER), (verb.uneven, verb.cuts))
    if wanted and not verb.reduces
}


@dataclass
class Received:
    """The result of an operation: it is there already, or is made of what arrived."""

    name: str
    result: Any
    like: Array | None
    out: Array | None
    root: int
    made: Array | None = None  # a gather's result where all have the same number of rows

    def get(self, backend: NativeGroup, handle: Any) -> Any:
        """Return the result of the operation, which has ended well."""
        if self.result is GATHERED:
            self.result = self._gathered(backend, handle)
        elif self.result is SCATTERED:
            self.result = self._scattered(backend, handle)
        elif self.result is COMPARED:
            self.result = self._compared(backend, handle)
        return self.result

    def _compared(self, backend: NativeGroup, handle: Any) -> Any:
        """Return what ``Call.compared`` asks for; of a message its number."""
        lib, signatures = backend.lib, backend.lib.fl_op_signatures(handle)
        if signatures == backend.ffi.NULL:
            return None
        verb = signatures[backend.rank].verb
        if verb in (lib.FL_SEND, lib.FL_RECV):  # the sender counts
            return max(signatures[rank].sequence for rank in range(backend.size))
        if verb not in _WITH_SHAPES:
            return None
        if verb != SCATTER.code:
            return [signatures[rank].shape[0] for rank in range(backend.size)]
        sent = signatures[self.root]
        code = sent.dtype & ~(lib.FL_COMPARED | lib.FL_ON_GPU)
        if code == MOVED:
            return WITH_TEXT, (sent.count,)
        return dtype_of_code(code), tuple(sent.shape[d] for d in range(sent.ndim))

    def _gathered(self, backend: NativeGroup, handle: Any) -> Array:
        """Return the rows of all ranks: ``out``, if the library has filled it, or a new array."""
        assert self.like is not None
        room = self.made if self.out is None else self.out
        if room is not None and not _fetched(backend, handle)[0]:
            return room
        signatures = backend.lib.fl_op_signatures(handle)
        rows = sum(signatures[rank].shape[0] for rank in range(backend.size))
        if room is not None and room.shape[0] == rows:  # without bytes
            return room
        if self.out is not None:
            require_length(self.name, self.out, rows, backend.rank, backend.size)
        return _wrap(backend, handle, self.like.dtype, (rows, *self.like.shape[1:]))

    def _scattered(self, backend: NativeGroup, handle: Any) -> Array:
        """Wrap this rank's part, of the dtype and shape that the root has sent."""
        sent = backend.lib.fl_op_signatures(handle)[self.root]
        if sent.dtype == MOVED:
            return of_bytes(_wrap(backend, handle, np.dtype(np.uint8), (sent.count,)))
        shape = tuple(sent.shape[d] for d in range(sent.ndim))
        return _wrap(backend, handle, dtype_of_code(sent.dtype), shape)


NOTHING = Received("", None, None, None, 0)


def _wrap(backend: NativeGroup, handle: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return what the library received, without a copy; the array keeps the handle alive."""
    ffi, (pointer, count) = backend.ffi, _fetched(backend, handle)
    owner = keeping(ffi, ffi.cast("char *", pointer), handle)
    array: Array = np.ndarray(shape, dtype, ffi.buffer(owner, count))
    return array


def freed_by(ffi: Any, pointer: Any, free: Callable[[Any], object], kept: object = None) -> Any:
    """Return ``pointer``, of which the end calls ``free``, and then lets go of ``kept``.

    ``free`` is a function in C, as is what calls it: what a signal handler raises in Python code
    that runs then, as Ctrl-C does, would be lost.
    """
    destructor: Any = functools.partial(free)
    destructor.kept = kept
    return ffi.gc(pointer, destructor)


def keeping(ffi: Any, pointer: Any, kept: object) -> Any:
    """Return ``pointer``, which keeps ``kept`` for as long as it is used."""
    return freed_by(ffi, pointer, id, kept)  # which does nothing


def _fetched(backend: NativeGroup, handle: Any) -> tuple[Any, int]:
    """Return where the library has put what it received, and its bytes; NULL: into the room."""
    count = backend.ffi.new("size_t *")
    return backend.lib.fl_op_output(handle, count), count[0]


class NativeWork(Work):
    """A handle on a native operation; keeps the arrays alive that it works on."""

    id = 0  # of the call in the backend's journal, where native code has started and recorded it

    def __init__(
        self,
        backend: NativeGroup,
        name: str,
        handle: Any,
        kept: Any,
        received: Received,
        seconds: float,
    ) -> None:
        self._backend = backend
        self._name = name
        self._lib = backend.lib
        self._handle = backend.ffi.gc(handle, backend.lib.fl_op_free)
        self._kept = kept
        self._received = received
        self._seconds = seconds
        self._number = backend.count[0]  # by now
        self._forks = journal.forks()

    def wait(self, timeout: float | None = None) -> Any:
        if self._forks != journal.forks():
            raise journal.forked(self._name)
        pending = self._lib.FL_PENDING
        if timeout is None:
            while (status := self._status(_SLICE_SECONDS)) == pending:
                pass
        else:
            end, left = time.monotonic() + timeout, timeout
            while (status := self._status(min(_SLICE_SECONDS, max(0.0, left)))) == pending:
                left = end - time.monotonic()
                if not left > 0:  # also where that is no number
                    raise limit_passed(f"[{self._name}] {self._backend.name}", timeout)
        self._backend.forget(self)
        if status != self._lib.FL_OK:
            raise self._failure(status)
        return self._received.get(self._backend, self._handle)

    def _status(self, seconds: float) -> int:
        """Wait up to ``seconds``, and return how the operation stands."""
        group = self._backend.group  # noqa: F841  (it lives as long: a wait may do the operation)
        return int(self._lib.fl_op_wait(self._handle, seconds))

    def is_completed(self) -> bool:
        """Return whether it has ended; in a forked child it has, as it is not this process's."""
        if self._forks != journal.forks():
            return True
        return self._status(0.0) != int(self._lib.FL_PENDING)

    def end_time(self) -> float | None:
        if self._forks != journal.forks():
            return None
        return self._lib.fl_op_ended(self._handle) or None

    def _failure(self, status: int) -> Exception:
        how = self._handle, status, self._name, self._seconds, self._number
        error = failure(self._backend, *how)
        if self.id and self._backend.journal is not None:
            self._backend.journal.failed(self.id, error)
            self.id = 0  # noted once, whoever waits
        return error
