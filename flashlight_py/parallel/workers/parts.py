"""Values taken apart into their arrays and a form that says how to put them together again.

The form is a pickle in which a number stands for each array, so that any nesting of tuples, dicts
and objects is carried, while the arrays lie in shared memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, is_cupy
from flashlight_py.launch.pickling import dumps

Part: TypeAlias = "Variable | Array"

# What stands for a part: its number, and of a Variable its calc_grad.
StandIn: TypeAlias = "tuple[int, bool | None]"


def take_apart(
    value: Any, is_part: Callable[[Any], bool], main_can_be_imported: bool = True
) -> tuple[bytes, list[Any]]:
    """Return the form of ``value`` and its parts, each once, in the order in which they are met.

    Raises:
        TypeError: it cannot be pickled.
    """
    numbers: dict[int, int] = {}
    parts: list[Any] = []

    def stand_in(value: Any) -> StandIn | None:
        if not is_part(value):
            return None
        if id(value) not in numbers:
            numbers[id(value)] = len(parts)
            parts.append(value)
        return numbers[id(value)], value.calc_grad if isinstance(value, Variable) else None

    return dumps(value, main_can_be_imported, stand_in), parts


def put_together(form: bytes, find: Callable[[int, bool | None], Any]) -> Any:
    """Return the value of ``form``, with what ``find`` returns for the number of each part."""

    unpickler = _Unpickler(io.BytesIO(form))
    unpickler.find = find
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    find: Callable[[int, bool | None], Any]

    def persistent_load(self, stand_in: StandIn) -> Any:
        return self.find(*stand_in)


def is_parameter(value: Any) -> bool:
    """Return whether ``value``, in a module, is a Variable of its own, not a result."""
    return isinstance(value, Variable) and value.node is None


def is_data(value: Any) -> bool:
    """Return whether ``value`` is a Variable or an array: what inputs and results consist of."""
    return isinstance(value, (Variable, np.ndarray)) or is_cupy(value)


def array_of(part: Part) -> Array:
    """Return the array of an input or a result."""
    return part.data if isinstance(part, Variable) else part
