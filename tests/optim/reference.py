"""The rules of the optimizers written a second time, for NumPy and CuPy, to check those that run.

Each takes a parameter, its gradient, its states and numbers, and returns the new values of the
parameter and of the states, as new arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, widened

__all__ = ["change"]

Results = tuple[Array, ...]

RULES: dict[str, Callable[..., Results]] = {}


def change(rule: str, numbers: Sequence[float], piece: Sequence[Any], grad_scale: float) -> None:
    """Change the arrays of ``piece`` in place, as ``rule`` says; its gradient stays as it is.

    What is narrower than float32 is computed in float32, and rounded once.

    Args:
        rule: the name of one of the rules below.
        numbers: what the rule takes, in the order of its parameters.
        piece: parameter, gradient, states, all of one shape.
        grad_scale: the factor of the gradient.
    """
    param, grad, *states = piece
    wide, total = widened(param), widened(grad)
    # Python's numbers would make float64 of arrays without dimensions.
    if grad_scale != 1:
        total = total * wide.dtype.type(grad_scale)
    typed = [wide.dtype.type(number) for number in numbers]
    results = RULES[rule](wide, total, *map(widened, states), *typed)
    for array, result in zip((param, *states), results, strict=True):
        array[...] = result


def _rule(function: Callable[..., Results]) -> Callable[..., Results]:
    RULES[function.__name__] = function
    return function


def _decayed(grad: Array, param: Array, decay: float) -> Array:
    """Return the gradient with that of the L2 penalty; 0 leaves also infinite parameters alone."""
    return grad + param * decay if decay else grad


def _sqrt(array: Array) -> Array:
    return array_module(array).sqrt(array)  # type: ignore[no-any-return]


def _normal(array: Array) -> Array:
    """Return zeros in the place of what is too small to be a normal number; see rules.inc."""
    is_small = abs(array) < np.finfo(array.dtype).tiny
    return array_module(array).where(is_small, array.dtype.type(0), array)  # type: ignore[no-any-return]


@_rule
def sgd(param: Array, grad: Array, lr: float, decay: float) -> Results:
    """Return what gradient descent makes of a parameter."""
    return (param - _decayed(grad, param, decay) * lr,)


@_rule
def momentum(
    param: Array,
    grad: Array,
    velocity: Array,
    lr: float,
    kept: float,
    decay: float,
    nesterov: float,
) -> Results:
    """Return what gradient descent with momentum, or with Nesterov's, makes of a parameter."""
    grad = _decayed(grad, param, decay)
    velocity = _normal(velocity * kept + grad)
    step = grad + velocity * kept if nesterov else velocity
    return param - step * lr, velocity


@_rule
def adam(
    param: Array,
    grad: Array,
    mean: Array,
    square: Array,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    eps: float,
    rate: float,
    root: float,
    shrink: float,
    decay: float,
) -> Results:
    """Return what Adam makes of a parameter; ``root`` corrects the bias of ``sqrt(square)``."""
    grad = _decayed(grad, param, decay)
    mean = _normal(mean * beta1 + grad * rest1)
    square = _normal(square * beta2 + grad * grad * rest2)
    return param * shrink - mean / (_sqrt(square) * root + eps) * rate, mean, square


@_rule
def amsgrad(
    param: Array,
    grad: Array,
    mean: Array,
    square: Array,
    largest: Array,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    eps: float,
    lr: float,
    shrink: float,
) -> Results:
    """Return what AMSgrad makes of a parameter."""
    mean = _normal(mean * beta1 + grad * rest1)
    square = _normal(square * beta2 + grad * grad * rest2)
    largest = array_module(largest).maximum(largest, square)
    return param * shrink - mean / (_sqrt(largest) + eps) * lr, mean, square, largest


@_rule
def adagrad(
    param: Array, grad: Array, square: Array, eps: float, lr: float, shrink: float
) -> Results:
    """Return what Adagrad makes of a parameter."""
    square = square + grad * grad
    return param * shrink - grad / (_sqrt(square) + eps) * lr, square


@_rule
def rmsprop(
    param: Array,
    grad: Array,
    square: Array,
    rho: float,
    rest: float,
    eps: float,
    lr: float,
    shrink: float,
) -> Results:
    """Return what RMSprop makes of a parameter."""
    square = _normal(square * rho + grad * grad * rest)
    return param * shrink - grad / (_sqrt(square) + eps) * lr, square


@_rule
def rmsprop_centered(
    param: Array,
    grad: Array,
    square: Array,
    mean: Array,
    rho: float,
    rest: float,
    eps: float,
    lr: float,
    shrink: float,
) -> Results:
    """Return what RMSprop with the variance, which rounding does not make negative, makes of it."""
    square = _normal(square * rho + grad * grad * rest)
    mean = _normal(mean * rho + grad * rest)
    variance = array_module(square).maximum(square - mean * mean, 0)
    return param * shrink - grad / (_sqrt(variance) + eps) * lr, square, mean


@_rule
def adadelta(
    param: Array,
    grad: Array,
    square: Array,
    change: Array,
    rho: float,
    rest: float,
    eps: float,
    lr: float,
    shrink: float,
) -> Results:
    """Return what Adadelta makes of a parameter; ``change`` is the mean square of changes."""
    square = _normal(square * rho + grad * grad * rest)
    delta = _sqrt((change + eps) / (square + eps)) * grad
    return param * shrink - delta * lr, square, _normal(change * rho + delta * delta * rest)


@_rule
def novograd(
    param: Array,
    grad: Array,
    mean: Array,
    beta1: float,
    rest1: float,
    inverse: float,
    lr: float,
    decay: float,
) -> Results:
    """Return what NovoGrad makes of a parameter; ``inverse`` is 1 by the gradients' norm."""
    mean = _normal(mean * beta1 + _decayed(grad * inverse, param, decay) * rest1)
    return param - mean * lr, mean
