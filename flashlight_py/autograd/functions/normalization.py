"""Normalizations: what is less its mean, and divided by its standard deviation.

Each is ``(x - mean) / sqrt(variance + eps) * weight + bias``; they differ in what means and
variances are of. Those are computed in float32 at least, from deviations from the mean, and half
precision is rounded once. Weight and bias may be None: 1 and 0. Results are new, in the memory
layout of ``x``.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from flashlight_py.autograd import native
from flashlight_py.autograd.functions.elementwise import as_variable, check_filled
from flashlight_py.autograd.native import contiguous, kernel, record_jointly
from flashlight_py.autograd.precision import as_float32, real
from flashlight_py.autograd.variable import Input, Variable
from flashlight_py.device import Array, array_module, narrowed, widened

_Given: TypeAlias = Sequence[Variable | None]


def layer_norm(
    x: Input, weight: Input | None = None, bias: Input | None = None, eps: float = 1e-5,
    dimensions: int = 1,
) -> Variable:  # fmt: skip
    """Return ``x`` normalized over its last dimensions (Ba, Kiros and Hinton, 2016).

    ``weight`` and ``bias`` have the shape of those dimensions; without them there are
    ``dimensions``. ``eps`` is added to the variance. A shape that does not fit, or nothing to
    normalize, is a ValueError.
    """
    return _of_rows("layer_norm", as_float32(x), weight, bias, eps, dimensions)


def rms_norm(x: Input, weight: Input | None = None, eps: float = 1e-5) -> Variable:
    """Return ``x / sqrt(mean(x ** 2) + eps) * weight`` (Zhang and Sennrich, 2019).

    The mean is over the last dimensions of ``x``, those of ``weight``; without one, the last. A
    shape that does not fit, or nothing to normalize, is a ValueError.
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
    check_filled(name, x)
    if not 1 <= dimensions <= x.ndim:
        raise ValueError(
            f"{name}: nothing to normalize in the last {dimensions} dimension(s) of shape {x.shape}"
        )
    inner = x.shape[-dimensions:]
    width = math.prod(inner)
    parts = x.size // width, width
    return _normalized(name, x, given, eps, parts, parts[0], inner, parts, (1,), (0,))[0]


def group_norm(
    x: Input, groups: int, weight: Input | None = None, bias: Input | None = None, eps: float = 1e-5
) -> Variable:
    """Return each sample's groups of channels normalized (Wu and He, 2018).

    ``x`` has shape ``[N, C, ...]``, of any strides, ``weight`` and ``bias`` ``[C]``. ``groups`` is
    the number of groups, of neighbouring channels. ``eps`` is added to the variance.

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
    return _of_channels("group_norm", x, given, eps, x.shape[0], groups)[0]


def batch_norm(
    x: Input, weight: Input | None = None, bias: Input | None = None, mean: Array | None = None,
    variance: Array | None = None, eps: float = 1e-5,
) -> Variable:  # fmt: skip
    """Return each channel normalized over all samples (Ioffe and Szegedy, 2015).

    ``x`` has shape ``[N, C, ...]``, of any strides, the others ``[C]``. ``mean`` and ``variance``
    are constants, used instead of the samples' own. ``eps`` is added to the variance. A shape that
    does not fit, or without ``mean`` and ``variance`` a channel with one value only, is a
    ValueError.
    """
    return batch_norm_with_moments(x, weight, bias, mean, variance, eps)[0]


def batch_norm_with_moments(
    x: Input, weight: Input | None, bias: Input | None, mean: Array | None, variance: Array | None,
    eps: float,
) -> tuple[Variable, Array, Array]:  # fmt: skip
    """Return :func:`batch_norm` with the means and (biased) variances of channels it has used."""
    x = as_variable(x)
    given = _checked("batch_norm", x, weight, bias)
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
    made = _of_channels("batch_norm", x, given, eps, 1, x.shape[1], moments)
    return made[0], made[1].reshape(-1), made[2].reshape(-1)


def few_values(name: str, shape: tuple[int, ...], _: object = None) -> ValueError:
    """Return the error of the function ``name`` for channels with one value or none."""
    return ValueError(
        f"{name}: needs more than one value per channel, got input of shape {shape}; "
        "train with larger batches, or call eval() on the module"
    )


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
    name: str, x: Variable, given: _Given, eps: float, samples: int, groups: int,
    moments: Sequence[Array] = (),
) -> tuple[Variable, Array, Array]:  # fmt: skip
    """Return what :func:`_normalized` does; ``samples`` is 1 where all count as one."""
    n, channels, *rest = x.shape
    positions = math.prod(rest)
    is_last = positions == 1 or not x.data.flags.c_contiguous
    sizes = samples, n // samples, channels, positions, groups, int(is_last)
    first, of_channel = (samples, n // samples), (groups, channels // groups)
    parts, axes, others = (*first, *of_channel, positions), (1, 3, 4), (0, 1, 4)
    if is_last:
        parts, axes, others = (*first, positions, *of_channel), (1, 2, 4), (0, 1, 2)
    of = samples * groups, (channels,), parts
    return _normalized(name, x, given, eps, sizes, *of, axes, others, moments, is_last)


def _normalized(
    name: str, x: Variable, given: _Given, eps: float, sizes: tuple[int, ...],
    count: int, inner: tuple[int, ...], parts: tuple[int, ...], axes: tuple[int, ...],
    others: tuple[int, ...], moments: Sequence[Array] = (), is_last: bool = False,
) -> tuple[Variable, Array, Array]:  # fmt: skip
    """Return what is normalized, and what it was normalized by.

    ``sizes`` are the kernel's, ``count`` the number of means, ``inner`` the shape of a parameter.
    In the shape ``parts`` elements of one mean are along ``axes``, those of one parameter along
    ``others``. ``moments`` are constants, used instead of the elements' own mean and variance;
    ``is_last``: whether channels are to lie last.
    """

    def laid_out(array: Array) -> Array:
        return contiguous(native.channels_last(array) if is_last else array)

    def as_given(array: Array) -> Array:
        return native.channels_second(array) if is_last else array

    x = real(x)
    rows = laid_out(widened(x.data))
    of_kernel = "given_norm" if moments else name.replace("batch", "group")
    run, xp, shape, dtype = kernel(of_kernel, rows), array_module(rows), rows.shape, rows.dtype
    w, b, *moments = (_values(each, dtype) for each in (*given, *moments))
    if run is not None:
        saved = () if moments else (((count,), dtype),) * 2
        found = run(((shape, dtype), *saved), sizes, (eps,), rows, w, b, *moments)
        out, mean, variance = (found, *moments) if moments else found
    else:
        of_parameter = [1 if axis in others else n for axis, n in enumerate(parts)]
        out = rows.reshape(parts)
        if moments:
            mean, variance = (each.reshape(of_parameter) for each in moments)
            out = out - mean
        else:
            mean = out.mean(axes, keepdims=True) if name != "rms_norm" else xp.zeros(1, dtype)
            out = out - mean
            variance = (out * out).mean(axes, keepdims=True)
        out /= xp.sqrt(variance + eps)
        out = out if w is None else out * w.reshape(of_parameter)
        out = (out if b is None else out + b.reshape(of_parameter)).reshape(shape)

    def back(grad: Array) -> Any:
        grad, w = laid_out(widened(grad)), _values(given[0], dtype)
        if run is not None:
            made = (shape, dtype), *((inner, dtype),) * 2
            found: Any = kernel(f"{of_kernel}_back", rows)
            dx, dweight, dbias = found(made, sizes, (eps,), grad, rows, mean, variance, w)
            return as_given(dx), dweight, dbias
        grad, inverse = grad.reshape(parts), 1 / xp.sqrt(variance + eps)
        standard = (rows.reshape(parts) - mean) * inverse
        dx = slope = grad if w is None else grad * w.reshape(of_parameter)
        if not moments:
            dx = slope - standard * (slope * standard).mean(axes, keepdims=True)
            if name != "rms_norm":
                dx -= slope.mean(axes, keepdims=True)
        dweight, dbias = (each.sum(others).reshape(inner) for each in (grad * standard, grad))
        return as_given((dx * inverse).reshape(shape)), dweight, dbias

    result = record_jointly(name, narrowed(as_given(out), x.data), back, x, *given)
    return result, mean, variance


def _values(given: Variable | Array | None, dtype: Any) -> Any:
    """Return a parameter or constants as kernels take them: contiguous, in that dtype."""
    if given is None:
        return None
    array = given.data if isinstance(given, Variable) else given
    return contiguous(array.astype(dtype, copy=False))
