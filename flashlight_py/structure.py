"""The structure of a captured step (``fl.capture``): modules, modes, hooks and options.

A replay reads the current values of arrays, but cannot see other changes. Code that changes the
structure must therefore call ``changed``.
"""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

count = np.zeros(1, np.int64)
"""Number of the last change. Native code reads this memory."""

_changes = itertools.count(1)


def changed() -> None:
    """Record that the computation of a module, an optimizer or a hook has changed."""
    count[0] = next(_changes)


class HoldsState:
    """An object whose arrays are part of the state of a captured step."""


class Structured(HoldsState):
    """An object whose attributes determine a step's computation. Changing one calls ``changed``."""

    def __setattr__(self, name: str, value: object) -> None:
        is_changed = vars(self).get(name, self) is not value
        super().__setattr__(name, value)
        if is_changed:
            changed()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        changed()


class _Here(threading.local):
    recorder: Any = None


thread_state = _Here()
"""``recorder``: the object that records operations of this thread, or None."""


def as_one(function: Function) -> Function:
    """Decorate ``function`` so that a replay repeats a whole call of it as one operation.

    ``function`` may modify arrays in place. Results other than arrays must be equal in each replay.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        recorder = thread_state.recorder
        if recorder is None:
            return function(*args, **options)
        return recorder.as_one(function, args, options)

    return call  # type: ignore[return-value]


@as_one
def require_all(holds: Any, values: Any, error: Callable[[Any], Exception]) -> None:
    """Raise ``error(value)`` for the first element of ``values`` for which ``holds`` is False.

    ``holds`` and ``values`` are arrays of the same shape. Waits until a GPU has computed them. Each
    replay of a captured step checks again.
    """
    if not holds.all():
        raise error(values[~holds][0])
