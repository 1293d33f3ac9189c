"""What the ranks of several hosts call, compared before anything moves.

Every collective begins with it, so that ranks which call different things meet in the same
place: inside each host, then one rank of each host with the others', then inside again.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.call_site import call_site
from flashlight_py.distributed.people import names
from flashlight_py.errors import MismatchError

__all__ = ["STEP", "Agreement", "between_hosts"]

# Between a verb and the collective that is a step of it.
STEP = "\n"

_KEY_BYTES = 16
# Room for a call and its place as text, told only where calls differ.
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
        # This rank has ended the last call while a mate may still wait for other hosts.
        self.is_ahead = False
        self._last, self._last_at = "no call of this group", time.monotonic()

    def reach(self, call: str, number: int, seconds: float | None = None) -> None:
        """Return once every rank has called ``call``, as "verb(...)" or "verb", STEP, "step(...)".

        It is call ``number`` of the group, as users count. ``seconds`` bounds each step of the way;
        None: the group's timeout does.

        Raises:
            MismatchError: another rank called something else; on every rank, nothing was changed.
            DistributedError: as ``Work.wait``.
        """
        with self._within(seconds):
            same = self._all_call(call, self._timeout if seconds is None else seconds)
            if same:
                self._last, self._last_at = (
                    f"call {number}, {call.replace(STEP, ': ')}",
                    time.monotonic(),
                )
                return
            raise MismatchError(self._differences(call, number))

    def last(self) -> str:
        """Say which call all ranks have joined last, and when."""
        return f"All ranks joined {self._last}, {time.monotonic() - self._last_at:.1f} s ago"

    def _all_call(self, call: str, seconds: float) -> bool:
        """Return whether all ranks call the same; the same answer on all of them."""
        mine = np.frombuffer(bytearray(_key(call)), np.uint8)
        local = self._gather_inside(mine).reshape(-1, _KEY_BYTES)
        # A host whose ranks differ tells zeros, which no other host's key equals.
        shared = mine if (local == mine).all() else np.zeros_like(mine)
        verdict = np.zeros(1, np.uint8)
        if self._inside.rank == 0 and self._between is not None:
            told = self._between.all_gather(shared, blocking=True).wait().reshape(-1, _KEY_BYTES)
            verdict[0] = bool((told == told[0]).all() and told[0].any())
        # The rank that gives it may wait for another host meanwhile, and is not late itself.
        with self._inside.within(between_hosts(seconds, 2)):
            self._inside.broadcast(verdict, 0, blocking=True).wait()
        return bool(verdict[0])

    def _gather_inside(self, mine: Array) -> Array:
        is_ahead, self.is_ahead = self.is_ahead, False
        limit = between_hosts(self._timeout, 4)  # of a mate that has three of them itself
        with self._inside.within(limit) if is_ahead else contextlib.nullcontext():
            local: Array = self._inside.all_gather(mine, blocking=True).wait()
        return local

    def _differences(self, call: str, number: int) -> str:
        call = call.partition(STEP)[0]  # what users know it as
        texts = self._flat.all_gather(_padded(f"{call} at {call_site()}"), blocking=True).wait()
        groups: dict[str, list[int]] = {}
        for rank, row in enumerate(texts.reshape(-1, _TEXT_BYTES)):
            text = row.tobytes().rstrip(b"\0").decode(errors="replace")
            groups.setdefault(text, []).append(rank)
        listed = "; ".join(f"{names(ranks)} called {text}" for text, ranks in groups.items())
        verb = call.partition("(")[0]
        return (
            f"[{verb}] rank {self._flat.rank} of {self._flat.size}: the ranks called different "
            f"things in call {number} of this group: {listed}. Nothing was changed; make every "
            "rank call the same"
        )

    @contextlib.contextmanager
    def _within(self, seconds: float | None) -> Iterator[None]:
        if seconds is None:
            yield
            return
        with contextlib.ExitStack() as limits:
            limits.enter_context(self._inside.within(seconds))
            for backend in filter(None, (self._between, self._flat)):
                limits.enter_context(backend.within(between_hosts(seconds)))
            yield


def _key(call: str) -> bytes:
    return hashlib.blake2b(call.encode(), digest_size=_KEY_BYTES).digest()


def _padded(text: str) -> Array:
    """Return ``text`` in an array of the same size on every rank; of a long one the end counts."""
    raw = text.encode()
    if len(raw) > _TEXT_BYTES:
        raw = raw[: _TEXT_BYTES // 2 - 2] + b" ... " + raw[3 - _TEXT_BYTES // 2 :]
    return np.frombuffer(bytearray(raw.ljust(_TEXT_BYTES, b"\0")), np.uint8)
