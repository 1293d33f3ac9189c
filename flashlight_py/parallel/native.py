"""The native module, csrc/tree, where it was built."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from flashlight_py import _native
from flashlight_py.errors import BackendUnavailableError

__all__ = ["native"]

_log = logging.getLogger("flashlight_py")


@functools.cache
def native() -> ModuleType | None:
    """Return the native module, or None, with a warning, where it is missing."""
    try:
        return _native.load("tree")
    except BackendUnavailableError as error:
        _log.warning("synchronize takes some microseconds longer for each array: %s", error)
        return None
