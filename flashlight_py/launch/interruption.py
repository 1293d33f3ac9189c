"""A signal that comes before there are ranks to hand it on to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from flashlight_py.launch.loop import FORWARDED

__all__ = ["Interrupted", "interruptible"]


class Interrupted(BaseException):
    """Signal ``number`` has come; no error, and not to be caught as one."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise ``Interrupted`` inside when a signal comes that would end the job."""
    ending = set(FORWARDED) - {signal.SIGUSR1, signal.SIGUSR2}
    before = {
        number: signal.signal(number, _raise)
        for number in ending
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: object) -> NoReturn:
    raise Interrupted(number)
