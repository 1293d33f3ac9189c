"""The native module, csrc/tape."""

from __future__ import annotations

from typing import Any

from flashlight_py import _native


def native() -> Any:
    """Return the module.

    Raises:
        BackendUnavailableError: it was not built; says why and what to do.
    """
    return _native.load("tape")
