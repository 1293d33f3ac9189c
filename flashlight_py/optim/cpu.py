"""The rules of optimizers on the CPU, native or in NumPy, and the sum of a gradient's squares."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from importlib import resources
from types import CodeType
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array, array_module, is_cupy, widened

# A field of a rule is a number, or a form with its parameters, such as (LR,) or (SHRINK, decay): a
# number that follows from memory at each step. The functions take the rate, the number of the
# parameter's step from 1 on, the field, and a function that adds the squared norm of the gradient
# to the running mean of them, with a decay. csrc/optim/tasks.cc does the same, to the bit.
Field: TypeAlias = "float | tuple[int] | tuple[int, float] | tuple[int, float, float]"
Rule: TypeAlias = tuple[str, tuple[Field, ...]]
LR, SHRINK, RATE, ROOT, INVERSE = range(5)
FORMS: tuple[Callable[[float, int, Any, Any], float], ...] = (
    lambda lr, time, field, norm: lr,
    lambda lr, time, field, norm: 1 - lr * field[1],
    lambda lr, time, field, norm: lr / (1 - field[1] ** time),
    lambda lr, time, field, norm: 1 / math.sqrt(1 - field[1] ** time),
    lambda lr, time, field, norm: 1 / d if (d := math.sqrt(norm(field[1])) + field[2]) else 0.0,
)


@functools.cache
def native() -> Any | None:
    """Return the module of the kernels, or None, with a warning, where it is missing."""
    return _native.optional("optim", "optimizers step in NumPy, some ten times slower")


def change(rule: str, numbers: Sequence[float], piece: Sequence[Any], grad_scale: float) -> None:
    """Change the arrays of ``piece`` in place by NumPy or CuPy, to the bit as csrc/optim does.

    Narrower types than float32 are computed in float32, and rounded once. ``numbers`` are those of
    the rule's fields. A piece is (parameter, gradient, *states), all of one shape: the gradient
    counts times ``grad_scale``, and stays as it is.
    """
    fields, changed, statements = _rules()[rule]
    param, grad, *states = piece
    wide, total = widened(param), widened(grad)
    # Python's numbers would make float64 of arrays without dimensions.
    real = wide.dtype.type
    if grad_scale != 1:
        total = total * real(grad_scale)
    values = dict(zip(fields, map(real, numbers), strict=True), grad=total, R=real)
    values.update(zip(changed, (wide, *map(widened, states)), strict=True))
    exec(statements, dict(_FUNCTIONS), values)
    for array, name in zip((param, *states), changed, strict=True):
        array[...] = values[name]


_STRUCT = re.compile(
    r"struct (\w+) \{.*?\n  R ([^;]+);\n.*?operator\(\)\((.+?)\) const \{(.+?)\}\n", re.DOTALL
)
_CHOICE = re.compile(r"(\w+ != 0) \? (.+?) : (\w+)")


@functools.cache
def _rules() -> dict[str, tuple[list[str], list[str], CodeType]]:
    """Return the fields of each rule of rules.inc, what it changes, and its body as Python."""
    text = resources.files("flashlight_py.optim").joinpath("rules.inc").read_text("utf-8")
    found = {}
    for name, fields, arguments, body in _STRUCT.findall(text):
        python = _CHOICE.sub(r"\2 if \1 else \3", body.replace("const R ", ""))
        lines = "\n".join(map(str.strip, python.split(";")))
        changed = re.findall(r"R &(\w+)", arguments)
        found[name] = fields.split(", "), changed, compile(lines, f"rules.inc, {name}", "exec")
    return found


def _normal(array: Array) -> Array:
    is_small = abs(array) < np.finfo(array.dtype).tiny
    return array_module(array).where(is_small, array.dtype.type(0), array)  # type: ignore[no-any-return]


# What rules.inc calls, for arrays. Without decay infinite parameters stay.
_FUNCTIONS = {
    "decayed": lambda grad, param, decay: grad + param * decay if decay else grad,
    "larger": lambda a, b: array_module(b).maximum(a, b),
    "normal": _normal,
    "sqrt": lambda array: array_module(array).sqrt(array),
}

BLOCK = 65536  # elements


def sum_of_squares(grad: Array) -> float:
    """Return the sum of the squares of all elements, in float64. Blocks until it is computed.

    In blocks of 65,536 elements, in which element ``i`` is added to sum ``i % 16``, in order; at
    last the 16 sums are added, one after the other. So NumPy arrays have the same sum everywhere.
    """
    if is_cupy(grad):
        wide = grad.astype(np.float64).reshape(-1)
        return float(wide.dot(wide))
    module = native()
    if module is not None and (sum_ := module.sum_of_squares(grad)) is not None:
        return float(sum_)
    return reference_sum(grad)


def sums_of_squares(grad: Array, mine: slice = slice(None)) -> list[float]:
    """Return the sum of squares of each block of 65,536 elements; of those in ``mine`` alone.

    Added up in order they are the same whoever has computed which. An array on a GPU is one block.
    """
    if is_cupy(grad):
        return [sum_of_squares(grad)]
    flat = grad.reshape(-1)
    starts = range(0, flat.size, BLOCK)[mine]
    return [sum_of_squares(flat[start : start + BLOCK]) for start in starts]


def reference_sum(grad: Array) -> float:
    """Return the sum of squares in the words of NumPy, to the bit that of csrc/optim."""
    flat, sums = grad.reshape(-1), np.zeros(16)
    for start in range(0, flat.size, BLOCK):
        squares = np.zeros((min(BLOCK, flat.size - start) + 15) // 16 * 16)
        block = flat[start : start + BLOCK]
        np.multiply(block, block, out=squares[: block.size], dtype=np.float64)
        sums += np.add.reduce(squares.reshape(-1, 16), axis=0)
    return float(np.add.accumulate(sums)[-1])
