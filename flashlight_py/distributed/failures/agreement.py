"""Comparison of the calls of all ranks, at the start of every collective between hosts.

First the ranks of each host compare their calls. Then one rank of each host compares with the other
hosts, and sends the result to the ranks of its host. The messages may also contain data (``Load``).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from flashlight_py import system
from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.journal import text_at_site
from flashlight_py.distributed.failures.wording import different_calls
from flashlight_py.distributed.verbs import ALL_GATHER, GATHER
from flashlight_py.errors import MismatchError

_KEY_BYTES = 16
# Maximum bytes of a call as text, with its line of code. Texts are sent only if calls differ.
_TEXT_BYTES = 320
# Data and messages begin at multiples of this number of bytes, sufficient for every dtype.
_ALIGNED = 16

_EMPTY = np.empty(0, np.uint8)


def between_hosts(seconds: float, times: int = 1) -> float:
    """Return the timeout between hosts if the timeout inside a host is ``seconds``.

    If a rank is late, its host must time out first, because only this host can name the rank. If
    ``times`` ranks wait for each other in a chain, the timeout is increased once for each rank.
    """
    for _ in range(times):
        seconds += min(2.0, 0.2 * seconds)
    return seconds


class Load(NamedTuple):
    """Data that a rank sends with its call: the number of rows of its array, and ``data``.

    The function ``inside`` combines ``data`` of the ranks of a host, and ``between`` combines the
    results of all hosts.
    """

    length: int = 0
    data: Array = _EMPTY
    inside: Callable[[Sequence[Array]], Array] = np.concatenate
    between: Callable[[Sequence[Array]], Array] = np.concatenate


NO_LOAD = Load()


class RankMessage(NamedTuple):
    """The call of one or more ranks as a message: digest, row count of each rank, and ``data``."""

    digest: bytes
    lengths: Sequence[int]
    data: Array

    def packed(self) -> Array:
        numbers = (self.data.size, len(self.lengths), *self.lengths)
        head = self.digest + struct.pack(f"={len(numbers)}q", *numbers)
        room = np.zeros(_up(len(head)) + _up(self.data.size), np.uint8)
        room[: len(head)] = np.frombuffer(head, np.uint8)
        room[_up(len(head)) :][: self.data.size] = self.data
        return room


def unpack_messages(packed: Array) -> list[RankMessage]:
    messages, text, at = [], packed.data, 0
    while at < packed.size:
        size, count = struct.unpack_from("=2q", text, at + _KEY_BYTES)
        lengths = struct.unpack_from(f"={count}q", text, at + _KEY_BYTES + 16)
        begin = at + _up(_KEY_BYTES + 16 + 8 * count)
        digest = bytes(text[at : at + _KEY_BYTES])
        messages.append(RankMessage(digest, lengths, packed[begin : begin + size]))
        at = begin + _up(size)
    return messages


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class Agreement:
    """Compares the calls of all ranks of a group.

    ``inside`` connects the ranks of a host, and ``flat`` connects all ranks. ``between`` connects
    one rank of each host; None on other ranks. ``timeout`` is the limit inside a host, in seconds.
    """

    timeout: float

    def __init__(self, inside: Backend, between: Backend | None, flat: Backend) -> None:
        self._inside, self._between, self._flat = inside, between, flat
        self._is_ahead = False
        self._last, self._last_at = "no call of this group", system.monotonic()

    def agree(self, call: Call, number: int, load: Load) -> RankMessage:
        """Wait until every rank has made a matching call. Return the combined loads of all ranks.

        The result also has the number of rows of each rank, in the order of hosts. ``number`` is
        the number of the call in the group. ``call.seconds`` is the timeout of each step.

        Raises MismatchError on every rank if the calls differ; no array has changed. Raises
        DistributedError like ``Work.wait``.
        """
        message = self.exchange(call.key, load, call.seconds)
        if not any(message.digest):
            raise self._differences(call, number)
        self._last, self._last_at = f"call {number}, {call.steps}", system.monotonic()
        return message

    def runs_ahead(self) -> None:
        """Record that ranks of this host may join the next call late, after other hosts."""
        self._is_ahead = True

    def last(self) -> str:
        """Return a sentence with the newest call that all ranks have joined, and its age."""
        return f"All ranks joined {self._last}, {system.monotonic() - self._last_at:.1f} s ago"

    def exchange(self, key: str, load: Load, seconds: float | None) -> RankMessage:
        """Return the combined loads of all ranks, with a zero digest if ranks differ in ``key``."""
        limit = self.timeout if seconds is None else seconds
        # After ``runs_ahead``, a rank of this host may be ``between_hosts(limit, 3)`` seconds late.
        ahead = seconds is None and self._is_ahead
        seconds, self._is_ahead = between_hosts(limit, 4) if ahead else limit, False
        # Rank 0 of the host first waits for the other hosts, so its answer may take longer.
        answered = between_hosts(seconds, 2)
        digest = hashlib.blake2b(key.encode(), digest_size=_KEY_BYTES).digest()
        own_message = RankMessage(digest, (load.length,), load.data).packed()
        answer = _EMPTY
        local = self._inside.step(GATHER, own_message, seconds)
        if self._inside.rank == 0 and self._between is not None:
            sent = _combine(unpack_messages(local), load.inside)
            gathered = self._between.step(ALL_GATHER, sent.packed(), between_hosts(seconds))
            answer = _combine(unpack_messages(gathered), load.between).packed()
            # All ranks of this host have called and wait for this answer: use the plain timeout.
            answered = limit
        return unpack_messages(self._inside.step(ALL_GATHER, answer, answered))[0]

    def _differences(self, call: Call, number: int) -> MismatchError:
        own_text = bytearray(text_at_site(str(call), _TEXT_BYTES).ljust(_TEXT_BYTES, b"\0"))
        text = Call(ALL_GATHER, np.frombuffer(own_text, np.uint8))
        if call.seconds is not None:
            text.seconds = between_hosts(call.seconds)
        rows = self._flat.start(text).wait().reshape(-1, _TEXT_BYTES)
        calls = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
        where = f"[{call.name}] rank {self._flat.rank} of {self._flat.size}"
        return MismatchError(different_calls(where, enumerate(calls), number), calls=calls)


def _combine(
    messages: Sequence[RankMessage], combine: Callable[[Sequence[Array]], Array]
) -> RankMessage:
    """Combine several messages into one. If their digests differ, its digest is zero."""
    digest = messages[0].digest
    if any(message.digest != digest for message in messages) or not any(digest):
        return RankMessage(bytes(_KEY_BYTES), (), _EMPTY)
    lengths = [length for message in messages for length in message.lengths]
    return RankMessage(digest, lengths, combine([message.data for message in messages]))
