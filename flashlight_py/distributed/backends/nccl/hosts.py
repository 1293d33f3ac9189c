"""One rank of each host compares with the others what its host has called, on a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl.ring import Ring, Word
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.verbs import ALL_GATHER
from flashlight_py.errors import DistributedError

__all__ = ["HostsLink"]

_log = logging.getLogger("flashlight_py")

_INTERVAL = 0.2
# How many of the latest calls are looked through for the first that differs.
_WINDOW = 512
_MISMATCH = 1


class HostsLink:
    """Joins this rank with one of each other host by ``between``; ``hosts`` are their ranks."""

    def __init__(self, between: Backend, hosts: Sequence[Sequence[int]], place: int) -> None:
        self._between, self._hosts, self._place = between, hosts, place
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, rings: Sequence[Ring], mine: Ring) -> None:
        """Begin to compare what this host's ``rings`` hold; ``mine`` is told what was found."""
        self._rings, self._mine = list(rings), mine
        self._thread = threading.Thread(target=self._run, name="flashlight-nccl-hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and the connection; may be repeated."""
        self._stop.set()
        self._between.abort("this host compares no more")  # ends a wait for the others
        if self._thread is not None:
            self._thread.join()
        self._between.close()

    def _run(self) -> None:
        try:
            while not self._stop.wait(_INTERVAL) and not self._found():
                pass
        except DistributedError as error:
            _log.debug("hosts compare their calls no more: %s", error)

    def _found(self) -> bool:
        """Compare once, all hosts together; tell whether something was wrong."""
        words = [self._decode(text) for text in exchange_bytes(self._between, self._said())]
        word = next(filter(None, words), None)
        if word is not None:
            self._mine.say(*word)
            return True
        counts = self._gather(np.array([min(ring.count for ring in self._rings)], np.int64))
        last = int(counts.min())
        chains = self._gather(self._chains(last))
        if not self._differ(chains[:, -1]):
            return False
        self._mine.say(_MISMATCH, self._difference(last, chains))
        return True

    def _said(self) -> bytes:
        """Return what a rank of this host has said, if any has."""
        words = (ring.word() for ring in self._rings)
        word = next(filter(None, words), None)
        return b"" if word is None else f"{word.kind}\n{word.text}".encode()

    @staticmethod
    def _decode(said: bytes) -> Word | None:
        kind, _, text = said.decode(errors="replace").partition("\n")
        return Word(int(kind), text) if kind else None

    def _chains(self, last: int) -> Array:
        """Return the checksums of the calls up to ``last``; -1 where one is not known any more."""
        first = last - _WINDOW + 1
        posted = [self._mine.read(number) if number > 0 else None for number in range(first, last)]
        posted.append(self._mine.read(last) if last > 0 else None)
        return np.array([-1 if each is None else each.chain for each in posted], np.int64)

    def _gather(self, mine: Array) -> Array:
        rows: Array = self._between.start(Call(ALL_GATHER, mine)).wait()
        return rows.reshape(self._between.size, -1)

    @staticmethod
    def _differ(chains: Array) -> bool:
        known = chains[chains >= 0]
        return known.size > 1 and bool((known != known[0]).any())

    def _difference(self, last: int, chains: Array) -> str:
        """Return which call is the first that hosts differ in, and what each host has called."""
        differing = [place for place in range(_WINDOW) if self._differ(chains[:, place])]
        number = last - _WINDOW + 1 + differing[0]
        posted = self._mine.read(number)
        mine = "something that is not known any more"
        if posted is not None:
            mine = f"{posted.call} at {posted.site}"
        told = exchange_bytes(self._between, mine.encode())
        listed = "; ".join(
            f"the host of rank {host[0]} called {text.decode(errors='replace')}"
            for host, text in zip(self._hosts, told, strict=True)
        )
        return f"call {number} of this group: {listed}"
