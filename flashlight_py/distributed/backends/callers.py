"""Callbacks from native code into Python, and the threads that are inside a native call.

During a wait, native code calls Python to run signal handlers (such as the handler of Ctrl-C) and
to find the line of user code that made the call.
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

SITE_BYTES = codes.SITE_BYTES - 1  # without the terminating zero


class Callers:
    """Threads that are inside a blocking call of a backend.

    A signal handler that interrupts such a call must not start another call of the backend: the new
    call would wait for the interrupted call, and ranks could not agree on the order of the two
    calls. The handler may end the group. An exception of the handler can occur at any point, so a
    caller adds the result of ``check`` to ``threads`` inside a ``try`` block, and discards it in
    ``finally``.
    """

    def __init__(self, name: str, parts: Sequence[Backend] = ()) -> None:
        self._name, self._parts = name, parts  # ``parts``: backends that this backend uses
        self.threads: set[int] = set()
        self.native_header: Sequence[int] | None = None  # of the journal; None before ``bind``

    def contains_this_thread(self) -> bool:
        """Return whether the current thread is inside a call of this backend."""
        thread = threading.get_ident()
        in_native = self.native_header is not None and thread in self.native_header[CALLERS]
        if in_native or thread in self.threads:
            return True
        return any(part.is_calling() for part in self._parts)

    def check(self, verb: str) -> int:
        """Return this thread's id. If it is inside a call, raise an error that names ``verb``."""
        if not self.contains_this_thread():
            return threading.get_ident()
        error = DistributedError(
            f"[{verb}] {self._name}: a signal handler cannot call the group while it interrupts "
            "another call of this group. Nothing was sent. Set a flag in the handler and act on it "
            "between two calls, or call distributed_shutdown()"
        )
        error.has_begun = False
        raise error


# By thread id: the exception that a signal handler raised during a wait in the library.
_exceptions: dict[int, BaseException] = {}


def raise_interruption(lib: Any, handle: Any) -> None:
    """If a signal handler raised an exception during the wait for ``handle``, raise it here."""
    if _exceptions and (raised := _exceptions.pop(threading.get_ident(), None)) is not None:
        lib.fl_op_free(handle)
        raise raised


def _store_exception(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    _exceptions[threading.get_ident()] = error


def call_site_callback(native: ModuleType) -> Any:
    """Return the C callback that reports the current line of user code to native code."""

    @native.ffi.def_extern(name="fl_where", onerror=_store_exception)  # type: ignore[untyped-decorator]
    def write_site(site: Any) -> None:
        site.text = call_site().encode()[-SITE_BYTES:]

    return native.lib.fl_where


def interrupt_callback(native: ModuleType) -> Any:
    """Return the C function by which a waiting native call lets Python run signal handlers."""

    @native.ffi.def_extern(name="fl_interrupted", error=1, onerror=_store_exception)  # type: ignore[untyped-decorator]
    def interrupted() -> int:
        return 0  # before this line Python has run the handlers; ``onerror`` stores their exception

    return native.lib.fl_interrupted
