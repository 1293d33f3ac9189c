"""The native module, csrc/optim, where it was built."""

from __future__ import annotations

import functools
from typing import Any

from flashlight_py import _native


@functools.cache
def native() -> Any | None:
    """Return the module of the kernels, or None, with a warning, where it is missing."""
    return _native.optional("optim", "optimizers step in NumPy, some ten times slower")
