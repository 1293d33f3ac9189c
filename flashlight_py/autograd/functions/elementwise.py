"""Elementwise functions, with NumPy's broadcasting, and activation functions.

Results are new arrays. At least one of two operands must be a variable. The other operand may be an
array or a number. A number takes the dtype of the variable. Shapes that do not broadcast raise
ValueError.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from flashlight_py import device, kernels
from flashlight_py.autograd.graph import Vjp
from flashlight_py.autograd.native import apply_elementwise, is_channels_last, kernel, record_mapped
from flashlight_py.autograd.precision import as_float32, as_floating
from flashlight_py.autograd.variable import Input, Operand, Variable, record, record_pair
from flashlight_py.device import Array, array_module, constant, is_cupy, narrowed, widened
from flashlight_py.erf import erf_of
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
    if isinstance(value, float) and not device.is_floating(dtype):
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
    return _limit("maximum", *as_pair(a, b))


def minimum(a: Operand, b: Operand) -> Variable:
    """Return the elementwise minimum. If two elements are equal, each gets half of the gradient."""
    return _limit("minimum", *as_pair(a, b))


def _limit(name: str, x: Variable, y: Variable) -> Variable:
    p, q = x.data, y.data
    out = getattr(array_module(p), name)(p, q)

    def share(grad: Array, chosen: Array) -> Any:
        half = array_module(grad).asarray(0.5, grad.dtype)  # products stay in this dtype
        return grad * ((chosen == out) - (p == q) * half)

    return record_pair(out, x, lambda grad: share(grad, p), y, lambda grad: share(grad, q))


def _mapped(name: str, x: Variable, vjp: Any, of_result: bool = False) -> Variable:
    """Return NumPy's function ``name`` of ``x``. ``vjp(xp, a, grad)`` gets ``x`` or the result."""
    xp = array_module(x.data)
    out = getattr(xp, name)(x.data)
    return record(out, (x, partial(vjp, xp, out if of_result else x.data)))


def exp(x: Input) -> Variable:
    """Return e to the power of ``x``."""
    return _mapped("exp", as_float32(x), lambda xp, out, grad: grad * out, True)


def log(x: Input) -> Variable:
    """Return the natural logarithm."""
    return _mapped("log", as_float32(x), lambda xp, a, grad: grad / a)


def sqrt(x: Input) -> Variable:
    """Return the square root."""
    return _mapped("sqrt", as_variable(x), lambda xp, out, grad: grad / (out + out), True)


def sin(x: Input) -> Variable:
    """Return the sine of an angle in radians."""
    return _mapped("sin", as_variable(x), lambda xp, a, grad: grad * xp.cos(a))


def cos(x: Input) -> Variable:
    """Return the cosine of an angle in radians."""
    return _mapped("cos", as_variable(x), lambda xp, a, grad: -grad * xp.sin(a))


def tanh(x: Input) -> Variable:
    """Return the hyperbolic tangent."""
    return _mapped("tanh", as_variable(x), lambda xp, out, grad: grad * (1 - out * out), True)


def sigmoid(x: Input) -> Variable:
    """Return ``1 / (1 + exp(-x))``, without overflow."""
    slope = lambda xp, a, out, grad: grad * (out * (1 - out))  # noqa: E731
    return _function(x, ("sigmoid",), sigmoid_of, slope)


def relu(x: Input) -> Variable:
    """Return ``max(x, 0)``. The slope at 0 is 0."""
    x = as_variable(x)
    zero = constant(0, x.data) if x._calc_grad else 0
    out = array_module(x.data).maximum(x.data, zero)
    slope = slope_of_relu(out, zero)
    slope.__qualname__ = "relu"  # errors quote it
    return record(out, (x, slope))


def slope_of_relu(out: Array, zero: Any) -> Vjp:
    """Return the vjp of a ReLU with result ``out``. The slope is 1 if ``out > zero``, else 0."""
    if is_cupy(out):
        return lambda grad: kernels.relu_slope(grad, out)

    def vjp(grad: Array) -> Any:
        # NumPy is as fast for few elements. A recorded kernel is one note, but needs more memory.
        if (type(out) is np.ndarray) is (out.size > 8192):
            result = apply_elementwise("relu_back", grad, out, is_last=is_channels_last(out))
            if result is not None:
                return result
        slope = (out > zero).astype(grad.dtype)  # in NumPy faster than bools times floats
        if not out.flags.c_contiguous:  # let NumPy choose the product's layout
            return grad * slope
        slope *= grad
        return slope

    return vjp


def abs(x: Input) -> Variable:
    """Return the absolute value. The slope at 0 is 0."""
    return _mapped("abs", as_variable(x), lambda xp, a, grad: grad * xp.sign(a))


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
    out = narrowed(array_module(x.data).clip(x.data, lower, upper), x.data)
    inside = out == x.data
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
    if not 0 <= ratio < 1:
        raise ValueError(f"dropout: the ratio must be at least 0 and below 1, got {ratio}")


def check_filled(name: str, *inputs: Input) -> None:
    """Raise ValueError if an input of the function ``name`` has no elements."""
    if not all(x.size for x in inputs):
        shapes = ", ".join(str(x.shape) for x in inputs)
        raise ValueError(
            f"{name}: expected inputs without dimensions of size 0 (empty batches), got {shapes}"
        )


# Activation functions. float16 is computed in float32 and rounded once.
def _function(x: Input, native: tuple[Any, ...], value: Any, vjp: Callable[..., Array]) -> Variable:
    """Return ``value(xp, x)`` with vjp ``vjp``. ``native``: name and numbers of a kernel, or ()."""
    x = as_variable(x)
    result = record_mapped(x, *native) if native else None
    if result is not None:
        return result
    array = widened(x.data)
    xp = array_module(array)
    out = value(xp, array)
    return record(narrowed(out, x.data), (x, partial(vjp, xp, array, out)))


def log1p(x: Input) -> Variable:
    """Return ``log(1 + x)``, accurate near 0."""
    return _function(x, (), lambda xp, a: xp.log1p(a), lambda xp, a, out, grad: grad / (a + 1))


def erf(x: Input) -> Variable:
    """Return ``2 / sqrt(pi)`` times the integral of ``exp(-t * t)`` from t = 0 to ``x``."""
    slope = lambda xp, a, out, grad: grad * xp.exp(-a * a) * (2 / math.sqrt(math.pi))  # noqa: E731
    return _function(x, ("erf",), lambda xp, a: erf_of(a), slope)


def gelu(x: Input, approximate: bool | str = False) -> Variable:
    """Return ``x * Phi(x)``, where ``Phi`` is the standard normal distribution function.

    ``Phi(x) = (1 + erf(x / sqrt(2))) / 2`` (Hendrycks and Gimpel, 2016). If ``approximate`` is True
    or ``"tanh"``, ``Phi(x) = (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2``, as in GPT-2.
    Raises ValueError unless ``approximate`` is a bool, ``"none"`` or ``"tanh"`` (torch's names).
    """
    x, by_tanh = as_variable(x), is_by_tanh(approximate)
    result = record_mapped(x, "gelu_by_tanh" if by_tanh else "gelu")
    if result is not None:
        return result
    array = widened(x.data)
    xp = array_module(array)
    if by_tanh:
        square = array * array
        doubled = xp.tanh(array * (square * (0.044715 * _GELU) + _GELU)) + 1
    else:
        doubled = erf_of(array * math.sqrt(0.5)) + 1
    half = array * 0.5

    def vjp(grad: Array) -> Any:
        if by_tanh:
            slope = doubled * (2 - doubled) * (square * (3 * 0.044715 * _GELU) + _GELU)
        else:
            slope = xp.exp(array * -half) * math.sqrt(2 / math.pi)
        return grad * (doubled * 0.5 + half * slope)

    return record(narrowed(half * doubled, x.data), (x, vjp))


_GELU = math.sqrt(2 / math.pi)


def is_by_tanh(approximate: bool | str) -> bool:
    """Return whether ``approximate`` selects tanh. Raises ValueError if the value is unknown."""
    if approximate not in (False, True, "none", "tanh"):
        raise ValueError(f"gelu: approximate must be 'none', 'tanh' or a bool, got {approximate!r}")
    return approximate in (True, "tanh")


def silu(x: Input) -> Variable:
    """Return ``x * sigmoid(x)``, also known as swish."""

    def vjp(xp: Any, a: Array, out: Array, grad: Array) -> Any:
        gate = sigmoid_of(xp, a)
        return grad * (gate + out * (1 - gate))

    return _function(x, ("silu",), lambda xp, a: a * sigmoid_of(xp, a), vjp)


def sigmoid_of(xp: Any, array: Array) -> Any:
    return xp.tanh(array * 0.5) * 0.5 + 0.5


def softplus(x: Input, beta: float = 1.0) -> Variable:
    """Return ``log(1 + exp(beta * x)) / beta``, without overflow."""
    return _function(
        *(x, ("softplus", beta)),
        lambda xp, a: xp.logaddexp(a * beta, 0) / beta,
        lambda xp, a, out, grad: grad * sigmoid_of(xp, a * beta),
    )


def elu(x: Input, alpha: float = 1.0) -> Variable:
    """Return ``x`` where ``x > 0``, else ``alpha * (exp(x) - 1)``. The slope at 0 is ``alpha``."""
    return _function(
        *(x, ("elu", alpha)),
        lambda xp, a: xp.where(a > 0, a, xp.expm1(xp.minimum(a, 0)) * alpha),
        lambda xp, a, out, grad: xp.where(a > 0, grad, grad * (out + alpha)),
    )


def leaky_relu(x: Input, slope: float = 0.01) -> Variable:
    """Return ``x`` where ``x > 0``, else ``slope * x``. The derivative at 0 is ``slope``."""
    return _function(
        *(x, ("leaky_relu", slope)),
        lambda xp, a: xp.where(a > 0, a, a * slope),
        lambda xp, a, out, grad: xp.where(a > 0, grad, grad * slope),
    )


def hardtanh(x: Input, lower: float = -1.0, upper: float = 1.0) -> Variable:
    """Return ``x`` limited to ``lower`` .. ``upper``. The slope is 1 only between the limits.

    Raises:
        ValueError: If ``lower`` is not below ``upper``.
    """
    if not lower < upper:
        raise ValueError(f"hardtanh: lower must be below upper, got {lower} and {upper}")
    return _function(
        *(x, ()),
        lambda xp, a: xp.clip(a, lower, upper),
        lambda xp, a, out, grad: grad * ((a > lower) & (a < upper)),
    )


def prelu(x: Input, weight: Input) -> Variable:
    """Return ``x`` where ``x > 0``, else ``weight * x``. The derivative at 0 is ``weight``.

    ``x`` has shape ``[batch, channels, ...]`` and ``weight`` ``[channels]``. With a ``weight`` of
    shape ``[1]``, ``x`` may have any shape.

    Raises:
        ValueError: If ``weight`` has another shape, or if ``x`` has no element.
    """
    x, weight = as_variable(x), as_variable(weight)
    shape = x.data.shape
    channels = shape[1] if len(shape) > 1 else 1
    if weight.data.shape not in ((channels,), (1,)):
        raise ValueError(
            f"prelu: expected a weight of shape ({channels},) or (1,) for input [batch, channels, "
            f"...] of shape {shape}, got {weight.data.shape}"
        )
    check_filled("prelu", x)
    weight = weight.reshape((-1, *(1,) * (len(shape) - 2)) if weight.data.size > 1 else ())
    array, w = widened(x.data), widened(weight.data)
    xp = array_module(array)
    above = array > 0
    out = xp.where(above, array, array * w)
    return record_pair(
        narrowed(out, x.data),
        *(x, lambda grad: xp.where(above, grad, grad * w)),
        *(weight, lambda grad: widened(grad) * xp.minimum(array, 0)),
    )


def glu(x: Input, axis: int = -1) -> Variable:
    """Return the first half of ``x`` along ``axis`` times the sigmoid of the second half.

    The result is half as long along ``axis`` (Dauphin et al., ICML 2017).

    Raises:
        ValueError: If the length along ``axis`` is odd, or if the axis does not exist.
    """
    x = as_variable(x)
    array = widened(x.data)
    if not -array.ndim <= axis < array.ndim or array.shape[axis] % 2:
        raise ValueError(f"glu: expected an even size of axis {axis}, got shape {array.shape}")
    before, count = (slice(None),) * (axis % array.ndim), array.shape[axis] // 2
    first, second = array[(*before, slice(count))], array[(*before, slice(count, None))]
    xp = array_module(array)
    gate = sigmoid_of(xp, second)

    def vjp(grad: Array) -> Any:
        of_first = grad * gate
        return xp.concatenate([of_first, of_first * (1 - gate) * first], axis=axis)

    return record(narrowed(first * gate, x.data), (x, vjp))
