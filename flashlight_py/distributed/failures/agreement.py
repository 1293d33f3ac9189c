"""Comparison of the calls of several hosts, with which every collective begins.

Ranks compare inside each host, then one rank of each host with those of the others, then inside
again. Small data travels with it.
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
from flashlight_py.distributed.calls.call_site import text_at_site
from flashlight_py.distributed.failures.wording import different_calls
from flashlight_py.distributed.verbs import ALL_GATHER, GATHER
from flashlight_py.errors import MismatchError

_KEY_BYTES = 16
# Bytes for a call and its place as text, exchanged only where calls differ.
_TEXT_BYTES = 320
# Where a message's data begins, and the next message: aligned for every dtype.
_ALIGNED = 16

_EMPTY = np.empty(0, np.uint8)


def between_hosts(seconds: float, times: int = 1) -> float:
    """Return the timeout between hosts if that of a host's ranks is ``seconds``.

    It is longer, so that the host of a late rank can name the rank. Repeated ``times`` times for a
    rank that waits for a waiting rank.
    """
    for _ in range(times):
        seconds += min(2.0, 0.2 * seconds)
    return seconds


def joined(parts: Sequence[Array]) -> Array:
    """Return the bytes of ``parts``, one after the other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Load(NamedTuple):
    """A rank's part of a comparison: ``data`` as bytes, and the number of rows of its array.

    ``inside`` combines the data of a host's ranks, ``between`` that of the hosts.
    """

    length: int = 0
    data: Array = _EMPTY
    inside: Callable[[Sequence[Array]], Array] = joined
    between: Callable[[Sequence[Array]], Array] = joined


NO_LOAD = Load()


class RankMessage(NamedTuple):
    """A digest of the call, the lengths of some ranks' arrays, and data as bytes."""

    digest: bytes
    lengths: Sequence[int]
    data: Array

    def packed(self) -> Array:
        """Return it as bytes."""
        numbers = (self.data.size, len(self.lengths), *self.lengths)
        head = self.digest + struct.pack(f"={len(numbers)}q", *numbers)
        room = np.zeros(_up(len(head)) + _up(self.data.size), np.uint8)
        room[: len(head)] = np.frombuffer(head, np.uint8)
        room[_up(len(head)) :][: self.data.size] = self.data
        return room


def unpacked(whole: Array) -> list[RankMessage]:
    """Return the messages of which ``whole`` has the bytes, one after the other."""
    messages, text, at = [], whole.data, 0
    while at < whole.size:
        size, count = struct.unpack_from("=2q", text, at + _KEY_BYTES)
        lengths = struct.unpack_from(f"={count}q", text, at + _KEY_BYTES + 16)
        begin = at + _up(_KEY_BYTES + 16 + 8 * count)
        digest = bytes(text[at : at + _KEY_BYTES])
        messages.append(RankMessage(digest, lengths, whole[begin : begin + size]))
        at = begin + _up(size)
    return messages


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class Agreement:
    """Compares calls of all ranks of ``flat``; ``inside`` and ``between`` join hosts: see there.

    ``timeout`` is that of ``inside``, in seconds.
    """

    timeout: float

    def __init__(self, inside: Backend, between: Backend | None, flat: Backend) -> None:
        self._inside, self._between, self._flat = inside, between, flat
        self._is_ahead = False
        self._last, self._last_at = "no call of this group", system.monotonic()

    def reach(self, call: Call, number: int, load: Load) -> RankMessage:
        """Wait until every rank has made a matching call; return the loads of all, combined.

        The message also has the lengths of the ranks' arrays, host by host. ``number`` counts the
        calls of users. ``call.seconds`` bounds each step; None: the timeout of the group.

        Raises:
            MismatchError: another rank called something else; on every rank, nothing was changed.
            DistributedError: as ``Work.wait``.
        """
        found = self.meet(call.key, load, call.seconds)
        if not any(found.digest):
            raise self._differences(call, number)
        self._last, self._last_at = f"call {number}, {call.steps}", system.monotonic()
        return found

    def runs_ahead(self) -> None:
        """Note that the last call has ended here while a local peer may wait for other hosts."""
        self._is_ahead = True

    def last(self) -> str:
        """Say which call all ranks have joined last, and when."""
        return f"All ranks joined {self._last}, {system.monotonic() - self._last_at:.1f} s ago"

    def meet(self, key: str, load: Load, seconds: float | None) -> RankMessage:
        """Return the combined loads of all ranks; the digest is zero if their keys differ."""
        limit = self.timeout if seconds is None else seconds
        # A local peer that is behind has three limits of other hosts itself.
        ahead = seconds is None and self._is_ahead
        seconds, self._is_ahead = between_hosts(limit, 4) if ahead else limit, False
        # The rank that has the answer may wait for another host meanwhile, and is not late itself.
        answered = between_hosts(seconds, 2)
        digest = hashlib.blake2b(key.encode(), digest_size=_KEY_BYTES).digest()
        mine = RankMessage(digest, (load.length,), load.data).packed()
        answer = _EMPTY
        local = self._inside.step(GATHER, mine, seconds)
        if self._inside.rank == 0 and self._between is not None:
            sent = _one_of(unpacked(local), load.inside)
            whole = self._between.step(ALL_GATHER, sent.packed(), between_hosts(seconds))
            answer = _one_of(unpacked(whole), load.between).packed()
            # Its peers wait already; other hosts do for it, in their next call.
            answered = limit
        return unpacked(self._inside.step(ALL_GATHER, answer, answered))[0]

    def _differences(self, call: Call, number: int) -> MismatchError:
        mine = bytearray(text_at_site(str(call), _TEXT_BYTES).ljust(_TEXT_BYTES, b"\0"))
        text = Call(ALL_GATHER, np.frombuffer(mine, np.uint8))
        if call.seconds is not None:
            text.seconds = between_hosts(call.seconds)
        rows = self._flat.start(text).wait().reshape(-1, _TEXT_BYTES)
        calls = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
        where = f"[{call.name}] rank {self._flat.rank} of {self._flat.size}"
        return MismatchError(different_calls(where, enumerate(calls), number), calls=calls)


def _one_of(
    messages: Sequence[RankMessage], made: Callable[[Sequence[Array]], Array]
) -> RankMessage:
    """Return one message in place of several; of zeros, as no call's, where calls differ."""
    digest = messages[0].digest
    if any(message.digest != digest for message in messages) or not any(digest):
        return RankMessage(bytes(_KEY_BYTES), (), _EMPTY)
    lengths = [length for message in messages for length in message.lengths]
    return RankMessage(digest, lengths, made([message.data for message in messages]))
