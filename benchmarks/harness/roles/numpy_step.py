"""The step by hand in the fastest form of plain NumPy.

Every result has preallocated memory. Parameters, gradients and moments are views of one flat array
each, so the
optimizer makes few calls for all layers, on chunks that fit the cache. With batch 1 the gradient of
a bias is the
gradient of the layer's output, which is written to its memory at once.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.role import RankSetup
from harness.roles.perceptron import (
    BETAS,
    EPS,
    LR,
    MOMENTUM,
    Recipe,
    Step,
    StepRole,
    batches,
    parameters,
)

PIECE = 1 << 15  # elements of a chunk
OUTER = 1024  # inputs from which on a multiplication is faster than BLAS's outer product

Floats = NDArray[Any]
Criterion = Callable[[Floats], float]


class HandWritten(StepRole):
    """One process."""

    rank, size = 0, 1

    def facts(self) -> dict[str, str]:
        return {"NumPy": np.__version__}

    def barrier(self) -> None:
        """Return, because there is no other rank."""

    def step(self, recipe: Recipe, kind: str) -> Step:
        return _step(recipe)


def _step(recipe: Recipe) -> Step:
    dtype, rows = np.dtype(recipe.dtype), recipe.batch
    start = parameters(recipe)
    flat = np.concatenate([array.reshape(-1) for array in start])
    params = _views(flat, start)
    flat_grads = np.zeros_like(flat)
    grads = _views(flat_grads, start)
    weights, biases = params[::2], [bias[None] for bias in params[1::2]]
    outputs = [np.empty((rows, width), dtype) for width in recipe.widths[1:]]
    deltas = [g[None] for g in grads[1::2]] if rows == 1 else [np.empty_like(o) for o in outputs]
    masks = [np.empty(o.shape, dtype if rows == 1 else bool) for o in outputs]
    zero, ones = np.zeros((), dtype), np.ones(rows, dtype)
    dot, add, multiply, maximum = np.dot, np.add, np.multiply, np.maximum
    sign, greater = np.sign, np.greater

    hidden = [(w.T, b, o) for w, b, o in zip(weights, biases, outputs, strict=True)]
    last_weight, last_bias, result = hidden.pop()
    backward = [
        (deltas[i], deltas[i].T, weights[i], grads[2 * i], grads[2 * i + 1], *below)
        for i, below in enumerate(zip(outputs[:-1], deltas[:-1], masks[:-1], strict=True), 1)
    ][::-1]
    first_delta, first_grads, first_inputs = deltas[0].T, grads[:2], recipe.widths[0]
    outer = multiply if rows == 1 and first_inputs >= OUTER else dot
    narrowest = min(recipe.widths[1:-1], default=0)
    outers = multiply if rows == 1 and narrowest >= OUTER else dot
    criterion = _CRITERIA[recipe.loss](result, deltas[-1])
    update = _UPDATES[recipe.rule](flat, flat_grads)
    coming, trains = itertools.cycle(_targets(recipe)), recipe.trains

    def step() -> float:
        x, target = next(coming)
        active = x
        for weight, bias, output in hidden:
            dot(active, weight, output)
            add(output, bias, output)
            active = maximum(output, zero, out=output)
        dot(active, last_weight, result)
        add(result, last_bias, result)
        loss = criterion(target)
        if not trains:
            return loss
        for delta, columns, weight, of_weight, of_bias, output, below, mask in backward:
            outers(columns, output, of_weight)
            dot(delta, weight, below)
            if rows == 1:  # multiplying by the sign is faster than casting a bool
                sign(output, mask)
            else:
                dot(ones, delta, of_bias)
                greater(output, zero, mask)
            multiply(below, mask, below)
        outer(first_delta, x, first_grads[0])
        if rows > 1:
            dot(ones, deltas[0], first_grads[1])
        update()
        return loss

    return step


def _views(flat: Floats, like: list[Floats]) -> list[Floats]:
    ends = list(itertools.accumulate(array.size for array in like))
    parts = np.split(flat, ends[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, like, strict=True)]


def _targets(recipe: Recipe) -> list[tuple[Floats, Floats]]:
    """Return classes as rows with a single 1, so the derivative is one subtraction."""
    if recipe.loss == "mse":
        return batches(recipe)
    rows = np.eye(recipe.widths[-1], dtype=recipe.dtype)
    return [(x, rows[classes]) for x, classes in batches(recipe)]


def _mean_squared_error(result: Floats, delta: Floats) -> Criterion:
    error, subtract, multiply = np.empty_like(result), np.subtract, np.multiply
    line, size, factor = error.reshape(-1), result.size, np.array(2 / result.size, result.dtype)

    def criterion(target: Floats) -> float:
        subtract(result, target, error)
        multiply(error, factor, delta)
        return float(line.dot(line)) / size

    return criterion


def _cross_entropy(result: Floats, delta: Floats) -> Criterion:
    rows = len(result)
    column = np.empty((rows, 1), result.dtype)
    factor, scores = np.array(1 / rows, result.dtype), result.reshape(-1)
    subtract, multiply, divide, exp, log = np.subtract, np.multiply, np.divide, np.exp, np.log
    largest, total, sums = np.maximum.reduce, np.add.reduce, column.reshape(-1)

    def criterion(target: Floats) -> float:
        largest(result, 1, out=column, keepdims=True)
        subtract(result, column, result)
        exp(result, delta)
        total(delta, 1, out=column, keepdims=True)
        divide(delta, column, delta)
        subtract(delta, target, delta)
        multiply(delta, factor, delta)
        log(column, column)
        return float(total(sums) - scores.dot(target.reshape(-1))) / rows

    return criterion


def _sgd(flat: Floats, grads: Floats) -> Callable[[], None]:
    pieces = _pieces(flat, grads, np.zeros_like(flat))
    momentum, rate = (np.array(value, flat.dtype) for value in (MOMENTUM, LR))
    add, subtract, multiply = np.add, np.subtract, np.multiply

    def update() -> None:
        for param, grad, velocity, change in pieces:
            multiply(velocity, momentum, velocity)
            add(velocity, grad, velocity)
            multiply(velocity, rate, change)
            subtract(param, change, param)

    return update


def _adam(flat: Floats, grads: Floats) -> Callable[[], None]:
    pieces = _pieces(flat, grads, np.zeros_like(flat), np.zeros_like(flat))
    numbers = (*BETAS, 1 - BETAS[0], 1 - BETAS[1], 0, 0)
    beta1, beta2, rest1, rest2, small, rate = (np.array(number, flat.dtype) for number in numbers)
    add, subtract, multiply, divide, root = np.add, np.subtract, np.multiply, np.divide, np.sqrt
    time = 0

    def update() -> None:
        nonlocal time
        time += 1
        correction = (1 - BETAS[1] ** time) ** 0.5
        small[()], rate[()] = EPS * correction, LR * correction / (1 - BETAS[0] ** time)
        for param, grad, mean, square, other in pieces:
            multiply(grad, rest1, other)
            multiply(mean, beta1, mean)
            add(mean, other, mean)
            multiply(grad, grad, other)
            multiply(other, rest2, other)
            multiply(square, beta2, square)
            add(square, other, square)
            root(square, other)
            add(other, small, other)
            divide(mean, other, other)
            multiply(other, rate, other)
            subtract(param, other, param)

    return update


def _pieces(*arrays: Floats) -> list[tuple[Floats, ...]]:
    """Return the chunks of each array, and a common scratch chunk."""
    scratch = np.empty(min(PIECE, arrays[0].size), arrays[0].dtype)
    starts = range(0, arrays[0].size, PIECE)
    parts = [[array[start : start + PIECE] for array in arrays] for start in starts]
    return [(*part, scratch[: part[0].size]) for part in parts]


_CRITERIA = {"mse": _mean_squared_error, "cross entropy": _cross_entropy}
_UPDATES = {"sgd": _sgd, "adam": _adam}


def join(_: RankSetup) -> HandWritten:
    """Return the role of the only rank."""
    return HandWritten()
