"""Activations: moments of a function of a Gaussian unit, and the slope that leads back.

Each is a function of means and variances, float32 arrays of one shape, that returns new arrays of
means, variances and slopes, and knows of no layer. The slope of ``a(z)`` is cov(a, z) / var(z).
Those that no bound cuts off are linearised at the mean: ``a(m)``, ``a'(m)^2 v``, ``a'(m)``.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape
from flashlight_py.tagi.mixtures import Moments, mixture_relu, mixture_sigmoid, mixture_tanh
from flashlight_py.tagi.states import REAL, BaseHiddenStates

LEAK = REAL.type(0.1)
HIGHEST = 88.0  # of exponents: e^88 is near float32's largest number


class Activation(BaseLayer):
    """The base of activations: the same shape, no parameters."""

    has_state = False
    keeps_input = False
    _function: ClassVar[staticmethod[[Array, Array], Moments]]

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

    def get_layer_info(self) -> str:
        """Return its name, such as ``"ReLU()"``."""
        return f"{self.get_layer_name()}()"

    def _moments(self, mean: Array, variance: Array) -> Moments:
        return type(self)._function(mean, variance)


def relu(mean: Array, variance: Array) -> Moments:
    """Return 0 below 0, the units themselves above, linearised."""
    slope = (mean > 0).astype(REAL)
    return mean * slope, variance * slope, slope


def leaky_relu(mean: Array, variance: Array) -> Moments:
    """Return a tenth of the units below 0, the units themselves above."""
    slope = array_module(mean).where(mean > 0, REAL.type(1), LEAK)
    return mean * slope, variance * (slope * slope), slope


def sigmoid(mean: Array, variance: Array) -> Moments:
    """Return 1 / (1 + e^-m), linearised."""
    xp = array_module(mean)
    small = xp.exp(-abs(mean))  # at most 1, of either sign
    whole = 1 / (1 + small)
    slope = small * whole * whole
    return xp.where(mean > 0, whole, small * whole), variance * (slope * slope), slope


def tanh(mean: Array, variance: Array) -> Moments:
    """Return tanh(m), linearised."""
    xp = array_module(mean)
    small = xp.exp(-2 * abs(mean))
    whole = 1 / (1 + small)
    slope = 4 * small * whole * whole  # 1 - tanh(m)^2, and exact where this is near 0
    return xp.tanh(mean), variance * (slope * slope), slope


def softplus(mean: Array, variance: Array) -> Moments:
    """Return ln(1 + e^m), linearised."""
    xp = array_module(mean)
    slope, _, _ = sigmoid(mean, variance)
    value = xp.log1p(xp.exp(-abs(mean))) + xp.maximum(mean, 0)
    return value, variance * (slope * slope), slope


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


class ReLU(Activation):
    """``max(z, 0)``, linearised at the mean."""

    _function = staticmethod(relu)


class LeakyReLU(Activation):
    """``max(z, z / 10)``, linearised at the mean."""

    _function = staticmethod(leaky_relu)


class Sigmoid(Activation):
    """``1 / (1 + e^-z)``, linearised at the mean."""

    _function = staticmethod(sigmoid)


class Tanh(Activation):
    """``tanh(z)``, linearised at the mean."""

    _function = staticmethod(tanh)


class Softplus(Activation):
    """``ln(1 + e^z)``, linearised at the mean."""

    _function = staticmethod(softplus)


class MixtureReLU(Activation):
    """``max(z, 0)``, with the exact moments of a Gaussian that is cut off."""

    _function = staticmethod(mixture_relu)


class MixtureSigmoid(Activation):
    """``max(0, min((z + 1) / 2, 1))``, with the exact moments of a Gaussian that is cut off."""

    _function = staticmethod(mixture_sigmoid)


class MixtureTanh(Activation):
    """``max(-1, min(z, 1))``, with the exact moments of a Gaussian that is cut off."""

    _function = staticmethod(mixture_tanh)


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
        """Take samples of an even number of units.

        Raises:
            ValueError: it is odd.
        """
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
