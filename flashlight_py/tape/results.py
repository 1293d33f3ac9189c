"""The results of a step: how a replay makes it anew."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd.graph import Node
from flashlight_py.tape.arrays import Number, Recorded, RecordedScalar
from flashlight_py.tape.operations import Later

Array = np.ndarray[Any, Any]

# Kinds of results in csrc/tape/program.h.
CONSTANT, ARRAY, VARIABLE, NUMBER, SCALAR, ARGUMENT_ITSELF, TUPLE, LIST, DICT = range(9)


class CannotCapture(Exception):
    """A step has no program; the message says why."""


class Returned(NamedTuple):
    """A variable that a step returned: itself, and what it held then."""

    variable: Variable
    data: Any
    has_history: bool
    was_there: bool  # before


class Results:
    """Describes results.

    ``values`` and ``arguments``: what the step was called with, and the arrays of that.
    ``is_made``: whether an array lies in memory that a replay writes. ``entry``: where one lies.
    """

    def __init__(
        self,
        values: Sequence[Any],
        arguments: Sequence[Array | None],
        is_made: Callable[[Array], bool],
        entry: Callable[[Array], int],
    ) -> None:
        self._values, self._arguments = values, arguments
        self._made, self._entry = is_made, entry

    def describe(self, result: Any) -> tuple[Any, ...]:
        """Return ``result`` as csrc/tape/program.cc reads it.

        Raises:
            CannotCapture: it holds something that cannot be made anew.
        """
        kind = type(result)
        if kind is Returned:
            return self._describe_variable(result)
        if kind in (Recorded, RecordedScalar):
            return self._describe_array(result)
        if kind is Number:
            return NUMBER, None, None, *self._array(result.array), ()
        if kind in _CONTAINERS:
            parts = tuple(map(self.describe, result.values() if kind is dict else result))
            keys = tuple(result) if kind is dict else None
            return _CONTAINERS[kind], keys, None, 0, 0, (), (), parts
        if result is None or kind in (int, float, bool, str, complex):
            return _constant(result)
        raise CannotCapture(f"it returns an object of type {kind.__name__}")

    def _describe_variable(self, result: Returned) -> tuple[Any, ...]:
        for number, value in enumerate(self._values):
            if result.variable is value:
                return _argument(number)
        if result.was_there:
            return _constant(result.variable)
        if type(result.data) not in (Recorded, RecordedScalar):
            raise CannotCapture("it returns a new variable of an array that it has not computed")
        array, calc_grad = result.data.array, result.variable.calc_grad
        node = None
        if result.has_history:
            node = Node(array.shape, array.dtype, None)  # type: ignore[arg-type]
        return VARIABLE, calc_grad, node, *self._array(array), ()

    def _describe_array(self, result: Recorded) -> tuple[Any, ...]:
        for number, array in enumerate(self._arguments):
            if result.array is array:
                return _argument(number)
        if not self._is_made(result):
            is_number = type(result) is RecordedScalar
            return _constant(result.array[()] if is_number else result.array)
        as_what = SCALAR if type(result) is RecordedScalar else ARRAY
        return as_what, None, None, *self._array(result.array), ()

    def _is_made(self, data: Any) -> bool:
        if type(data) not in (Recorded, RecordedScalar):
            return False
        return self._made(data.array)

    def _array(self, array: Array) -> tuple[Any, ...]:
        strides = () if array.flags.c_contiguous else array.strides
        return self._entry(array), array.dtype.num, array.shape, strides


def arrays_of(result: Any) -> list[Array]:
    """Return the arrays in what a step returned."""
    if type(result) is Returned:
        result = result.data
    kind = type(result)
    if kind in (Recorded, RecordedScalar, Number):
        return [result.array]
    if kind in _CONTAINERS:
        each_of = result.values() if kind is dict else result
        return [array for each in each_of for array in arrays_of(each)]
    return []


_CONTAINERS: dict[type, int] = {tuple: TUPLE, list: LIST, dict: DICT}


def _constant(value: Any) -> tuple[Any, ...]:
    return CONSTANT, value, None, 0, 0, (), (), ()


def _argument(number: int) -> tuple[Any, ...]:
    return ARGUMENT_ITSELF, None, None, number, 0, (), (), ()


def as_returned(result: Any, there: Container[int]) -> Any:
    """Return what the step returned, with what variables in it held.

    ``there``: the ids of variables that were there before.
    """
    kind = type(result)
    if kind is Variable:
        return Returned(result, result.data, result.node is not None, id(result) in there)
    if kind in (tuple, list):
        return kind([as_returned(each, there) for each in result])
    if kind is dict:
        return {name: as_returned(each, there) for name, each in result.items()}
    return result


def unwrapped(result: Any) -> Any:
    """Return what the step returned, with arrays in the place of what stands for them."""
    kind = type(result)
    if kind is Variable:
        if type(result.data) in (Recorded, RecordedScalar):
            result.data = np.array(result.data.array)
        return result
    if kind is Recorded:
        return result.array
    if kind is RecordedScalar:
        return result.array[()]
    if kind in (tuple, list) or hasattr(kind, "_make"):
        return getattr(kind, "_make", kind)(map(unwrapped, result))
    if kind is dict:
        return {name: unwrapped(each) for name, each in result.items()}
    return result.value if kind in (Number, Later) else result
