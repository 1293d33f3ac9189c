"""The dropout layer."""

from __future__ import annotations

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.dropout import check_ratio
from flashlight_py.nn.module import Module


class Dropout(Module):
    """Zeroes elements at random while training and scales the others up; else the identity.

    Args:
        ratio: the probability with which an element is zeroed, at least 0 and below 1.

    Raises:
        ValueError: ``ratio`` is outside that range.
    """

    def __init__(self, ratio: float = 0.5) -> None:
        check_ratio(ratio)
        self.ratio = ratio

    def forward(self, x: Variable) -> Variable:
        """Return ``x`` with dropout while training, else ``x`` itself."""
        return F.dropout(x, self.ratio if self.training else 0.0)

    def __repr__(self) -> str:
        return f"Dropout({self.ratio})"
