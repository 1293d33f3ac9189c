"""How far the clocks of other hosts are from rank 0's."""

from __future__ import annotations

import time

import numpy as np

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.hosts import host_identity
from flashlight_py.distributed.verbs import RECV, SEND

__all__ = ["offset_to_rank_0"]

# The quickest of so many exchanges counts: it had the least to wait for.
_ROUNDS = 16
# Users' tags begin at 0, and new groups use -1.
_TAG = -2


def offset_to_rank_0(backend: Backend) -> int:
    """Return the nanoseconds to add to this rank's monotonic clock to get rank 0's. Collective.

    0 on rank 0's host, whose ranks have one clock. Else rank 0 is asked for its time, and taken to
    have answered halfway (F. Cristian, Probabilistic clock synchronization, 1989), which is wrong
    by at most half the time of the exchange.
    """
    identities = exchange_bytes(backend, host_identity())
    elsewhere = [rank for rank in range(backend.size) if identities[rank] != identities[0]]
    if backend.rank in elsewhere:
        return _ask(backend)
    if backend.rank == 0:
        for rank in elsewhere:
            _answer(backend, rank)
    return 0


def _ask(backend: Backend) -> int:
    question, answer = np.zeros(1, np.int64), np.zeros(1, np.int64)
    measured = []
    for _ in range(_ROUNDS):
        asked = time.monotonic_ns()
        backend.start(Call(SEND, question, peer=0, tag=_TAG)).wait()
        backend.start(Call(RECV, answer, peer=0, tag=_TAG)).wait()
        got = time.monotonic_ns()
        measured.append((got - asked, int(answer[0]) - (asked + got) // 2))
    return min(measured)[1]


def _answer(backend: Backend, rank: int) -> None:
    room = np.zeros(1, np.int64)
    for _ in range(_ROUNDS):
        backend.start(Call(RECV, room, peer=rank, tag=_TAG)).wait()
        now = np.array([time.monotonic_ns()], np.int64)
        backend.start(Call(SEND, now, peer=rank, tag=_TAG)).wait()
