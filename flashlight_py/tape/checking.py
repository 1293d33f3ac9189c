"""A replay beside the step itself: both from the same state, and what differs afterwards."""

from __future__ import annotations

import functools
import math
import random as random_of_python
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.tape.reach import Reach
from flashlight_py.tape.recording import live

Array = np.ndarray[Any, Any]


class SavedNumbers:
    """The numbers of ``objects``, such as an optimizer's count of steps, as they are now."""

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = [(each, _copied(vars(each))) for each in objects if _has_state(each)]

    def restore(self) -> None:
        """Make them as they were."""
        for each, attributes in self._objects:
            _put_back(vars(each), attributes)

    def differences(self, other: SavedNumbers) -> Iterator[str]:
        """Say whose differ from ``other``."""
        theirs = {id(each): attributes for each, attributes in other._objects}
        for each, attributes in self._objects:
            if not _equal(attributes, theirs.get(id(each), attributes)):
                yield f"the numbers of a {type(each).__name__}"


class SavedState:
    """All that a step may change, as it is now: arrays, gradients, counts, random numbers."""

    def __init__(self, reach: Reach) -> None:
        self._slots = [(variable, variable.grad) for variable in reach.variables]
        places = [(place.words(), place.get()) for place in reach.arrays]
        self._arrays = [(words, array, array.copy()) for words, array in places]
        self._numbers = SavedNumbers(live.values())
        self._random = random.state_dict()

    def restore(self) -> None:
        """Make all as it was."""
        for variable, grad in self._slots:
            variable.grad = grad
        for _, array, copy in self._arrays:
            np.copyto(array, copy)
        self._numbers.restore()
        random.load_state_dict(self._random)

    def differences(self, other: SavedState, result: Any, expected: Any) -> Iterator[str]:
        """Say what differs from ``other``, which the step itself has left behind."""
        if not _equal(result, expected):
            yield "what it returns"
        theirs = {words: copy for words, _, copy in other._arrays}
        for words, _, copy in self._arrays:
            if not _equal(copy, theirs.get(words)):
                yield words
        yield from self._numbers.differences(other._numbers)
        if self._random != other._random:
            yield "the random numbers that follow"


def others_drawn(reach: Reach) -> tuple[Any, ...]:
    """Return the states of all generators of random numbers that are not this package's."""
    own = [repr(each.bit_generator.state) for each in reach.generators]
    name, key, *rest = np.random.get_state(legacy=True)
    return random_of_python.getstate(), name, np.asarray(key).tobytes(), rest, own


def root_of(step: Callable[..., Any], objects: list[Any]) -> Callable[..., Any]:
    """Return what leads to the step itself, and to the objects that it is called with."""
    whole: Any = step
    if isinstance(step, functools.partial):  # which another one would take apart
        whole = whole.__call__
    return functools.partial(whole, *objects)


def beside(
    step: Callable[..., Any],
    replay: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Return what ``step`` returns, after ``replay`` was found to do the same.

    Raises:
        RuntimeError: it does something else; everything is as the step itself has left it.
    """
    objects = [each for each in (*args, *options.values()) if type(each) is not np.ndarray]
    root = root_of(step, objects)
    before = SavedState(Reach(root))
    result = replay(*args, **options)
    after = SavedState(Reach(root))
    before.restore()
    expected = step(*args, **options)
    wrong = list(after.differences(SavedState(Reach(root)), result, expected))
    if wrong:
        name = getattr(step, "__qualname__", "step")
        raise RuntimeError(
            f"capture(check=True): a replay of {name} differs from the step itself in "
            f"{', '.join(wrong)}. The step depends on something that its recording cannot see; "
            "pass it as an argument, or leave this step uncaptured, and report it"
        )
    return expected


def _has_state(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {n: list(each) if type(each) is list else each for n, each in attributes.items()}


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name, each in before.items():
        if type(each) is list and type(attributes.get(name)) is list:
            attributes[name][:] = each  # which others may hold
        else:
            attributes[name] = each


def _equal(one: Any, other: Any) -> bool:
    """Return whether all numbers have the same bits; objects of other kinds are not compared."""
    if isinstance(one, Variable) and isinstance(other, Variable):
        one, other = one.data, other.data
    if isinstance(one, (np.ndarray, np.generic)):
        if not isinstance(other, (np.ndarray, np.generic)):
            return False
        same_kind = one.shape == other.shape and one.dtype == other.dtype
        return same_kind and np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, float):
        return isinstance(other, float) and (one == other or math.isnan(one))
    return one == other if isinstance(one, (int, str)) else True
