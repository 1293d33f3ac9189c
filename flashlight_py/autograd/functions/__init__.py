"""Differentiable functions on variables, one family per file."""

from __future__ import annotations

from flashlight_py.autograd.functions.arithmetic import (
    add,
    div,
    maximum,
    minimum,
    mul,
    negative,
    pow,
    sub,
)
from flashlight_py.autograd.functions.dropout import dropout
from flashlight_py.autograd.functions.elementwise import (
    abs,
    clamp,
    cos,
    exp,
    log,
    relu,
    sigmoid,
    sin,
    sqrt,
    tanh,
)
from flashlight_py.autograd.functions.losses import (
    categorical_cross_entropy,
    log_softmax,
    mean_squared_error,
    softmax,
)
from flashlight_py.autograd.functions.matrix import linear, linear_relu, matmul
from flashlight_py.autograd.functions.reduction import max, mean, min, sum, var
from flashlight_py.autograd.functions.shape import (
    astype,
    concatenate,
    flat,
    index,
    moddims,
    reshape,
    transpose,
)

__all__ = [
    "negative",
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "maximum",
    "minimum",
    "exp",
    "log",
    "sqrt",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "relu",
    "abs",
    "clamp",
    "sum",
    "mean",
    "var",
    "max",
    "min",
    "matmul",
    "linear",
    "linear_relu",
    "reshape",
    "moddims",
    "flat",
    "transpose",
    "concatenate",
    "index",
    "astype",
    "softmax",
    "log_softmax",
    "dropout",
    "mean_squared_error",
    "categorical_cross_entropy",
]
