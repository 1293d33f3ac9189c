"""What backends with a native library share: describing a call, starting it, waiting for it."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.arrays import dtype_code
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.native_errors import failure
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import CollectiveTimeoutError, GroupClosedError

__all__ = ["MESSAGE_BYTES", "NativeBackend"]

# How long a wait stays inside the library: signal handlers (Ctrl-C) run in between.
_SLICE_SECONDS = 0.1
MESSAGE_BYTES = 1024


class NativeBackend(Backend):
    """A backend whose operations run in a library with the C ABI of ``csrc/common``."""

    kind = DistributedBackend.GLOO

    def __init__(self, native: ModuleType, rank: int, size: int, timeout: float) -> None:
        self.ffi, self.lib = native.ffi, native.lib
        self.rank, self.size, self.timeout = rank, size, timeout
        self._group: Any = None  # the library's handle; None once the group is closed
        self._signature = self.ffi.new("fl_signature *")
        self._running: list[NativeWork] = []

    @abc.abstractmethod
    def _run(self, data: Any, output: Any, peer: int, seconds: float, blocking: bool) -> Any:
        """Start the operation of ``self._signature``; a handle, or NULL where it has ended well."""

    def all_reduce(self, array: Array, op: ReduceOp, scale: float, blocking: bool = False) -> Work:
        """Reduce in rank order and in place; see ``Backend``."""
        verb = self.lib.FL_ALL_REDUCE
        return self._start("all_reduce", verb, array, op=op, scale=scale, blocking=blocking)

    def reduce_scatter(
        self, array: Array, op: ReduceOp, scale: float, blocking: bool = False
    ) -> Work:
        """Reduce in rank order into a new array; see ``Backend``."""
        part = np.empty((array.shape[0] // self.size, *array.shape[1:]), array.dtype)
        verb = self.lib.FL_REDUCE_SCATTER
        return self._start(
            "reduce_scatter", verb, array, op=op, scale=scale, output=part, blocking=blocking
        )

    def broadcast(self, array: Array, root: int, blocking: bool = False) -> Work:
        """Receive ``root``'s array in place; see ``Backend``."""
        return self._start("broadcast", self.lib.FL_BROADCAST, array, root=root, blocking=blocking)

    def all_gather(self, array: Array, blocking: bool = False) -> Work:
        """Join all ranks' arrays into a new one; see ``Backend``."""
        verb = self.lib.FL_ALL_GATHER
        return self._start("all_gather", verb, array, output=GATHERED, blocking=blocking)

    def send(self, array: Array, dst: int, tag: int, blocking: bool = False) -> Work:
        """Send; ends when ``dst`` has received; see ``Backend``."""
        return self._start("send", self.lib.FL_SEND, array, root=tag, peer=dst, blocking=blocking)

    def recv(self, array: Array, src: int, tag: int, blocking: bool = False) -> Work:
        """Receive in place; see ``Backend``."""
        return self._start("recv", self.lib.FL_RECV, array, root=tag, peer=src, blocking=blocking)

    def barrier(self, timeout: float | None = None) -> Work:
        """Wait for all; ``timeout`` in seconds; see ``Backend``."""
        return self._start("barrier", self.lib.FL_BARRIER, None, timeout=timeout, blocking=True)

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
        output: Array | _Gathered | None = None,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Work:
        if self._group is None:
            raise GroupClosedError(f"[{name}] rank {self.rank} of {self.size}: the group is closed")
        seconds = self.timeout if timeout is None else timeout
        self._describe(name, verb, array, op, scale, root)
        result = array if output is None else output
        handle = self._run(self._pointer(array), self._pointer(output), peer, seconds, blocking)
        if handle == self.ffi.NULL:
            return Done(result)
        work = NativeWork(self, name, handle, array, result, seconds)
        # The library writes into the array whether or not anybody keeps the Work, also after Ctrl-C
        # has ended a blocking wait for it.
        self._running = [other for other in self._running if not other.is_completed()]
        self._running.append(work)
        return work

    def _describe(
        self, name: str, verb: int, array: Array | None, op: ReduceOp, scale: float, root: int
    ) -> None:
        signature = self._signature
        signature.verb, signature.op, signature.scale, signature.root = verb, op, scale, root
        shape: Sequence[int] = () if array is None else array.shape
        signature.dtype = 0 if array is None else dtype_code(name, array.dtype)
        signature.itemsize = 0 if array is None else array.itemsize
        signature.count = math.prod(shape) if array is not None else 0
        signature.ndim = len(shape)
        for d, extent in enumerate(shape[:8]):
            signature.shape[d] = extent

    def _pointer(self, array: Array | _Gathered | None) -> Any:
        if not isinstance(array, np.ndarray):
            return self.ffi.NULL
        return self.ffi.cast("void *", array.ctypes.data)

    def message(self, room: Any) -> str:
        """Return what the library wrote into ``room``."""
        text: str = self.ffi.string(room).decode(errors="replace")
        return text

    def forget(self, work: NativeWork) -> None:
        """Let go of an operation that has ended, and of whose end the caller hears now."""
        self._running = [other for other in self._running if other is not work]

    def synchronize(self) -> None:
        """Block until all that was started has ended; raises what the first failure raises."""
        for work in list(self._running):
            work.wait()

    def close(self) -> None:
        """End what runs and free the group; the native thread has ended on return."""
        group, self._group = self._group, None
        if group is not None:
            self._close(group)
        self._running.clear()

    @abc.abstractmethod
    def _close(self, group: Any) -> None:
        """Free the library's ``group``."""


class _Gathered:
    """Marks that the result is what the library received."""


GATHERED = _Gathered()


class NativeWork(Work):
    """A handle on a native operation; keeps the arrays alive that it works on."""

    def __init__(
        self, backend: NativeBackend, name: str, handle: Any, data: Any, result: Any, seconds: float
    ) -> None:
        self._backend = backend
        self._name = name
        self._lib = backend.lib
        self._handle = backend.ffi.gc(handle, backend.lib.fl_op_free)
        self._data = data
        self._result = result
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``."""
        wait, pending = self._lib.fl_op_wait, self._lib.FL_PENDING
        if timeout is None:
            while (status := wait(self._handle, _SLICE_SECONDS)) == pending:
                pass
        else:
            end = time.monotonic() + timeout
            while (status := wait(self._handle, self._slice(end))) == pending:
                if time.monotonic() >= end:
                    raise CollectiveTimeoutError(self._still_running(timeout))
        self._backend.forget(self)
        return self._finish(status)

    def _slice(self, end: float) -> float:
        return min(_SLICE_SECONDS, max(0.0, end - time.monotonic()))

    def _still_running(self, timeout: float) -> str:
        return (
            f"[{self._name}] rank {self._backend.rank} of {self._backend.size}: still running "
            f"after wait(timeout={timeout:g}) seconds; it goes on, and can be waited for again"
        )

    def is_completed(self) -> bool:
        """Tell whether it has ended."""
        return bool(self._lib.fl_op_wait(self._handle, 0.0) != self._lib.FL_PENDING)

    def _finish(self, status: int) -> Any:
        backend = self._backend
        if status != self._lib.FL_OK:
            raise failure(
                backend.ffi,
                self._lib,
                self._handle,
                status,
                self._name,
                backend.rank,
                backend.size,
                self._seconds,
            )
        if self._result is GATHERED:
            self._result = self._gathered()
        return self._result

    def _gathered(self) -> Array:
        """Wrap what the library received, without a copy; the array keeps the handle alive."""
        ffi = self._backend.ffi
        count = ffi.new("size_t *")
        pointer = self._lib.fl_op_output(self._handle, count)
        owner = ffi.gc(ffi.cast("char *", pointer), _Keep(self._handle))
        flat = np.frombuffer(ffi.buffer(owner, count[0]), np.uint8)
        like = self._data
        signatures = self._lib.fl_op_signatures(self._handle)
        rows = sum(signatures[rank].shape[0] for rank in range(self._backend.size))
        joined: Array = flat.view(like.dtype).reshape(rows, *like.shape[1:])
        return joined


class _Keep:
    """A destructor that does nothing but hold a reference."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, pointer: Any) -> None:
        """The handle goes with this object."""
