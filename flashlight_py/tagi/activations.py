"""Activations: moments of a function of a Gaussian unit, and its slope for the backward pass.

Each input ``z`` has mean ``m`` and variance ``v``. The slope of ``a(z)`` is ``cov(a, z) / v``. A
linearised activation has mean ``a(m)``, variance ``a'(m)^2 v`` and slope ``a'(m)``.
"""

import abc
import math
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import kernels
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.erf import FAR, MIDDLE, NEAR, SPLIT, quotient
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape
from flashlight_py.tagi.states import REAL, BaseHiddenStates, floats, native_for

Moments: TypeAlias = tuple[Array, Array, Array]

FLOOR = np.float32(1e-6)  # minimum of variances, and of the means of relu_moments
SMALLEST = float(np.finfo(REAL).tiny)
LEAK = REAL.type(0.1)
HIGHEST = 88.0  # maximum exponent: e^88 is close to the largest float32
LARGEST = float(np.finfo(REAL).max)
WIDEST = 80.0  # maximum v in ClosedFormSoftmax: a much larger v overflows e^v in float32


class Activation(BaseLayer):
    """Base class of activations. An activation keeps the input shape and has no parameters."""

    has_state = False
    keeps_input = False

    def connect(self, shape: Shape) -> Shape:
        """Return ``shape``; any shape is valid."""
        self.input_shape = self.output_shape = shape
        return shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return the moments of the output, in the shape of ``x``.

        If another activation computed ``x``, the slope is multiplied by the slope of ``x``.
        """
        variance = array_module(x.mean).zeros_like(x.mean) if x.variance is None else x.variance
        mean, variance, slope = self._moments(x.mean, variance)
        return BaseHiddenStates(mean, variance, slope if x.slope is None else slope * x.slope)

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas:
        """Return ``d`` and ``e``. The layer before the activation multiplies them by the slope."""
        return d, e

    def _sizes(self) -> tuple[()]:
        return ()

    @abc.abstractmethod
    def _moments(self, mean: Array, variance: Array) -> Moments:
        """Return means, variances and slopes: new float32 arrays with the shape of ``mean``."""


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
        inverse = 1 / (1 + small)
        slope = 4 * small * inverse * inverse  # 1 - tanh(m)^2, without cancellation
        return xp.tanh(mean), variance * (slope * slope), slope


class Softplus(Activation):
    """``ln(1 + e^z)``, linearised at the mean. The slope is the sigmoid of the mean."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        xp = array_module(mean)
        slope, _ = _logistic(mean)
        value = xp.log1p(xp.exp(-abs(mean))) + xp.maximum(mean, 0)
        return value, variance * (slope * slope), slope


class MixtureReLU(Activation):
    """``max(z, 0)``, with the exact moments of a truncated Gaussian."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        return relu_moments(mean, variance)


class MixtureSigmoid(Activation):
    """``max(0, min((z + 1) / 2, 1))``, with the exact moments of a truncated Gaussian."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        return tanh_moments(mean, variance, 0.5, 0.5)


class MixtureTanh(Activation):
    """``max(-1, min(z, 1))``, with the exact moments of a truncated Gaussian."""

    def _moments(self, mean: Array, variance: Array) -> Moments:
        return tanh_moments(mean, variance)


class EvenExp(Activation):
    """``e^z`` for units 1, 3, 5, ... of a sample; units 0, 2, 4, ... are unchanged.

    As the last layer, it gives pairs: a value, and the positive variance of its observation error.

    Args:
        slope_times_variance: False: the slope is the mean E of e^z. True: the slope is v E with v =
            var(z), as in pytagi 0.2.1. The deltas of means are then v times too large, and the
            deltas of variances v^2 times.
    """

    def __init__(self, slope_times_variance: bool = False) -> None:
        super().__init__()
        self.slope_times_variance = slope_times_variance

    def connect(self, shape: Shape) -> Shape:
        """Return ``shape``, which must have an even number of units."""
        if int(np.prod(shape)) % 2:
            raise ValueError(f"expected an even number of units, got samples of {shape}")
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
    xp = array_module(mean)
    small = xp.exp(-abs(mean))  # at most 1 for either sign
    inverse = 1 / (1 + small)
    return xp.where(mean > 0, inverse, small * inverse), small * inverse * inverse


def exponential(mean: Array, variance: Array) -> Moments:
    """Return the exact mean E = exp(m + v/2), variance E^2 (e^v - 1) and slope E of e^z.

    Exponents above 88 are replaced by 88. Variances above the largest float32 are replaced by it.
    """
    xp = array_module(mean)
    m, v = mean.astype(np.float64), variance.astype(np.float64)
    value = xp.exp(xp.minimum(m + v / 2, HIGHEST))
    spread = value * value * xp.expm1(xp.minimum(v, HIGHEST))
    slope = value.astype(REAL)
    return slope, xp.minimum(spread, np.finfo(REAL).max).astype(REAL), slope


class _Shares(Activation):
    """Base class of activations that divide each unit by the sum over its sample.

    The units of a sample are the classes of one distribution, whatever the shape of the sample. The
    computation uses float64. Results above the largest float32 are replaced by that number.
    """

    def _moments(self, mean: Array, variance: Array) -> Moments:
        xp, rows = array_module(mean), (len(mean), -1)
        m, v, slope = (
            xp.minimum(array, LARGEST).astype(REAL).reshape(mean.shape)
            for array in self._shares(mean.reshape(rows), variance.reshape(rows))
        )
        return m, v, slope

    @abc.abstractmethod
    def _shares(self, mean: Array, variance: Array) -> Moments:
        """Return the moments in float64. Arguments and results have shape ``[batch, classes]``."""


class Softmax(_Shares):
    """``e^z`` divided by the sum over the sample, linearised at the means.

    With p = softmax(m) and J = p (1 - p), means are p and slopes J. The effect of other units on a
    slope is neglected. Variances are ``J^2 (v + v_max)``, where v_max is the variance of the unit
    with the largest m.
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
    """``max(z, 0)`` divided by the sum over the sample: probabilities in closed form.

    ``MixtureReLU`` gives each class a mean M, a variance V and a slope P. M' and V' are the sums of
    M and V over the classes. The values max(z, 0) and their sum are treated as log-normal: their
    logarithms have variances lambda, lambda' and means kappa, kappa' (:func:`_log_normal`). With c
    = ln(1 + V / (M M')) and w = lambda + lambda' - 2c, the results are:

    - Means: A = exp(kappa - kappa' + w / 2), at least 1e-6, then divided by the sum over classes.
    - Variances: (e^w - 1) A^2.
    - Slopes: (e^(lambda - c) - 1) A M / (P v), limited to a correlation of 1; 0 if v is 0.
    """

    def _shares(self, mean: Array, variance: Array) -> Moments:
        xp = array_module(mean)
        positive, spread, above = (a.astype(np.float64) for a in relu_moments(mean, variance))
        v = xp.maximum(variance.astype(np.float64), SMALLEST)
        total, total_spread = (array.sum(axis=1, keepdims=True) for array in (positive, spread))
        log_variance, log_mean = _log_normal(positive, spread)
        total_log_variance, total_log_mean = _log_normal(total, total_spread)
        log_cross = xp.log1p(spread / (positive * total))
        width = xp.maximum(log_variance + total_log_variance - 2 * log_cross, 0)
        shares = xp.maximum(xp.exp(log_mean - total_log_mean + width / 2), 1e-6)
        shares /= shares.sum(axis=1, keepdims=True)
        variances = xp.expm1(width) * shares * shares
        covariance = xp.expm1(log_variance - log_cross) * shares * positive
        slope = xp.minimum(xp.sqrt(variances * v), covariance / xp.maximum(above, SMALLEST)) / v
        return shares, variances, xp.where(variance > 0, slope, 0)


class ClosedFormSoftmax(_Shares):
    """``e^z`` divided by the sum over the sample; less stable than ``Remax`` for large variances.

    The exponentials have means E = exp(m + v/2) and variances V = E^2 (e^v - 1). E' and V' are the
    sums of E and V over the classes. The sum of the exponentials is treated as log-normal: its
    logarithm has variance lambda' and mean kappa'. With c = ln(1 + V / (E E')) and w = v + lambda'
    - 2c, the means are A = exp(m - kappa' + w / 2), the variances (e^w - 1) A^2, and the slopes A
    (v - c) / v. Variances v above 80 are replaced by 80.
    """

    def _shares(self, mean: Array, variance: Array) -> Moments:
        xp = array_module(mean)
        v = xp.clip(variance.astype(np.float64), SMALLEST, WIDEST)
        m = mean.astype(np.float64)
        m -= (m + v / 2).max(axis=1, keepdims=True)  # exp cannot overflow; the shares do not change
        exponential = xp.exp(m + v / 2)
        total = exponential.sum(axis=1, keepdims=True)
        spread = exponential * exponential * xp.expm1(v)
        total_log_variance, total_log_mean = _log_normal(total, spread.sum(axis=1, keepdims=True))
        log_cross = xp.log1p(exponential * xp.expm1(v) / total)
        width = xp.maximum(v + total_log_variance - 2 * log_cross, 0)
        shares = xp.exp(m - total_log_mean + width / 2)
        return shares, xp.expm1(width) * shares * shares, shares * (v - log_cross) / v


def _log_normal(mean: Array, variance: Array) -> tuple[Array, Array]:
    """Return the variance and the mean of ln(X) for a log-normal X with this mean and variance."""
    xp = array_module(mean)
    log_variance = xp.log1p(variance / (mean * mean))
    return log_variance, xp.log(mean) - log_variance / 2


# Moments of truncated Gaussians with a point mass at each bound, as in pytagi 0.2.1. The formulas
# use tails of the normal distribution, because this avoids differences of nearly equal numbers. A
# variance below the smallest normal number is replaced by that number.


def relu_moments(mean: Array, variance: Array) -> Moments:
    """Return means and variances of max(z, 0), both at least 1e-6, and the slopes P(z > 0)."""
    if is_cupy(mean):
        return kernels.mixture_relu(mean, variance)
    module = native_for(mean)
    if module is not None:
        return _call_kernel(module, "relu", mean, variance)
    m, v, s = _wide(mean, variance)
    q, g, h = tails(abs(m) / s)
    xp, above = array_module(m), m > 0
    moments = xp.where(above, m, 0) + s * g, v * (xp.where(above, 1 - 2 * q, 0) + h)
    return (*map(_floored, moments), xp.where(above, 1 - q, q).astype(REAL))


def tanh_moments(mean: Array, variance: Array, share: float = 1, shift: float = 0) -> Moments:
    """Return the moments of ``share * max(-1, min(z, 1)) + shift``.

    Variances are at least 1e-6. Slopes are ``share * P(|z| < 1)``. The NumPy code computes with |m|
    and restores the sign of m at the end. It uses max(-1, min(z, 1)) = z - max(z - 1, 0) +
    max(-1 - z, 0). By Stein's lemma, the covariance of z with max(z - 1, 0) is v P(z > 1).
    """
    module = native_for(mean)
    if module is not None:
        return _call_kernel(module, "between", mean, variance, share, shift)
    m, v, s = _wide(mean, variance)
    xp = array_module(m)
    far, nearer = (1 + abs(m)) / s, (1 - abs(m)) / s
    inside = nearer >= 0
    q, g, h = tails(abs(nearer))
    far_q, far_g, far_h = tails(far)
    moments = xp.where(inside, abs(m), 1) + s * (far_g - g)
    cut = xp.where(inside, g, g - nearer)  # mean of max(z - 1, 0) in units of s
    kept = xp.where(inside, 1 - 2 * q, 0) + h + (far_h - 2 * far_q) + 2 * cut * far_g
    slope = xp.where(inside, 1 - q, q) - far_q
    mean = xp.sign(m) * moments * share + shift
    return mean.astype(REAL), _floored(v * kept * share**2), (slope * share).astype(REAL)


def _call_kernel(module: Any, kind: str, mean: Array, variance: Array, *options: float) -> Moments:
    is_dense = mean.flags.c_contiguous and variance.flags.c_contiguous
    if not (is_dense and mean.dtype == variance.dtype == REAL):
        # The kernel reads flat memory, so arrays are copied in the order of their strides.
        order = sorted(range(mean.ndim), key=lambda axis: -mean.strides[axis])
        inverse = [order.index(axis) for axis in range(mean.ndim)]
        m, v = (np.ascontiguousarray(array.transpose(order), REAL) for array in (mean, variance))
        m, v, slope = (a.transpose(inverse) for a in _call_kernel(module, kind, m, v, *options))
        return m, v, slope
    moments = np.empty_like(mean), np.empty_like(mean), np.empty_like(mean)
    flat = [floats(module, array) for array in (mean, variance, *moments)]
    getattr(module.lib, f"fl_tagi_mixture_{kind}")(*flat, mean.size, *options)
    return moments


def _wide(mean: Array, variance: Array) -> Moments:
    """Return means, variances and standard deviations in float64."""
    v = array_module(mean).maximum(variance.astype(np.float64), SMALLEST)
    return mean.astype(np.float64), v, array_module(mean).sqrt(v)


def _floored(values: Array) -> Array:
    return array_module(values).maximum(values.astype(REAL), FLOOR)  # type: ignore[no-any-return]


# A fitted quotient computes the tail without a difference of nearly equal numbers. The C library's
# erf would differ between machines.
def tails(a: Array) -> tuple[Array, Array, Array]:
    """Return P(z > a), mean and variance of max(z - a, 0) for z ~ N(0, 1) and float64 a >= 0."""
    xp, x = array_module(a), a * math.sqrt(0.5)
    low, middle, far = xp.minimum(x, SPLIT), xp.clip(x, SPLIT, 4), xp.maximum(x, 4)
    square, inverse = low * low, 1 / (far * far)
    small = (1 - low * quotient(NEAR, square)) * xp.exp(square)
    large = (1 / math.sqrt(math.pi) - inverse * quotient(FAR, inverse)) / far
    scaled = xp.where(x <= SPLIT, small, xp.where(x <= 4, quotient(MIDDLE, middle), large))
    p = xp.exp(-0.5 * a * a) * (1 / math.sqrt(2 * math.pi))  # the density
    ratio = math.sqrt(math.pi / 2) * scaled  # P(z > a) / p
    mean = p * (1 - a * ratio)
    return p * ratio, mean, p * (ratio - a * (1 - a * ratio)) - mean * mean
