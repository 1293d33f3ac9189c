"""The structure of a step and its parts, for captured steps (``fl.capture``).

A replay finds arrays where they lie. Its structure shows in no array: which modules there are, in
which modes, with which hooks and options. Their owners say when it changes.
"""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

count = np.zeros(1, np.int64)
"""Another number after every change; native code reads it where it lies."""

_changes = itertools.count(1)


def changed() -> None:
    """Note that what a module, an optimizer or a hook computes has changed."""
    count[0] = next(_changes)


class HoldsState:
    """An object whose arrays are state of the steps that use it."""


class Structured(HoldsState):
    """An object whose attributes decide what a step computes; to set another value is a change."""

    def __setattr__(self, name: str, value: object) -> None:
        is_other = vars(self).get(name, self) is not value
        super().__setattr__(name, value)
        if is_other:
            changed()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        changed()


class _Here(threading.local):
    recorder: Any = None


here = _Here()
"""``recorder``: whoever takes note of what this thread does; None: nobody."""


def as_one(function: Function) -> Function:
    """Let replays repeat ``function`` as one operation, not the operations in it.

    It may change arrays, not only compute new ones. Results that are no arrays must not vary.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        recorder = here.recorder
        if recorder is None:
            return function(*args, **options)
        return recorder.as_one(function, args, options)

    return call  # type: ignore[return-value]


@as_one
def require(holds: Any, values: Any, error: Callable[[Any], Exception]) -> None:
    """Raise ``error(value)`` of the first of ``values`` where ``holds``, of their shape, is false.

    On a GPU it waits for them. Replays of a captured step check their own values.
    """
    if not holds.all():
        raise error(values[~holds][0])
