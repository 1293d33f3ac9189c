"""Square windows over images: as columns of a matrix, and back; and pools: the mean, the largest.

Images are ``[batch, channels, height, width]``. They may lie in memory in any order of batch and
channels: a convolution writes its output channel by channel, as its product of matrices leaves it,
and the layers behind it read that as it lies.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape, times_slope
from flashlight_py.tagi.native import address, native_for
from flashlight_py.tagi.states import REAL, BaseHiddenStates


class WindowPart(NamedTuple):
    """The windows of some images, in some rows of the output."""

    images: slice
    rows: slice
    columns: slice  # where they are among all windows: image by image, row by row


@dataclass(frozen=True)
class Windows:
    """Windows of ``kernel`` x ``kernel``, ``stride`` apart, over images of ``height`` x ``width``.

    ``before`` and ``after`` are how many rows and columns of zeros there are above and to the left
    of the images, and below and to the right.
    """

    kernel: int
    stride: int
    before: int
    after: int
    height: int
    width: int

    @property
    def out_height(self) -> int:
        """How many windows there are below each other."""
        return (self.height + self.before + self.after - self.kernel) // self.stride + 1

    @property
    def out_width(self) -> int:
        """How many windows there are beside each other."""
        return (self.width + self.before + self.after - self.kernel) // self.stride + 1

    def parts(self, batch: int, columns: int) -> Iterator[WindowPart]:
        """Divide the windows of ``batch`` images into parts of about ``columns``, at most so many
        where a row has not more.
        """
        rows, height = max(1, columns // self.out_width), self.out_height
        if rows >= height:
            for images in _evenly(batch, rows // height):
                size = height * self.out_width
                places = slice(images.start * size, images.stop * size)
                yield WindowPart(images, slice(0, height), places)
            return
        for image in range(batch):
            for part in _evenly(height, rows):
                first = (image * height + part.start) * self.out_width
                places = slice(first, first + (part.stop - part.start) * self.out_width)
                yield WindowPart(slice(image, image + 1), part, places)

    def padded(self, images: Array) -> Array:
        """Return copies of the images with zeros around them."""
        around = ((0, 0), (0, 0), *[(self.before, self.after)] * 2)
        return array_module(images).pad(images, around)  # type: ignore[no-any-return]

    def inner(self, padded: Array) -> Array:
        """Return the images inside their padding; a view."""
        rows, columns = (slice(self.before, self.before + n) for n in (self.height, self.width))
        return padded[:, :, rows, columns]

    def at(self, padded: Array, y: int, x: int) -> Array:
        """Return the element (y, x) of every window, ``[batch, channels, out_height, out_width]``;
        a view.
        """
        return self.along(self.down(padded, y), x)

    def down(self, padded: Array, y: int) -> Array:
        """Return row ``y`` of every row of windows, as wide as it is; a view."""
        return padded[:, :, self._each(y, self.out_height)]

    def along(self, rows: Array, x: int) -> Array:
        """Return element ``x`` of every window of these rows; a view."""
        return rows[..., self._each(x, self.out_width)]

    def _each(self, first: int, count: int) -> slice:
        return slice(first, first + (count - 1) * self.stride + 1, self.stride)


def _evenly(size: int, most: int) -> Iterator[slice]:
    """Yield slices of 0 to ``size``, as few as have at most ``most``, and about equal."""
    count = -(-size // most)
    for number in range(count):
        yield slice(size * number // count, size * (number + 1) // count)


def channel_first(images: Array) -> Array:
    """Return ``[channels, batch * height * width]``: a view where they lie so, or else a copy."""
    return images.transpose(1, 0, 2, 3).reshape(images.shape[1], -1)


def batch_first(matrix: Array, shape: tuple[int, ...]) -> Array:
    """Return ``[channels, batch * height * width]`` as images of ``shape``; a view."""
    batch, channels, height, width = shape
    return matrix.reshape(channels, batch, height, width).transpose(1, 0, 2, 3)


def readable(mean: Array, variance: Array | None = None) -> tuple[Array, Array | None]:
    """Return images with contiguous rows and the same strides: themselves, or else copies."""
    alike = variance is None or variance.strides == mean.strides
    if alike and mean.strides[3] == mean.itemsize:
        return mean, variance
    return mean.copy(), None if variance is None else variance.copy()


def patches(
    windows: Windows, part: WindowPart, mean: Array, variance: Array | None, out: tuple[Array, ...]
) -> None:
    """Write windows of a part as columns, ``[channels * kernel**2, windows]``.

    Into ``out``, contiguous: those of ``mean``, and with a ``variance`` of it and of ``mean**2 +
    variance``; otherwise, if it has two, of ``mean**2``. Images are as of :func:`readable`.
    """
    columns = out if variance is not None else (out[0], None, *out[1:], None)[:3]
    if call("patches", windows, part, mean, mean, variance, *columns):
        return
    xp, k = array_module(mean), windows.kernel

    def taken(images: Array, out: Array) -> None:
        padded = windows.padded(images[part.images])
        columns = out.reshape(images.shape[1], k, k, padded.shape[0], -1, windows.out_width)
        for y in range(k):
            for x in range(k):
                found = windows.at(padded, y, x)[:, :, part.rows]
                columns[:, y, x] = found.transpose(1, 0, 2, 3)

    taken(mean, out[0])
    if variance is not None:
        taken(variance, out[1])
        xp.multiply(out[0], out[0], out=out[2])
        out[2][...] += out[1]
    elif len(out) > 1:
        xp.multiply(out[0], out[0], out=out[1])


def add_patches(windows: Windows, part: WindowPart, columns: Array, images: Array) -> None:
    """Add columns, as of :func:`patches`, to the places that they are of, in place: its adjoint.

    Both are contiguous, images in their rows.
    """
    if call("add_patches", windows, part, images, columns, images):
        return
    k, chosen = windows.kernel, images[part.images]
    padded = windows.padded(chosen)
    split = columns.reshape(images.shape[1], k, k, len(chosen), -1, windows.out_width)
    for y in range(k):
        for x in range(k):
            windows.at(padded, y, x)[:, :, part.rows] += split[:, y, x].transpose(1, 0, 2, 3)
    chosen[...] = windows.inner(padded)


def contiguous(images: Array) -> Array:
    """Return images of which each channel is contiguous: the same object, or else a copy."""
    strides = (images.shape[3] * images.itemsize, images.itemsize)
    return images if images.strides[2:] == strides else images.copy()


def empty_like(x: Array, shape: tuple[int, ...], dtype: DTypeLike = REAL) -> Array:
    """Return new images for the batch of ``x``, in the order of batch and channels that it has."""
    xp, (channels, *size) = array_module(x), shape
    if x.strides[0] < x.strides[1]:
        return xp.empty((channels, len(x), *size), dtype).swapaxes(0, 1)  # type: ignore[no-any-return]
    return xp.empty((len(x), *shape), dtype)  # type: ignore[no-any-return]


def call(
    name: str, windows: Windows, part: WindowPart | None, images: Array,
    *arguments: Array | float | None,
) -> bool:  # fmt: skip
    """Call the kernel with a description of a part of the windows (None: all), and ``arguments``.

    Returns False, and does nothing, where there is none for ``images``.
    """
    module = native_for(images)
    if module is None:
        return False
    images_in, rows = slice(0, len(images)), slice(0, windows.out_height)
    if part is not None:
        images_in, rows, _ = part
    sizes = (images.shape[1], windows.height, windows.width, windows.out_width)
    moved = (windows.kernel, windows.stride, windows.before)
    chosen = (images_in.start, images_in.stop, rows.start, rows.stop)
    steps = (step // REAL.itemsize for step in images.strides[:3])
    described = module.ffi.new("fl_tagi_windows *", (*sizes, *moved, *chosen, *steps))
    kernel = getattr(module.lib, f"fl_tagi_{name}")
    given = (a if isinstance(a, int | float) else address(module, a) for a in arguments)
    if kernel(described, *given):
        raise MemoryError(f"{name}: no memory is left for the rows of a window")
    return True


class _Extent:
    """An attribute of a layer: an extent of its images, 0 until it is known."""

    def __init__(self, of: str, at: int) -> None:
        self._of, self._at = of, at

    def __get__(self, layer: BaseLayer, owner: object = None) -> int:
        shape: Shape | None = getattr(layer, self._of, None)
        return 0 if shape is None else shape[self._at]


class ImageLayer(BaseLayer):
    """The base of layers that move a square window over images ``[batch, channels, height,
    width]``.

    Args:
        kernel_size: height and width of the window, at least 1.
        stride: from one window to the next, at least 1.
        padding: how many rows and columns of zeros are put around the images.
        padding_type: where: 1: on all sides; 2: below and to the right; 0: nowhere, and then
            ``padding`` must be 0.

    Attributes:
        in_channels, in_height, in_width: of the input images; 0 until they are known.
        out_channels, out_height, out_width: of the output images; 0 until they are known.

    Raises:
        ValueError: one of them is out of range.
    """

    in_channels, in_height, in_width = (_Extent("input_shape", at) for at in range(3))
    out_channels, out_height, out_width = (_Extent("output_shape", at) for at in range(3))

    def __init__(self, kernel_size: int, stride: int, padding: int, padding_type: int) -> None:
        super().__init__()
        name = self.get_layer_name()
        if kernel_size < 1 or stride < 1 or padding < 0:
            raise ValueError(
                f"{name}: kernel_size and stride must be at least 1, padding at least 0; got "
                f"{kernel_size}, {stride}, {padding}"
            )
        if padding_type not in (0, 1, 2):
            raise ValueError(f"{name}: padding_type must be 0, 1 or 2, got {padding_type}")
        if padding and padding_type == 0:
            raise ValueError(
                f"{name}: padding_type 0 is no padding, got padding={padding}; pass padding_type=1 "
                "for all sides, 2 for below and to the right"
            )
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.padding_type = padding, padding_type

    def _sizes(self) -> Sequence[int]:
        channels, size = (self.in_channels, self.out_channels), (self.out_width, self.out_height)
        return (*channels, *size, self.kernel_size)

    def _cover(self, images: Shape, channels: int) -> Shape:
        """Take ``images``, to an output of so many channels with an element for each window."""
        self._over = self._windows(*images[1:])
        self.input_shape = images
        self.output_shape = (channels, self._over.out_height, self._over.out_width)
        return self.output_shape

    def _windows(self, height: int, width: int) -> Windows:
        """Return the windows over images of this size, if they cover them exactly."""
        before = self.padding if self.padding_type == 1 else 0
        windows = Windows(self.kernel_size, self.stride, before, self.padding, height, width)
        for name, size in (("height", height), ("width", width)):
            rest = size + before + self.padding - self.kernel_size
            if rest < 0 or rest % self.stride:
                raise ValueError(
                    f"windows of {self.kernel_size}, {self.stride} apart, do not cover a {name} of "
                    f"{size} with padding {before} before and {self.padding} after it exactly; "
                    f"{rest} is to be 0 or a multiple of {self.stride}: change padding, "
                    "padding_type, kernel_size or the images"
                )
        return windows


def images_of(shape: Shape) -> tuple[int, int, int]:
    """Return the shape of a sample as (channels, height, width), if it is one."""
    if len(shape) != 3:
        raise ValueError(
            f"expected images (channels, height, width), got samples of shape {shape}; pass an "
            "array [batch, channels, height, width], or in_width and in_height to a convolution"
        )
    return shape


class _Pool(ImageLayer):
    has_state = False
    _slope: Array | None = None
    _like = np.empty((0, 0, 0, 0), REAL)

    def connect(self, shape: Shape) -> Shape:
        """Take images that the windows cover exactly."""
        images = images_of(shape)
        return self._cover(images, images[0])

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Return to each element the shares of its windows' deltas, added up, times slopes."""
        if not wanted:
            return None
        shape = self.shape_of_outputs(len(self._like))
        back, back_e = (self._spread(each.reshape(shape), n) for n, each in enumerate((d, e), 1))
        return times_slope(back, back_e, self._slope)

    @abc.abstractmethod
    def _spread(self, deltas: Array, power: int) -> Array:
        """Return new images with the deltas of the means (``power`` 1), or of the variances (2)."""


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
        stride = kernel_size if stride == -1 else stride
        super().__init__(kernel_size, stride, padding, padding_type)

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        x = x.shaped(self.input_shape)
        if self.training:
            self._slope, self._like = x.slope, x.mean
        count = self.kernel_size**2
        variance = None if x.variance is None else sum_windows(self._over, x.variance, 1 / count**2)
        return BaseHiddenStates(sum_windows(self._over, x.mean, 1 / count), variance)

    def _spread(self, deltas: Array, power: int) -> Array:
        return spread_windows(self._over, deltas, 1 / self.kernel_size ** (2 * power), self._like)


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

    def _spread(self, deltas: Array, power: int) -> Array:
        return spread_taken(self._over, deltas, self._taken, self._like)


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
    the adjoint of :func:`sum_windows`. They have the shape, and the order in memory, of ``like``.
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
    around the images. Images ``[batch, channels, out_height, out_width]`` in the order of batch and
    channels that ``mean`` has; the last ones int32: the place in the window, from 0, row by row.
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
    """Return images that have the delta of each window at the element that was ``taken``, as of
    :func:`largest`, added up. They have the shape, and the order in memory, of ``like``.
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
