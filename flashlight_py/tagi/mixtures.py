"""Exact moments of a Gaussian unit that is cut off: mixtures of the part kept and of the bound.

Each function takes means and variances, float32 arrays of one shape, and returns new arrays of
means, variances and slopes: the moments of the mixtures of pytagi 0.2.1, written with the tail of
the normal distribution, so that none is a difference of numbers that are nearly equal. Variances
below the smallest normal number count as this.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import kernels
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.tagi.native import floats, native_for
from flashlight_py.tagi.states import REAL

Moments: TypeAlias = tuple[Array, Array, Array]

FLOOR = np.float32(1e-6)  # of means and variances, where it is said
SMALLEST = float(np.finfo(REAL).tiny)


def mixture_relu(mean: Array, variance: Array) -> Moments:
    """Return the moments of max(z, 0), means and variances at least 1e-6; the slope is P(z > 0)."""
    if is_cupy(mean):
        return kernels.mixture_relu(mean, variance)
    module = native_for(mean)
    if module is None:
        return mixture_relu_in_numpy(mean, variance)
    return _natively(module, "relu", mean, variance)


def mixture_relu_in_numpy(mean: Array, variance: Array) -> Moments:
    """Do what the kernels do, in float64."""
    m, v, s = _wide(mean, variance)
    q, g, h = tails(abs(m) / s)
    xp, above = array_module(m), m > 0
    moments = xp.where(above, m, 0) + s * g, v * (xp.where(above, 1 - 2 * q, 0) + h)
    return (*map(_floored, moments), xp.where(above, 1 - q, q).astype(REAL))


def mixture_tanh(mean: Array, variance: Array) -> Moments:
    """Return the moments of max(-1, min(z, 1)), variances at least 1e-6; slopes are P(|z| < 1)."""
    return _between(mean, variance, 1, 0)


def mixture_sigmoid(mean: Array, variance: Array) -> Moments:
    """Return those of (mixture_tanh + 1) / 2: z between -1 and 1 becomes a line from 0 to 1."""
    return _between(mean, variance, 0.5, 0.5)


def _between(mean: Array, variance: Array, share: float, shift: float) -> Moments:
    """Return the moments of max(-1, min(z, 1)) times ``share`` plus ``shift``."""
    module = native_for(mean)
    if module is None:
        return between_in_numpy(mean, variance, share, shift)
    return _natively(module, "between", mean, variance, share, shift)


def between_in_numpy(mean: Array, variance: Array, share: float, shift: float) -> Moments:
    """Do what the kernels do.

    For a mean of at least 0, as the rest is symmetric: z is cut off at 1, much or little of it,
    and in the tail at -1. The covariance of z and of what one cut takes away is v P(it cuts), by
    Stein's lemma.
    """
    m, v, s = _wide(mean, variance)
    xp = array_module(m)
    far, near = (1 + abs(m)) / s, (1 - abs(m)) / s
    inside = near >= 0
    q, g, h = tails(abs(near))
    far_q, far_g, far_h = tails(far)
    moments = xp.where(inside, abs(m), 1) + s * (far_g - g)
    cut = xp.where(inside, g, g - near)  # how much the cut at 1 takes, on average
    kept = xp.where(inside, 1 - 2 * q, 0) + h + (far_h - 2 * far_q) + 2 * cut * far_g
    slope = xp.where(inside, 1 - q, q) - far_q
    mean = xp.sign(m) * moments * share + shift
    return mean.astype(REAL), _floored(v * kept * share**2), (slope * share).astype(REAL)


def _natively(module: Any, kind: str, mean: Array, variance: Array, *options: float) -> Moments:
    """Call the kernel with flat arrays as they lie; results lie as ``mean`` does."""
    lies_right = mean.flags.c_contiguous and variance.flags.c_contiguous
    if not (lies_right and mean.dtype == variance.dtype == REAL):
        # Such as images with the channels first: another order of dimensions, without gaps.
        order = sorted(range(mean.ndim), key=lambda axis: -mean.strides[axis])
        back = [order.index(axis) for axis in range(mean.ndim)]
        m, v = (np.ascontiguousarray(each.transpose(order), REAL) for each in (mean, variance))
        m, v, slope = (each.transpose(back) for each in _natively(module, kind, m, v, *options))
        return m, v, slope
    moments = np.empty_like(mean), np.empty_like(mean), np.empty_like(mean)
    flat = [floats(module, array) for array in (mean, variance, *moments)]
    getattr(module.lib, f"fl_tagi_mixture_{kind}")(*flat, mean.size, *options)
    return moments


def _wide(mean: Array, variance: Array) -> Moments:
    """Return means, variances and standard deviations, float64."""
    v = array_module(mean).maximum(variance.astype(np.float64), SMALLEST)
    return mean.astype(np.float64), v, array_module(mean).sqrt(v)


def _floored(values: Array) -> Array:
    result: Array = array_module(values).maximum(values.astype(REAL), FLOOR)
    return result


# Rational approximations of erf(x) up to 15/32, erfc(x) exp(x^2) up to 4, and beyond (W. J. Cody,
# Rational Chebyshev approximations for the error function, Mathematics of Computation 23, 1969).
# The highest power stands first; a denominator begins with 1.
_NEAR = (
    (0.185777706184603153, 3.16112374387056560, 113.864154151050156, 377.485237685302021,
     3209.37758913846947),
    (1, 23.6012909523441209, 244.024637934444173, 1282.61652607737228, 2844.23683343917062),
)  # fmt: skip
_MIDDLE = (
    (2.15311535474403846e-8, 0.564188496988670089, 8.88314979438837594, 66.1191906371416295,
     298.635138197400131, 881.952221241769090, 1712.04761263407058, 2051.07837782607147,
     1230.33935479799725),
    (1, 15.7449261107098347, 117.693950891312499, 537.181101862009858, 1621.38957456669019,
     3290.79923573345963, 4362.61909014324716, 3439.36767414372164, 1230.33935480374942),
)  # fmt: skip
_FAR = (
    (0.0163153871373020978, 0.305326634961232344, 0.360344899949804439, 0.125781726111229246,
     0.0160837851487422766, 6.58749161529837803e-4),
    (1, 2.56852019228982242, 1.87295284992346725, 0.527905102951428412, 0.0605183413124413191,
     2.33520497626869185e-3),
)  # fmt: skip


def tails(a: Array) -> tuple[Array, Array, Array]:
    """Return, of a standard normal z, P(z > a), and mean and variance of ``max(z - a, 0)``.

    Args:
        a: float64, at least 0; any shape.
    """
    p = array_module(a).exp(-0.5 * a * a) * (1 / math.sqrt(2 * math.pi))  # the density
    ratio = math.sqrt(math.pi / 2) * _scaled_complement(a * math.sqrt(0.5))  # of P(z > a) to p
    mean = p * (1 - a * ratio)
    return p * ratio, mean, p * (ratio - a * (1 - a * ratio)) - mean * mean


def _scaled_complement(x: Array) -> Array:
    """Return erfc(x) exp(x^2) for ``x`` of at least 0."""
    xp = array_module(x)
    near, middle, far = xp.minimum(x, 0.46875), xp.clip(x, 0.46875, 4), xp.maximum(x, 4)
    square, inverse = near * near, 1 / (far * far)
    results = (
        (1 - near * _ratio(_NEAR, square)) * xp.exp(square),
        _ratio(_MIDDLE, middle),
        (1 / math.sqrt(math.pi) - inverse * _ratio(_FAR, inverse)) / far,
    )
    chosen: Array = xp.where(x <= 0.46875, results[0], xp.where(x <= 4, results[1], results[2]))
    return chosen


def _ratio(polynomials: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    upper, lower = (0 * x + numbers[0] for numbers in polynomials)
    for above, below in zip(polynomials[0][1:], polynomials[1][1:], strict=True):
        upper, lower = upper * x + above, lower * x + below
    ratio: Array = upper / lower
    return ratio
