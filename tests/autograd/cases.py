"""Every differentiable function with inputs, and the same in torch: one row per promise.

``ours`` takes variables; ``theirs`` is an expression of torch, ``F`` (torch.nn.functional) and the
tensors a, b, c, in the order of ``arrays``, and of what ``extra`` names besides. The inputs stay
away from kinks and poles, where neither central differences nor conventions about slopes can be
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.autograd import functions as F


class Case(NamedTuple):
    name: str
    ours: Callable[..., Any]
    theirs: str
    arrays: tuple[np.ndarray, ...]
    extra: dict[str, Any] = {}  # noqa: RUF012 - of a NamedTuple


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
        f"F.cross_entropy(a, labels, reduction={reduction!r}, ignore_index=-1)",
        (signed(4, 3),),
        {"labels": LABELS},
    )


CASES = [
    Case(
        "conv2d", F.conv2d, "F.conv2d(a, b, c)", (signed(2, 3, 4, 5), signed(4, 3, 2, 3), signed(4))
    ),
    Case("pool2d", lambda x: F.pool2d(x, 2), "F.max_pool2d(a, 2)", (signed(2, 3, 4, 5),)),
    Case("negative", F.negative, "-a", (A,)),
    Case("add", F.add, "a + b", (A, B)),
    Case("add_row", F.add, "a + b", (A, ROW)),
    Case("sub", F.sub, "a - b", (A, B)),
    Case("sub_column", F.sub, "a - b", (COLUMN, A)),
    Case("mul", F.mul, "a * b", (A, B)),
    Case("mul_scalar", F.mul, "a * b", (SCALAR, A)),
    Case("mul_outer", F.mul, "a * b", (COLUMN, ROW)),
    Case("div", F.div, "a / b", (A, B)),
    Case("div_row", F.div, "a / b", (ROW, A)),
    Case("pow", F.pow, "a**b", (P, B)),
    Case("pow_number", lambda x: x**3, "a**3", (A,)),
    Case("maximum", F.maximum, "torch.maximum(a, b)", (A, B)),
    Case("maximum_row", F.maximum, "torch.maximum(a, b)", (A, ROW)),
    Case("minimum", F.minimum, "torch.minimum(a, b)", (A, B)),
    Case("exp", F.exp, "torch.exp(a)", (A,)),
    Case("log", F.log, "torch.log(a)", (P,)),
    Case("sqrt", F.sqrt, "torch.sqrt(a)", (P,)),
    Case("sin", F.sin, "torch.sin(a)", (A,)),
    Case("cos", F.cos, "torch.cos(a)", (A,)),
    Case("tanh", F.tanh, "torch.tanh(a)", (A,)),
    Case("sigmoid", F.sigmoid, "torch.sigmoid(a)", (A,)),
    Case("relu", F.relu, "torch.relu(a)", (A,)),
    Case("abs", F.abs, "torch.abs(a)", (A,)),
    Case("clamp", lambda x: F.clamp(x, -0.55, 0.55), "torch.clamp(a, -0.55, 0.55)", (A,)),
    Case("clamp_below", lambda x: F.clamp(x, -0.55), "torch.clamp(a, -0.55)", (A,)),
    Case("clamp_above", lambda x: F.clamp(x, upper=0.55), "a.clamp(max=0.55)", (A,)),
    Case("sum", F.sum, "a.sum()", (CUBE,)),
    Case("sum_axis", lambda x: F.sum(x, 1), "a.sum(1)", (CUBE,)),
    Case("sum_axes", lambda x: F.sum(x, (0, -1)), "a.sum((0, -1))", (CUBE,)),
    Case("sum_keep", lambda x: F.sum(x, -1, True), "a.sum(-1, True)", (CUBE,)),
    Case("mean", F.mean, "a.mean()", (CUBE,)),
    Case("mean_axes", lambda x: F.mean(x, (0, 2)), "a.mean((0, 2))", (CUBE,)),
    Case("var", F.var, "a.var(correction=0)", (CUBE,)),
    Case("var_axis", lambda x: F.var(x, 1, ddof=1), "a.var(1)", (CUBE,)),
    Case("max", F.max, "a.amax()", (CUBE,)),
    Case("max_axis", lambda x: F.max(x, 1), "a.amax(1)", (CUBE,)),
    Case("max_keep", lambda x: F.max(x, 1, True), "a.amax(1, True)", (CUBE,)),
    Case("min_axes", lambda x: F.min(x, (0, 2)), "a.amin((0, 2))", (CUBE,)),
    Case("matmul", F.matmul, "a @ b", (A, signed(4, 2))),
    Case("matmul_batched", F.matmul, "a @ b", (CUBE, signed(2, 4, 2))),
    Case("matmul_broadcast", F.matmul, "a @ b", (CUBE, signed(4, 2))),
    Case("matmul_row", F.matmul, "a @ b", (ROW, signed(2, 4, 3))),
    Case("matmul_column", F.matmul, "a @ b", (CUBE, ROW)),
    Case("matmul_inner", F.matmul, "a @ b", (ROW, signed(4))),
    Case("reshape", lambda x: F.reshape(x, (4, -1)), "a.reshape(4, -1)", (A,)),
    Case("moddims", lambda x: F.moddims(x, (2, 6)), "a.reshape(2, 6)", (A,)),
    Case("flat", F.flat, "a.reshape(-1)", (A,)),
    Case("transpose", F.transpose, "a.permute(2, 1, 0)", (CUBE,)),
    Case("transpose_axes", lambda x: F.transpose(x, (1, -1, 0)), "a.permute(1, 2, 0)", (CUBE,)),
    Case("concatenate", lambda *v: F.concatenate(v), "torch.cat([a, b, c])", (A, B, signed(1, 4))),
    Case("concatenate_axis", lambda *v: F.concatenate(v, -1), "torch.cat([a, b], -1)", (A, COLUMN)),
    Case("index", lambda x: x[1:, ..., 2], "a[1:, ..., 2]", (CUBE,)),
    Case("index_new", lambda x: x[None, -1], "a[None, -1]", (CUBE,)),
    Case("index_repeated", lambda x: x[ROWS], "a[rows]", (A,), {"rows": ROWS}),
    Case("index_pairs", lambda x: x[ROWS, ROWS], "a[rows, rows]", (A,), {"rows": ROWS}),
    Case("index_mask", lambda x: x[A > 0], "a[mask]", (A,), {"mask": A > 0}),
    Case("softmax", F.softmax, "a.softmax(-1)", (A,)),
    Case("softmax_axis", lambda x: F.softmax(x, 1), "a.softmax(1)", (CUBE,)),
    Case("log_softmax", F.log_softmax, "a.log_softmax(-1)", (A,)),
    Case("log_softmax_axis", lambda x: F.log_softmax(x, 0), "a.log_softmax(0)", (A,)),
    Case("linear", F.linear, "F.linear(a, b)", (A, B)),
    Case("linear_bias", F.linear, "F.linear(a, b, c)", (A, signed(2, 4), signed(2))),
    Case(
        "linear_relu", F.linear_relu, "torch.relu(F.linear(a, b, c))", (A, signed(2, 4), signed(2))
    ),
    Case(
        "linear_relu_vector",
        F.linear_relu,
        "torch.relu(F.linear(a, b, c))",
        (ROW, signed(2, 4), signed(2)),
    ),
    Case("linear_one_row", F.linear, "F.linear(a, b, c)", (signed(1, 4), signed(2, 4), signed(2))),
    Case("linear_vector", F.linear, "F.linear(a, b, c)", (ROW, signed(2, 4), signed(2))),
    Case("linear_batched", F.linear, "F.linear(a, b, c)", (CUBE, signed(2, 4), signed(2))),
    Case("mean_squared_error", F.mean_squared_error, "F.mse_loss(a, b)", (A, B)),
    cross_entropy("mean"),
    cross_entropy("sum"),
    cross_entropy("none"),
]
