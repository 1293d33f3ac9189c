"""Exact moments of a Gaussian unit that is cut off: mixtures of what is kept and of the bound.

Each function takes means and variances, float32 arrays of one shape, and returns new arrays of
means, variances and slopes: the moments of the mixtures of pytagi 0.2.1, written with what lies in
the tail, so that none is a difference of numbers that are nearly equal. Variances below the
smallest normal number count as this.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from flashlight_py import kernels
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.tagi.native import native
from flashlight_py.tagi.states import REAL
from flashlight_py.tagi.tails import tails

Moments: TypeAlias = tuple[Array, Array, Array]

FLOOR = np.float32(1e-6)  # of means and variances, where it is said
SMALLEST = float(np.finfo(REAL).tiny)


def mixture_relu(mean: Array, variance: Array) -> Moments:
    """Return the moments of max(z, 0), means and variances at least 1e-6; the slope is P(z > 0)."""
    if is_cupy(mean):
        return kernels.mixture_relu(mean, variance)
    kernel = native()
    if kernel is None:
        return mixture_relu_in_numpy(mean, variance)
    return _each(kernel.lib.fl_tagi_mixture_relu, kernel.ffi, mean, variance)


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
    kernel = None if is_cupy(mean) else native()
    if kernel is None:
        return between_in_numpy(mean, variance, share, shift)
    return _each(kernel.lib.fl_tagi_mixture_between, kernel.ffi, mean, variance, share, shift)


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


def _each(function: Any, ffi: Any, mean: Array, variance: Array, *options: float) -> Moments:
    """Call ``function`` with flat arrays as they lie; results lie as ``mean`` does."""
    lies_right = mean.flags.c_contiguous and variance.flags.c_contiguous
    if not (lies_right and mean.dtype == variance.dtype == REAL):
        # Such as images with the channels first: another order of dimensions, without gaps.
        order = sorted(range(mean.ndim), key=lambda axis: -mean.strides[axis])
        back = [order.index(axis) for axis in range(mean.ndim)]
        moments = _each(
            function,
            ffi,
            np.ascontiguousarray(mean.transpose(order), REAL),
            np.ascontiguousarray(variance.transpose(order), REAL),
            *options,
        )
        m, v, slope = (each.transpose(back) for each in moments)
        return m, v, slope
    moments = np.empty_like(mean), np.empty_like(mean), np.empty_like(mean)
    flat = [ffi.from_buffer("float[]", array) for array in (mean, variance, *moments)]
    function(*flat, mean.size, *options)
    return moments


def _wide(mean: Array, variance: Array) -> Moments:
    """Return means, variances and standard deviations, float64."""
    v = array_module(mean).maximum(variance.astype(np.float64), SMALLEST)
    return mean.astype(np.float64), v, array_module(mean).sqrt(v)


def _floored(values: Array) -> Array:
    result: Array = array_module(values).maximum(values.astype(REAL), FLOOR)
    return result
