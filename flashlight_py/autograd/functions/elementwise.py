"""Elementwise functions of one or two operands, with NumPy's broadcasting.

Results are new arrays. At least one of two operands must be a variable. The other operand may be an
array or a number. A number takes the dtype of the variable. Shapes that do not broadcast raise
ValueError.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py import kernels
from flashlight_py.autograd.graph import Vjp
from flashlight_py.autograd.native import apply_elementwise, is_channels_last, kernel, record_mapped
from flashlight_py.autograd.precision import as_float32, as_floating
from flashlight_py.autograd.variable import Input, Operand, Variable, record, record_pair
from flashlight_py.device import Array, array_module, constant, is_cupy, is_floating, narrowed
from flashlight_py.random import generator


def as_variable(x: Input) -> Variable:
    """Return ``x`` if it is a variable, else a variable without gradient for the array ``x``."""
    return x if isinstance(x, Variable) else Variable(x)


def as_pair(a: Operand, b: Operand) -> tuple[Variable, Variable]:
    """Return ``a`` and ``b`` as variables. Raises TypeError unless one of them is a variable."""
    if isinstance(a, Variable):
        return a, b if isinstance(b, Variable) else _as_constant(b, a)
    if isinstance(b, Variable):
        return _as_constant(a, b), b
    raise TypeError(
        f"expected at least one Variable, got {type(a).__name__} and {type(b).__name__}. "
        "Convert an array by fl.input or fl.no_grad"
    )


def _as_constant(value: Operand, like: Variable) -> Variable:
    if not isinstance(value, (int, float)):
        return Variable(value)  # type: ignore[arg-type]
    dtype = like.data.dtype
    if isinstance(value, float) and not is_floating(dtype):
        dtype = None  # type: ignore[assignment]  # the library's choice for integers and a float
    return Variable(array_module(like.data).asarray(value, dtype))


def negative(x: Input) -> Variable:
    """Return ``-x``, elementwise."""
    x = as_variable(x)
    return record(-x.data, (x, lambda grad: -grad))


def add(a: Operand, b: Operand) -> Variable:
    """Return ``a + b``, elementwise."""
    x, y = as_pair(a, b)
    return record_pair(x.data + y.data, x, lambda grad: grad, y, lambda grad: grad)


def sub(a: Operand, b: Operand) -> Variable:
    """Return ``a - b``, elementwise."""
    x, y = as_pair(a, b)
    return record_pair(x.data - y.data, x, lambda grad: grad, y, lambda grad: -grad)


def mul(a: Operand, b: Operand) -> Variable:
    """Return ``a * b``, elementwise."""
    x, y = as_pair(a, b)
    p, q = x.data, y.data
    return record_pair(p * q, x, lambda grad: grad * q, y, lambda grad: grad * p)


def div(a: Operand, b: Operand) -> Variable:
    """Return ``a / b``, elementwise."""
    x, y = as_pair(a, b)
    p, q = x.data, y.data
    return record_pair(p / q, x, lambda grad: grad / q, y, lambda grad: -grad * p / (q * q))


def pow(a: Operand, b: Operand) -> Variable:
    """Return ``a ** b``, elementwise.

    The gradient of the exponent is 0 if the base is 0, and nan if the base is negative.
    """
    x, y = map(as_float32, as_pair(a, b))
    base, exponent = x.data, y.data
    out = base**exponent

    def base_vjp(grad: Array) -> Any:
        # The slope for exponent 0 is 0, but 0 * base ** -1 would be nan for base 0.
        lowered = array_module(exponent).where(exponent == 0, 0, exponent - 1)
        return grad * exponent * base ** lowered.astype(exponent.dtype)

    def exponent_vjp(grad: Array) -> Any:
        xp = array_module(base)
        return grad * out * xp.log(xp.where(base == 0, 1, base))

    return record_pair(out, x, base_vjp, y, exponent_vjp)


def maximum(a: Operand, b: Operand) -> Variable:
    """Return the elementwise maximum. If two elements are equal, each gets half of the gradient."""
    x, y = as_pair(a, b)
    p, q = x.data, y.data
    out = array_module(p).maximum(p, q)
    return record_pair(out, x, lambda grad: grad * _share(p > q, p == q, grad),
                       y, lambda grad: grad * _share(q > p, p == q, grad))  # fmt: skip


def minimum(a: Operand, b: Operand) -> Variable:
    """Return the elementwise minimum. If two elements are equal, each gets half of the gradient."""
    x, y = as_pair(a, b)
    p, q = x.data, y.data
    out = array_module(p).minimum(p, q)
    return record_pair(out, x, lambda grad: grad * _share(p < q, p == q, grad),
                       y, lambda grad: grad * _share(q < p, p == q, grad))  # fmt: skip


def _share(chosen: Array, equal: Array, grad: Array) -> Any:
    return (chosen * 2 + equal) * array_module(grad).asarray(0.5, grad.dtype)


def exp(x: Input) -> Variable:
    """Return e to the power of ``x``."""
    x = as_float32(x)
    out = array_module(x.data).exp(x.data)
    return record(out, (x, lambda grad: grad * out))


def log(x: Input) -> Variable:
    """Return the natural logarithm."""
    x = as_float32(x)
    array = x.data
    return record(array_module(array).log(array), (x, lambda grad: grad / array))


def sqrt(x: Input) -> Variable:
    """Return the square root."""
    x = as_variable(x)
    out = array_module(x.data).sqrt(x.data)
    return record(out, (x, lambda grad: grad / (out + out)))


def sin(x: Input) -> Variable:
    """Return the sine of an angle in radians."""
    x = as_variable(x)
    array = x.data
    xp = array_module(array)
    return record(xp.sin(array), (x, lambda grad: grad * xp.cos(array)))


def cos(x: Input) -> Variable:
    """Return the cosine of an angle in radians."""
    x = as_variable(x)
    array = x.data
    xp = array_module(array)
    return record(xp.cos(array), (x, lambda grad: -grad * xp.sin(array)))


def tanh(x: Input) -> Variable:
    """Return the hyperbolic tangent."""
    x = as_variable(x)
    out = array_module(x.data).tanh(x.data)
    return record(out, (x, lambda grad: grad * (1 - out * out)))


def sigmoid(x: Input) -> Variable:
    """Return ``1 / (1 + exp(-x))``, without overflow."""
    x = as_variable(x)
    result = record_mapped("sigmoid", x)
    if result is not None:
        return result
    half = x.data / 2
    out = (array_module(half).tanh(half) + 1) / 2
    return record(out, (x, lambda grad: grad * (out * (1 - out))))


def relu(x: Input) -> Variable:
    """Return ``max(x, 0)``. The slope at 0 is 0."""
    x = as_variable(x)
    zero = constant(0, x.data) if x._calc_grad else 0
    out = array_module(x.data).maximum(x.data, zero)
    slope = slope_of_relu(out, zero)

    def vjp(grad: Array) -> Any:  # errors take the name relu from it
        return slope(grad)

    return record(out, (x, vjp))


def slope_of_relu(out: Array, zero: Any) -> Vjp:
    """Return the vjp of a ReLU with result ``out``. The slope is 1 if ``out > zero``, else 0."""
    if is_cupy(out):
        return lambda grad: kernels.relu_slope(grad, out)

    def vjp(grad: Array) -> Any:
        slope = (out > zero).astype(grad.dtype)  # in NumPy faster than bools times floats
        if not out.flags.c_contiguous:  # let NumPy choose the product's layout
            return grad * slope
        slope *= grad
        return slope

    return vjp


def abs(x: Input) -> Variable:
    """Return the absolute value. The slope at 0 is 0."""
    x = as_variable(x)
    array = x.data
    xp = array_module(array)
    return record(xp.abs(array), (x, lambda grad: grad * xp.sign(array)))


def clamp(x: Input, lower: float | None = None, upper: float | None = None) -> Variable:
    """Return ``x`` limited to ``lower`` .. ``upper``. The slope is 1 inside and on the limits.

    Raises:
        ValueError: If there is no limit, or if ``lower`` exceeds ``upper``.
    """
    x = as_variable(x)
    if lower is None and upper is None:
        raise ValueError("clamp: expected lower, upper or both, got None for both")
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"clamp: lower must not exceed upper, got {lower} and {upper}")
    array = x.data
    inside: Any = True
    if lower is not None:
        inside = inside & (array >= lower)
    if upper is not None:
        inside = inside & (array <= upper)
    out = narrowed(array_module(array).clip(array, lower, upper), array)
    return record(out, (x, lambda grad: grad * inside))


clip = clamp  # name in NumPy


def dropout(x: Input, ratio: float) -> Variable:
    """Return ``x`` with each element set to 0 with probability ``ratio``.

    The other elements are multiplied by ``1 / (1 - ratio)``, which keeps the expectation.
    ``set_seed`` seeds the generator. If ``ratio`` is 0, the result is ``x`` itself. Raises
    ValueError unless ``0 <= ratio < 1``.
    """
    x = as_variable(x)
    check_ratio(ratio)
    if not ratio:
        return x
    x = as_floating(x)
    array = x.data
    if kernel("dropout", array) is not None:
        seed = generator().integers(0, 2**63 - 1, 1, dtype=np.int64)
        is_last = is_channels_last(array)

        def vjp(grad: Array) -> Any:  # errors quote its __qualname__
            return apply_elementwise("dropout", grad, seed, numbers=(ratio,), is_last=is_last)

        return record(vjp(array), (x, vjp))
    draw = generator(array_module(array)).random(array.shape, dtype=np.float32)
    mask = (draw >= ratio).astype(array.dtype)
    mask *= 1 / (1 - ratio)
    return record(array * mask, (x, lambda grad: grad * mask))


def check_ratio(ratio: float) -> None:
    """Raise ValueError unless ``0 <= ratio < 1``."""
    if not 0 <= ratio < 1:
        raise ValueError(f"dropout: the ratio must be at least 0 and below 1, got {ratio}")


def check_filled(name: str, *inputs: Input) -> None:
    """Raise ValueError if an input of the function ``name`` has no elements."""
    if not all(x.size for x in inputs):
        shapes = ", ".join(str(x.shape) for x in inputs)
        raise ValueError(
            f"{name}: expected inputs without dimensions of size 0 (empty batches), got {shapes}"
        )
