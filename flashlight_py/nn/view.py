"""The reshaping layer."""

from __future__ import annotations

from collections.abc import Sequence

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.nn.module import Module


class View(Module):
    """Gives its input another shape, the batch dimension included.

    Args:
        shape: the new shape; one entry may be -1 and is then computed, so that ``(-1, 784)``
            takes any batch.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def forward(self, x: Variable) -> Variable:
        """Return ``x`` in the new shape.

        Raises:
            ValueError: the number of elements differs.
        """
        return F.reshape(x, self.shape)

    def __repr__(self) -> str:
        return f"View({self.shape})"
