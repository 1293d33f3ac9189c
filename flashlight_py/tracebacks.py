"""Tracebacks as a user reads them: the program's own lines, without those inside this package.

Only what is printed or sent is shortened; the exception keeps its traceback.
FLASHLIGHT_FULL_TRACEBACK=1 shows everything.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FULL", "folded", "is_full", "words_of"]

FULL = "FLASHLIGHT_FULL_TRACEBACK"
"""The environment variable that, if it is "1", has tracebacks printed in full."""

_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_BETWEEN = contextlib.__file__  # of a block that is ours, where one of our frames is before it


def is_full() -> bool:
    """Return whether the user wants to see the frames inside this package."""
    return os.environ.get(FULL) == "1"


def words_of(error: BaseException) -> str:
    """Return ``str(error)``, or why there is none: it is the user's code."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - whatever it raises
        return f"(its str() raises {type(failure).__name__})"


def folded(error: BaseException, start: int = 0) -> str:
    """Return what Python prints of an exception from frame ``start`` on, our frames as one line.

    So also in those that led to it. An exception of which no frame is the user's stays whole.
    """
    whole = traceback.TracebackException.from_exception(error)
    del whole.stack[:start]
    if not is_full() and not all(_is_ours(frame) for frame in whole.stack):
        for each in _chain(whole):
            each.stack = _Folded(each.stack)
    return "".join(whole.format())


class _Folded(traceback.StackSummary):
    """A stack that is printed with each run of our frames as one line."""

    def format(self, **options: Any) -> list[str]:
        """Return the lines; see ``traceback.StackSummary.format``."""
        lines = []
        for ours, run in itertools.groupby(self._by_owner(), key=lambda each: each[0]):
            frames = [frame for _, frame in run]
            if ours:
                lines.append(_in_one_line(frames))
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines

    def _by_owner(self) -> Iterator[tuple[bool, traceback.FrameSummary]]:
        ours = False
        for frame in self:
            ours = _is_ours(frame) or (ours and frame.filename == _BETWEEN)
            yield ours, frame


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE)


def _in_one_line(frames: list[traceback.FrameSummary]) -> str:
    last = frames[-1]
    number = f"{len(frames)} frame{'s' if len(frames) > 1 else ''}"
    file = last.filename.rpartition("flashlight_py" + os.sep)[2]
    return (
        f"  [{number} inside flashlight_py, to {file}:{last.lineno} in {last.name}; {FULL}=1 shows "
        "them]\n"
    )


def _chain(whole: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield ``whole``, what led to it, and the members of groups."""
    left = [whole]
    while left:
        each = left.pop()
        yield each
        members = getattr(each, "exceptions", None) or []  # since Python 3.11
        left += [other for other in (each.__cause__, each.__context__, *members) if other]
