"""The native kernels, csrc/tagi, where they were built."""

from __future__ import annotations

from typing import Any

from flashlight_py import _native


def native() -> Any | None:
    """Return CFFI's module of the kernels, or None, with a warning, where it is missing."""
    return _native.optional("tagi", "fl.tagi computes with NumPy alone, some times slower")
