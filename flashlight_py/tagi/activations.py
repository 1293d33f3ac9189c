"""Activations: moments of a function of a Gaussian unit, and the slope that leads back.

Each is a function of means and variances that returns means, variances and slopes, and knows of no
layer. The slope of ``a(z)`` is cov(a, z) / var(z).
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape
from flashlight_py.tagi.states import REAL, BaseHiddenStates

Moments: TypeAlias = tuple[Array, Array, Array]


class Activation(BaseLayer):
    """The base of activations: the same shape, no parameters."""

    has_state = False
    moments: ClassVar[staticmethod[[Array, Array], Moments]]

    def connect(self, shape: Shape) -> Shape:
        """Take inputs of any shape."""
        self.input_shape = self.output_shape = shape
        return shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return moments of the same shape, with the slope of this activation.

        Of units that another activation made, the slope is the product of both.
        """
        variance = array_module(x.mean).zeros_like(x.mean) if x.variance is None else x.variance
        mean, variance, slope = type(self).moments(x.mean, variance)
        return BaseHiddenStates(mean, variance, slope if x.slope is None else slope * x.slope)

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas:
        """Return the deltas as they are: the layer before multiplies them by the slope."""
        return d, e

    def get_layer_info(self) -> str:
        """Return its name, such as ``"ReLU()"``."""
        return f"{self.get_layer_name()}()"


def relu(mean: Array, variance: Array) -> Moments:
    """Linearised at the mean: 0 below 0, the units themselves above."""
    slope = (mean > 0).astype(REAL)
    return mean * slope, variance * slope, slope


class ReLU(Activation):
    """``max(z, 0)``, linearised at the mean."""

    moments = staticmethod(relu)
