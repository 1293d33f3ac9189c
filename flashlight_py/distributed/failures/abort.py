"""Notification of the other ranks if an exception ends the program of this rank.

An uncaught exception is printed, and its traceback is sent to the ranks of every open group. These
ranks raise ``PeerLostError`` with the traceback instead of waiting. If an exception ends only a
thread, it is sent when the process exits, if groups are still open. ``abort_on_exception`` is for
exceptions that the program catches.
"""

import functools
import inspect
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from flashlight_py import system
from flashlight_py.distributed.backend import Backend
from flashlight_py.tracebacks import folded, is_full

F = TypeVar("F", bound=Callable[..., Any])

# Maximum bytes of the traceback text that native code sends.
_BYTES = 3900
_SUMMARY_BYTES = 500

after_report: list[Callable[[], None]] = []
"""Functions to call after an uncaught exception has been printed and reported."""

# A dict, because a WeakSet runs Python code when it drops a backend. If a signal handler raises in
# this code, Python ignores the exception.
_open: dict[weakref.ref[Backend], None] = {}


def _abandon_in_child() -> None:
    """Close inherited backends after a fork: the child is not a rank of these groups."""
    for backend in open_backends():
        backend.abandon()
    _open.clear()


system.register_at_fork(after_in_child=_abandon_in_child)


class _Hooks:
    """Hooks for ``sys.excepthook`` and ``threading.excepthook`` that also call the old hooks."""

    def __init__(self) -> None:
        self._main, self._of_threads = sys.excepthook, threading.excepthook
        self._pid = os.getpid()
        self.of_a_thread: BaseException | None = None
        sys.excepthook, threading.excepthook = self._end, self._end_thread

    def remove(self) -> None:
        """Restore the previous hooks, unless other code has installed its own hooks since."""
        if sys.excepthook == self._end:
            sys.excepthook = self._main
        if threading.excepthook == self._end_thread:
            threading.excepthook = self._of_threads

    def _end(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        try:
            if self._main is sys.__excepthook__ and sys.stderr is not None and not is_full():
                print(folded(error), end="", file=sys.stderr, flush=True)
            else:
                self._main(kind, error, trace)
        finally:
            if self._is_rank():
                try:
                    report(error)
                finally:
                    for end in after_report:
                        end()

    def _end_thread(self, args: Any) -> None:
        if self._is_rank() and args.exc_value is not None:
            self.of_a_thread = args.exc_value
        self._of_threads(args)

    def _is_rank(self) -> bool:
        return _hooks is self and self._pid == os.getpid()


_hooks: _Hooks | None = None


def watch(backend: Backend) -> None:
    """Send uncaught exceptions to the other ranks of ``backend`` as long as ``backend`` exists."""
    _open[weakref.ref(backend, _open.pop)] = None


def open_backends() -> list[Backend]:
    return [backend for reference in list(_open) if (backend := reference()) is not None]


def install_hooks() -> None:
    """Install hooks for uncaught exceptions, except at an interactive Python prompt."""
    global _hooks  # noqa: PLW0603  (there is one sys.excepthook)
    at_a_prompt = hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect
    if _hooks is None and not at_a_prompt:
        _hooks = _Hooks()


def uninstall_hooks() -> None:
    global _hooks  # noqa: PLW0603
    if _hooks is not None:
        _hooks.remove()
    _hooks = None


def report(error: BaseException, backends: Sequence[Backend] | None = None) -> None:
    """Notify the other ranks of ``backends`` (None: all open) that ``error`` ends this rank."""
    words = _report_text(error)
    for backend in open_backends() if backends is None else backends:
        backend.abort(words)


def report_of_threads() -> None:
    """Notify the other ranks, at exit, if an exception has ended a thread."""
    if _hooks is not None and _hooks.of_a_thread is not None:
        report(_hooks.of_a_thread)


class abort_on_exception:
    """Notify the other ranks of an exception that leaves a ``with`` block or a function.

    The other ranks raise ``PeerLostError`` with the traceback of this rank, instead of waiting for
    their timeout. All open groups of this process end, and the exception propagates. Use this if a
    program catches exceptions around your code (Ray, Dask, ``concurrent.futures``, pytest, a
    notebook), because only uncaught exceptions are sent automatically. To continue afterwards, call
    ``distributed_shutdown`` and ``distributed_init`` on every rank.

    Not collective. Blocks for at most half a second. May be used in any thread. If blocks are
    nested, only the innermost block sends the exception. ``KeyboardInterrupt`` is sent, and
    ``SystemExit`` if its code is neither 0 nor None. No effect in a world of one process, such as
    before ``distributed_init``.

    Raises:
        TypeError: If it decorates a coroutine or generator function, whose body runs after the
            call. Use a ``with`` statement inside the function.

    Example:
        >>> @fl.abort_on_exception()
        ... def train(batches):
        ...     return [float(fl.all_reduce(np.array(x))) for x in batches]
        >>> train([1.0, 2.0])
        [1.0, 2.0]
        >>> with fl.abort_on_exception():
        ...     fl.barrier()
    """

    def __call__(self, func: F) -> F:
        kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
        if any(is_kind(func) for is_kind in kinds):
            raise TypeError(
                f"abort_on_exception: expected a plain function, got {func.__qualname__}, a "
                "coroutine or generator function, which runs after its call has returned. Use "
                "`with abort_on_exception():` inside it."
            )

        # contextlib.ContextDecorator would add its own frame to the tracebacks that users see.
        @functools.wraps(func)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return cast(F, guarded)

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        is_exit = isinstance(error, SystemExit) and error.code in (0, None)
        if error is not None and not (is_exit or isinstance(error, GeneratorExit)):
            report(error)


def _report_text(error: BaseException) -> str:
    """Return the exception as one line, then the end of its traceback: at most ``_BYTES`` bytes."""
    last = traceback.format_exception_only(type(error), error)[-1].strip()
    summary = _bytes(last.splitlines()[0] if last else type(error).__name__)[:_SUMMARY_BYTES]
    lines = _bytes(folded(error).rstrip())
    room = _BYTES - len(summary)
    tail = lines if len(lines) <= room else b"[...] " + lines[6 - room :]
    return f"{summary.decode(errors='ignore')}\n{tail.decode(errors='ignore')}"


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # a file name may be invalid UTF-8
