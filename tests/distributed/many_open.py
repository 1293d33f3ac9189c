"""Thousands of messages that are open at once: what runs on the ranks."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

import numpy as np

import flashlight_py as fl

# What a message may hold beside its array and Python's objects, in bytes.
MOST_BYTES = 200
# A list or a table of Python's that grows with the first messages, in bytes.
ONCE = 600_000


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def native_bytes() -> int:
    """Return the bytes that malloc has given away; small objects of Python lie elsewhere."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def hold_open(rank: int, size: int, count: int, kind: str, one_tag: bool) -> list[float]:
    """Have ``count`` open that nobody answers, then answer them; twice.

    Returns, of each time, the bytes of native memory that one of them held.
    """
    peer = rank ^ 1
    mine, theirs = (np.full((count, 2), value, np.int32) for value in (rank, -1))
    sources, rooms = list(mine), list(theirs)  # views, made before anything is counted
    tags = [0 if one_tag else i for i in range(count)]
    source = None if kind == "irecv of any" else peer
    works: list[Any] = [None] * (2 * count)

    def send(i: int) -> Any:
        return fl.isend(sources[i], peer, tags[i])

    def receive(i: int) -> Any:
        return fl.irecv(rooms[i], source, tags[i])

    first, then = (send, receive) if kind == "isend" else (receive, send)
    held = []
    fl.sendrecv(np.zeros(2, np.int32), peer, np.zeros(2, np.int32), peer)
    for _ in range(2):
        theirs[...] = -1
        gc.collect()
        fl.barrier()
        before, bytes_before = threads(), native_bytes()
        for i in range(count):
            works[i] = first(i)
        held.append((native_bytes() - bytes_before) / count)
        assert threads() <= before, f"{threads() - before} more threads"
        fl.barrier()
        for i in range(count):
            works[count + i] = then(i)
        assert threads() <= before, f"{threads() - before} more threads"
        for work in works:
            work.wait()
        assert np.all(theirs == peer)
        works[:] = [None] * len(works)
    return held
