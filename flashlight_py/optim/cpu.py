"""The update rules of optimizers on the CPU, and sums of squares of gradients."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array, array_module, is_cupy, widened

# A field of an update rule is a number, or a tuple that begins with an index of FORMS, such as
# (LR,) or (SHRINK, decay). In each step, the function FORMS[index] computes the number from the
# learning rate, the parameter's step number (from 1), the tuple, and ``norm``. ``norm(decay)`` adds
# the gradient's squared norm to a running mean and returns the mean. csrc/optim/tasks.cc computes
# the same bits.
Field: TypeAlias = "float | tuple[int] | tuple[int, float] | tuple[int, float, float]"
Rule: TypeAlias = tuple[str, tuple[Field, ...]]
Numbers: TypeAlias = Sequence[float]
Results: TypeAlias = tuple[Array, ...]
LR, SHRINK, RATE, ROOT, INVERSE = range(5)
FORMS: tuple[Callable[[float, int, Any, Any], float], ...] = (
    lambda lr, time, field, norm: lr,
    lambda lr, time, field, norm: 1 - lr * field[1],
    lambda lr, time, field, norm: lr / (1 - field[1] ** time),
    lambda lr, time, field, norm: 1 / math.sqrt(1 - field[1] ** time),
    lambda lr, time, field, norm: 1 / d if (d := math.sqrt(norm(field[1])) + field[2]) else 0.0,
)


def numbers_of(fields: Sequence[Field], lr: float, time: int, norm: Any = None) -> list[float]:
    """Return the values of ``fields`` at learning rate ``lr`` in step ``time`` of the parameter."""
    return [FORMS[f[0]](lr, time, f, norm) if isinstance(f, tuple) else f for f in fields]


@functools.cache
def optimizer_kernels() -> Any | None:
    """Return the module of native kernels. If it is missing, warn and return None."""
    return _native.optional("optim", "optimizers step in NumPy, about ten times slower")


def change(rule: str, numbers: Sequence[float], piece: Sequence[Any], grad_scale: float) -> None:
    """Update the arrays of ``piece`` in place by NumPy or CuPy. csrc/optim computes the same bits.

    Types narrower than float32 are computed in float32 and rounded once. ``numbers`` are the values
    of the rule's fields. ``piece`` is (parameter, gradient, *states), all of the same shape. The
    gradient is multiplied by ``grad_scale``, but its array is not modified.
    """
    param, grad, *states = piece
    wide, total = widened(param), widened(grad)
    # Numbers get the dtype of the arrays, because Python numbers turn 0-d arrays into float64.
    real = wide.dtype.type
    if grad_scale != 1:
        total = total * real(grad_scale)
    results = RULES[rule]([*map(real, numbers)], wide, total, *map(widened, states))
    for array, result in zip((param, *states), results, strict=True):
        array[...] = result


# The rules of rules.inc for arrays. Each gets numbers, parameter, gradient and states, and returns
# the new parameter and states.
def _sgd(numbers: Numbers, param: Array, grad: Array) -> Results:
    lr, decay = numbers
    return (param - _decayed(grad, param, decay) * lr,)


def _momentum(numbers: Numbers, param: Array, grad: Array, velocity: Array) -> Results:
    lr, kept, decay, nesterov = numbers
    grad = _decayed(grad, param, decay)
    velocity = _normal(velocity * kept + grad)
    return param - (grad + velocity * kept if nesterov else velocity) * lr, velocity


def _adam(numbers: Numbers, param: Array, grad: Array, mean: Array, square: Array) -> Results:
    beta1, rest1, beta2, rest2, eps, rate, root, shrink, decay = numbers
    grad = _decayed(grad, param, decay)
    mean = _normal(mean * beta1 + grad * rest1)
    square = _normal(square * beta2 + grad * grad * rest2)
    return param * shrink - mean / (np.sqrt(square) * root + eps) * rate, mean, square


def _amsgrad(
    numbers: Numbers, param: Array, grad: Array, mean: Array, square: Array, largest: Array
) -> Results:
    beta1, rest1, beta2, rest2, eps, lr, shrink = numbers
    mean = _normal(mean * beta1 + grad * rest1)
    square = _normal(square * beta2 + grad * grad * rest2)
    largest = array_module(largest).maximum(largest, square)
    return param * shrink - mean / (np.sqrt(largest) + eps) * lr, mean, square, largest


def _adagrad(numbers: Numbers, param: Array, grad: Array, square: Array) -> Results:
    eps, lr, shrink = numbers
    square = square + grad * grad
    return param * shrink - grad / (np.sqrt(square) + eps) * lr, square


def _rmsprop(numbers: Numbers, param: Array, grad: Array, square: Array, *mean: Array) -> Results:
    rho, rest, eps, lr, shrink = numbers
    square = variance = _normal(square * rho + grad * grad * rest)
    if mean:  # "rmsprop_centered"
        mean = (_normal(mean[0] * rho + grad * rest),)
        # Rounding may give negative differences.
        variance = array_module(square).maximum(square - mean[0] * mean[0], 0)
    return param * shrink - grad / (np.sqrt(variance) + eps) * lr, square, *mean


def _adadelta(numbers: Numbers, param: Array, grad: Array, square: Array, change: Array) -> Results:
    rho, rest, eps, lr, shrink = numbers
    square = _normal(square * rho + grad * grad * rest)
    delta = np.sqrt((change + eps) / (square + eps)) * grad
    return param * shrink - delta * lr, square, _normal(change * rho + delta * delta * rest)


def _novograd(numbers: Numbers, param: Array, grad: Array, mean: Array) -> Results:
    beta1, rest1, inverse, lr, decay = numbers
    mean = _normal(mean * beta1 + _decayed(grad * inverse, param, decay) * rest1)
    return param - mean * lr, mean


RULES: dict[str, Callable[..., Results]] = {
    "sgd": _sgd, "momentum": _momentum, "adam": _adam, "amsgrad": _amsgrad, "adagrad": _adagrad,
    "rmsprop": _rmsprop, "rmsprop_centered": _rmsprop, "adadelta": _adadelta,
    "novograd": _novograd,
}  # fmt: skip


def _decayed(grad: Array, param: Array, decay: float) -> Array:
    return grad + param * decay if decay else grad  # inf * 0 is nan


def _normal(array: Array) -> Array:
    is_small = abs(array) < np.finfo(array.dtype).tiny
    return array_module(array).where(is_small, array.dtype.type(0), array)  # type: ignore[no-any-return]


BLOCK = 65536  # elements of a block in sums of squares


def sum_of_squares(grad: Array) -> float:
    """Return the sum of the squares of all elements, in float64. Blocks until it is computed.

    On the CPU, blocks of 65,536 elements are summed in order. In a block, element ``i`` is added to
    sum ``i % 16``, and then the 16 sums are added in order. So the result is equal on all machines.
    """
    if is_cupy(grad):
        wide = grad.astype(np.float64).reshape(-1)
        return float(wide.dot(wide))
    module = optimizer_kernels()
    if module is not None and (sum_ := module.sum_of_squares(grad)) is not None:
        return float(sum_)
    return reference_sum(grad)


def sums_of_squares(grad: Array, blocks: slice = slice(None)) -> list[float]:
    """Return the sum of squares of each block of 65,536 elements in the slice ``blocks``.

    If these sums are added in order, the total is equal on all ranks. A GPU array is one block.
    """
    if is_cupy(grad):
        return [sum_of_squares(grad)]
    flat = grad.reshape(-1)
    starts = range(0, flat.size, BLOCK)[blocks]
    return [sum_of_squares(flat[start : start + BLOCK]) for start in starts]


def reference_sum(grad: Array) -> float:
    flat, sums = grad.reshape(-1), np.zeros(16)
    for start in range(0, flat.size, BLOCK):
        squares = np.zeros((min(BLOCK, flat.size - start) + 15) // 16 * 16)
        block = flat[start : start + BLOCK]
        np.multiply(block, block, out=squares[: block.size], dtype=np.float64)
        sums += np.add.reduce(squares.reshape(-1, 16), axis=0)
    return float(np.add.accumulate(sums)[-1])
