"""The native kernels of optimizers in a captured step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.autograd import Variable
from flashlight_py.tape.recording import Recording, handlers

Array = np.ndarray[Any, Any]


class OptimizerStep:
    """An optimizer's step as it is done by every replay: it reads the rate and counts by itself.

    ``grads``: the gradient of each of ``params`` when the step is done, or None.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        grads: list[Array | None],
    ) -> None:
        self._step, self._args, self._grads = step, args, grads
        self._params: list[Variable] = args[0]
        self.__name__ = "optimizer.step"

    @property
    def __captured_arrays__(self) -> list[Array]:
        return [grad for grad in self._grads if grad is not None]

    def with_arrays(self, arrays: list[Array]) -> OptimizerStep:
        """Return the same with other gradients, which lie where they are in a replay."""
        left = iter(arrays)
        grads = [None if grad is None else next(left) for grad in self._grads]
        return OptimizerStep(self._step, self._args, grads)

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return what a replay calls, with which arguments."""
        held = [variable.grad for variable in self._params]
        if all(a is b for a, b in zip(held, self._grads, strict=True)):
            return self._step, self._args  # as variables have their gradients during a replay
        return self._run, ()

    def _run(self) -> None:
        for variable, grad in zip(self._params, self._grads, strict=True):
            variable.grad = grad
        self._step(*self._args)


def _record_step(
    recording: Recording, function: Callable[..., Any], args: tuple[Any, ...], _: Any
) -> Any:
    params, states, steps, rule, scale, per_position, is_sharded = args
    if is_sharded or any(variable.placement is not None for variable in params):
        recording.leave("the optimizer steps a sharded module")
        return function(*args)
    plain = [getattr(variable.grad, "array", None) for variable in params]
    kept = [(variable.data, variable.grad) for variable in params]
    own_states = tuple([[getattr(each, "array", each) for each in row] for row in states])
    optimizer = getattr(rule, "__self__", None)
    replayed = (params, own_states, steps, rule, scale, per_position, is_sharded)

    def step() -> Any:
        for variable, (data, _), grad in zip(params, kept, plain, strict=True):
            variable.data, variable.grad = data.array, grad
        try:
            return function(*replayed)
        finally:
            for variable, (data, grad) in zip(params, kept, strict=True):
                variable.data, variable.grad = data, grad

    left = recording.without(step)
    if left is not None:
        recording.leave("the optimizer steps arrays for which there is no native kernel")
        return left
    recording.live += [optimizer, steps]
    changed = [data.array for data, grad in kept if grad is not None]
    changed += [each for row in own_states for each in row]
    recording.effect(OptimizerStep(function, replayed, plain), (), {}, [], changed)
    return None


def install() -> None:
    """Let recordings know the kernels, once they are loaded."""
    module = _native.optional("optim", "optimizers step in NumPy, some ten times slower")
    if module is not None:
        handlers[module.step] = _record_step
