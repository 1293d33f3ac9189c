"""Functions of arrays in NumPy: plain code, captured code, and hand-written code with preallocated
results."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashlight_py as fl
from harness.role import Prepared, RankSetup
from harness.roles.flashlight import RankRole

Array = NDArray[Any]
Function = Callable[[Array], Any]

EPS, ROOT = np.float32(1e-5), np.float32(0.79788456)
HALF, ONE, CUBIC = np.float32(0.5), np.float32(1), np.float32(0.044715)


def layer_norm(x: Array) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + EPS)


def layer_norm_by_hand(shape: tuple[int, ...]) -> Function:
    centred, square = np.empty(shape, np.float32), np.empty(shape, np.float32)
    column = np.empty((shape[0], 1), np.float32)

    def function(x: Array) -> Any:
        np.mean(x, -1, keepdims=True, out=column)
        np.subtract(x, column, out=centred)
        np.multiply(centred, centred, out=square)
        np.mean(square, -1, keepdims=True, out=column)
        np.add(column, EPS, out=column)
        np.sqrt(column, out=column)
        return np.divide(centred, column, out=centred)

    return function


def log_softmax(x: Array) -> Any:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def log_softmax_by_hand(shape: tuple[int, ...]) -> Function:
    shifted, powers = np.empty(shape, np.float32), np.empty(shape, np.float32)
    column = np.empty((shape[0], 1), np.float32)

    def function(x: Array) -> Any:
        np.maximum.reduce(x, -1, keepdims=True, out=column)
        np.subtract(x, column, out=shifted)
        np.exp(shifted, out=powers)
        np.add.reduce(powers, -1, keepdims=True, out=column)
        np.log(column, out=column)
        return np.subtract(shifted, column, out=shifted)

    return function


def gelu(x: Array) -> Any:
    return HALF * x * (ONE + np.tanh(ROOT * (x + CUBIC * x * x * x)))


def gelu_by_hand(shape: tuple[int, ...]) -> Function:
    inner, half = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def function(x: Array) -> Any:
        np.multiply(x, CUBIC, out=inner)
        np.multiply(inner, x, out=inner)
        np.multiply(inner, x, out=inner)
        np.add(inner, x, out=inner)
        np.multiply(inner, ROOT, out=inner)
        np.tanh(inner, out=inner)
        np.add(inner, ONE, out=inner)
        np.multiply(x, HALF, out=half)
        return np.multiply(inner, half, out=inner)

    return function


def squared_sum(x: Array) -> Any:
    return (x * x).sum(0)


def squared_sum_by_hand(shape: tuple[int, ...]) -> Function:
    square, total = np.empty(shape, np.float32), np.empty(shape[1:], np.float32)
    return lambda x: np.add.reduce(np.multiply(x, x, out=square), 0, out=total)


FUNCTIONS: dict[str, tuple[Function, Callable[[tuple[int, ...]], Function]]] = {
    "layer norm": (layer_norm, layer_norm_by_hand),
    "log softmax": (log_softmax, log_softmax_by_hand),
    "gelu": (gelu, gelu_by_hand),
    "squares, summed over rows": (squared_sum, squared_sum_by_hand),
}


class Functions(RankRole):
    """Kinds are "eager", "captured" and "by hand"."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        shape, kind = tuple(task["shape"]), task["kind"]
        plain, by_hand = FUNCTIONS[task["function"]]
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        function = by_hand(shape) if kind == "by hand" else plain
        if kind == "captured":
            function = fl.capture(function)
        function(x)
        return Prepared(lambda: function(x), {"losses": function(x).ravel()[:9].tolist()})


def join(setup: RankSetup) -> Functions:
    """Return the role of the only rank."""
    return Functions(setup)
