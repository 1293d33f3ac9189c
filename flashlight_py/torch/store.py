"""torch's store as the place where the ranks of a process group meet."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

from flashlight_py.distributed.rendezvous.store import Store, Waiting, not_arrived
from flashlight_py.errors import RendezvousError

# How often a wait looks whether another rank has given up, in seconds.
_LOOK_SECONDS = 1.0
_ABORTED, _SECRET = "aborted", "secret"


class TorchStore(Store):
    """The ``size`` ranks that have ``store``, a ``torch.distributed.Store``, for themselves alone.

    ``timeout`` (seconds) bounds each exchange. Rank 0 puts the secret there by which ranks know
    each other later: whoever can read the store can join.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self._store, self._timeout, self._count = store, timeout, 0
        self.rank, self.size = rank, size
        if rank == 0:
            self._do("set", _SECRET, secrets.token_hex(32))
        self.secret = self._read([_SECRET])[0]

    def exchange(self, payload: bytes) -> list[bytes]:
        """Pass ``payload`` and return that of every rank; see ``Store``."""
        keys = [f"{self._count}/{rank}" for rank in range(self.size)]
        self._do("set", keys[self.rank], payload)
        found = self._read(keys)
        if self._count:  # everybody has read what came before
            self._do("delete_key", f"{self._count - 1}/{self.rank}")
        self._count += 1
        return found

    def close(self) -> None:
        """Wait for all; nothing is left in the store but some empty keys."""
        self.exchange(b"")

    def abort(self, reason: str) -> None:
        """Have ranks that wait in the store raise because of ``reason``."""
        self._do("set", _ABORTED, f"rank {self.rank}: {reason}")

    def _read(self, keys: list[str]) -> list[bytes]:
        """Return the values of ``keys``, of which rank r sets the r-th."""
        end, waiting = time.monotonic() + self._timeout, Waiting("they meet in torch's store")
        while True:
            left = min(_LOOK_SECONDS, max(0.001, end - time.monotonic()))
            try:
                self._store.wait(keys, timedelta(seconds=left))
                return [bytes(self._do("get", key)) for key in keys]
            except RuntimeError:  # as it seems, the time is up: else the next call raises the same
                pass
            if self._do("check", [_ABORTED]):
                words = bytes(self._do("get", _ABORTED)).decode(errors="replace")
                raise RendezvousError(f"{self._place()}: {words}")
            missing = [rank for rank, key in enumerate(keys) if not self._do("check", [key])]
            waiting.look(missing)
            if missing and time.monotonic() >= end:
                raise RendezvousError(
                    f"{self._place()}: {not_arrived(missing, self.size, self._timeout)} "
                    "in torch's store; see what they print, or allow more by timeout="
                )

    def _do(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._store, name)(*args)
        except RuntimeError as error:
            raise RendezvousError(
                f"{self._place()}: torch's store does not answer ({error}); it is kept by the "
                "process at MASTER_ADDR and MASTER_PORT, rank 0 or torchrun's agent"
            ) from error

    def _place(self) -> str:
        return f"rank {self.rank} of {self.size}"
