"""Signal handlers (Ctrl-C) while the main thread waits inside a native library."""

from __future__ import annotations

import threading
from types import ModuleType, TracebackType
from typing import Any

__all__ = ["answer_to_interrupts", "raise_interruption"]


class _Interruption(threading.local):
    """What a signal handler raised while this thread waited in the library."""

    raised: BaseException | None = None


_interruption = _Interruption()


def raise_interruption(lib: Any, handle: Any) -> None:
    """Raise what a signal handler raised during the wait for ``handle``, if one did."""
    if _interruption.raised is not None:
        raised, _interruption.raised = _interruption.raised, None
        lib.fl_op_free(handle)
        raise raised


def answer_to_interrupts(native: ModuleType, name: str) -> Any:
    """Return the C function ``name``, which lets Python's signal handlers run during a wait."""

    def keep(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
        _interruption.raised = error

    @native.ffi.def_extern(name=name, error=1, onerror=keep)  # type: ignore[untyped-decorator]
    def interrupted() -> int:
        return 0  # the interpreter runs pending handlers on its way here; what they raise is kept

    return getattr(native.lib, name)
