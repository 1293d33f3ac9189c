"""The line of user code that called a verb."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = f"{Path(__file__).parents[2]}/"
# Second: code there has a name that says nothing, as __exit__ (csrc/fast/binding.c knows that too).
_folders = [PACKAGE, contextlib.__file__]

Place = tuple[str, int]
"""A file's path, and a line of it."""

Instruction = tuple[CodeType, int, str]
"""A line of user code that is worked out when somebody reads it, as that takes longer than a call:
its code, the instruction in it (a frame's ``f_lasti``), and the function of ours that it called."""


@functools.cache
def _is_ours(path: str) -> bool:
    """Return whether a file is of this package, or of what calls it for users."""
    return path.startswith(folders())


def folders() -> tuple[str, ...]:
    """Return the folders and files whose code is no user's."""
    return tuple(_folders)


def hide(folder: str) -> None:
    """Take code below ``folder``, or a file, which calls verbs for users, for none of theirs."""
    if folder not in _folders:
        _folders.append(folder)
        _is_ours.cache_clear()


def frame_of_caller(depth: int) -> tuple[FrameType, CodeType]:
    """Return the innermost frame outside this package, and the code that it called.

    The first ``depth`` frames are known to be ours: they are not looked at, which saves time.
    """
    frame = sys._getframe(depth)
    code = ours = frame.f_code
    while _is_ours(code.co_filename) and (back := frame.f_back) is not None:
        if code.co_filename != _folders[1]:
            ours = code
        frame = back
        code = frame.f_code
    return frame, ours


# The line that this thread works for, left long ago by another thread.
_pinned: ContextVar[Place | None] = ContextVar("place", default=None)


def caller(depth: int = 1) -> Place:
    """Return where the innermost caller outside this package is; ``depth`` callers are inside."""
    if (place := _pinned.get()) is not None:
        return place
    frame, _ = frame_of_caller(depth + 1)
    return frame.f_code.co_filename, frame.f_lineno


def site_of(place: Place) -> str:
    """Return ``place`` as "folder/file.py:line", with escapes for bytes that are no text."""
    path, line = place
    name = "/".join(path.split("/")[-2:])
    return f"{name.encode(errors='backslashreplace').decode()}:{line}"


def place_of_caller(depth: int) -> Instruction:
    """Return the line outside this package that called; ``depth`` frames above are ours."""
    frame, ours = frame_of_caller(depth + 1)
    return frame.f_code, frame.f_lasti, ours.co_name


def line_of(code: CodeType, instruction: int) -> str:
    """Return "folder/file.py:12" of an instruction, a frame's ``f_lasti``."""
    found = [line for start, end, line in code.co_lines() if start <= instruction < end and line]
    return site_of((code.co_filename, found[0] if found else code.co_firstlineno))


def call_site() -> str:
    """Return "folder/file.py:line" of the innermost caller outside this package."""
    return site_of(caller())


def text_at_site(text: str, limit: int) -> bytes:
    """Return ``text`` and where user code has called, in ``limit`` bytes: the middle goes."""
    raw = f"{text} at {call_site()}".encode(errors="backslashreplace")
    half = limit // 2
    return raw if len(raw) <= limit else raw[: half - 2] + b" ... " + raw[3 + half - limit :]


@contextlib.contextmanager
def called_at(place: Place) -> Iterator[None]:
    """Make ``place`` what ``caller`` returns on this thread, for what was started there."""
    token = _pinned.set(place)
    try:
        yield
    finally:
        _pinned.reset(token)
