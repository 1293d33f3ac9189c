"""NumPy arrays between processes through Gloo, over TCP.

The native side (csrc/gloo) runs one operation after the other on a thread of its own; here
operations are described, started, waited for, and their failures put into words.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array
from flashlight_py.distributed.arrays import dtype_code
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.gloo_errors import failure
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.work import Work
from flashlight_py.errors import BackendUnavailableError, CollectiveTimeoutError, GroupClosedError

__all__ = ["GlooBackend"]

# How long a wait stays inside the library: signal handlers (Ctrl-C) run in between.
_SLICE_SECONDS = 0.1
_MESSAGE_BYTES = 1024


class GlooBackend(Backend):
    """Every rank of ``store`` connected to every other; collective, blocking.

    ``host`` is the name or address that the sockets are bound to, or empty: then ``interface``
    names the network interface. ``timeout`` (seconds) bounds connecting and each operation.

    Raises:
        BackendUnavailableError: the native extension or the interface is missing.
        PeerLostError, CollectiveTimeoutError: a rank could not be connected.
    """

    kind = DistributedBackend.GLOO

    def __init__(self, store: Store, host: str, interface: str, timeout: float) -> None:
        native = _native.load("gloo")
        self._ffi, self._lib = native.ffi, native.lib
        self.rank, self.size, self._timeout = store.rank, store.size, timeout
        self._signature = self._ffi.new("fl_signature *")
        self._running: list[_GlooWork] = []
        self._group = self._create(host, interface)
        try:
            self._connect(store)
        except BaseException:
            self.close()
            raise

    def _create(self, host: str, interface: str) -> Any:
        message = self._ffi.new("char[]", _MESSAGE_BYTES)
        group = self._lib.fl_gloo_create(
            self.rank,
            self.size,
            host.encode(),
            interface.encode(),
            self._timeout,
            message,
            _MESSAGE_BYTES,
        )
        if group == self._ffi.NULL:
            reason = self._ffi.string(message).decode(errors="replace")
            raise BackendUnavailableError(
                f"rank {self.rank} of {self.size}: Gloo cannot use "
                f"{f'address {host!r}' if host else f'interface {interface!r}'}: {reason}. "
                "Choose another with params={'INTERFACE': ...}"
            )
        return group

    def _connect(self, store: Store) -> None:
        """Give each peer the address that is meant for it, and connect to what they gave."""
        mine = [self._address(peer) for peer in range(self.size)]
        stride = len(mine[0])
        theirs = store.exchange(b"".join(mine))
        at = slice(self.rank * stride, (self.rank + 1) * stride)
        addresses = b"".join(blob[at] for blob in theirs)
        op = self._lib.fl_gloo_connect(self._group, addresses, stride, self._timeout)
        _GlooWork(self, "connect", op, addresses, None, self._timeout).wait()

    def _address(self, peer: int) -> bytes:
        room = self._ffi.new("char[]", _MESSAGE_BYTES)
        count = self._lib.fl_gloo_address(self._group, peer, room, _MESSAGE_BYTES)
        if count < 0:
            raise BackendUnavailableError(f"Gloo gave no address for rank {peer}")
        return bytes(self._ffi.buffer(room, count))

    def all_reduce(self, array: Array, op: ReduceOp, scale: float) -> Work:
        """Reduce in rank order and in place; see ``Backend``."""
        return self._start("all_reduce", self._lib.FL_ALL_REDUCE, array, op=op, scale=scale)

    def reduce_scatter(self, array: Array, op: ReduceOp, scale: float) -> Work:
        """Reduce in rank order into a new array; see ``Backend``."""
        rows = array.shape[0] // self.size
        part = np.empty((rows, *array.shape[1:]), array.dtype)
        verb = self._lib.FL_REDUCE_SCATTER
        return self._start("reduce_scatter", verb, array, op=op, scale=scale, output=part)

    def broadcast(self, array: Array, root: int) -> Work:
        """Receive ``root``'s array in place; see ``Backend``."""
        return self._start("broadcast", self._lib.FL_BROADCAST, array, root=root)

    def all_gather(self, array: Array) -> Work:
        """Join all ranks' arrays into a new one; see ``Backend``."""
        return self._start("all_gather", self._lib.FL_ALL_GATHER, array, output=_Gathered())

    def send(self, array: Array, dst: int, tag: int) -> Work:
        """Send; ends when ``dst`` has received; see ``Backend``."""
        return self._start("send", self._lib.FL_SEND, array, root=tag, peer=dst)

    def recv(self, array: Array, src: int, tag: int) -> Work:
        """Receive in place; see ``Backend``."""
        return self._start("recv", self._lib.FL_RECV, array, root=tag, peer=src)

    def barrier(self, timeout: float | None = None) -> Work:
        """Wait for all; ``timeout`` in seconds; see ``Backend``."""
        return self._start("barrier", self._lib.FL_BARRIER, None, timeout=timeout)

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
    ) -> Work:
        if self._group is None:
            raise GroupClosedError(f"[{name}] rank {self.rank} of {self.size}: the group is closed")
        seconds = self._timeout if timeout is None else timeout
        self._describe(name, verb, array, op, scale, root)
        handle = self._lib.fl_gloo_run(
            self._group, self._signature, self._pointer(array), self._pointer(output), peer, seconds
        )
        result = array if output is None else output
        work = _GlooWork(self, name, handle, array, result, seconds)
        # The library writes into the array whether or not anybody keeps the Work: hold it here.
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
            return self._ffi.NULL
        return self._ffi.cast("void *", array.ctypes.data)

    def synchronize(self) -> None:
        """Block until all that was started has ended; raises what the first failure raises."""
        for work in list(self._running):
            work.wait()

    def close(self) -> None:
        """End what runs, close the sockets; the native thread has ended on return."""
        group, self._group = self._group, None
        if group is not None:
            self._lib.fl_gloo_close(group)
        self._running.clear()


class _Gathered:
    """Marks that the result is what the library received."""


class _GlooWork(Work):
    """A handle on a native operation; keeps the arrays alive that it works on."""

    def __init__(
        self, backend: GlooBackend, name: str, handle: Any, data: Any, result: Any, seconds: float
    ) -> None:
        self._backend = backend
        self._name = name
        self._lib = backend._lib
        self._handle = backend._ffi.gc(handle, backend._lib.fl_op_free)
        self._data = data
        self._result = result
        self._seconds = seconds
        self._error: Exception | None = None

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
        if status != self._lib.FL_OK:
            backend = self._backend
            raise failure(
                backend._ffi,
                self._lib,
                self._handle,
                status,
                self._name,
                backend.rank,
                backend.size,
                self._seconds,
            )
        if isinstance(self._result, _Gathered):
            self._result = self._gathered()
        return self._result

    def _gathered(self) -> Array:
        """Wrap what the library received, without a copy; the array keeps the handle alive."""
        ffi = self._backend._ffi
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
