"""A running native operation, and the array that the operation receives."""

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
from flashlight_py.distributed.calls import arrays, journal
from flashlight_py.distributed.work import Work, wait_timeout_error
from flashlight_py.errors import DistributedError

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.native import NativeBackend

# Maximum seconds of one wait inside the library; signal handlers (Ctrl-C) run between waits.
_SLICE_SECONDS = 0.1


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
        self, backend: NativeBackend, name: str, handle: Any, kept: Any, seconds: float,
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
            backend, number = self._backend, self.number
            error = failure(backend, self._handle, status, self._name, self._seconds, number)
            if self.id and backend.journal is not None:
                backend.journal.record_failure(self.id, error)
                self.id = 0  # record the call once, even if several threads wait
            raise error
        if callable(self._result):
            self._result = self._result(self)
        return self._result

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
        if code == MOVED:
            return arrays.ENCODED_PART, (signature.count,)
        return arrays.dtype_of_code(code), tuple(signature.shape[0 : signature.ndim])

    def _signatures(self) -> Any:
        return self._lib.fl_op_signatures(self._handle)

    def _gathered(self) -> Any:
        """Return the rows of all ranks: ``out`` if the library filled it, otherwise a new array."""
        backend, result = self._backend, self._made if self._out is None else self._out
        if result is not None and not self._fetched()[0]:
            return result
        signatures = self._signatures()
        rows = sum(signatures[rank].shape[0] for rank in range(backend.size))
        if result is not None and arrays.row_count(result) == rows:  # empty: no bytes arrived
            return result
        if self._out is not None:
            arrays.check_out_rows(self._name, self._out, rows, backend.rank, backend.size)
        return self._wrap(self._like.dtype, (rows, *self._like.shape[1:]))

    def _scattered(self) -> Array:
        dtype, shape = self._sent()
        if dtype is arrays.ENCODED_PART:
            return arrays.decode_part(self._wrap(np.dtype(np.uint8), shape))
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
