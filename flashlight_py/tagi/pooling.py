"""Layers that make images smaller: the mean of each window, or its largest element."""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array
from flashlight_py.tagi.images import ImageLayer, images_of
from flashlight_py.tagi.layer import Deltas, Shape, times_slope
from flashlight_py.tagi.pools import largest, spread_taken, spread_windows, sum_windows
from flashlight_py.tagi.states import REAL, BaseHiddenStates


class _Pool(ImageLayer):
    has_state = False

    def connect(self, shape: Shape) -> Shape:
        """Take images that the windows cover exactly."""
        images = images_of(shape)
        self._over = self._windows(*images[1:])
        self.input_shape = images
        self.output_shape = (images[0], self._over.out_height, self._over.out_width)
        return self.output_shape


class AvgPool2d(_Pool):
    """The mean of each window, channel by channel: ``[batch, channels, height, width]`` to
    ``[batch, channels, out_height, out_width]``.

    With k^2 elements: ``mean = sum(m) / k^2``, ``variance = sum(v) / k^4``. The zeros around an
    image count.

    Args:
        kernel_size: height and width of the window.
        stride: from one window to the next; -1: ``kernel_size``.
        padding, padding_type: see :class:`ImageLayer`.

    Raises:
        ValueError: one of them is out of range.
    """

    def __init__(
        self, kernel_size: int, stride: int = -1, padding: int = 0, padding_type: int = 0
    ) -> None:
        super().__init__(
            kernel_size, kernel_size if stride == -1 else stride, padding, padding_type
        )
        self._slope: Array | None = None
        self._like = np.empty((0, 0, 0, 0), REAL)

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return ``[batch, *output_shape]``."""
        assert self.input_shape is not None
        x = x.shaped(self.input_shape)
        if self.training:
            self._slope, self._like = x.slope, x.mean
        count = self.kernel_size**2
        variance = None if x.variance is None else sum_windows(self._over, x.variance, 1 / count**2)
        return BaseHiddenStates(sum_windows(self._over, x.mean, 1 / count), variance)

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Return to each element ``d / k^2`` and ``e / k^4`` of its windows, times slopes."""
        if not wanted:
            return None
        assert self.output_shape is not None
        shape, count = (len(self._like), *self.output_shape), self.kernel_size**2
        back = spread_windows(self._over, d.reshape(shape), 1 / count, self._like)
        back_e = spread_windows(self._over, e.reshape(shape), 1 / count**2, self._like)
        return times_slope(back, back_e, self._slope)


class MaxPool2d(_Pool):
    """The element of the largest mean of each window, channel by channel: ``[batch, channels,
    height, width]`` to ``[batch, channels, out_height, out_width]``.

    The output has the mean and the variance of that element; the first, row by row, of several. The
    places around an image are never taken.

    Args:
        kernel_size: height and width of the window.
        stride: from one window to the next.
        padding, padding_type: see :class:`ImageLayer`; the padding is below ``kernel_size``.

    Raises:
        ValueError: one of them is out of range.
    """

    def __init__(
        self, kernel_size: int, stride: int = 1, padding: int = 0, padding_type: int = 0
    ) -> None:
        super().__init__(kernel_size, stride, padding, padding_type)
        if padding >= kernel_size:
            raise ValueError(
                f"MaxPool2d: a window of {kernel_size} that lies in a padding of {padding} has "
                "no largest element"
            )
        self._slope: Array | None = None
        self._like = np.empty((0, 0, 0, 0), REAL)
        self._taken = np.empty((0, 0, 0, 0), np.int32)  # place in its window, row by row

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return ``[batch, *output_shape]``."""
        assert self.input_shape is not None
        x = x.shaped(self.input_shape)
        mean, variance, taken = largest(self._over, x.mean, x.variance)
        if self.training:
            self._slope, self._like, self._taken = x.slope, x.mean, taken
        return BaseHiddenStates(mean, variance)

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Return ``d`` and ``e`` to the elements that were taken, added up, times slopes."""
        if not wanted:
            return None
        over, taken, like = self._over, self._taken, self._like
        back, back_e = (
            spread_taken(over, each.reshape(taken.shape), taken, like) for each in (d, e)
        )
        return times_slope(back, back_e, self._slope)
