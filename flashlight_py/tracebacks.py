"""Shortened tracebacks: the frames inside this package are printed as one line.

Only the text that is printed or sent to other ranks is shortened, not the exception's traceback.
FLASHLIGHT_FULL_TRACEBACK=1 prints all frames.
"""

import contextlib
import itertools
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FULL", "folded", "is_full", "message_of"]

FULL = "FLASHLIGHT_FULL_TRACEBACK"
"""Environment variable that, if set to "1", prints all frames of tracebacks."""

_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_BETWEEN = contextlib.__file__  # contextlib's frames between package frames count as package frames


def is_full() -> bool:
    return os.environ.get(FULL) == "1"


def message_of(error: BaseException) -> str:
    """Return ``str(error)``. If that raises, return the name of the raised error."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - user code may raise any exception
        return f"(its str() raises {type(failure).__name__})"


def folded(error: BaseException, start: int = 0) -> str:
    """Return the printed traceback of ``error`` without its first ``start`` frames.

    Consecutive frames of this package are one line. If there are no other frames, all are printed.
    """
    shortened = traceback.TracebackException.from_exception(error)
    del shortened.stack[:start]
    if not is_full() and not all(_is_ours(frame) for frame in shortened.stack):
        for part in _chain(shortened):
            part.stack = _Folded(part.stack)
    return "".join(shortened.format())


class _Folded(traceback.StackSummary):
    """A stack that prints consecutive frames of this package as one line."""

    def format(self, **options: Any) -> list[str]:
        """Return the lines; see ``traceback.StackSummary.format``."""
        lines = []
        for is_ours, run in itertools.groupby(self._by_owner(), key=lambda item: item[0]):
            frames = [frame for _, frame in run]
            if is_ours:
                lines.append(_in_one_line(frames))
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines

    def _by_owner(self) -> Iterator[tuple[bool, traceback.FrameSummary]]:
        is_ours = False
        for frame in self:
            is_ours = _is_ours(frame) or (is_ours and frame.filename == _BETWEEN)
            yield is_ours, frame


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE)


def _in_one_line(frames: list[traceback.FrameSummary]) -> str:
    last = frames[-1]
    number = f"{len(frames)} frame{'s' if len(frames) > 1 else ''}"
    file = last.filename.rpartition("flashlight_py" + os.sep)[2]
    end = f"{file}:{last.lineno} in {last.name}"
    return f"  [{number} inside flashlight_py, to {end}; {FULL}=1 shows them]\n"


def _chain(first: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield ``first``, its causes and contexts, and the members of exception groups."""
    pending = [first]
    while pending:
        current = pending.pop()
        yield current
        members = getattr(current, "exceptions", None) or []  # since Python 3.11
        pending += filter(None, (current.__cause__, current.__context__, *members))
