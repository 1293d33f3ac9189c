"""Normalizations: what is less its mean, and divided by its standard deviation.

Each is ``(x - mean) / sqrt(variance + eps) * weight + bias``; they differ in what means and
variances are of. Those are computed in float32 at least, from deviations from the mean, and half
precision is rounded once. Weight and bias may be None: 1 and 0. Results are new, in the memory
layout of ``x``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from flashlight_py.autograd.functions.elementwise import as_variable
from flashlight_py.autograd.native import contiguous, kernel, record_jointly
from flashlight_py.autograd.precision import as_float32
from flashlight_py.autograd.variable import Input, Variable
from flashlight_py.device import Array, array_module, narrowed, widened

Backward = Callable[[Array], tuple[Array, Array, Array]]


def layer_norm(
    x: Input, weight: Input | None = None, bias: Input | None = None, eps: float = 1e-5,
    dimensions: int = 1,
) -> Variable:  # fmt: skip
    """Return ``x`` normalized over its last dimensions (Ba, Kiros and Hinton, 2016).

    Args:
        x: shape ``[..., *normalized]``.
        weight: the shape ``normalized``.
        bias: the same.
        eps: what is added to the variance.
        dimensions: how many dimensions are normalized; those of ``weight`` if there is one.

    Raises:
        ValueError: ``x`` does not end with the shape of ``weight`` and ``bias``, or there is
            nothing to normalize.
    """
    return _of_rows("layer_norm", as_float32(x), weight, bias, eps, dimensions)


def rms_norm(x: Input, weight: Input | None = None, eps: float = 1e-5) -> Variable:
    """Return ``x / sqrt(mean(x ** 2) + eps) * weight`` (Zhang and Sennrich, 2019).

    The mean is over the last dimensions of ``x``, those of ``weight``; without one, the last.

    Raises:
        ValueError: ``x`` does not end with the shape of ``weight``, or there is nothing to
            normalize.
    """
    return _of_rows("rms_norm", as_float32(x), weight, None, eps, 1)


def _of_rows(
    name: str, x: Variable, weight: Input | None, bias: Input | None, eps: float, dimensions: int
) -> Variable:
    given = [None if each is None else as_variable(each) for each in (weight, bias)]
    for each in given:
        if each is not None:
            dimensions = each.ndim
            if not 1 <= dimensions <= x.ndim or x.shape[-dimensions:] != each.shape:
                raise ValueError(
                    f"{name}: expected input of shape [..., {', '.join(map(str, each.shape))}] for "
                    f"a weight or bias of shape {each.shape}, got {x.shape}"
                )
    width = math.prod(x.shape[-dimensions:])
    if not 1 <= dimensions <= x.ndim or not width:
        raise ValueError(
            f"{name}: nothing to normalize in the last {dimensions} dimension(s) of shape {x.shape}"
        )
    wide = widened(x.data)
    w, b = (_values(each, wide) for each in given)
    rows, centred = wide.size // width, name == "layer_norm"
    sizes, shape, dtype = (rows, width), x.shape, wide.dtype
    native = kernel(name, wide)
    if native is not None:
        wide = contiguous(wide)
        saved = (rows,), dtype
        out, mean, inverse = native(((shape, dtype), saved, saved), sizes, (eps,), wide, w, b)
    else:
        xp, wide = array_module(wide), wide.reshape(sizes)
        mean = wide.mean(1, keepdims=True) if centred else xp.zeros((rows, 1), dtype)
        out = wide - mean
        inverse = 1 / xp.sqrt((out * out).mean(1, keepdims=True) + eps)
        out = _affine(out * inverse, w, b).reshape(shape)

    def back(grad: Array) -> tuple[Array, Array, Array]:
        grad, w = widened(grad), _values(given[0], wide)
        made = (shape, dtype), ((width,), dtype), ((width,), dtype)
        if native is not None:
            found: Any = kernel(f"{name}_back", wide)
            return found(made, sizes, (), contiguous(grad), wide, mean, inverse, w)  # type: ignore[no-any-return]
        grad = grad.reshape(sizes)
        standard = (wide - mean) * inverse
        slope = _affine(grad, w, None)
        dx = slope - standard * (slope * standard).mean(1, keepdims=True)
        if centred:
            dx -= slope.mean(1, keepdims=True)
        return (dx * inverse).reshape(shape), (grad * standard).sum(0), grad.sum(0)

    return record_jointly(name, narrowed(out, x.data), back, x, *given)


def group_norm(
    x: Input, groups: int, weight: Input | None = None, bias: Input | None = None, eps: float = 1e-5
) -> Variable:
    """Return each sample's groups of channels normalized (Wu and He, 2018).

    Args:
        x: shape ``[N, C, ...]``, of any strides; channels that lie side by side are read so.
        groups: how many groups the channels are divided into, one after another.
        weight: shape ``[C]``.
        bias: shape ``[C]``.
        eps: what is added to the variance.

    Raises:
        ValueError: the channels are not divisible by ``groups``, weight or bias have another shape,
            or there is nothing to normalize.
    """
    x = as_float32(x)
    given = _checked("group_norm", x, weight, bias)
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(
            f"group_norm: {channels} channels of shape {x.shape} cannot be divided into {groups} "
            "groups of the same size"
        )
    out, _, _, back = _of_channels(widened(x.data), x.shape[0], groups, given, x, eps)
    return record_jointly("group_norm", narrowed(out, x.data), back, x, *given)


def batch_norm(
    x: Input, weight: Input | None = None, bias: Input | None = None, mean: Array | None = None,
    variance: Array | None = None, eps: float = 1e-5,
) -> Variable:  # fmt: skip
    """Return each channel normalized over all samples (Ioffe and Szegedy, 2015).

    Args:
        x: shape ``[N, C, ...]``, of any strides; channels that lie side by side are read so.
        weight: shape ``[C]``.
        bias: shape ``[C]``.
        mean: shape ``[C]``, constants, to normalize by instead of the samples' own.
        variance: the same.
        eps: what is added to the variance.

    Raises:
        ValueError: a shape does not fit, or, without ``mean`` and ``variance``, a channel has one
            value only.
    """
    return batch_norm_with_moments(x, weight, bias, mean, variance, eps)[0]


def batch_norm_with_moments(
    x: Input, weight: Input | None, bias: Input | None, mean: Array | None, variance: Array | None,
    eps: float,
) -> tuple[Variable, Array, Array]:  # fmt: skip
    """Return :func:`batch_norm` with the means and (biased) variances of channels it has used."""
    x = as_variable(x)
    given = _checked("batch_norm", x, weight, bias)
    moments = None
    if mean is not None and variance is not None:
        shapes = mean.shape, variance.shape
        if shapes != (x.shape[1:2],) * 2:
            raise ValueError(
                f"batch_norm: mean and variance must have shape {x.shape[1:2]} for input of shape "
                f"{x.shape}, got {shapes[0]} and {shapes[1]}"
            )
        moments = mean, variance
    elif x.size // x.shape[1] < 2:
        raise ValueError(
            f"batch_norm: needs more than one value per channel, got input of shape {x.shape}; "
            "train with larger batches, or call eval() on the module"
        )
    wide = widened(x.data)
    out, mean, variance, back = _of_channels(wide, 1, x.shape[1], given, x, eps, moments)
    result = record_jointly("batch_norm", narrowed(out, x.data), back, x, *given)
    return result, mean, variance


def _checked(name: str, x: Variable, *given: Input | None) -> list[Variable | None]:
    if x.ndim < 2 or not x.size:
        raise ValueError(
            f"{name}: expected input of shape [N, C, ...] with elements, got {x.shape}"
        )
    found = [None if each is None else as_variable(each) for each in given]
    for what, each in zip(("weight", "bias"), found, strict=True):
        if each is not None and each.shape != x.shape[1:2]:
            raise ValueError(
                f"{name}: expected {what} of shape {x.shape[1:2]} for input of shape {x.shape}, "
                f"got {each.shape}"
            )
    return found


def _of_channels(
    wide: Array, samples: int, groups: int, given: list[Variable | None], x: Variable, eps: float,
    moments: tuple[Array, Array] | None = None,
) -> tuple[Array, Array, Array, Backward]:  # fmt: skip
    """Return what is normalized, means and variances, and what computes gradients.

    ``samples`` is 1 where all count as one; ``moments``: what is used instead of their own.
    """
    n, channels, *rest = wide.shape
    positions = math.prod(rest)
    order, inverse_order = (
        (0, *range(2, wide.ndim), 1),
        (0, wide.ndim - 1, *range(1, wide.ndim - 1)),
    )
    is_last = positions == 1 or not wide.flags.c_contiguous

    def laid_out(array: Array) -> Array:
        return contiguous(array.transpose(order) if is_last else array)

    def as_given(array: Array) -> Array:
        return array.transpose(inverse_order) if is_last else array

    rows, dtype = laid_out(wide), wide.dtype
    w, b = (_values(each, wide) for each in given)
    sizes = samples, n // samples, channels, positions, groups, int(is_last)
    name = "group_norm" if moments is None else "given_norm"
    native, xp, saved = kernel(name, wide), array_module(wide), ((samples * groups,), dtype)
    if moments is not None:
        mean, variance = (contiguous(each.astype(dtype, copy=False)) for each in moments)
    # Shapes in which all elements of a group, and its parameters, are along their own dimensions.
    each = (samples, n // samples, positions, groups, channels // groups)
    axes, others, of_channel = (1, 2, 4), (0, 1, 2), (1, 1, 1, groups, channels // groups)
    if not is_last:
        each = samples, n // samples, groups, channels // groups, positions
        axes, others, of_channel = (1, 3, 4), (0, 1, 4), (1, 1, groups, channels // groups, 1)
    of_group = tuple(1 if axis in axes else size for axis, size in enumerate(each))
    if native is not None and moments is None:
        made = (rows.shape, dtype), saved, saved
        out, mean, variance = native(made, sizes, (eps,), rows, w, b)
    elif native is not None:
        out = native(((rows.shape, dtype),), sizes, (eps,), rows, w, b, mean, variance)
    else:
        parts = rows.reshape(each)
        if moments is None:
            mean = parts.mean(axes)
            deviation = parts - mean.reshape(of_group)
            variance = (deviation * deviation).mean(axes).reshape(-1)
            mean = mean.reshape(-1)
        scaled = (parts - mean.reshape(of_group)) / xp.sqrt(variance + eps).reshape(of_group)
        w, b = (None if p is None else p.reshape(of_channel) for p in (w, b))
        out = _affine(scaled, w, b).reshape(rows.shape)

    def back(grad: Array) -> tuple[Array, Array, Array]:
        grad, w = laid_out(widened(grad)), _values(given[0], wide)
        made = (rows.shape, dtype), ((channels,), dtype), ((channels,), dtype)
        if native is not None:
            found: Any = kernel(f"{name}_back", wide)
            dx, *more = found(made, sizes, (eps,), grad, rows, mean, variance, w)
            return as_given(dx), *more
        parts, grad = rows.reshape(each), grad.reshape(each)
        deviation = 1 / xp.sqrt(variance + eps).reshape(of_group)
        standard = (parts - mean.reshape(of_group)) * deviation
        dx = slope = _affine(grad, None if w is None else w.reshape(of_channel), None)
        if moments is None:
            dx = slope - slope.mean(axes, keepdims=True)
            dx -= standard * (slope * standard).mean(axes, keepdims=True)
        dweight, dbias = (p.sum(others).reshape(-1) for p in (grad * standard, grad))
        return as_given((dx * deviation).reshape(rows.shape)), dweight, dbias

    return as_given(out), mean, variance, back


def _values(parameter: Variable | None, like: Array) -> Array | None:
    """Return a parameter as the kernels take it: contiguous, in the dtype that is computed in."""
    if parameter is None:
        return None
    return contiguous(parameter.data.astype(like.dtype, copy=False))


def _affine(standard: Array, weight: Array | None, bias: Array | None) -> Array:
    if weight is not None:
        standard = standard * weight
    return standard if bias is None else standard + bias
