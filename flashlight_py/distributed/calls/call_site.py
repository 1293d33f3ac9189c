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
# Lines of contextlib.py are skipped, too. Otherwise records would name __exit__ instead of a verb.
# csrc/fast/binding.c skips the same files.
_folders = [PACKAGE, contextlib.__file__]

Site = tuple[str, int]
"""Path and line number of a source file."""

Instruction = tuple[CodeType, int, str]
"""A line of user code whose number is computed only on demand, because that takes longer than a
call. Fields: code object, ``f_lasti`` of a frame, name of the called function."""


@functools.cache
def _is_ours(path: str) -> bool:
    return path.startswith(hidden_files())


def hidden_files() -> tuple[str, ...]:
    """Return the files and folders that contain no user code."""
    return tuple(_folders)


def hide_folder(folder: str) -> None:
    """Treat a folder or file like this package: ``caller`` skips its lines."""
    if folder not in _folders:
        _folders.append(folder)
        _is_ours.cache_clear()


def frame_of_caller(depth: int) -> tuple[FrameType, CodeType]:
    """Return the frame of the calling user code, and the code object of the called function.

    The first ``depth`` frames belong to this package, so they are skipped without a check.
    """
    frame = sys._getframe(depth)
    code = ours = frame.f_code
    while _is_ours(code.co_filename) and (back := frame.f_back) is not None:
        if code.co_filename != _folders[1]:
            ours = code
        frame = back
        code = frame.f_code
    return frame, ours


# Result of ``caller`` on this thread, if ``called_at`` has set it.
_pinned: ContextVar[Site | None] = ContextVar("site", default=None)


def caller(depth: int = 1) -> Site:
    """Return the line of user code that called this package. Skip ``depth`` frames."""
    if (pinned := _pinned.get()) is not None:
        return pinned
    frame, _ = frame_of_caller(depth + 1)
    return frame.f_code.co_filename, frame.f_lineno


def site_of(site: Site) -> str:
    """Return ``site`` as "folder/file.py:line". Bytes that are not UTF-8 are escaped."""
    path, line = site
    name = "/".join(path.split("/")[-2:])
    return f"{name.encode(errors='backslashreplace').decode()}:{line}"


def instruction_of_caller(depth: int) -> Instruction:
    """Return the calling line of user code as an ``Instruction``, without its line number."""
    frame, ours = frame_of_caller(depth + 1)
    return frame.f_code, frame.f_lasti, ours.co_name


def line_of(code: CodeType, instruction: int) -> str:
    """Return "folder/file.py:12" for the first two fields of an ``Instruction``."""
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end and line]
    return site_of((code.co_filename, lines[0] if lines else code.co_firstlineno))


def call_site() -> str:
    return site_of(caller())


def text_at_site(text: str, limit: int) -> bytes:
    """Return ``text`` and the calling line. If they exceed ``limit`` bytes, cut out the middle."""
    raw = f"{text} at {call_site()}".encode(errors="backslashreplace")
    half = limit // 2
    return raw if len(raw) <= limit else raw[: half - 2] + b" ... " + raw[3 + half - limit :]


@contextlib.contextmanager
def called_at(site: Site) -> Iterator[None]:
    """Make ``caller`` return ``site`` in a ``with`` block of this thread."""
    token = _pinned.set(site)
    try:
        yield
    finally:
        _pinned.reset(token)
