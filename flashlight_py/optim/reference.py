"""The rules of the optimizers in the words of NumPy and CuPy: what csrc/optim computes, to the bit.

Each takes a parameter, its gradient, its states and numbers, and returns the new values of the
parameter and of the states, as new arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.autograd.narrow import widened
from flashlight_py.device import Array, array_module, is_cupy

__all__ = ["change", "sum_of_squares"]

Results = tuple[Array, ...]

RULES: dict[str, Callable[..., Results]] = {}


def change(rule: str, piece: Sequence[Any], numbers: Sequence[float], grad_scale: float) -> None:
    """Change the arrays of ``piece`` in place, as ``rule`` says; its gradient stays as it is.

    What is narrower than float32 is computed in float32, and rounded once.

    Args:
        rule: the name of one of the rules below.
        piece: parameter, gradient, states, all of one shape; the gradient may be a list of arrays,
            which are summed in its order.
        numbers: what the rule takes, in the order of its parameters.
        grad_scale: the factor of the gradient.
    """
    param, grad, *states = piece
    first, *others = grad if isinstance(grad, (list, tuple)) else [grad]
    wide = widened(param)
    total = widened(first)
    for other in others:
        total = total + widened(other)
    # Python's numbers would make float64 of arrays without dimensions.
    if grad_scale != 1:
        total = total * wide.dtype.type(grad_scale)
    typed = [wide.dtype.type(number) for number in numbers]
    results = RULES[rule](wide, total, *map(widened, states), *typed)
    for array, result in zip((param, *states), results, strict=True):
        array[...] = result


def sum_of_squares(grad: Array) -> float:
    """Return the sum of the squares of all elements, in float64. Blocks until it is computed.

    In blocks of 65,536 elements, in which element ``i`` is added to sum ``i % 16``, in order; at
    last the 16 sums are added, one after the other. So NumPy arrays have the same sum everywhere.
    """
    if is_cupy(grad):
        wide = grad.astype(np.float64).reshape(-1)
        return float(wide.dot(wide))
    flat, sums = grad.reshape(-1), np.zeros(16)
    for start in range(0, flat.size, 65536):
        squares = np.zeros((min(65536, flat.size - start) + 15) // 16 * 16)
        block = flat[start : start + 65536]
        np.multiply(block, block, out=squares[: block.size], dtype=np.float64)
        sums += np.add.reduce(squares.reshape(-1, 16), axis=0)
    return float(np.add.accumulate(sums)[-1])


def _rule(function: Callable[..., Results]) -> Callable[..., Results]:
    RULES[function.__name__] = function
    return function


def _decayed(grad: Array, param: Array, decay: float) -> Array:
    """Return the gradient with that of the L2 penalty; 0 leaves also infinite parameters alone."""
    return grad + param * decay if decay else grad


def _sqrt(array: Array) -> Array:
    return array_module(array).sqrt(array)  # type: ignore[no-any-return]


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
    velocity = velocity * kept + grad
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
    mean = mean * beta1 + grad * rest1
    square = square * beta2 + grad * grad * rest2
    return param * shrink - mean / (_sqrt(square) * root + eps) * rate, mean, square
