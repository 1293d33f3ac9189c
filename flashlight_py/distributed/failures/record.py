"""One call of a verb: what, on which line, from when to when, and how it ended."""

from __future__ import annotations

import math
import weakref
from types import CodeType
from typing import Any, NamedTuple

from flashlight_py.distributed.calls.call_site import frame_of_caller, site_of
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.work import Work

# A line of user code, to be worked out when somebody reads it (which takes longer than a call): its
# code, the instruction in it (a frame's ``f_lasti``), and the name of our function that it called.
Place = tuple[CodeType, int, str]


class What(NamedTuple):
    """The verb and its arguments; ``number`` counts the group's calls, and is 0 for messages."""

    group: str
    number: int
    verb: str
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    op: ReduceOp | None = None
    root: int | None = None
    peer: int | None = None
    tag: int | None = None
    bytes: int | None = None  # where it does not follow from dtype and shape

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends or receives."""
        if self.bytes is not None:
            return self.bytes
        if self.dtype is None or self.shape is None:
            return 0
        return int(self.dtype.itemsize * math.prod(self.shape))

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain types."""
        return {
            **self._asdict(),
            "number": self.number or None,
            "dtype": None if self.dtype is None else str(self.dtype),
            "shape": None if self.shape is None else list(self.shape),
            "op": None if self.op is None else self.op.name.lower(),
            "bytes": self.nbytes,
        }


class Record:
    """A call. Times are nanoseconds of ``time.monotonic_ns``; ``ended`` is 0 while it runs.

    ``what`` are the fields of a ``What``, which would take longer to make than the rest. ``waits``
    are the times (from, to) that the program spent in ``Work.wait`` for it, while profiled.
    """

    ended = 0
    error = ""
    id = 0  # of the group's calls in this process
    is_async = False
    size: int | None = None  # bytes that were not known when it began
    waits: tuple[tuple[int, int], ...] = ()
    work: weakref.ref[Work] | None = None
    flight: Any = None  # of a collective that the device does while the host goes on

    def __init__(self, what: tuple[Any, ...], started: int, place: Place | None) -> None:
        self.what, self.started, self.place = what, started, place

    def settle(self) -> None:
        """Find out whether an operation that nobody has waited for has ended meanwhile."""
        if self.ended:
            return
        work = None if self.work is None else self.work()
        if self.flight is not None:
            ended = self.flight.ended
        else:
            ended = work.end_time() if work is not None and work.is_completed() else None
        if ended is not None:
            self.ended = int(ended * 1e9)

    def as_dict(self) -> dict[str, Any]:
        """Return what a reader wants to see, in plain types; times stay as they are."""
        self.settle()
        what = What(*self.what)
        fields = what.as_dict()
        if self.size is not None:
            fields["bytes"] = self.size
        if self.place is not None:
            code, instruction, via = self.place
            fields["line"] = line_of(code, instruction)
            fields["via"] = via if via and via != what.verb else None
        fields |= {
            "async": self.is_async or None,
            "started": self.started,
            "ended": self.ended or None,
            "waits": [list(wait) for wait in self.waits] or None,
            "error": self.error or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


def place_of_caller(depth: int) -> Place:
    """Return the line outside this package that called; ``depth`` frames above are ours."""
    frame, ours = frame_of_caller(depth + 1)
    return frame.f_code, frame.f_lasti, ours.co_name


def line_of(code: CodeType, instruction: int) -> str:
    """Return "folder/file.py:12" of an instruction, a frame's ``f_lasti``."""
    found = [line for start, end, line in code.co_lines() if start <= instruction < end and line]
    return site_of((code.co_filename, found[0] if found else code.co_firstlineno))
