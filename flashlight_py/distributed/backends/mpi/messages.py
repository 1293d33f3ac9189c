"""Messages between two ranks: offered, compared, then sent.

The sender offers a message, with tag, dtype and shape. When the receiver has asked for one of that
tag it answers, and only then the array moves: both ends hear of what does not fit, a send ends when
it has been received, and MPI's own tags are numbers of messages, so that tags need no bound.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.backends.mpi.failures import mismatch
from flashlight_py.distributed.backends.mpi.memory import as_bytes, chunks
from flashlight_py.distributed.backends.mpi.notes import Kind, Notes
from flashlight_py.distributed.backends.mpi.progress import Progress, Steps
from flashlight_py.distributed.call import Matched, array_in_words, kind_of
from flashlight_py.distributed.call_site import call_site

__all__ = ["Messages"]

# An array up to this many bytes travels with its offer, which saves waiting for the answer.
_INLINE_BYTES = 1024
# MPI promises tags up to this.
_LARGEST_TAG = 32767


@dataclass(frozen=True)
class Offer:
    """What a rank would send. ``data`` are the bytes themselves, if they are few."""

    number: int
    tag: int
    kind: str
    data: bytes | None
    site: str
    rows: int
    refused: str = ""  # in words, if there is none in truth

    def __str__(self) -> str:
        if self.refused:
            return f"{self.refused} at {self.site}"
        return f"send({self.kind}, tag={self.tag}) at {self.site}"


@dataclass
class Sending:
    """An offer that has not been answered yet; then, perhaps, the call that it does not fit."""

    offer: Offer
    dst: int
    answered: bool = False
    unfit: str | None = None


@dataclass(eq=False)
class Receiving:
    """What a rank waits to receive; ``src`` is None: from any rank."""

    src: int | None
    tag: int
    kind: str
    site: str
    refused: str = ""

    def __str__(self) -> str:
        if self.refused:
            return f"{self.refused} at {self.site}"
        return f"recv({self.kind}, tag={self.tag}) at {self.site}"


class Messages:
    """The messages of one rank of a group: arrays over ``wire``, the rest over ``notes``."""

    def __init__(self, mpi: Any, wire: Any, notes: Notes, progress: Progress, place: str) -> None:
        self._mpi, self._wire, self._notes, self._progress = mpi, wire, notes, progress
        self._place = place
        self._rank = int(wire.Get_rank())
        self._numbers = itertools.count()
        self._sending: dict[int, Sending] = {}
        self._receiving: list[Receiving] = []
        self._offers: dict[int, list[Offer]] = {}

    def send(self, array: Array, dst: int, tag: int) -> Steps:
        """Offer ``array`` to ``dst`` at once; the steps go on from there."""
        inline = array.nbytes <= _INLINE_BYTES and not is_cupy(array)
        data = array.tobytes() if inline else None
        rows = array.shape[0] if array.ndim else 1
        offer = Offer(next(self._numbers), tag, _kind(array), data, call_site(), rows)
        return self._offer(offer, array, dst)

    def _offer(self, offer: Offer, array: Array | None, dst: int) -> Steps:
        sending = self._sending[offer.number] = Sending(offer, dst)
        self._notes.send(dst, Kind.OFFER, offer)
        return self._send(sending, array)

    def refuse(self, call: str, peer: int, tag: int, sends: bool) -> Steps:
        """Do this rank's part of a message that it refuses: the peer is notified."""
        if sends:
            offer = Offer(next(self._numbers), tag, "", b"", call_site(), 0, refused=call)
            return self._offer(offer, None, peer)
        receiving = Receiving(peer, tag, "", call_site(), refused=call)
        self._receiving.append(receiving)
        return self._recv(receiving, None)

    def _send(self, sending: Sending, array: Array | None) -> Steps:
        while not sending.answered:
            yield
        del self._sending[sending.offer.number]
        if sending.unfit is not None:
            calls = {self._rank: str(sending.offer), sending.dst: sending.unfit}
            raise self._mismatch("send", calls)
        if sending.offer.data is None:
            assert array is not None
            tag = sending.offer.number % _LARGEST_TAG
            parts = chunks(as_bytes(array))
            requests = [
                self._wire.Isend([c, c.size, self._mpi.BYTE], sending.dst, tag) for c in parts
            ]
            yield from self._progress.until(requests, moving=True)
        return array

    def recv(self, array: Array, src: int | None, tag: int, partial: bool = False) -> Steps:
        """Ask for a message at once; the steps go on from there. The result is a ``Matched``."""
        receiving = Receiving(src, tag, _kind(array), call_site())
        self._receiving.append(receiving)
        return self._recv(receiving, array, partial)

    def _recv(self, receiving: Receiving, array: Array | None, partial: bool = False) -> Steps:
        while (found := self._offer_for(receiving)) is None:
            yield
        self._receiving.remove(receiving)
        src, offer = found
        if partial and array is not None and array.ndim and offer.rows <= array.shape[0]:
            array = array[: offer.rows]
        if array is None or offer.kind != _kind(array):
            self._notes.send(src, Kind.REPLY, (offer.number, str(receiving)))
            raise self._mismatch("recv", {self._rank: str(receiving), src: str(offer)})
        yield from self._take(offer, src, array)
        return Matched(src, array.shape[0] if array.ndim else 1)

    def _take(self, offer: Offer, src: int, array: Array) -> Steps:
        if offer.data is not None:
            array[...] = np.frombuffer(offer.data, array.dtype).reshape(array.shape)
            self._notes.send(src, Kind.REPLY, (offer.number, None))
            return
        tag = offer.number % _LARGEST_TAG
        parts = chunks(as_bytes(array))
        requests = [self._wire.Irecv([c, c.size, self._mpi.BYTE], src, tag) for c in parts]
        self._notes.send(src, Kind.REPLY, (offer.number, None))
        yield from self._progress.until(requests, moving=True)

    def _offer_for(self, receiving: Receiving) -> tuple[int, Offer] | None:
        """Take the first offer of this tag, unless an earlier receive of the tag waits for it.

        A receive from any rank leaves alone what one from that rank waits for, earlier or not.
        """
        src, tag = receiving.src, receiving.tag
        earlier = self._receiving[: self._receiving.index(receiving)]
        if any((other.src, other.tag) == (src, tag) for other in earlier):
            return None
        asked = {other.src for other in self._receiving if other.tag == tag}
        sources = [src] if src is not None else [r for r in self._offers if r not in asked]
        for source in sources:
            offers = self._offers.get(source, [])
            found = next((offer for offer in offers if offer.tag == tag), None)
            if found is not None:
                offers.remove(found)
                if src is None:  # the next one looks at the others first
                    self._offers[source] = self._offers.pop(source)
                return source, found
        return None

    def hear(self, source: int, kind: Kind, content: Any) -> None:
        """Take an offer, or the answer to one."""
        if kind is Kind.OFFER:
            self._offers.setdefault(source, []).append(content)
        else:
            number, unfit = content
            self._sending[number].answered, self._sending[number].unfit = True, unfit

    def waiting_with(self, rank: int) -> list[str]:
        """Return what this rank waits for with ``rank``, in words."""
        sends = [str(sending.offer) for sending in self._sending.values() if sending.dst == rank]
        return sends + [
            str(receiving) for receiving in self._receiving if receiving.src in (rank, None)
        ]

    def explain(self, peer: int, waits_for: list[str]) -> str:
        """Say what ``peer`` waits for with this rank, as it answered or as its offers show."""
        offers = [str(offer) for offer in self._offers.get(peer, [])]
        calls = ", ".join(dict.fromkeys([*waits_for, *offers]))
        here = ", ".join(self.waiting_with(peer))
        there = f"rank {peer} called {calls}" if calls else f"nothing was heard of rank {peer}"
        return f"rank {self._rank} called {here}; {there}"

    def _mismatch(self, name: str, calls: dict[int, str]) -> Exception:
        return mismatch(f"[{name}] {self._place}", "a message", dict(sorted(calls.items())))


def _kind(array: Array) -> str:
    return array_in_words(kind_of(array), array.shape)
