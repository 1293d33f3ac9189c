"""Numbers: of Python, that a step reads from arrays and returns, and of NumPy in its functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from flashlight_py.tape.arrays import Recorded
from flashlight_py.tape.noting import read


class Number:
    """A Python number read from an array, which the step may return, and not use before that."""

    __slots__ = ("array", "value")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.value = array.item()

    @property
    def plain(self) -> Any:
        """The number."""
        return self.value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    @classmethod
    def __operation__(cls, function: Any, args: Any, options: Any) -> Any:
        """Do what does more than compute, as of arrays."""
        return Recorded.__operation__(function, args, options)

    def __getattr__(self, name: str) -> Any:
        read("item()")
        return getattr(self.value, name)


def _reading(name: str) -> Callable[..., Any]:
    def method(self: Number, *args: Any) -> Any:
        read("item()")
        others = [each.value if type(each) is Number else each for each in args]
        return getattr(self.value, name)(*others)

    return method


for _name in (
    *[
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "truediv",
        "rtruediv",
        "floordiv",
        "rfloordiv",
        "mod",
        "rmod",
        "divmod",
        "rdivmod",
    ],
    *[
        "pow",
        "rpow",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "neg",
        "pos",
        "abs",
        "bool",
        "int",
        "float",
        "complex",
        "index",
        "trunc",
        "floor",
        "ceil",
    ],
    *["round", "hash", "repr", "str", "format"],
):
    setattr(Number, f"__{_name}__", _reading(f"__{_name}__"))


def is_written_in_python(function: Any) -> bool:
    """Return whether a function of NumPy may look at which kind of object it is given."""
    return type(getattr(function, "_implementation", None)) is FunctionType and (
        function is not np.clip
    )


@functools.lru_cache(maxsize=256)
def of_numbers(function: Any, places: tuple[int, ...]) -> Callable[..., Any]:
    """Return ``function``, which gets numbers of NumPy in the place of arrays of one."""

    def call(*args: Any, **options: Any) -> Any:
        given = [each[()] if place in places else each for place, each in enumerate(args)]
        return function(*given, **options)

    call.__qualname__ = f"{function.__name__} of numbers"
    return call
