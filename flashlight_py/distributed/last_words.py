"""What a rank tells the others when its program raises: the exception that ends it.

An exception that nobody catches is printed, by whatever prints it otherwise, and then every open
group hears of it: the others raise at once, with this rank's traceback. One that ends a thread
alone is told when the process exits, if it leaves its groups open then.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flashlight_py.tracebacks import folded, is_full

if TYPE_CHECKING:
    from flashlight_py.distributed.backend import Backend

__all__ = [
    "install",
    "is_interactive",
    "listen",
    "open_backends",
    "tell",
    "tell_of_threads",
    "uninstall",
]

# What fits into the farewells of csrc.
_BYTES = 3900
_SUMMARY_BYTES = 500

_open: weakref.WeakSet[Backend] = weakref.WeakSet()


def _abandon_in_child() -> None:
    """After a fork: a child is no rank of its parent's groups."""
    for backend in list(_open):
        backend.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_in_child)


class _Hooks:
    """``sys.excepthook`` and ``threading.excepthook`` around what was there before."""

    def __init__(self) -> None:
        self._main, self._of_threads = sys.excepthook, threading.excepthook
        self._pid = os.getpid()
        self._active = True
        self.of_a_thread: BaseException | None = None
        sys.excepthook, threading.excepthook = self._end, self._end_thread

    def remove(self) -> None:
        """Put back what was there; somebody may have put hooks of their own around these."""
        self._active = False
        if sys.excepthook == self._end:
            sys.excepthook = self._main
        if threading.excepthook == self._end_thread:
            threading.excepthook = self._of_threads

    def _end(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            if self._main is sys.__excepthook__ and sys.stderr is not None and not is_full():
                print(folded(error), end="", file=sys.stderr, flush=True)
            else:
                self._main(kind, error, trace)
        finally:
            if self._is_rank():
                tell(error)

    def _end_thread(self, args: Any) -> None:
        if self._is_rank() and args.exc_value is not None:
            self.of_a_thread = args.exc_value
        self._of_threads(args)

    def _is_rank(self) -> bool:
        """Return whether this is the process that was hooked, not one that it has forked."""
        return self._active and self._pid == os.getpid()


_hooks: _Hooks | None = None


def listen(backend: Backend) -> None:
    """Have ``backend`` told; it is forgotten when it is collected."""
    _open.add(backend)


def open_backends() -> list[Backend]:
    """Return all that listen, those of groups that were closed since perhaps among them."""
    return list(_open)


def install() -> None:
    """Watch for exceptions that nobody catches, until ``uninstall``; not at a Python prompt."""
    global _hooks  # noqa: PLW0603  (there is one sys.excepthook)
    if _hooks is None and not is_interactive():
        _hooks = _Hooks()


def uninstall() -> None:
    """Undo ``install``."""
    global _hooks  # noqa: PLW0603
    if _hooks is not None:
        _hooks.remove()
    _hooks = None


def tell(error: BaseException) -> None:
    """Tell every other rank that this one ends by ``error``; all open groups end."""
    words = _in_words(error)
    for backend in list(_open):
        backend.abort(words)


def tell_of_threads() -> None:
    """At exit: tell what has ended a thread, if anything has."""
    if _hooks is not None and _hooks.of_a_thread is not None:
        tell(_hooks.of_a_thread)


def is_interactive() -> bool:
    """Return whether an exception that nobody catches leaves the process alive, at a prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


def _in_words(error: BaseException) -> str:
    """Return the exception in one line, then as much of the traceback's end as others can take."""
    last = traceback.format_exception_only(type(error), error)[-1].strip()
    summary = _bytes(last.splitlines()[0] if last else type(error).__name__)[:_SUMMARY_BYTES]
    lines = _bytes(folded(error).rstrip())
    room = _BYTES - len(summary)
    tail = lines if len(lines) <= room else b"[...] " + lines[6 - room :]
    return f"{summary.decode(errors='ignore')}\n{tail.decode(errors='ignore')}"


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # a file's name may be no text
