"""One call of a verb: what, on which line, from when to when, and how it ended."""

from __future__ import annotations

import math
import sys
import weakref
from pathlib import Path
from types import CodeType
from typing import Any

from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.work import Work

__all__ = ["PACKAGE", "Record", "line_of"]

PACKAGE = f"{Path(__file__).parents[2]}/"


class Record:
    """A call. Times are nanoseconds of ``time.monotonic_ns``; ``ended`` is 0 while it runs.

    ``number`` counts the calls of the group, from 1 on every rank; messages have no number.
    ``waits`` are the times (from, to) that the program spent in ``Work.wait`` for it.
    """

    __slots__ = (
        "group", "number", "verb", "dtype", "shape", "op", "root", "peer", "tag", "bytes",
        "code", "instruction", "via", "is_async", "started", "ended", "error", "waits", "work", "flight",
    )  # fmt: skip

    def __init__(self, group: str, number: int, verb: str, started: int) -> None:
        self.group, self.number, self.verb, self.started = group, number, verb, started
        self.dtype: Any = None
        self.shape: tuple[int, ...] | None = None
        self.op: ReduceOp | None = None
        self.root: int | None = None
        self.peer: int | None = None
        self.tag: int | None = None
        self.bytes: int | None = None  # where it does not follow from dtype and shape
        self.code: CodeType | None = None
        self.instruction = 0
        self.via = ""
        self.is_async = False
        self.ended = 0
        self.error = ""
        self.waits: list[tuple[int, int]] | None = None
        self.work: weakref.ref[Work] | None = None
        self.flight: Any = None  # of a collective that the device does while the host goes on

    def locate(self, depth: int) -> None:
        """Note the line outside this package that called; ``depth`` frames above are ours.

        The line itself is worked out when somebody reads it: that takes longer than the rest.
        """
        frame = sys._getframe(depth)
        ours = frame
        while (back := frame.f_back) is not None and frame.f_code.co_filename.startswith(PACKAGE):
            ours, frame = frame, back
        self.code, self.instruction, self.via = frame.f_code, frame.f_lasti, ours.f_code.co_name

    @property
    def line(self) -> str:
        """The line of user code, as "folder/file.py:12"; empty where it was not noted."""
        return "" if self.code is None else line_of(self.code, self.instruction)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank gives or takes."""
        if self.bytes is not None:
            return self.bytes
        if self.dtype is None or self.shape is None:
            return 0
        return int(self.dtype.itemsize * math.prod(self.shape))

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
        fields = {
            "group": self.group,
            "number": self.number or None,
            "verb": self.verb,
            "dtype": None if self.dtype is None else str(self.dtype),
            "shape": None if self.shape is None else list(self.shape),
            "bytes": self.nbytes,
            "op": None if self.op is None else self.op.name.lower(),
            "root": self.root,
            "peer": self.peer,
            "tag": self.tag,
            "line": self.line or None,
            "via": self.via if self.via != self.verb and self.via else None,
            "async": self.is_async or None,
            "started": self.started,
            "ended": self.ended or None,
            "waits": self.waits,
            "error": self.error or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


def line_of(code: CodeType, instruction: int) -> str:
    """Return "folder/file.py:12" of an instruction, a frame's ``f_lasti``."""
    found = [line for start, end, line in code.co_lines() if start <= instruction < end and line]
    path = "/".join(code.co_filename.split("/")[-2:])
    return f"{path}:{found[0] if found else code.co_firstlineno}"
