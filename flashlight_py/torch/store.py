"""Rendezvous of the ranks of a process group in torch's store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from flashlight_py.distributed.internal import rendezvous
from flashlight_py.errors import RendezvousError

# Maximum pause between polls, in seconds. torch's store cannot wait for the first of two keys, and
# it prints a warning if a wait times out.
_MOST_PAUSE = 0.05
_SECRET = "secret"
_PAYLOAD, _ABORTED = b"+", b"!"


class TorchStore(rendezvous.Store):
    """A rendezvous of ranks in ``store``, a ``torch.distributed.Store``.

    ``timeout`` (seconds) limits each exchange. Rank 0 stores the job's secret, so a process that
    can read the store can join. Keys begin with a part of this secret. So they differ from the keys
    that ranks left in the store before torchrun restarted the ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self._store, self._timeout, self._count = store, timeout, 0
        self.rank, self.size = rank, size
        waiting, nonce = rendezvous.Waiting("they meet in torch's store"), secrets.token_hex(8)
        if rank == 0:
            self.secret = secrets.token_hex(32).encode()
            self._do("set", _SECRET, self.secret)
            for number in self._read(self._keys("here", 1), waiting):
                self._do("set", self._key("seen", number.decode()), b"")
            return
        seen, pause, end = "", 0.001, time.monotonic() + timeout
        while not (seen and self._do("check", [seen])):
            if self._do("check", [_SECRET]) and self._do("get", _SECRET) != self.secret:
                self.secret = self._do("get", _SECRET)
                seen = self._key("seen", nonce)
                self._do("set", self._key("here", rank), nonce)
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE)
            if (now := time.monotonic()) > min(end, waiting.due):
                missing = (seen and self._missing(self._keys("here", 1))) or [0]
                waiting.log_missing(missing)
                if now > end:
                    raise self._late(missing)
        self._do("delete_key", seen)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, [self.secret[:16].decode(), *parts]))

    def _keys(self, name: object, first: int = 0) -> dict[int, str]:
        return {rank: self._key(name, rank) for rank in range(first, self.size)}

    def exchange(self, payload: bytes) -> rendezvous.Roster:
        """Send ``payload`` to all ranks, and return the payloads of all ranks; see ``Store``."""
        keys = self._keys(self._count)
        self._do("set", keys[self.rank], _PAYLOAD + payload)
        texts = self._read(keys, rendezvous.Waiting("they exchange in torch's store"))
        for text in texts:
            if text[:1] == _ABORTED:
                raise self._error(text[1:].decode(errors="replace"))
        if self._count:  # no rank needs the keys of the previous exchange
            self._do("delete_key", self._keys(self._count - 1)[self.rank])
        self._count += 1
        return rendezvous.Roster.of([text[1:] for text in texts])

    def close(self) -> None:
        """Wait for all ranks, and remove the secret and most keys of the rendezvous.

        Rank 0 returns last, because its process may host the store.
        """
        self.exchange(b"")
        if self.rank:
            self._do("delete_key", self._key("here", self.rank))
            self._do("set", self._key("left", self.rank), b"")
            return
        left = self._keys("left", 1)
        self._read(left, rendezvous.Waiting("they leave torch's store"))
        for key in [*left.values(), _SECRET]:
            self._do("delete_key", key)

    def abort(self, reason: str) -> None:
        """Make ranks that wait in the store raise an error with ``reason``."""
        text = f"rank {self.rank}: {reason}".encode()
        self._do("set", self._keys(self._count)[self.rank], _ABORTED + text)

    def _read(self, keys: dict[int, str], waiting: rendezvous.Waiting) -> list[bytes]:
        """Return the values of ``keys``. Block until the ranks have set them."""
        end, every = time.monotonic() + self._timeout, list(keys.values())
        while missing := self._missing(keys):
            if (left := end - time.monotonic()) <= 0:
                raise self._late(missing)
            waiting.log_missing(missing)
            with suppress(RuntimeError):  # timeout, or an error that the next call raises
                self._store.wait(every, timedelta(seconds=min(left, rendezvous.NEXT_SECONDS)))
        return [bytes(self._do("get", key)) for key in every]

    def _missing(self, keys: dict[int, str]) -> list[int]:
        return [rank for rank, key in keys.items() if not self._do("check", [key])]

    def _late(self, missing: Sequence[int]) -> RendezvousError:
        who = rendezvous.missing_text(missing, self.size, self._timeout)
        return self._error(f"{who} in torch's store. Read their output, or raise the timeout")

    def _do(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._store, name)(*args)
        except RuntimeError as error:
            raise self._error(
                f"torch's store does not answer ({error}). Check the process at MASTER_ADDR and "
                "MASTER_PORT, which is rank 0 or torchrun's agent"
            ) from error

    def _error(self, reason: str) -> RendezvousError:
        return RendezvousError(f"rank {self.rank} of {self.size}: {reason}")
