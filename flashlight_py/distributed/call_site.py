"""The line of user code that called a verb."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["call_site", "called_at"]

_PACKAGE = f"{Path(__file__).parents[1]}/"


class _Pinned(threading.local):
    """What this thread works for: a line that was left long ago, on another thread."""

    site = ""


_pinned = _Pinned()


def call_site() -> str:
    """Return "folder/file.py:line" of the innermost caller outside this package."""
    if _pinned.site:
        return _pinned.site
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    path = frame.f_code.co_filename
    return f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno}"


@contextlib.contextmanager
def called_at(site: str) -> Iterator[None]:
    """Make ``site`` what ``call_site`` returns on this thread, for what was started there."""
    _pinned.site = site
    try:
        yield
    finally:
        _pinned.site = ""
