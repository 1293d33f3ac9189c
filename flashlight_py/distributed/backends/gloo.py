"""NumPy arrays between processes through Gloo, over TCP.

The native side is csrc/gloo. Operations run on the caller's thread, asynchronous ones on threads of
the group's own: collectives in turn, messages beside them.
"""

from __future__ import annotations

from typing import Any

from flashlight_py import _native
from flashlight_py.distributed.backends.interrupts import (
    answer_to_interrupts,
    raise_interruption,
)
from flashlight_py.distributed.backends.native import MESSAGE_BYTES, NativeBackend
from flashlight_py.distributed.backends.native_calls import call_in_words
from flashlight_py.distributed.backends.native_work import NOTHING, NativeWork
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import BackendUnavailableError

__all__ = ["GlooBackend"]


class GlooBackend(NativeBackend):
    """Every rank of ``store`` connected to every other; collective, blocking.

    ``host`` is the name or address that the sockets are bound to, or empty: then ``interface``
    names the network interface. ``timeout`` (seconds) bounds connecting and each operation.

    Raises:
        BackendUnavailableError: the native extension or the interface is missing.
        PeerLostError, CollectiveTimeoutError: a rank could not be connected.
    """

    path = "Gloo over TCP"

    def __init__(self, store: Store, host: str, interface: str, timeout: float) -> None:
        native = _native.load("gloo")
        super().__init__(native, store, timeout)
        self._group = self._create(host, interface)
        answer = answer_to_interrupts(native, "fl_gloo_interrupted")
        self.lib.fl_gloo_call_ranks(self._group, self.ffi.new("int[]", self.numbers))
        self.lib.fl_gloo_on_interrupt(self._group, answer)
        try:
            self._connect(store)
        except BaseException:
            self.close()
            raise

    def _create(self, host: str, interface: str) -> Any:
        room = self.ffi.new("char[]", MESSAGE_BYTES)
        group = self.lib.fl_gloo_create(
            self.rank,
            self.size,
            host.encode(),
            interface.encode(),
            self.timeout,
            room,
            MESSAGE_BYTES,
        )
        if group == self.ffi.NULL:
            raise BackendUnavailableError(
                f"rank {self.rank} of {self.size}: Gloo cannot use "
                f"{f'address {host!r}' if host else f'interface {interface!r}'}: "
                f"{self.message(room)}. Choose another with params={{'INTERFACE': ...}}"
            )
        return group

    def _connect(self, store: Store) -> None:
        """Give each peer the address that is meant for it, and connect to what they gave."""
        mine = [self._address(peer) for peer in range(self.size)]
        stride = len(mine[0])
        theirs = store.exchange(b"".join(mine))
        at = slice(self.rank * stride, (self.rank + 1) * stride)
        addresses = b"".join(blob[at] for blob in theirs)
        op = self.lib.fl_gloo_connect(self._group, addresses, stride, self.timeout)
        NativeWork(self, "connect", op, addresses, NOTHING, self.timeout).wait()

    def _address(self, peer: int) -> bytes:
        room = self.ffi.new("char[]", MESSAGE_BYTES)
        count = self.lib.fl_gloo_address(self._group, peer, room, MESSAGE_BYTES)
        if count < 0:
            raise BackendUnavailableError(f"Gloo gave no address for rank {peer}")
        return bytes(self.ffi.buffer(room, count))

    def _run(self, data: Any, output: Any, peer: int, seconds: float, blocking: bool) -> Any:
        handle = self.lib.fl_gloo_run(
            self._group, self._signature, data, output, peer, seconds, not blocking, self._here()
        )
        raise_interruption(self.lib, handle)
        return handle

    def _exchange(self, messages: Any, results: Any) -> None:
        self.lib.fl_gloo_exchange(self._group, messages, len(messages), self.timeout, results)

    def call_ahead(self, rank: int) -> str:
        """Say what ``rank`` has begun here and this rank has not; see ``NativeBackend``."""
        call = self.ffi.new("fl_signature *")
        ahead = self._group is not None and self.lib.fl_gloo_is_ahead(self._group, rank, call)
        return call_in_words(self.lib, call) if ahead else ""

    def _give_up(self, group: Any, why: bytes) -> None:
        self.lib.fl_gloo_give_up(group, why)

    def _close(self, group: Any) -> None:
        self.lib.fl_gloo_close(group)
