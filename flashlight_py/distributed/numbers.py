"""Numbers in verbs that work in place: as they cannot be changed, the result is returned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flashlight_py.device import Array

NUMBERS = (bool, int, float, complex, np.generic)
"""Python's numbers, and NumPy's scalars."""

_LIMIT = 2**63


def as_number(verb: str, x: Any) -> tuple[Array, Callable[[], Any]]:
    """Return ``x`` as an array, and what makes a number of the kind of ``x`` of it again.

    Python's numbers travel as bool, int64, float64 and complex128, NumPy's scalars as they are.

    Raises:
        OverflowError: ``x`` is an int beyond 64 bits.
    """
    require_bits(verb, x)
    array = np.array(x, np.int64 if type(x) is int else None)
    return array, (lambda: array[()]) if isinstance(x, np.generic) else array.item


def require_bits(verb: str, x: Any, op: str = "", scale: float = 1.0, size: int = 1) -> None:
    """Refuse a Python int whose reduction could pass 64 bits, where NumPy's would wrap around.

    Each rank looks at its own, as if all ``size`` had the same: then none passes.

    Raises:
        OverflowError: it could.
    """
    if type(x) is not int:
        return
    largest = {"sum": abs(x) * size, "prod": abs(x) ** size}.get(op, abs(x))
    if isinstance(scale, int | float) and math.isfinite(scale):
        largest = math.ceil(largest * abs(int(scale)))
    if largest >= _LIMIT:
        of = f" of {size} ranks by {op!r}" if op else ""
        raise OverflowError(
            f"{verb}: {x}, an int, travels in 64 bits, and its reduction{of} could pass them; pass "
            "a float, or the digits by all_gather_object"
        )
