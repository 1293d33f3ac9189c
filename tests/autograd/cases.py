"""Every differentiable function with inputs, and its name in torch: one row per promise.

``ours`` takes variables, ``theirs`` gets torch and its tensors. The inputs stay away from kinks
and poles, where neither central differences nor conventions about slopes can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.autograd import functions as F


class Case(NamedTuple):
    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]


_random = np.random.default_rng(0)


def signed(*shape: int) -> np.ndarray:
    """Values of both signs, at least 0.1 from 0 and from each other's magnitude."""
    size = int(np.prod(shape))
    values = 0.1 + np.arange(1, size + 1) / size
    return (_random.permutation(values) * _random.choice([-1, 1], size)).reshape(shape)


def positive(*shape: int) -> np.ndarray:
    return np.abs(signed(*shape))


A, B, ROW, COLUMN, SCALAR = signed(3, 4), signed(3, 4), signed(4), signed(3, 1), signed()
P, Q = positive(3, 4), positive(3, 4)
CUBE = signed(2, 3, 4)
LABELS = np.array([2, 0, -1, 1])
ROWS = np.array([0, 2, 2, 1])


def cross_entropy(reduction: str) -> Case:
    from flashlight_py.autograd import input

    return Case(
        f"categorical_cross_entropy_{reduction}",
        lambda x: F.categorical_cross_entropy(F.log_softmax(x), input(LABELS), reduction),
        lambda t, x: t.nn.functional.cross_entropy(
            x, t.tensor(LABELS), reduction=reduction, ignore_index=-1
        ),
        (signed(4, 3),),
    )


def t_linear_relu(t: Any, *arrays: Any) -> Any:
    return t.relu(t.nn.functional.linear(*arrays))


CASES = [
    Case("negative", F.negative, lambda t, x: -x, (A,)),
    Case("add", F.add, lambda t, x, y: x + y, (A, B)),
    Case("add_row", F.add, lambda t, x, y: x + y, (A, ROW)),
    Case("sub", F.sub, lambda t, x, y: x - y, (A, B)),
    Case("sub_column", F.sub, lambda t, x, y: x - y, (COLUMN, A)),
    Case("mul", F.mul, lambda t, x, y: x * y, (A, B)),
    Case("mul_scalar", F.mul, lambda t, x, y: x * y, (SCALAR, A)),
    Case("mul_outer", F.mul, lambda t, x, y: x * y, (COLUMN, ROW)),
    Case("div", F.div, lambda t, x, y: x / y, (A, B)),
    Case("div_row", F.div, lambda t, x, y: x / y, (ROW, A)),
    Case("pow", F.pow, lambda t, x, y: x**y, (P, B)),
    Case("pow_number", lambda x: x**3, lambda t, x: x**3, (A,)),
    Case("maximum", F.maximum, t_maximum := lambda t, x, y: t.maximum(x, y), (A, B)),
    Case("maximum_row", F.maximum, t_maximum, (A, ROW)),
    Case("minimum", F.minimum, lambda t, x, y: t.minimum(x, y), (A, B)),
    Case("exp", F.exp, lambda t, x: t.exp(x), (A,)),
    Case("log", F.log, lambda t, x: t.log(x), (P,)),
    Case("sqrt", F.sqrt, lambda t, x: t.sqrt(x), (P,)),
    Case("sin", F.sin, lambda t, x: t.sin(x), (A,)),
    Case("cos", F.cos, lambda t, x: t.cos(x), (A,)),
    Case("tanh", F.tanh, lambda t, x: t.tanh(x), (A,)),
    Case("sigmoid", F.sigmoid, lambda t, x: t.sigmoid(x), (A,)),
    Case("relu", F.relu, lambda t, x: t.relu(x), (A,)),
    Case("abs", F.abs, lambda t, x: t.abs(x), (A,)),
    Case("clamp", lambda x: F.clamp(x, -0.55, 0.55), lambda t, x: t.clamp(x, -0.55, 0.55), (A,)),
    Case("clamp_below", lambda x: F.clamp(x, -0.55), lambda t, x: t.clamp(x, -0.55), (A,)),
    Case("clamp_above", lambda x: F.clamp(x, upper=0.55), lambda t, x: x.clamp(max=0.55), (A,)),
    Case("sum", F.sum, lambda t, x: x.sum(), (CUBE,)),
    Case("sum_axis", lambda x: F.sum(x, 1), lambda t, x: x.sum(1), (CUBE,)),
    Case("sum_axes", lambda x: F.sum(x, (0, -1)), lambda t, x: x.sum((0, -1)), (CUBE,)),
    Case("sum_keep", lambda x: F.sum(x, -1, True), lambda t, x: x.sum(-1, True), (CUBE,)),
    Case("mean", F.mean, lambda t, x: x.mean(), (CUBE,)),
    Case("mean_axes", lambda x: F.mean(x, (0, 2)), lambda t, x: x.mean((0, 2)), (CUBE,)),
    Case("var", F.var, lambda t, x: x.var(correction=0), (CUBE,)),
    Case("var_axis", lambda x: F.var(x, 1, ddof=1), lambda t, x: x.var(1), (CUBE,)),
    Case("max", F.max, lambda t, x: x.amax(), (CUBE,)),
    Case("max_axis", lambda x: F.max(x, 1), lambda t, x: x.amax(1), (CUBE,)),
    Case("max_keep", lambda x: F.max(x, 1, True), lambda t, x: x.amax(1, True), (CUBE,)),
    Case("min_axes", lambda x: F.min(x, (0, 2)), lambda t, x: x.amin((0, 2)), (CUBE,)),
    Case("matmul", F.matmul, t_matmul := lambda t, x, y: x @ y, (A, signed(4, 2))),
    Case("matmul_batched", F.matmul, t_matmul, (CUBE, signed(2, 4, 2))),
    Case("matmul_broadcast", F.matmul, t_matmul, (CUBE, signed(4, 2))),
    Case("matmul_row", F.matmul, t_matmul, (ROW, signed(2, 4, 3))),
    Case("matmul_column", F.matmul, t_matmul, (CUBE, ROW)),
    Case("matmul_inner", F.matmul, t_matmul, (ROW, signed(4))),
    Case("reshape", lambda x: F.reshape(x, (4, -1)), lambda t, x: x.reshape(4, -1), (A,)),
    Case("moddims", lambda x: F.moddims(x, (2, 6)), lambda t, x: x.reshape(2, 6), (A,)),
    Case("flat", F.flat, lambda t, x: x.reshape(-1), (A,)),
    Case("transpose", F.transpose, lambda t, x: x.permute(2, 1, 0), (CUBE,)),
    Case(
        "transpose_axes",
        lambda x: F.transpose(x, (1, -1, 0)),
        lambda t, x: x.permute(1, 2, 0),
        (CUBE,),
    ),
    Case("concatenate", lambda *v: F.concatenate(v), lambda t, *v: t.cat(v), (A, B, signed(1, 4))),
    Case(
        "concatenate_axis",
        lambda *v: F.concatenate(v, -1),
        lambda t, *v: t.cat(v, -1),
        (A, COLUMN),
    ),
    Case("index", lambda x: x[1:, ..., 2], lambda t, x: x[1:, ..., 2], (CUBE,)),
    Case("index_new", lambda x: x[None, -1], lambda t, x: x[None, -1], (CUBE,)),
    Case("index_repeated", lambda x: x[ROWS], lambda t, x: x[ROWS], (A,)),
    Case("index_pairs", lambda x: x[ROWS, ROWS], lambda t, x: x[ROWS, ROWS], (A,)),
    Case("index_mask", lambda x: x[A > 0], lambda t, x: x[t.tensor(A > 0)], (A,)),
    Case("softmax", F.softmax, lambda t, x: x.softmax(-1), (A,)),
    Case("softmax_axis", lambda x: F.softmax(x, 1), lambda t, x: x.softmax(1), (CUBE,)),
    Case("log_softmax", F.log_softmax, lambda t, x: x.log_softmax(-1), (A,)),
    Case("log_softmax_axis", lambda x: F.log_softmax(x, 0), lambda t, x: x.log_softmax(0), (A,)),
    Case("linear", F.linear, t_linear := lambda t, *v: t.nn.functional.linear(*v), (A, B)),
    Case("linear_bias", F.linear, t_linear, (A, signed(2, 4), signed(2))),
    Case("linear_relu", F.linear_relu, t_linear_relu, (A, signed(2, 4), signed(2))),
    Case("linear_relu_vector", F.linear_relu, t_linear_relu, (ROW, signed(2, 4), signed(2))),
    Case("linear_one_row", F.linear, t_linear, (signed(1, 4), signed(2, 4), signed(2))),
    Case("linear_vector", F.linear, t_linear, (ROW, signed(2, 4), signed(2))),
    Case("linear_batched", F.linear, t_linear, (CUBE, signed(2, 4), signed(2))),
    Case(
        "mean_squared_error",
        F.mean_squared_error,
        lambda t, x, y: t.nn.functional.mse_loss(x, y),
        (A, B),
    ),
    cross_entropy("mean"),
    cross_entropy("sum"),
    cross_entropy("none"),
]
