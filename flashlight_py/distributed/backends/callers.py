"""Threads in the middle of a call: signal handlers run there, and may call again, or raise.

A native library asks Python while it works whether to stop (Ctrl-C), and for the caller's site.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

from flashlight_py._native import codes
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call_site import call_site
from flashlight_py.distributed.calls.journal import CALLERS
from flashlight_py.errors import DistributedError

SITE_BYTES = codes.SITE_BYTES - 1  # without the zero behind the text


class Callers:
    """The threads that are in a blocking call of a backend, or about to begin one.

    A signal handler that calls the same backend would wait for the call that it interrupted, and
    the ranks could not agree on the order of the two. Leaving the group is allowed. A handler may
    raise anywhere, so a caller adds what ``check`` returns to ``threads`` inside of the ``try``
    whose ``finally`` discards it.
    """

    def __init__(self, who: str, parts: Sequence[Backend] = ()) -> None:
        self._who, self._parts = who, parts  # of a backend that is made of others
        self.threads: set[int] = set()
        self.of_native: Sequence[int] | None = None  # the header of the group's ring

    def has_this(self) -> bool:
        """Return whether this thread is in the middle of a call."""
        thread = threading.get_ident()
        in_native = self.of_native is not None and thread in self.of_native[CALLERS]
        if in_native or thread in self.threads:
            return True
        return any(part.is_calling() for part in self._parts)

    def check(self, verb: str) -> int:
        """Return this thread's number; raise DistributedError if it is in the middle of a call."""
        if not self.has_this():
            return threading.get_ident()
        error = DistributedError(
            f"[{verb}] {self._who}: called in a signal handler that has interrupted another call "
            "of this group, which would have to end first. Nothing was sent. Let the handler set "
            "a flag and act on it between two calls, or leave by distributed_shutdown()"
        )
        error.has_begun = False
        raise error


# By thread, what a signal handler raised while it waited in the library.
_raised: dict[int, BaseException] = {}


def raise_interruption(lib: Any, handle: Any) -> None:
    """Raise what a signal handler raised during the wait for ``handle``, if one did."""
    if _raised and (raised := _raised.pop(threading.get_ident(), None)) is not None:
        lib.fl_op_free(handle)
        raise raised


def _keep(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    _raised[threading.get_ident()] = error


def answer_where(native: ModuleType) -> Any:
    """Return the C function that writes where user code has called, as an fl_site."""

    @native.ffi.def_extern(name="fl_where", onerror=_keep)  # type: ignore[untyped-decorator]
    def where(site: Any) -> None:
        site.text = call_site().encode()[-SITE_BYTES:]

    return native.lib.fl_where


def answer_to_interrupts(native: ModuleType) -> Any:
    """Return the C function that lets Python's signal handlers run during a wait."""

    @native.ffi.def_extern(name="fl_interrupted", error=1, onerror=_keep)  # type: ignore[untyped-decorator]
    def interrupted() -> int:
        return 0  # the interpreter runs pending handlers on its way here; what they raise is kept

    return native.lib.fl_interrupted
