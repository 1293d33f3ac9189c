"""Normalizations: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

The functions differ in the elements over which they compute mean and variance. Variances are
computed from deviations from the mean, in float32 or wider. Weight and bias may be None. Results
are new arrays in the memory layout of ``x``. float16 and bfloat16 are rounded once.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from flashlight_py.autograd.functions.elementwise import as_variable, check_filled
from flashlight_py.autograd.native import channels_last, channels_second, kernel, record_jointly
from flashlight_py.autograd.precision import as_float32, as_floating
from flashlight_py.autograd.variable import Input, Variable
from flashlight_py.device import Array, array_module, as_packed, narrowed, widened

_Given: TypeAlias = Sequence[Variable | None]


def layer_norm(
    x: Input, weight: Input | None = None, bias: Input | None = None, eps: float = 1e-5,
    dimensions: int = 1,
) -> Variable:  # fmt: skip
    """Return ``x`` normalized over its last dimensions (Ba, Kiros and Hinton, 2016).

    ``weight`` and ``bias`` have the shape of the normalized dimensions. If both are None,
    ``dimensions`` is the number of normalized dimensions. ``eps`` is added to the variance. Raises
    ValueError if a shape does not fit, or if ``x`` is empty.
    """
    return _of_rows("layer_norm", as_float32(x), weight, bias, eps, dimensions)


def rms_norm(x: Input, weight: Input | None = None, eps: float = 1e-5) -> Variable:
    """Return ``x / sqrt(mean(x ** 2) + eps) * weight`` (Zhang and Sennrich, 2019).

    The mean is over the last dimensions, which have the shape of ``weight``. If ``weight`` is None,
    it is over the last dimension. Raises ValueError if a shape does not fit, or if ``x`` is empty.
    """
    return _of_rows("rms_norm", as_float32(x), weight, None, eps, 1)


def _of_rows(
    name: str, x: Variable, weight: Input | None, bias: Input | None, eps: float, dimensions: int
) -> Variable:
    params = [None if param is None else as_variable(param) for param in (weight, bias)]
    for param in params:
        if param is not None:
            dimensions = param.ndim
            if not 1 <= dimensions <= x.ndim or x.shape[-dimensions:] != param.shape:
                raise ValueError(
                    f"{name}: expected input of shape [..., {', '.join(map(str, param.shape))}] "
                    f"for a weight or bias of shape {param.shape}, got {x.shape}"
                )
    check_filled(name, x)
    if not 1 <= dimensions <= x.ndim:
        raise ValueError(
            f"{name}: dimensions must be 1 to {x.ndim} for shape {x.shape}, got {dimensions}"
        )
    inner = x.shape[-dimensions:]
    width = math.prod(inner)
    parts = x.size // width, width
    return _normalized(name, x, params, eps, parts, parts[0], inner, parts, (1,), (0,))[0]


def group_norm(
    x: Input, groups: int, weight: Input | None = None, bias: Input | None = None, eps: float = 1e-5
) -> Variable:
    """Return ``x`` normalized over groups of channels of each sample (Wu and He, 2018).

    ``x`` has shape ``[N, C, ...]``, with any strides. ``weight`` and ``bias`` have shape ``[C]``.
    ``groups`` is the number of groups of adjacent channels. ``eps`` is added to the variance.

    Raises:
        ValueError: If ``groups`` does not divide the number of channels, if weight or bias have
            another shape, or if ``x`` has no elements.
    """
    x = as_float32(x)
    params = _checked("group_norm", x, weight, bias)
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(
            f"group_norm: groups must divide the {channels} channels of shape {x.shape}, got "
            f"{groups}"
        )
    return _of_channels("group_norm", x, params, eps, x.shape[0], groups)[0]


def batch_norm(
    x: Input, weight: Input | None = None, bias: Input | None = None, mean: Array | None = None,
    variance: Array | None = None, eps: float = 1e-5,
) -> Variable:  # fmt: skip
    """Return ``x`` with each channel normalized over all samples (Ioffe and Szegedy, 2015).

    ``x`` has shape ``[N, C, ...]``, with any strides. All other arrays have shape ``[C]``. ``mean``
    and ``variance`` are constants. By default they are computed from ``x``. ``eps`` is added to the
    variance. Raises ValueError if a shape does not fit, or if mean and variance would be computed
    from one value per channel.
    """
    return batch_norm_with_moments(x, weight, bias, mean, variance, eps)[0]


def batch_norm_with_moments(
    x: Input, weight: Input | None, bias: Input | None, mean: Array | None, variance: Array | None,
    eps: float,
) -> tuple[Variable, Array, Array]:  # fmt: skip
    """Return :func:`batch_norm`, and the means and (biased) variances of the channels."""
    x = as_variable(x)
    params = _checked("batch_norm", x, weight, bias)
    moments = []
    if mean is not None and variance is not None:
        shapes = mean.shape, variance.shape
        if shapes != (x.shape[1:2],) * 2:
            raise ValueError(
                f"batch_norm: mean and variance must have shape {x.shape[1:2]} for input of shape "
                f"{x.shape}, got {shapes[0]} and {shapes[1]}"
            )
        moments = [mean, variance]
    elif x.size < 2 * x.shape[1]:
        raise few_values("batch_norm", x.shape)
    made = _of_channels("batch_norm", x, params, eps, 1, x.shape[1], moments)
    return made[0], made[1].reshape(-1), made[2].reshape(-1)


def few_values(name: str, shape: tuple[int, ...], _: object = None) -> ValueError:
    """Return the error that function ``name`` raises if a channel has less than two values."""
    return ValueError(
        f"{name}: expected more than one value per channel, got input of shape {shape}. "
        "Train with larger batches, or call eval() on the module"
    )


def _checked(name: str, x: Variable, *params: Input | None) -> list[Variable | None]:
    if x.ndim < 2 or not x.size:
        raise ValueError(f"{name}: expected input of shape [N, C, ...], not empty, got {x.shape}")
    variables = [None if param is None else as_variable(param) for param in params]
    for kind, param in zip(("weight", "bias"), variables, strict=True):
        if param is not None and param.shape != x.shape[1:2]:
            raise ValueError(
                f"{name}: expected {kind} of shape {x.shape[1:2]} for input of shape {x.shape}, "
                f"got {param.shape}"
            )
    return variables


def _of_channels(
    name: str, x: Variable, params: _Given, eps: float, samples: int, groups: int,
    moments: Sequence[Array] = (),
) -> tuple[Variable, Array, Array]:  # fmt: skip
    """Normalize each group of channels over the batch (``samples`` is 1) or in each sample."""
    n, channels, *rest = x.shape
    positions = math.prod(rest)
    is_last = positions == 1 or not x.data.flags.c_contiguous
    sizes = samples, n // samples, channels, positions, groups, int(is_last)
    first, of_channel = (samples, n // samples), (groups, channels // groups)
    parts, axes, others = (*first, *of_channel, positions), (1, 3, 4), (0, 1, 4)
    if is_last:
        parts, axes, others = (*first, positions, *of_channel), (1, 2, 4), (0, 1, 2)
    of = samples * groups, (channels,), parts
    return _normalized(name, x, params, eps, sizes, *of, axes, others, moments, is_last)


def _normalized(
    name: str, x: Variable, params: _Given, eps: float, sizes: tuple[int, ...],
    count: int, inner: tuple[int, ...], parts: tuple[int, ...], axes: tuple[int, ...],
    others: tuple[int, ...], moments: Sequence[Array] = (), is_last: bool = False,
) -> tuple[Variable, Array, Array]:  # fmt: skip
    """Return the normalized variable, the means and the variances.

    ``sizes``: arguments of the native kernel. ``count``: number of means. ``inner``: shape of
    weight and bias. Without a kernel, ``x`` is reshaped to ``parts``, means are over ``axes``, and
    the gradient of a weight is summed over ``others``. ``moments``: mean and variance that replace
    the computed ones, or (). ``is_last``: whether channels are last in memory.
    """

    def laid_out(array: Array) -> Array:
        return as_packed(channels_last(array) if is_last else array)

    def as_given(array: Array) -> Array:
        return channels_second(array) if is_last else array

    x = as_floating(x)
    rows = laid_out(widened(x.data))
    of_kernel = "given_norm" if moments else name.replace("batch", "group")
    run, xp, shape, dtype = kernel(of_kernel, rows), array_module(rows), rows.shape, rows.dtype
    w, b = (_values(params[k], 1 - k, inner, rows) for k in range(2))
    moments = [_values(array, 0, inner, rows) for array in moments]
    if run is not None:
        saved = () if moments else (((count,), dtype),) * 2
        results = run(((shape, dtype), *saved), sizes, (eps,), rows, w, b, *moments)
        out, mean, variance = (results, *moments) if moments else results
    else:
        of_parameter = [1 if axis in others else n for axis, n in enumerate(parts)]
        out = rows.reshape(parts)
        if moments:
            mean, variance = (array.reshape(of_parameter) for array in moments)
            out = out - mean
        else:
            mean = out.mean(axes, keepdims=True) if name != "rms_norm" else xp.zeros(1, dtype)
            out = out - mean
            variance = (out * out).mean(axes, keepdims=True)
        out /= xp.sqrt(variance + eps)
        out = (out * w.reshape(of_parameter) + b.reshape(of_parameter)).reshape(shape)

    def back(grad: Array) -> Any:
        grad, w = laid_out(widened(grad)), _values(params[0], 1, inner, rows)
        if run is not None:
            made = (shape, dtype), *((inner, dtype),) * 2
            results: Any = kernel(f"{of_kernel}_back", rows)
            dx, dweight, dbias = results(made, sizes, (eps,), grad, rows, mean, variance, w)
            return as_given(dx), dweight, dbias
        grad, inverse = grad.reshape(parts), 1 / xp.sqrt(variance + eps)
        standard = (rows.reshape(parts) - mean) * inverse
        dx = slope = grad * w.reshape(of_parameter)
        if not moments:
            dx = slope - standard * (slope * standard).mean(axes, keepdims=True)
            if name != "rms_norm":
                dx -= slope.mean(axes, keepdims=True)
        dweight, dbias = (array.sum(others).reshape(inner) for array in (grad * standard, grad))
        return as_given((dx * inverse).reshape(shape)), dweight, dbias

    return record_jointly(name, narrowed(as_given(out), x.data), back, x, *params), mean, variance


def _values(value: Variable | Array | None, fill: int, shape: tuple[int, ...], like: Array) -> Any:
    if value is None:
        return array_module(like).full(shape, fill, like.dtype)
    array = value.data if isinstance(value, Variable) else value
    return as_packed(array.astype(like.dtype, copy=False))
