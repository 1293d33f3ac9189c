"""Activations: moments of a function of a Gaussian unit, and the slope that leads back.

The slope of ``a(z)`` is cov(a, z) / var(z). Functions that no bound cuts off are linearised at the
mean: ``a(m)``, ``a'(m)^2 v``, ``a'(m)``.
"""

from __future__ import annotations

import abc
import math
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import kernels
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.erf import FAR, MIDDLE, NEAR, SPLIT, quotient
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape
from flashlight_py.tagi.native import floats, native_for
from flashlight_py.tagi.states import REAL, BaseHiddenStates

Moments: TypeAlias = tuple[Array, Array, Array]

FLOOR = np.float32(1e-6)  # of means and variances of mixtures, where it is said
SMALLEST = float(np.finfo(REAL).tiny)
LEAK = REAL.type(0.1)
HIGHEST = 88.0  # of exponents: e^88 is near float32's largest number
LARGEST = float(np.finfo(REAL).max)
WIDEST = 80.0  # of variances of exponents: from here on e^v is beyond float32


class Activation(BaseLayer):
    """The base of activations: the same shape, no parameters."""

    has_state = False
    keeps_input = False

    def connect(self, shape: Shape) -> Shape:
        """Take inputs of any shape."""
        self.input_shape = self.output_shape = shape
        return shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return moments of the same shape, with the slope of this activation.

        Of units that another activation made, the slope is the product of both.
        """
        variance = array_module(x.mean).zeros_like(x.mean) if x.variance is None else x.variance
        mean, variance, slope = self._moments(x.mean, variance)
        return BaseHiddenStates(mean, variance, slope if x.slope is None else slope * x.slope)

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas:
        """Return the deltas as they are: the layer before multiplies them by the slope."""
        return d, e

    def _sizes(self) -> tuple[()]:
        return ()

    @abc.abstractmethod
    def _moments(self, mean: Array, variance: Array) -> Moments:
        """Return means, variances and slopes: new float32 arrays of one shape."""


class ReLU(Activation):
    """``max(z, 0)``, linearised at the mean."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        slope = (mean > 0).astype(REAL)
        return mean * slope, variance * slope, slope


class LeakyReLU(Activation):
    """``max(z, z / 10)``, linearised at the mean."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        slope = array_module(mean).where(mean > 0, REAL.type(1), LEAK)
        return mean * slope, variance * (slope * slope), slope


class Sigmoid(Activation):
    """``1 / (1 + e^-z)``, linearised at the mean."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        value, slope = _logistic(mean)
        return value, variance * (slope * slope), slope


class Tanh(Activation):
    """``tanh(z)``, linearised at the mean."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        xp = array_module(mean)
        small = xp.exp(-2 * abs(mean))
        whole = 1 / (1 + small)
        slope = 4 * small * whole * whole  # 1 - tanh(m)^2, and exact where this is near 0
        return xp.tanh(mean), variance * (slope * slope), slope


class Softplus(Activation):
    """``ln(1 + e^z)``, linearised at the mean: its slope is the sigmoid."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        xp = array_module(mean)
        slope, _ = _logistic(mean)
        value = xp.log1p(xp.exp(-abs(mean))) + xp.maximum(mean, 0)
        return value, variance * (slope * slope), slope


class MixtureReLU(Activation):
    """``max(z, 0)``, with the exact moments of a Gaussian that is cut off."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        return mixture_relu(mean, variance)


class MixtureSigmoid(Activation):
    """``max(0, min((z + 1) / 2, 1))``, with the exact moments of a Gaussian that is cut off."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        return mixture_tanh(mean, variance, 0.5, 0.5)


class MixtureTanh(Activation):
    """``max(-1, min(z, 1))``, with the exact moments of a Gaussian that is cut off."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        return mixture_tanh(mean, variance)


class EvenExp(Activation):
    """``e^z`` of every second unit of a sample, from the second on; the others stay as they are.

    So a network says for each value (the first of a pair) also the variance of its error.

    Args:
        slope_times_variance: False: the slope is cov / var, E. True: it is v E, as in pytagi
            0.2.1, by which the deltas are v times too large, of the variances v^2 times.
    """

    def __init__(self, slope_times_variance: bool = False) -> None:
        super().__init__()
        self.slope_times_variance = slope_times_variance

    def connect(self, shape: Shape) -> Shape:
        """Take samples of an even number of units."""
        if int(np.prod(shape)) % 2:
            raise ValueError(f"expected pairs, an even number of units, got samples of {shape}")
        return super().connect(shape)

    def _moments(self, mean: Array, variance: Array) -> Moments:
        m, v = mean.reshape(-1, 2).copy(), variance.reshape(-1, 2).copy()
        slope = array_module(mean).ones_like(m)
        if self.slope_times_variance:
            slope[:, 1] = v[:, 1]
        m[:, 1], v[:, 1], growth = exponential(m[:, 1], v[:, 1])
        slope[:, 1] *= growth
        return m.reshape(mean.shape), v.reshape(mean.shape), slope.reshape(mean.shape)


def _logistic(mean: Array) -> tuple[Array, Array]:
    """Return 1 / (1 + e^-m) and its derivative."""
    xp = array_module(mean)
    small = xp.exp(-abs(mean))  # at most 1, of either sign
    whole = 1 / (1 + small)
    return xp.where(mean > 0, whole, small * whole), small * whole * whole


def exponential(mean: Array, variance: Array) -> Moments:
    """Return the exact moments of e^z: E = exp(m + v/2), E^2 (e^v - 1); the slope is E.

    Exponents above 88 count as 88, and variances above float32's largest number as this.
    """
    xp = array_module(mean)
    m, v = mean.astype(np.float64), variance.astype(np.float64)
    value = xp.exp(xp.minimum(m + v / 2, HIGHEST))
    spread = value * value * xp.expm1(xp.minimum(v, HIGHEST))
    slope = value.astype(REAL)
    return slope, xp.minimum(spread, np.finfo(REAL).max).astype(REAL), slope


class _Shares(Activation):
    """The base of activations that make the units of a sample shares of a whole.

    They take all units of a sample, of any shape, as one class each, and compute in float64; the
    largest number is float32's.
    """

    def _moments(self, mean: Array, variance: Array) -> Moments:
        xp, rows = array_module(mean), (len(mean), -1)
        m, v, slope = (
            xp.minimum(each, LARGEST).astype(REAL).reshape(mean.shape)
            for each in self._shares(mean.reshape(rows), variance.reshape(rows))
        )
        return m, v, slope

    @abc.abstractmethod
    def _shares(self, mean: Array, variance: Array) -> Moments:
        """Return the moments in float64; all arrays are ``[batch, classes]``."""


class Softmax(_Shares):
    """``e^z`` over its sum, linearised at the means; the slope is that of each unit alone.

    p = softmax(m), variances ``J^2 (v + v of the largest m)``, J = p (1 - p).
    """

    def _shares(self, mean: Array, variance: Array) -> Moments:
        xp = array_module(mean)
        m, v = mean.astype(np.float64), variance.astype(np.float64)
        largest = m.argmax(axis=1)
        shares = xp.exp(m - m.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        slope = shares * (1 - shares)
        return shares, slope * slope * (v + v[xp.arange(len(v)), largest][:, None]), slope


class Remax(_Shares):
    """``max(z, 0)`` over its sum: probabilities in closed form, which stay in bounds.

    ReLU's moments and their sums over the classes are both taken as log-normal. M, V, P are those
    of ``MixtureReLU``; with sums M', V' and (lambda, kappa) of each as :func:`_log_normal`, c =
    ln(1 + V / (M M')), w = lambda + lambda' - 2c: means A = exp(kappa - kappa' + w / 2), at least
    1e-6, then over their sum; variances (e^w - 1) A^2; slopes (e^(lambda - c) - 1) A M / (P v), by
    which no correlation is above 1, and 0 where v is.
    """

    def _shares(self, mean: Array, variance: Array) -> Moments:
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
        return shares, variances, xp.where(variance > 0, slope, 0)


class ClosedFormSoftmax(_Shares):
    """``e^z`` over its sum in closed form; less stable than ``Remax`` where variances are large.

    The exponentials and their sum over the classes are both taken as log-normal: E = exp(m + v/2),
    V = E^2 (e^v - 1); with sums E', V' and (lambda', kappa') of these as :func:`_log_normal`, c =
    ln(1 + V / (E E')), w = v + lambda' - 2c: means A = exp(m - kappa' + w / 2); variances (e^w - 1)
    A^2; slopes A (v - c) / v. Variances above 80 count as 80.
    """

    def _shares(self, mean: Array, variance: Array) -> Moments:
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
        return shares, xp.expm1(width) * shares * shares, shares * (v - together) / v


def _log_normal(mean: Array, variance: Array) -> tuple[Array, Array]:
    """Return variance and mean of the logarithm: lambda = ln(1 + V / M^2), ln M - lambda / 2."""
    xp = array_module(mean)
    log_variance = xp.log1p(variance / (mean * mean))
    return log_variance, xp.log(mean) - log_variance / 2


# Mixtures of the part of a Gaussian that is kept and of the bound where it is cut off: those of
# pytagi 0.2.1, written with the tail of the normal distribution, so that nothing is a difference of
# numbers that are nearly equal. Variances below the smallest normal number count as this.


def mixture_relu(mean: Array, variance: Array) -> Moments:
    """Return the moments of max(z, 0), means and variances at least 1e-6; the slope is P(z > 0)."""
    if is_cupy(mean):
        return kernels.mixture_relu(mean, variance)
    module = native_for(mean)
    if module is not None:
        return _natively(module, "relu", mean, variance)
    m, v, s = _wide(mean, variance)
    q, g, h = tails(abs(m) / s)
    xp, above = array_module(m), m > 0
    moments = xp.where(above, m, 0) + s * g, v * (xp.where(above, 1 - 2 * q, 0) + h)
    return (*map(_floored, moments), xp.where(above, 1 - q, q).astype(REAL))


def mixture_tanh(mean: Array, variance: Array, share: float = 1, shift: float = 0) -> Moments:
    """Return the moments of max(-1, min(z, 1)), variances at least 1e-6; slopes are P(|z| < 1).

    Then times ``share`` plus ``shift``. In NumPy, for a mean of at least 0, as the rest is
    symmetric: z is cut off at 1, much or little of it, and in the tail at -1. The covariance of z
    and of what one cut takes away is v P(it cuts), by Stein's lemma.
    """
    module = native_for(mean)
    if module is not None:
        return _natively(module, "between", mean, variance, share, shift)
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
    return array_module(values).maximum(values.astype(REAL), FLOOR)  # type: ignore[no-any-return]


# Mean and probability follow from one fitted quotient of a normal tail without cancelling digits,
# in float32 as well; the erf of a libm would differ between machines.
def tails(a: Array) -> tuple[Array, Array, Array]:
    """Return, of a standard normal z, P(z > a), and mean and variance of ``max(z - a, 0)``.

    Args:
        a: float64, at least 0; any shape.
    """
    xp, x = array_module(a), a * math.sqrt(0.5)
    near, middle, far = xp.minimum(x, SPLIT), xp.clip(x, SPLIT, 4), xp.maximum(x, 4)
    square, inverse = near * near, 1 / (far * far)
    small = (1 - near * quotient(NEAR, square)) * xp.exp(square)
    large = (1 / math.sqrt(math.pi) - inverse * quotient(FAR, inverse)) / far
    scaled = xp.where(x <= SPLIT, small, xp.where(x <= 4, quotient(MIDDLE, middle), large))
    p = xp.exp(-0.5 * a * a) * (1 / math.sqrt(2 * math.pi))  # the density
    ratio = math.sqrt(math.pi / 2) * scaled  # of P(z > a) to p
    mean = p * (1 - a * ratio)
    return p * ratio, mean, p * (ratio - a * (1 - a * ratio)) - mean * mean
