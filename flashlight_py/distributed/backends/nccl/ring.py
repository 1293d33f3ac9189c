"""What the ranks of one host call, in memory that they share: posted, never waited for.

NCCL compares nothing. So every rank posts each call, with a checksum of all calls so far, in a ring
of its own, and its watchdog looks whether the others have posted the same.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from flashlight_py.distributed.call_site import Place, caller, site_of
from flashlight_py.distributed.memory_file import open_memory

__all__ = ["Posted", "Ring", "Word", "bytes_of_rings", "map_rings"]

_SLOTS = 1024  # CUDA lets a host run about as many launches ahead
_ENTRY = struct.Struct("<QIId200s64s")  # number, chain, checksum of the text, time, call, site
_COUNT = struct.Struct("<Q")
_WORD = struct.Struct("<i4000s")
_WORD_AT, _ENTRIES_AT = 16, 4096
_RING_BYTES = _ENTRIES_AT + _SLOTS * _ENTRY.size
_CALL_BYTES, _SITE_BYTES, _WORDS_BYTES = 200, 64, 4000


class Posted(NamedTuple):
    """A call: the number, a checksum of it and all before it, when (seconds), what, and where."""

    number: int
    chain: int
    at: float
    call: str
    site: str


class Word(NamedTuple):
    """What a rank says that has found something wrong: of which ``kind``, and what."""

    kind: int
    text: str


def bytes_of_rings(ranks: int) -> int:
    """Return how much memory the rings of ``ranks`` ranks take."""
    return ranks * _RING_BYTES


def map_rings(path: str, create: bool, ranks: int) -> mmap.mmap:
    """Map the rings of ``ranks`` ranks, after reserving their memory if ``create``.

    Raises:
        OSError: they cannot be had.
    """
    fd = open_memory(path)
    try:
        if create:
            os.posix_fallocate(fd, 0, bytes_of_rings(ranks))
        return mmap.mmap(fd, bytes_of_rings(ranks))
    finally:
        os.close(fd)


class Ring:
    """The calls of ``rank`` in ``memory``. One process posts, any reads."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory, self._begin = memory, rank * _RING_BYTES
        self._chain = self._posted = 0

    @property
    def count(self) -> int:
        """How many calls have been posted."""
        count: int = _COUNT.unpack_from(self._memory, self._begin)[0]
        return count

    def post(self, call: str, key: str) -> None:
        """Add a call of user code, of which all ranks must have the same ``key``.

        Whoever reads it a moment too early knows by its checksum.
        """
        self._posted += 1
        number, text, site = self._posted, _fit(call, _CALL_BYTES), _site(caller())
        self._chain = zlib.crc32(key.encode(), self._chain)
        entry = (number, self._chain, _checksum(number, text), time.monotonic(), text, site)
        _ENTRY.pack_into(self._memory, self._place(number), *entry)
        _COUNT.pack_into(self._memory, self._begin, number)

    def read(self, number: int) -> Posted | None:
        """Return call ``number``, unless it is not there yet, or not any more."""
        entry = _ENTRY.unpack_from(self._memory, self._place(number))
        found, chain, checksum, at, text, site = entry
        text = text.rstrip(b"\0")
        if found != number or checksum != _checksum(number, text):
            return None
        return Posted(number, chain, at, _text(text), _text(site))

    def say(self, kind: int, text: str) -> None:
        """Tell whoever looks, once; ``kind`` is not 0."""
        if self.word() is None:
            words = _fit(text, _WORDS_BYTES)
            at = self._begin + _WORD_AT
            _WORD.pack_into(self._memory, at, 0, words)
            struct.pack_into("<i", self._memory, at, kind)

    def word(self) -> Word | None:
        """Return what this rank has said, if anything."""
        kind, text = _WORD.unpack_from(self._memory, self._begin + _WORD_AT)
        return Word(kind, _text(text)) if kind else None

    def _place(self, number: int) -> int:
        return self._begin + _ENTRIES_AT + number % _SLOTS * _ENTRY.size


def first_difference(rings: Sequence[Ring], after: int) -> tuple[int, list[Posted | None]]:
    """Return how far all of ``rings`` are known to agree, from ``after`` on, and what differs then.

    What differs is what each ring has there; the list is empty while all is well.
    """
    last = min(ring.count for ring in rings)
    latest = [ring.read(last) for ring in rings] if last > after else []
    if len({each.chain for each in latest if each is not None}) <= 1:
        settled = last > after and all(each is not None for each in latest)
        return (last if settled else after), []
    for number in range(max(after, last - _SLOTS) + 1, last + 1):
        calls = [ring.read(number) for ring in rings]
        if len({each.chain for each in calls if each is not None}) > 1:
            return number - 1, calls
    return after, latest


def _checksum(number: int, text: bytes) -> int:
    return zlib.crc32(text, number & 0xFFFFFFFF)


@functools.lru_cache(maxsize=1024)
def _site(place: Place) -> bytes:
    return _fit(site_of(place), _SITE_BYTES)


def _fit(text: str, limit: int) -> bytes:
    return text.encode()[:limit]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
