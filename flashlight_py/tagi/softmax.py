"""Activations that make the units of a sample shares of a whole.

They take all units of a sample, of any shape, as one class each, and compute in float64. What would
be above float32's largest number is this number.
"""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.activations import Activation
from flashlight_py.tagi.mixtures import SMALLEST, Moments, mixture_relu
from flashlight_py.tagi.states import REAL

LARGEST = float(np.finfo(REAL).max)
# Of variances of exponents: from here on e^v is beyond float32.
WIDEST = 80.0


def softmax(mean: Array, variance: Array) -> Moments:
    """Return p = softmax(m), variances ``J^2 (v + v of the largest m)``, J = p (1 - p).

    All arrays are ``[batch, classes]``, here and below.
    """
    xp = array_module(mean)
    m, v = mean.astype(np.float64), variance.astype(np.float64)
    largest = m.argmax(axis=1)
    shares = xp.exp(m - m.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    slope = shares * (1 - shares)
    return _real(shares, slope * slope * (v + v[xp.arange(len(v)), largest][:, None]), slope)


def remax(mean: Array, variance: Array) -> Moments:
    """Return the moments of ReLU's share of the sum over the classes, both taken as log-normal.

    M, V, P are those of ``mixture_relu``; with sums M', V' and (lambda, kappa) of each as
    :func:`_log_normal`, c = ln(1 + V / (M M')), w = lambda + lambda' - 2c: means A = exp(kappa -
    kappa' + w / 2), at least 1e-6, then over their sum; variances (e^w - 1) A^2; slopes (e^(lambda
    - c) - 1) A M / (P v), by which no correlation is above 1, and 0 where v is.
    """
    xp = array_module(mean)
    positive, spread, above = (each.astype(np.float64) for each in mixture_relu(mean, variance))
    v = xp.maximum(variance.astype(np.float64), SMALLEST)
    total, total_spread = (each.sum(axis=1, keepdims=True) for each in (positive, spread))
    log_variance, log_mean = _log_normal(positive, spread)
    total_log_variance, total_log_mean = _log_normal(total, total_spread)
    together = xp.log1p(spread / (positive * total))
    width = xp.maximum(log_variance + total_log_variance - 2 * together, 0)
    shares = xp.maximum(xp.exp(log_mean - total_log_mean + width / 2), 1e-6)
    shares /= shares.sum(axis=1, keepdims=True)
    variances = xp.expm1(width) * shares * shares
    covariance = xp.expm1(log_variance - together) * shares * positive
    slope = xp.minimum(xp.sqrt(variances * v), covariance / xp.maximum(above, SMALLEST)) / v
    return _real(shares, variances, xp.where(variance > 0, slope, 0))


def closed_form_softmax(mean: Array, variance: Array) -> Moments:
    """Return the moments of e^z's share of the sum over the classes, both taken as log-normal.

    E = exp(m + v/2), V = E^2 (e^v - 1); with sums E', V' and (lambda', kappa') of these as
    :func:`_log_normal`, c = ln(1 + V / (E E')), w = v + lambda' - 2c: means A = exp(m - kappa' + w
    / 2); variances (e^w - 1) A^2; slopes A (v - c) / v. Variances above 80 count as 80.
    """
    xp = array_module(mean)
    v = xp.clip(variance.astype(np.float64), SMALLEST, WIDEST)
    m = mean.astype(np.float64)
    m -= (m + v / 2).max(axis=1, keepdims=True)  # shares stay, and no exponent is above 0
    exponential = xp.exp(m + v / 2)
    total = exponential.sum(axis=1, keepdims=True)
    spread = exponential * exponential * xp.expm1(v)
    total_log_variance, total_log_mean = _log_normal(total, spread.sum(axis=1, keepdims=True))
    together = xp.log1p(exponential * xp.expm1(v) / total)
    width = xp.maximum(v + total_log_variance - 2 * together, 0)
    shares = xp.exp(m - total_log_mean + width / 2)
    return _real(shares, xp.expm1(width) * shares * shares, shares * (v - together) / v)


class _OverClasses(Activation):
    def _moments(self, mean: Array, variance: Array) -> Moments:
        rows = (len(mean), -1)
        moments = type(self)._function(mean.reshape(rows), variance.reshape(rows))
        m, v, slope = (each.reshape(mean.shape) for each in moments)
        return m, v, slope


class Softmax(_OverClasses):
    """``e^z`` over its sum, linearised at the means; the slope is that of each unit alone."""

    _function = staticmethod(softmax)


class Remax(_OverClasses):
    """``max(z, 0)`` over its sum: probabilities in closed form, which stay in bounds."""

    _function = staticmethod(remax)


class ClosedFormSoftmax(_OverClasses):
    """``e^z`` over its sum in closed form; less stable than ``Remax`` where variances are large."""

    _function = staticmethod(closed_form_softmax)


def _log_normal(mean: Array, variance: Array) -> tuple[Array, Array]:
    """Return variance and mean of the logarithm: lambda = ln(1 + V / M^2), ln M - lambda / 2."""
    xp = array_module(mean)
    log_variance = xp.log1p(variance / (mean * mean))
    return log_variance, xp.log(mean) - log_variance / 2


def _real(*moments: Array) -> Moments:
    mean, variance, slope = (
        array_module(each).minimum(each, LARGEST).astype(REAL) for each in moments
    )
    return mean, variance, slope
