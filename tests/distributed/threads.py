"""Ranks that are threads of one process, and a Gloo group of them."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashlight_py import _native, errors
from flashlight_py.distributed.backends.gloo import GlooBackend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.rendezvous.store import Roster, Store
from flashlight_py.distributed.verbs import ALL_GATHER


def run_on_threads(size: int, run: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class ThreadStore(Store):
    def __init__(
        self, rank: int, shared: list[dict[int, bytes]], barrier: threading.Barrier, pause: float
    ) -> None:
        self.rank, self.size = rank, barrier.parties
        self._shared, self._barrier, self._round, self._pause = shared, barrier, 0, pause

    def exchange(self, payload: bytes) -> Roster:
        self._shared[self._round][self.rank] = payload
        self._barrier.wait(10.0)
        self._round += 1
        time.sleep(self._pause)
        return Roster.of([self._shared[self._round - 1][rank] for rank in range(self.size)])


def connect_ranks(
    keys: list[bytes], pause: float = 0.0, kind: Any = GlooBackend, joining: float = 10.0
) -> list[Any]:
    """Connect a group of threads, each with a key; return the result or error of each.

    The last rank makes the others wait for ``pause`` seconds after the exchange.
    """
    try:
        _native.load_extension("gloo")
    except errors.BackendUnavailableError as error:
        pytest.skip(str(error))
    shared: list[dict[int, bytes]] = [{} for _ in range(4)]
    barrier = threading.Barrier(len(keys))
    results: list[Any] = [None] * len(keys)

    def join(rank: int) -> None:
        store = ThreadStore(rank, shared, barrier, pause if rank == len(keys) - 1 else 0.0)
        try:
            group = kind(store, "127.0.0.1", 10.0, joining, keys[rank])
        except (errors.PeerLostError, errors.CollectiveTimeoutError) as error:
            results[rank] = error
            return
        try:
            results[rank] = group.start(Call(ALL_GATHER, np.array([rank]))).wait().tolist()
            barrier.wait(10.0)
        finally:
            group.close()

    run_on_threads(len(keys), join)
    return results
