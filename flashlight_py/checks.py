"""Checks of integer arguments."""

import operator

import numpy as np


def as_integer(value: object) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, np.bool_):  # NumPy before 2.3 converts it, with a warning
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_integer(function: str, name: str, value: object, least: int = 0) -> int:
    """Return ``value`` as an int. Raises an error with ``name`` if it is less than ``least``."""
    number = None if isinstance(value, bool) else as_integer(value)
    if number is None:
        raise TypeError(f"{function}: {name} must be an integer, got {type(value).__name__}")
    if number < least:
        raise ValueError(f"{function}: {name} must be at least {least}, got {number}")
    return number
