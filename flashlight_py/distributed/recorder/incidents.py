"""Whoever wants to hear of calls, or of those that failed, listens here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashlight_py.distributed.recorder.record import Record

# Called with each call as it begins, while a profile is taken.
listener: Callable[[Record], None] | None = None
# Called with the exception of each call that failed.
on_failure: Callable[[BaseException], None] | None = None


def report(error: BaseException) -> None:
    """Tell whoever listens that a call failed with ``error``."""
    if on_failure is not None:
        on_failure(error)
