"""Let NumPy do what the native kernels would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock


def in_numpy(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of fl.tagi as it is where the kernels were not built."""
    with mock.patch("flashlight_py._native.optional", return_value=None):
        return function(*args)
