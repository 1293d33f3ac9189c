"""A native operation in flight, and the array that it receives."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flashlight_py._native import codes
from flashlight_py._native.codes import MOVED
from flashlight_py.device import Array
from flashlight_py.distributed.backends.native_errors import failure
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.arrays import (
    ENCODED_PART,
    check_out_rows,
    decode_part,
    dtype_of_code,
    row_count,
)
from flashlight_py.distributed.verbs import SCATTER, VERBS
from flashlight_py.distributed.work import Work, wait_timeout_error
from flashlight_py.errors import DistributedError

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.native import NativeBackend

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


@functools.cache
def light_work(fast: Any) -> Any:
    """Return the class of Works that ``fast``, the native code, makes by itself."""
    return type("LightWork", (fast.Started, Work), {"__slots__": (), "__module__": __name__})


class NativeWork(Work):
    """A handle on a native operation; keeps the arrays alive that it works on.

    A wait returns ``result``, or makes the result of it: for a call with the array ``like`` and
    perhaps ``out``, by or from ``root``. ``made`` is the result of a gather if all ranks have the
    same number of rows. A description of an array may replace the array.
    """

    id = 0  # of the call in the backend's journal, where native code has started and recorded it

    def __init__(
        self,
        backend: NativeBackend,
        name: str,
        handle: Any,
        kept: Any,
        seconds: float,
        result: Any = None,
        like: Any = None,
        out: Any = None,
        root: int = 0,
        made: Any = None,
    ) -> None:
        self._backend, self._name, self._lib = backend, name, backend.lib
        self._handle = backend.ffi.gc(handle, backend.lib.fl_op_free)
        self._kept, self._seconds = kept, seconds
        self._result, self._like, self._out, self._root = result, like, out, root
        self._made = made
        self.number = backend.count[0]  # by now
        self._forks = journal.fork_count()

    def wait(self, timeout: float | None = None) -> Any:
        if self._forks != journal.fork_count():
            raise journal.forked(self._name)
        pending = self._lib.FL_PENDING
        seconds = left = math.inf if timeout is None else timeout
        end = time.monotonic() + seconds
        while (status := self._status(min(_SLICE_SECONDS, max(0.0, left)))) == pending:
            left = end - time.monotonic()
            if not left > 0:  # also where that is no number
                raise wait_timeout_error(f"[{self._name}] {self._backend.name}", seconds)
        self._backend.forget(self)
        if status != self._lib.FL_OK:
            raise self._failure(status)
        if self._result is GATHERED:
            self._result = self._gathered()
        elif self._result is SCATTERED:
            self._result = self._scattered()
        elif self._result is COMPARED:
            self._result = self._compared()
        return self._result

    def _status(self, seconds: float) -> int:
        """Wait up to ``seconds``, and return how the operation stands."""
        group = self._backend.group  # noqa: F841  (it lives as long: a wait may do the operation)
        return int(self._lib.fl_op_wait(self._handle, seconds))

    def cancel(self) -> None:
        if self._forks == journal.fork_count() and self._lib.fl_op_cancel(self._handle):
            raise DistributedError(f"cancel: the library has failed: {self._backend.reason()}")

    def is_completed(self) -> bool:
        """Return whether it has ended; in a forked child it has, as it is not this process's."""
        if self._forks != journal.fork_count():
            return True
        return self._status(0.0) != int(self._lib.FL_PENDING)

    def has_ended_well(self) -> bool:
        """Return whether it has ended without an error that ``wait`` would raise."""
        if self._forks == journal.fork_count() and self._status(0.0) != self._lib.FL_OK:
            return False
        return self._result is not GATHERED or self._out is None or not self._fetched()[0]

    def end_time(self) -> float | None:
        if self._forks != journal.fork_count():
            return None
        return self._lib.fl_op_ended(self._handle) or None

    def _failure(self, status: int) -> Exception:
        how = self._handle, status, self._name, self._seconds, self.number
        error = failure(self._backend, *how)
        if self.id and self._backend.journal is not None:
            self._backend.journal.record_failure(self.id, error)
            self.id = 0  # noted once, whoever waits
        return error

    def _compared(self) -> Any:
        """Return what ``Call.compared`` asks for; of a message its number."""
        size, signatures = self._backend.size, self._signatures()
        if signatures == self._backend.ffi.NULL:
            return None
        verb = signatures[self._backend.rank].verb
        if verb in (codes.SEND, codes.RECV):  # the sender counts
            return max(signatures[rank].sequence for rank in range(size))
        if verb not in _WITH_SHAPES:
            return None
        if verb == SCATTER.code:
            return self._sent()
        return [signatures[rank].shape[0] for rank in range(size)]

    def _sent(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return dtype and shape of the parts that the root of a scatter has sent."""
        sent = self._signatures()[self._root]
        code = sent.dtype & ~(codes.COMPARED | codes.ON_GPU)
        if code == MOVED:
            return ENCODED_PART, (sent.count,)
        return dtype_of_code(code), tuple(sent.shape[0 : sent.ndim])

    def _signatures(self) -> Any:
        return self._lib.fl_op_signatures(self._handle)

    def _gathered(self) -> Any:
        """Return the rows of all ranks: ``out``, if the library has filled it, or a new array."""
        backend, room = self._backend, self._made if self._out is None else self._out
        if room is not None and not self._fetched()[0]:
            return room
        signatures = self._signatures()
        rows = sum(signatures[rank].shape[0] for rank in range(backend.size))
        if room is not None and row_count(room) == rows:  # without bytes
            return room
        if self._out is not None:
            check_out_rows(self._name, self._out, rows, backend.rank, backend.size)
        return self._wrap(self._like.dtype, (rows, *self._like.shape[1:]))

    def _scattered(self) -> Array:
        """Wrap this rank's part."""
        dtype, shape = self._sent()
        if dtype is ENCODED_PART:
            return decode_part(self._wrap(np.dtype(np.uint8), shape))
        return self._wrap(dtype, shape)

    def _wrap(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return what the library received, without a copy; the array keeps the handle alive."""
        ffi, (pointer, count) = self._backend.ffi, self._fetched()
        owner = keeping(ffi, ffi.cast("char *", pointer), self._handle)
        array: Array = np.ndarray(shape, dtype, ffi.buffer(owner, count))
        return array

    def _fetched(self) -> tuple[Any, int]:
        """Return where the library has put what it received, and its bytes; NULL: in the room."""
        count = self._backend.ffi.new("size_t *")
        return self._lib.fl_op_output(self._handle, count), count[0]
