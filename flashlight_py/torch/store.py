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
# And whether another rank 0 has come, which happens at once or not at all.
_MEET_SECONDS = 0.1
_ABORTED, _SECRET = "aborted", "secret"


class TorchStore(Store):
    """The ranks that have ``store``, a ``torch.distributed.Store``, in common.

    ``timeout`` (seconds) bounds each exchange. Rank 0 puts the secret there by which ranks know
    each other later: whoever can read the store can join. Ranks that were here before and are gone
    may have left keys, as where torchrun restarts all: those of one meeting are below its secret,
    and rank 0 shows each of the others that it is here now.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self._store, self._timeout, self._count = store, timeout, 0
        self.rank, self.size = rank, size
        if rank == 0:
            self.secret = secrets.token_hex(32).encode()
            self._do("set", _SECRET, self.secret)
        mine = secrets.token_hex(8)
        while not self._meets_rank_0(mine):
            pass

    def _meets_rank_0(self, mine: str) -> bool:
        """Return whether rank 0 has seen ``mine``: else the secret is that of an earlier one."""
        if self.rank:
            self.secret = self._read([_SECRET])[0]
        here = self._keys("here")
        self._do("set", here[self.rank], mine)
        if self.rank:
            seen = self._key("seen", mine)
            return bool(self._read([seen], here)) and bool(self._do("delete_key", seen))
        for other in self._read(here)[1:]:
            self._do("set", self._key("seen", other.decode()), b"")
        return True

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, [self.secret[:16].decode(), *parts]))

    def _keys(self, name: object) -> list[str]:
        return [self._key(name, rank) for rank in range(self.size)]

    def exchange(self, payload: bytes) -> list[bytes]:
        """Pass ``payload`` and return that of every rank; see ``Store``."""
        keys = self._keys(self._count)
        self._do("set", keys[self.rank], payload)
        found = self._read(keys)
        if self._count:  # everybody has read what came before
            self._do("delete_key", self._keys(self._count - 1)[self.rank])
        self._count += 1
        return found

    def close(self) -> None:
        """Wait for all; little is left in the store, and no secret."""
        self.exchange(b"")
        self._do("delete_key", self._keys("here")[self.rank])
        if self.rank == 0:
            self._do("delete_key", _SECRET)

    def abort(self, reason: str) -> None:
        """Have ranks that wait in the store raise because of ``reason``."""
        self._do("set", self._key(_ABORTED), f"rank {self.rank}: {reason}")

    def _read(self, keys: list[str], here: list[str] | None = None) -> list[bytes]:
        """Return the values of ``keys``, of which rank r sets the r-th.

        Of those that rank 0 sets as soon as all ranks have set their keys ``here``, none where
        another rank 0 has come meanwhile.
        """
        end, waiting = time.monotonic() + self._timeout, Waiting("they meet in torch's store")
        while True:
            look = _LOOK_SECONDS if here is None else _MEET_SECONDS
            left = min(look, max(0.001, end - time.monotonic()))
            try:
                self._store.wait(keys, timedelta(seconds=left))
                return [bytes(self._do("get", key)) for key in keys]
            except RuntimeError:  # as it seems, the time is up: else the next call raises the same
                pass
            if here is not None and self._read([_SECRET])[0] != self.secret:
                return []
            if keys != [_SECRET] and self._do("check", [self._key(_ABORTED)]):
                words = bytes(self._do("get", self._key(_ABORTED))).decode(errors="replace")
                raise RendezvousError(f"{self._place()}: {words}")
            asked = enumerate(keys if here is None else here)
            missing = [rank for rank, key in asked if not self._do("check", [key])]
            waiting.look(missing)
            if time.monotonic() >= end and (missing or here is not None):
                who = not_arrived(missing or [0], self.size, self._timeout)
                raise RendezvousError(
                    f"{self._place()}: {who} in torch's store; see what they print, or allow more "
                    "by timeout="
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
