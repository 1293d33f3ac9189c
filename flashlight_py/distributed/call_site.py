"""The line of user code that called a verb."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Place", "call_site", "called_at", "caller", "site_of"]

_PACKAGE = f"{Path(__file__).parents[1]}/"

Place = tuple[str, int]
"""A file's path, and a line of it."""


class _Pinned(threading.local):
    """What this thread works for: a line that was left long ago, on another thread."""

    place: Place | None = None


_pinned = _Pinned()


def caller(depth: int = 1) -> Place:
    """Return where the innermost caller outside this package is.

    The first ``depth`` callers are known to be inside: they are not looked at, which saves time.
    """
    if _pinned.place is not None:
        return _pinned.place
    frame = sys._getframe(depth)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def site_of(place: Place) -> str:
    """Return ``place`` as "folder/file.py:line".

    Example:
        >>> site_of(("/home/me/run/train.py", 12))
        'run/train.py:12'
    """
    path, line = place
    return f"{'/'.join(path.split('/')[-2:])}:{line}"


def call_site() -> str:
    """Return "folder/file.py:line" of the innermost caller outside this package."""
    return site_of(caller())


@contextlib.contextmanager
def called_at(place: Place) -> Iterator[None]:
    """Make ``place`` what ``caller`` returns on this thread, for what was started there."""
    _pinned.place = place
    try:
        yield
    finally:
        _pinned.place = None
