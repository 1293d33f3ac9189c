"""The native kernels of optimizers in a captured step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.tape.recording import Recording, handlers

Array = np.ndarray[Any, Any]


class OptimizerStep:
    """An optimizer's step as it is done by every replay: it reads the rate and counts by itself.

    ``pieces``: position, parameter, gradient and states of each parameter that is stepped.
    """

    def __init__(
        self, step: Callable[..., Any], args: tuple[Any, ...], pieces: list[tuple[Any, ...]]
    ) -> None:
        self._step, self._args, self._pieces = step, args, pieces
        self.__name__ = "optimizer.step"

    @property
    def __captured_arrays__(self) -> list[Array]:
        return [array for piece in self._pieces for array in piece[1:]]

    def with_arrays(self, arrays: list[Array]) -> OptimizerStep:
        """Return the same with arrays where they lie in a replay."""
        left = iter(arrays)
        pieces = [(piece[0], *(next(left) for _ in piece[1:])) for piece in self._pieces]
        return OptimizerStep(self._step, self._args, pieces)

    def call(self) -> Callable[[], Any]:
        """Return what a replay calls."""
        params, _, *how = self._args
        held = [(params[position], grad) for position, _, grad, *_ in self._pieces]
        are_held = all(variable.grad is grad for variable, grad in held)
        step: Callable[[], Any]
        try:
            step = self._step.__self__.Steps(self._pieces, *how)  # type: ignore[attr-defined]
        except ValueError:  # a gradient that is not contiguous, which each step copies
            step = functools.partial(self._step, *self._args)
        else:
            if not how[-1]:
                return step
        if are_held:
            return step

        def with_gradients() -> None:  # those that are gone when the captured step is over
            for variable, grad in held:
                variable.grad = grad
            step()

        return with_gradients


def _record_step(
    recording: Recording, function: Callable[..., Any], args: tuple[Any, ...], _: Any
) -> Any:
    params, states, steps, rule, scale, per_position = args
    plain = [getattr(variable.grad, "array", variable.grad) for variable in params]
    kept = [(variable.data, variable.grad) for variable in params]
    own_states = tuple([[getattr(each, "array", each) for each in row] for row in states])
    optimizer = getattr(rule, "__self__", None)
    replayed = (params, own_states, steps, rule, scale, per_position)

    def step() -> Any:
        for variable, (data, _), grad in zip(params, kept, plain, strict=True):
            variable.data, variable.grad = data.array, grad
        try:
            return function(*replayed)
        finally:
            for variable, (data, grad) in zip(params, kept, strict=True):
                variable.data, variable.grad = data, grad

    left = recording.without(step)
    if any(grad is own and own is not None for (_, own), grad in zip(kept, plain, strict=True)):
        recording.leave("a gradient was computed of arrays that the step has made itself")
        return left
    if left is not None:
        recording.leave("the optimizer steps arrays for which there is no native kernel")
        return left
    recording.read_by_replays(optimizer)
    pieces = [
        (position, data.array, grad.array, *(row[position] for row in own_states))
        for position, (data, grad) in enumerate(kept)
        if grad is not None
    ]
    changed = [array for _, param, _, *own in pieces for array in (param, *own)]
    again: Any = OptimizerStep(function, replayed, pieces)
    recording.effect(again, (), {}, [], changed)
    return None


def install() -> None:
    """Let recordings know the kernels, once they are loaded."""
    module = _native.optional("optim", "optimizers step in NumPy, some ten times slower")
    if module is not None:
        handlers[module.step] = _record_step
