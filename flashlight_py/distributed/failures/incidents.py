"""Functions that are notified of calls, and of those that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashlight_py.distributed.failures.record import Record

# Called with each call as it begins, while a profile is taken.
listener: Callable[[Record], None] | None = None
# Called with the exception of each call that failed.
on_failure: Callable[[BaseException], None] | None = None


def report(error: BaseException) -> None:
    """Notify whoever asked for it that a call failed with ``error``."""
    if on_failure is not None:
        on_failure(error)
