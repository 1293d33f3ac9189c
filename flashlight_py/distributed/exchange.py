"""Bytes between ranks that are joined already."""

from __future__ import annotations

import numpy as np

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.rendezvous.store import Store

__all__ = ["BackendStore", "exchange_bytes"]


def exchange_bytes(backend: Backend, payload: bytes) -> list[bytes]:
    """Give ``payload``, of any length, and return every rank's; collective, blocking.

    Raises:
        DistributedError: as ``Work.wait``.
    """
    mine = np.frombuffer(bytearray(payload), np.uint8)
    lengths = backend.all_gather(np.array([mine.size]), blocking=True).wait()
    joined = backend.all_gather(mine, blocking=True).wait().tobytes()
    ends = np.cumsum(lengths)
    return [joined[end - n : end] for end, n in zip(ends, lengths, strict=True)]


class BackendStore(Store):
    """A store among the ranks of a backend."""

    def __init__(self, backend: Backend) -> None:
        self.rank, self.size = backend.rank, backend.size
        self._backend = backend

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give ``payload`` and return every rank's; collective, blocking.

        Raises:
            DistributedError: as ``Work.wait``.
        """
        return exchange_bytes(self._backend, payload)

    def close(self) -> None:
        """Do nothing: the backend goes on."""
