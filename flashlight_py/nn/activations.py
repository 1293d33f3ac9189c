"""Activations: without parameters; the shape stays."""

from __future__ import annotations

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.nn.module import Module


class ReLU(Module):
    """``max(x, 0)``, elementwise."""

    def forward(self, x: Variable) -> Variable:
        """Return ``max(x, 0)``."""
        return F.relu(x)

    def __repr__(self) -> str:
        return "ReLU()"


class Tanh(Module):
    """The hyperbolic tangent, elementwise."""

    def forward(self, x: Variable) -> Variable:
        """Return ``tanh(x)``."""
        return F.tanh(x)

    def __repr__(self) -> str:
        return "Tanh()"


class Sigmoid(Module):
    """``1 / (1 + exp(-x))``, elementwise."""

    def forward(self, x: Variable) -> Variable:
        """Return the logistic function of ``x``."""
        return F.sigmoid(x)

    def __repr__(self) -> str:
        return "Sigmoid()"


class LogSoftmax(Module):
    """The logarithm of the softmax along one dimension.

    Args:
        axis: the dimension of the classes, by default the last.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Variable) -> Variable:
        """Return the log probabilities of the scores ``x``."""
        return F.log_softmax(x, self.axis)

    def __repr__(self) -> str:
        return f"LogSoftmax(axis={self.axis})"
