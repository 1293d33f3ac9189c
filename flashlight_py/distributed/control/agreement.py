"""What the ranks of several hosts call, compared before anything moves.

Every collective begins with it, so that ranks which call different things meet in the same
place: inside each host, then one rank of each host with the others', then inside again.
"""

from __future__ import annotations

import hashlib
import time

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.call_site import text_at_site
from flashlight_py.distributed.control.wording import different_calls
from flashlight_py.distributed.verbs import ALL_GATHER, BROADCAST
from flashlight_py.errors import MismatchError

_KEY_BYTES = 16
# Bytes for a call and its place as text, exchanged only where calls differ.
_TEXT_BYTES = 320


def between_hosts(seconds: float, times: int = 1) -> float:
    """Return how long hosts wait for each other where ranks of one host wait ``seconds``.

    A little longer: the host of a rank that is late can then say so, instead of being late itself.
    And so on, ``times`` times, for who waits for one that waits.
    """
    for _ in range(times):
        seconds += min(2.0, 0.2 * seconds)
    return seconds


class Agreement:
    """Compares calls of all ranks of ``flat``; ``inside`` and ``between`` join hosts: see there.

    ``timeout`` is that of ``inside``, in seconds.
    """

    def __init__(
        self, inside: Backend, between: Backend | None, flat: Backend, timeout: float
    ) -> None:
        self._inside, self._between, self._flat = inside, between, flat
        self._timeout = timeout
        # This rank has ended the last call while a local peer may still wait for other hosts.
        self.is_ahead = False
        self._last, self._last_at = "no call of this group", time.monotonic()

    def reach(self, call: Call, number: int) -> None:
        """Return once every rank has called what goes together with ``call``.

        It is call ``number`` of the group, as users count. Its ``seconds`` bound each step of the
        way; None: the group's timeout does.

        Raises:
            MismatchError: another rank called something else; on every rank, nothing was changed.
            DistributedError: as ``Work.wait``.
        """
        if not self._all_call(call.key, self._timeout if call.seconds is None else call.seconds):
            raise self._differences(call, number)
        self._last, self._last_at = f"call {number}, {call.steps}", time.monotonic()

    def last(self) -> str:
        """Say which call all ranks have joined last, and when."""
        return f"All ranks joined {self._last}, {time.monotonic() - self._last_at:.1f} s ago"

    def _all_call(self, key: str, seconds: float) -> bool:
        """Return whether all ranks call the same; the same answer on all of them."""
        mine = np.frombuffer(bytearray(_digest(key)), np.uint8)
        local = self._gather_inside(mine, seconds).reshape(-1, _KEY_BYTES)
        # A host whose ranks differ sends zeros, which no other host's digest equals.
        shared = mine if (local == mine).all() else np.zeros_like(mine)
        verdict = np.zeros(1, np.uint8)
        if self._inside.rank == 0 and self._between is not None:
            call = Call(ALL_GATHER, shared, seconds=between_hosts(seconds))
            hosts = self._between.start(call).wait().reshape(-1, _KEY_BYTES)
            verdict[0] = bool((hosts == hosts[0]).all() and hosts[0].any())
        # The rank that has it may wait for another host meanwhile, and is not late itself.
        limit = between_hosts(seconds, 2)
        self._inside.start(Call(BROADCAST, verdict, root=0, seconds=limit)).wait()
        return bool(verdict[0])

    def _gather_inside(self, mine: Array, seconds: float) -> Array:
        if self.is_ahead:  # of a local peer that has three limits of other hosts itself
            seconds = between_hosts(self._timeout, 4)
        self.is_ahead = False
        local: Array = self._inside.start(Call(ALL_GATHER, mine, seconds=seconds)).wait()
        return local

    def _differences(self, call: Call, number: int) -> MismatchError:
        mine = bytearray(text_at_site(str(call), _TEXT_BYTES).ljust(_TEXT_BYTES, b"\0"))
        text = Call(ALL_GATHER, np.frombuffer(mine, np.uint8))
        if call.seconds is not None:
            text.seconds = between_hosts(call.seconds)
        rows = self._flat.start(text).wait().reshape(-1, _TEXT_BYTES)
        calls = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
        where = f"[{call.name}] rank {self._flat.rank} of {self._flat.size}"
        words = different_calls(where, f"call {number} of this group", enumerate(calls))
        return MismatchError(words, calls=calls)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=_KEY_BYTES).digest()
