"""A training step that is recorded by its first calls and replayed natively by later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashlight_py.tape.step import Captured

__all__ = ["capture"]


def capture(step: Callable[..., Any] | None = None, check: bool = False) -> Any:
    if step is None:
        return lambda step: Captured(step, check)
    return Captured(step, check)
