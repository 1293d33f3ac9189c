"""The native kernels, csrc/tagi, where they were built."""

from __future__ import annotations

import functools
import logging
from typing import Any

from flashlight_py import _native
from flashlight_py.errors import BackendUnavailableError

_log = logging.getLogger("flashlight_py")


@functools.cache
def native() -> Any | None:
    """Return CFFI's module of the kernels, or None, with a warning, where it is missing."""
    try:
        return _native.load("tagi")
    except BackendUnavailableError as error:
        _log.warning("fl.tagi computes with NumPy alone, some times slower: %s", error)
        return None
