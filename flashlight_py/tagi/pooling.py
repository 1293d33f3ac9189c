"""Layers that make images smaller: the mean of each window, or its largest element."""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import Deltas, Shape, times_slope
from flashlight_py.tagi.states import REAL, BaseHiddenStates
from flashlight_py.tagi.windows import (
    ImageLayer,
    Windows,
    call,
    contiguous,
    empty_like,
    images_of,
    readable,
)


class _Pool(ImageLayer):
    has_state = False
    _slope: Array | None = None
    _like = np.empty((0, 0, 0, 0), REAL)

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

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
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
        shape, count = self.shape_of_outputs(len(self._like)), self.kernel_size**2
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
        self._taken = np.empty((0, 0, 0, 0), np.int32)  # place in its window, row by row

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
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


def sum_windows(windows: Windows, images: Array, factor: float) -> Array:
    """Return the sum of each window times ``factor``, ``[batch, channels, out_height,
    out_width]``; in the order of batch and channels that the images have.
    """
    images, _ = readable(images)
    sums = empty_like(images, (images.shape[1], windows.out_height, windows.out_width))
    if call("sum_windows", windows, None, images, images, sums, *_steps(sums), factor):
        return sums
    padded = windows.padded(images)
    down = windows.down(padded, 0).copy()
    for y in range(1, windows.kernel):
        down += windows.down(padded, y)
    sums[...] = 0
    for x in range(windows.kernel):
        sums += windows.along(down, x)
    sums *= REAL.type(factor)
    return sums


def spread_windows(windows: Windows, deltas: Array, factor: float, like: Array) -> Array:
    """Return images that have ``factor`` times the delta of each window at its places, added up:
    the adjoint of :func:`sum_windows`.

    Args:
        windows: over the images.
        deltas: ``[batch, channels, out_height, out_width]``.
        factor: of all.
        like: images of the shape, batch and channels lying in the order, that those returned have.
    """
    images, deltas = empty_like(like, like.shape[1:]), contiguous(deltas)
    if call("spread_windows", windows, None, images, deltas, images, *_steps(deltas), factor):
        return images
    padded = windows.padded(array_module(images).zeros_like(images))
    rows = array_module(images).zeros_like(windows.down(padded, 0))
    deltas = deltas * REAL.type(factor)
    for x in range(windows.kernel):
        windows.along(rows, x)[...] += deltas
    for y in range(windows.kernel):
        windows.down(padded, y)[...] += rows
    images[...] = windows.inner(padded)
    return images


def largest(
    windows: Windows, mean: Array, variance: Array | None
) -> tuple[Array, Array | None, Array]:
    """Return the largest mean of each window, the variance of the same element, and which it is.

    The first of several, row by row; NaN only where there is nothing else; never one of the zeros
    around the images.

    Args:
        windows: over the images.
        mean: ``[batch, channels, height, width]``.
        variance: the same shape; or None, and then None is returned.

    Returns:
        Images ``[batch, channels, out_height, out_width]`` in the order of batch and channels that
        ``mean`` has; the last ones int32: the place in the window, from 0, row by row.
    """
    mean, variance = readable(mean, variance)
    shape = (mean.shape[1], windows.out_height, windows.out_width)
    best, taken = empty_like(mean, shape), empty_like(mean, shape, np.int32)
    best_v = None if variance is None else empty_like(mean, shape)
    found = best, best_v, taken
    if call("largest", windows, None, mean, mean, variance, *found, *_steps(best)):
        return found
    xp, padded = array_module(mean), windows.padded(mean)
    inside = windows.padded(xp.ones_like(mean[:1, :1], dtype=bool))
    padded_v = None if variance is None else windows.padded(variance)
    best[...] = np.nan
    taken[...] = 0
    for place, (y, x) in enumerate(np.ndindex(windows.kernel, windows.kernel)):
        here = windows.at(padded, y, x)
        better = ((here > best) | xp.isnan(best)) & windows.at(inside, y, x)
        xp.copyto(best, here, where=better)
        xp.copyto(taken, place, where=better)
        if padded_v is not None:
            xp.copyto(best_v, windows.at(padded_v, y, x), where=better)
    return found


def spread_taken(windows: Windows, deltas: Array, taken: Array, like: Array) -> Array:
    """Return images that have the delta of each window at the element that was taken, added up.

    Args:
        windows: over the images.
        deltas: ``[batch, channels, out_height, out_width]``.
        taken: as :func:`largest` has returned it, the same shape.
        like: images of the shape, batch and channels lying in the order, that those returned have.
    """
    images, deltas = empty_like(like, like.shape[1:]), contiguous(deltas)
    images[...] = 0
    where = (deltas, *_steps(deltas), taken, *_steps(taken))
    if call("spread_taken", windows, None, images, *where, images):
        return images
    padded = windows.padded(images)  # in another order of additions than the kernel's
    for place, (y, x) in enumerate(np.ndindex(windows.kernel, windows.kernel)):
        windows.at(padded, y, x)[...] += array_module(images).where(taken == place, deltas, 0)
    images[...] = windows.inner(padded)
    return images


def _steps(images: Array) -> tuple[int, int]:
    """Return how many elements the images, and their channels, are apart."""
    batch_step, channel_step = (step // images.itemsize for step in images.strides[:2])
    return batch_step, channel_step
