"""The calls of the native ``all_reduce``: a ring that csrc/fast/ring.h writes and Python reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from flashlight_py.distributed.arrays import DTYPES
from flashlight_py.distributed.call_site import PACKAGE
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.recorder import incidents
from flashlight_py.distributed.recorder.record import Record, What, place_of_caller

__all__ = ["FastCalls"]

CALLS = 256
_HEADER_BYTES = 64
_CALL = np.dtype(
    {
        "names": ["number", "started", "ended", "count", "shape", "dtype", "op", "ndim", "flags"],
        "formats": ["u8", "i8", "i8", "i8", ("i8", 3), "i1", "i1", "i1", "i1"],
        "offsets": [0, 8, 16, 24, 32, 56, 57, 58, 59],
        "itemsize": 64,
    }
)
# Places in the header, in eights of bytes.
NUMBER, _WRITTEN, _OFF, CALLER = 0, 1, 2, 3
_FAILED, _PLACED = 1, 2

_living: weakref.WeakSet[FastCalls] = weakref.WeakSet()  # used by the main program alone
_all_off = False


class FastCalls:
    """The ring of one group; ``fast`` is the extension that writes it.

    ``header[NUMBER]`` is how many calls the group has had, by either way, ``header[CALLER]`` the
    thread that is in the native one, or 0. ``inside`` are those that are in others.
    """

    def __init__(self, fast: Any, inside: set[int]) -> None:
        self._clocks, self.inside = fast.clocks, inside
        self.memory = np.zeros(_HEADER_BYTES + CALLS * _CALL.itemsize, np.uint8)
        self.places: list[Any] = [None] * CALLS
        self.header = memoryview(self.memory.data)[:_HEADER_BYTES].cast("Q")
        self._calls = self.memory[_HEADER_BYTES:].view(_CALL)
        self._zero: tuple[int, int] = self._clocks()
        self._errors: dict[int, str] = {}
        self.header[_OFF] = _all_off
        _living.add(self)

    @property
    def package(self) -> str:
        """The folder whose code is not the user's."""
        return PACKAGE

    def records(self, group: str) -> list[Record]:
        """Return the calls of the ring, the oldest first."""
        written = self.header[_WRITTEN]
        calls, places = self._calls.copy(), list(self.places)
        rate = self._nanoseconds_per_tick()
        slots = [index % CALLS for index in range(max(0, written - CALLS), written)]
        return [self._record(group, calls[slot], places[slot], rate) for slot in slots]

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Note that the last call failed by what the body raises, and the line that it was on."""
        try:
            yield
        except BaseException as error:
            self._note(f"{type(error).__name__}: {error}")
            incidents.report(error)
            raise

    def _note(self, error: str) -> None:
        slot = (self.header[_WRITTEN] - 1) % CALLS
        self.places[slot] = place_of_caller(5)  # above: failing, contextlib's, the backend's
        self._calls[slot]["flags"] |= _FAILED | _PLACED
        self._errors = {int(self._calls[slot]["number"]): error}

    def _nanoseconds_per_tick(self) -> float:
        ticks, nanoseconds = self._clocks()
        return float((nanoseconds - self._zero[1]) / max(1, ticks - self._zero[0]))

    def _record(self, group: str, call: Any, place: Any, rate: float) -> Record:
        ticks, nanoseconds = self._zero
        number, flags, ndim = int(call["number"]), call["flags"], int(call["ndim"])
        dtype = np.dtype(DTYPES[call["dtype"]])
        fits = ndim <= len(call["shape"])
        shape = tuple(int(extent) for extent in call["shape"][:ndim]) if fits else None
        size = int(call["count"]) * dtype.itemsize
        op = ReduceOp(int(call["op"]))
        what = What(group, number, "all_reduce", dtype, shape, op, bytes=size)
        started = nanoseconds + int((int(call["started"]) - ticks) * rate)
        record = Record(what, started, place if flags & _PLACED else None)
        if call["ended"]:
            record.ended = nanoseconds + int((int(call["ended"]) - ticks) * rate)
        if flags & _FAILED:
            record.error = self._errors.get(number, "failed")
        return record


def leave_to_python(off: bool) -> None:
    """Have every ``all_reduce`` take the way through Python, which notes more; or no longer."""
    global _all_off  # noqa: PLW0603  (rings that are made meanwhile must know)
    _all_off = off
    for calls in _living:
        calls.header[_OFF] = off
