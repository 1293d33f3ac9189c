"""Where the threads of this process stand."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from flashlight_py.distributed.call_site import PACKAGE
from flashlight_py.distributed.recorder.record import line_of

__all__ = ["stacks", "stands_at"]

_RECORDER = str(Path(__file__).parent)
_LIBRARY = str(Path(threading.__file__).parent)


def stacks() -> list[str]:
    """Return where each thread stands, in lines, the innermost last; leaves out the recorder."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        entries = [
            line
            for entry in traceback.extract_stack(frame)
            if not entry.filename.startswith(_RECORDER)
            for line in "".join(traceback.format_list([entry])).rstrip().splitlines()
        ]
        lines += [f"Thread {names.get(ident, ident)} (most recent call last):", *entries]
    return lines


def stands_at() -> str:
    """Return the line of user code that the main thread is on, as "folder/file.py:12 in f"."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{line_of(frame.f_code, frame.f_lasti)} in {frame.f_code.co_name}"


def _is_users(path: str) -> bool:
    """Return whether code is neither ours nor the standard library's, nor the interpreter's own."""
    if path.startswith((PACKAGE, "<frozen")):
        return False
    return not path.startswith(_LIBRARY) or "site-packages" in path
