"""What a native library asks Python while it works: to stop (Ctrl-C)? and where was it called?"""

from __future__ import annotations

import threading
from types import ModuleType, TracebackType
from typing import Any

from flashlight_py.distributed.calls.call_site import call_site

SITE_BYTES = 255  # and a zero: the text of an fl_site


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


def _keep(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    _interruption.raised = error


def answer_where(native: ModuleType, name: str) -> Any:
    """Return the C function ``name``, which writes where user code has called, as an fl_site."""

    @native.ffi.def_extern(name=name, onerror=_keep)  # type: ignore[untyped-decorator]
    def where(site: Any) -> None:
        site.text = call_site().encode()[-SITE_BYTES:]

    return getattr(native.lib, name)


def answer_to_interrupts(native: ModuleType, name: str) -> Any:
    """Return the C function ``name``, which lets Python's signal handlers run during a wait."""

    @native.ffi.def_extern(name=name, error=1, onerror=_keep)  # type: ignore[untyped-decorator]
    def interrupted() -> int:
        return 0  # the interpreter runs pending handlers on its way here; what they raise is kept

    return getattr(native.lib, name)
