"""The recording of this thread, and how computations get into it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashlight_py.tape.recording import Recording


class _Current(threading.local):
    recording: Recording | None = None


current = _Current()


def compute(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    changed: tuple[Any, ...] = (),
) -> Any:
    """Return what NumPy's ``function`` returns, and note it; ``changed``: what it changes."""
    recording = current.recording
    if recording is None:
        return function(*plain(args), **plain(options))
    return recording.compute(function, args, options, changed)


def plain(value: Any) -> Any:
    """Return ``value`` with arrays in the place of what stands for them."""
    kind = type(value)
    if hasattr(kind, "__operation__"):
        return value.plain
    if kind is tuple or kind is list:
        return kind(map(plain, value))
    if kind is dict:
        return {name: plain(each) for name, each in value.items()}
    return value


def read(how: str) -> None:
    if current.recording is not None:
        current.recording.leave(f"{how} reads a value that is computed in it")
