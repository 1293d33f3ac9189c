"""Where the threads of this process stand."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from flashlight_py.distributed.recorder.record import PACKAGE, line_of

__all__ = ["stacks", "stands_at"]

_RECORDER = str(Path(__file__).parent)


def stacks() -> list[str]:
    """Return where each thread stands, in lines, the innermost last; without the recorder itself."""
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
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return ""
    return f"{line_of(found.f_code, found.f_lasti)} in {found.f_code.co_name}"
