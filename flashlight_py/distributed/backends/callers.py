"""Which threads are in the middle of a call: one that calls again there runs a signal handler."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashlight_py.distributed.failures.journal import CALLER, not_begun
from flashlight_py.errors import DistributedError

if TYPE_CHECKING:
    from flashlight_py.distributed.backend import Backend


class Callers:
    """The threads that are in a blocking call of a backend, or about to begin one.

    A signal handler runs in the midst of what its thread does. What it has interrupted goes on only
    when it returns, so that a call of the same backend would wait for itself; nor could the ranks
    agree on the order of the two. Of a thread that ``check`` has let through, this is how it calls,
    and how a handler that raises anywhere in between leaves nothing behind::

        thread = callers.check(verb)
        try:
            callers.threads.add(thread)
            ...
        finally:
            callers.threads.discard(thread)
    """

    def __init__(self, who: str, parts: Sequence[Backend] = ()) -> None:
        self._who, self._parts = who, parts  # of a backend that is made of others
        self.threads: set[int] = set()
        self.of_native: Sequence[int] | None = None  # the header of the group's ring

    def has_this(self) -> bool:
        """Return whether this thread is in the middle of a call."""
        thread = threading.get_ident()
        if self.of_native is not None and self.of_native[CALLER] == thread:
            return True
        if thread in self.threads:
            return True
        return bool(self._parts) and any(part.is_calling() for part in self._parts)

    def check(self, verb: str) -> int:
        """Return this thread's number.

        Raises:
            DistributedError: it is in the middle of a call.
        """
        if self.has_this():
            error = DistributedError(
                f"[{verb}] {self._who}: called in a signal handler that has interrupted another "
                "call of this group, which would have to end first. Nothing was sent. Let the "
                "handler set a flag and act on it between two calls, or leave by "
                "distributed_shutdown()"
            )
            raise not_begun(error)
        return threading.get_ident()
