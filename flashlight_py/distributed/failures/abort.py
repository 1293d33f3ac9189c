"""Reports of the exception that ends this rank's program to the other ranks.

An uncaught exception is printed and then reported in every open group: the other ranks raise at
once, with this rank's traceback. If it ends a thread other than the main one, it is reported when
the process exits with open groups. ``abort_on_exception`` reports one that a host program catches.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

from flashlight_py.distributed.backend import Backend
from flashlight_py.tracebacks import folded, is_full

F = TypeVar("F", bound=Callable[..., Any])

# What fits into what csrc sends.
_BYTES = 3900
_SUMMARY_BYTES = 500

afterwards: list[Callable[[], None]] = []
"""Called when an exception that nobody catches has been printed and reported."""

# A WeakSet would run Python code when a backend is collected; an exception of a signal handler
# would be lost there.
_open: dict[weakref.ref[Backend], None] = {}


def _abandon_in_child() -> None:
    """After a fork: a child is no rank of its parent's groups."""
    for backend in open_backends():
        backend.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_in_child)


class _Hooks:
    """``sys.excepthook`` and ``threading.excepthook`` around what was there before."""

    def __init__(self) -> None:
        self._main, self._of_threads = sys.excepthook, threading.excepthook
        self._pid = os.getpid()
        self.of_a_thread: BaseException | None = None
        sys.excepthook, threading.excepthook = self._end, self._end_thread

    def remove(self) -> None:
        """Put back what was there, unless somebody has put hooks of their own around these."""
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
                try:
                    report(error)
                finally:
                    for end in afterwards:
                        end()

    def _end_thread(self, args: Any) -> None:
        if self._is_rank() and args.exc_value is not None:
            self.of_a_thread = args.exc_value
        self._of_threads(args)

    def _is_rank(self) -> bool:
        """Return whether this is the process that was hooked, not one that it has forked."""
        return _hooks is self and self._pid == os.getpid()


_hooks: _Hooks | None = None


def watch(backend: Backend) -> None:
    """Report to the ranks of ``backend`` as well; it is forgotten when it is collected."""
    _open[weakref.ref(backend, _open.pop)] = None


def open_backends() -> list[Backend]:
    """Return all that are watched, those of closed groups perhaps among them."""
    return [backend for known in list(_open) if (backend := known()) is not None]


def install() -> None:
    """Watch for exceptions that nobody catches, until ``uninstall``; not at a Python prompt."""
    global _hooks  # noqa: PLW0603  (there is one sys.excepthook)
    at_a_prompt = hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect
    if _hooks is None and not at_a_prompt:
        _hooks = _Hooks()


def uninstall() -> None:
    """Undo ``install``."""
    global _hooks  # noqa: PLW0603
    if _hooks is not None:
        _hooks.remove()
    _hooks = None


def report(error: BaseException, backends: Sequence[Backend] | None = None) -> None:
    """Report to the other ranks of ``backends``, default all open ones, that this one ends."""
    words = _in_words(error)
    for backend in open_backends() if backends is None else backends:
        backend.abort(words)


def report_of_threads() -> None:
    """At exit: report what has ended a thread, if anything has."""
    if _hooks is not None and _hooks.of_a_thread is not None:
        report(_hooks.of_a_thread)


class abort_on_exception:
    """Report an exception that leaves the block, or the function, to the other ranks at once.

    They raise ``PeerLostError`` with this rank's traceback instead of waiting until their timeout,
    and every open group of this process ends. The exception goes on to whoever catches it: a host
    program (Ray, Dask, ``concurrent.futures``, pytest, a notebook) that catches what a rank raises
    keeps it from the hook that reports uncaught ones. To begin anew, every rank calls
    ``distributed_shutdown`` and ``distributed_init``.

    Not collective; takes half a second at most. In any thread, and nested: the innermost block
    reports. ``KeyboardInterrupt`` is reported as well, and ``SystemExit`` unless its code is 0 or
    None. Without another rank, as before ``distributed_init``, it does nothing.

    Raises:
        TypeError: it decorates a coroutine or generator function, whose call only makes an object;
            use it in a ``with`` statement inside.

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
        """Return ``func`` with every call of it in such a block."""
        kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
        if any(is_kind(func) for is_kind in kinds):
            raise TypeError(
                f"abort_on_exception cannot decorate {func.__qualname__}: a coroutine or generator "
                "function runs after its call has returned; write `with abort_on_exception():` "
                "inside it"
            )

        @functools.wraps(func)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return cast(F, guarded)

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the block; report ``error``, if there is one."""
        is_planned = isinstance(error, GeneratorExit) or (
            isinstance(error, SystemExit) and error.code in (0, None)
        )
        if error is not None and not is_planned:
            report(error)


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
