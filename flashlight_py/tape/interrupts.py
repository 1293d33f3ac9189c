"""Ctrl-C while a recording begins and ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class CtrlC:
    """A block that handles Ctrl-C after its end, or at once within ``let_in``.

    So a KeyboardInterrupt leaves no recording half ended. On threads other than the main thread,
    which alone handles signals, the block does nothing.
    """

    def __init__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._handler: Any = signal.getsignal(signal.SIGINT) if is_main else None
        self._waits, self._was_pressed = True, False

    def __enter__(self) -> CtrlC:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._handler)
        if self._was_pressed:
            self._handler(signal.SIGINT, None)

    def let_in(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return ``function(*args, **options)``, during which Ctrl-C is handled at once."""
        self._waits = False
        try:
            return function(*args, **options)
        finally:
            self._waits = True

    def _handle(self, number: int, frame: Any) -> None:
        if self._waits:
            self._was_pressed = True
            return
        self._waits = True  # if the handler raises, another Ctrl-C waits for the end
        self._handler(number, frame)
        self._waits = False
