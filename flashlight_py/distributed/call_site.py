"""The line of user code that called a verb."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["call_site"]

_PACKAGE = f"{Path(__file__).parents[1]}/"


def call_site() -> str:
    """Return "folder/file.py:line" of the innermost caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    path = frame.f_code.co_filename
    return f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno}"
