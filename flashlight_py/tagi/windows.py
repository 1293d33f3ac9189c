"""Square windows over images: matrix columns of windows, and mean and maximum pooling.

Images are ``[batch, channels, height, width]``. In memory, the batch or the channels may be first.
A convolution writes its output with channels first, as its matrix product does. Later layers read
this order without a copy.
"""

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape, times_slope
from flashlight_py.tagi.states import REAL, BaseHiddenStates, data_pointer, native_for


class WindowPart(NamedTuple):
    """A chunk of the windows: a range of images and a range of output rows."""

    images: slice
    rows: slice
    columns: slice  # indices of the windows, counted image by image and row by row


@dataclass(frozen=True)
class Windows:
    """Windows of ``kernel`` x ``kernel`` with ``stride`` over images of ``height`` x ``width``.

    ``before`` is the number of zero rows above and zero columns to the left of the images;
    ``after`` is the number below and to the right.
    """

    kernel: int
    stride: int
    before: int
    after: int
    height: int
    width: int

    @property
    def out_height(self) -> int:
        """Number of windows in a column."""
        return (self.height + self.before + self.after - self.kernel) // self.stride + 1

    @property
    def out_width(self) -> int:
        """Number of windows in a row."""
        return (self.width + self.before + self.after - self.kernel) // self.stride + 1

    def parts(self, batch: int, columns: int) -> Iterator[WindowPart]:
        """Divide the windows of ``batch`` images into chunks of at most ``columns`` windows. A row
        with more windows is one chunk."""
        rows, height = max(1, columns // self.out_width), self.out_height
        if rows >= height:
            for images in _evenly(batch, rows // height):
                size = height * self.out_width
                span = slice(images.start * size, images.stop * size)
                yield WindowPart(images, slice(0, height), span)
            return
        for image in range(batch):
            for part in _evenly(height, rows):
                first = (image * height + part.start) * self.out_width
                span = slice(first, first + (part.stop - part.start) * self.out_width)
                yield WindowPart(slice(image, image + 1), part, span)

    def padded(self, images: Array) -> Array:
        around = ((0, 0), (0, 0), *[(self.before, self.after)] * 2)
        return array_module(images).pad(images, around)  # type: ignore[no-any-return]

    def inner(self, padded: Array) -> Array:
        rows, columns = (slice(self.before, self.before + n) for n in (self.height, self.width))
        return padded[:, :, rows, columns]

    def at(self, padded: Array, y: int, x: int) -> Array:
        """Return element (y, x) of each window as ``[batch, channels, out_height, out_width]``."""
        return self.along(self.down(padded, y), x)

    def down(self, padded: Array, y: int) -> Array:
        """Return row ``y`` of the windows as ``[batch, channels, out_height, width]``."""
        return padded[:, :, self._every_stride(y, self.out_height)]

    def along(self, rows: Array, x: int) -> Array:
        """Return element ``x`` of each window's row in ``rows``, a result of :meth:`down`."""
        return rows[..., self._every_stride(x, self.out_width)]

    def _every_stride(self, first: int, count: int) -> slice:
        return slice(first, first + (count - 1) * self.stride + 1, self.stride)


def _evenly(size: int, most: int) -> Iterator[slice]:
    """Divide 0 to ``size`` into the fewest slices of at most ``most``, with similar lengths."""
    count = -(-size // most)
    for number in range(count):
        yield slice(size * number // count, size * (number + 1) // count)


def channel_first(images: Array) -> Array:
    """Return images as ``[channels, batch * height * width]``: a view if possible, else a copy."""
    return images.transpose(1, 0, 2, 3).reshape(images.shape[1], -1)


def batch_first(matrix: Array, shape: tuple[int, ...]) -> Array:
    """Return a view of ``matrix``, ``[channels, batch * height * width]``, with ``shape``."""
    batch, channels, height, width = shape
    return matrix.reshape(channels, batch, height, width).transpose(1, 0, 2, 3)


def readable(mean: Array, variance: Array | None = None) -> tuple[Array, Array | None]:
    """Return both arrays with contiguous rows and equal strides. Copy them if necessary."""
    alike = variance is None or variance.strides == mean.strides
    if alike and mean.strides[3] == mean.itemsize:
        return mean, variance
    return mean.copy(), None if variance is None else variance.copy()


def patches(
    windows: Windows, part: WindowPart, mean: Array, variance: Array | None, out: tuple[Array, ...]
) -> None:
    """Write each window of ``part`` as a column of the matrices ``out``.

    The matrices are contiguous, ``[channels * kernel**2, windows]``. They receive the windows of
    ``mean``, ``variance`` and ``mean**2 + variance``. If ``variance`` is None, they receive the
    windows of ``mean`` and ``mean**2``. Images must come from :func:`readable`.
    """
    columns = out if variance is not None else (out[0], None, *out[1:], None)[:3]
    if call_kernel("patches", windows, part, mean, mean, variance, *columns):
        return
    xp, k = array_module(mean), windows.kernel

    def copy_windows(images: Array, out: Array) -> None:
        padded = windows.padded(images[part.images])
        columns = out.reshape(images.shape[1], k, k, padded.shape[0], -1, windows.out_width)
        for y in range(k):
            for x in range(k):
                columns[:, y, x] = windows.at(padded, y, x)[:, :, part.rows].transpose(1, 0, 2, 3)

    copy_windows(mean, out[0])
    if variance is not None:
        copy_windows(variance, out[1])
        xp.multiply(out[0], out[0], out=out[2])
        out[2][...] += out[1]
    elif len(out) > 1:
        xp.multiply(out[0], out[0], out=out[1])


def add_patches(windows: Windows, part: WindowPart, columns: Array, images: Array) -> None:
    """Add contiguous ``columns`` to ``images`` with contiguous rows: reverses :func:`patches`."""
    if call_kernel("add_patches", windows, part, images, columns, images):
        return
    k, selected = windows.kernel, images[part.images]
    padded = windows.padded(selected)
    split = columns.reshape(images.shape[1], k, k, len(selected), -1, windows.out_width)
    for y in range(k):
        for x in range(k):
            windows.at(padded, y, x)[:, :, part.rows] += split[:, y, x].transpose(1, 0, 2, 3)
    selected[...] = windows.inner(padded)


def contiguous_channels(images: Array) -> Array:
    """Return images with contiguous channels: the same object, or a copy."""
    strides = (images.shape[3] * images.itemsize, images.itemsize)
    return images if images.strides[2:] == strides else images.copy()


def empty_images(x: Array, shape: tuple[int, ...], dtype: DTypeLike = REAL) -> Array:
    """Return new images of ``shape``, with the batch size and memory order of ``x``."""
    xp, (channels, *size) = array_module(x), shape
    if x.strides[0] < x.strides[1]:
        return xp.empty((channels, len(x), *size), dtype).swapaxes(0, 1)  # type: ignore[no-any-return]
    return xp.empty((len(x), *shape), dtype)  # type: ignore[no-any-return]


def call_kernel(
    name: str, windows: Windows, part: WindowPart | None, images: Array,
    *arguments: Array | float | None,
) -> bool:  # fmt: skip
    """Call kernel ``name`` for the windows of ``part`` (None: all). False if there is no kernel."""
    module = native_for(images)
    if module is None:
        return False
    image_range, rows = slice(0, len(images)), slice(0, windows.out_height)
    if part is not None:
        image_range, rows, _ = part
    sizes = (images.shape[1], windows.height, windows.width, windows.out_width)
    geometry = (windows.kernel, windows.stride, windows.before)
    ranges = (image_range.start, image_range.stop, rows.start, rows.stop)
    steps = (step // REAL.itemsize for step in images.strides[:3])
    kernel = getattr(module.lib, f"fl_tagi_{name}")
    values = (a if isinstance(a, int | float) else data_pointer(module, a) for a in arguments)
    if kernel((*sizes, *geometry, *ranges, *steps), *values):
        raise MemoryError(f"{name} needs more memory for the rows of a window")
    return True


class _Extent:
    """Attribute of a layer: a height, width or number of channels; 0 until it is known."""

    def __init__(self, shape_name: str, axis: int) -> None:
        self._shape_name, self._axis = shape_name, axis

    def __get__(self, layer: BaseLayer, owner: object = None) -> int:
        shape: Shape | None = getattr(layer, self._shape_name, None)
        return 0 if shape is None else shape[self._axis]


class ImageLayer(BaseLayer):
    """Base class of layers with a square window over ``[batch, channels, height, width]``.

    Args:
        kernel_size: Height and width of the window, at least 1.
        stride: Distance between two windows, at least 1.
        padding: Number of zero rows or columns on each padded side.
        padding_type: Sides of the padding. 1: all. 2: below and to the right. 0: none; ``padding``
            must be 0.

    Attributes:
        in_channels, in_height, in_width: Size of the input images; 0 until it is known.
        out_channels, out_height, out_width: Size of the output images; 0 until it is known.

    Raises:
        ValueError: If an argument is out of range.
    """

    in_channels, in_height, in_width = (_Extent("input_shape", axis) for axis in range(3))
    out_channels, out_height, out_width = (_Extent("output_shape", axis) for axis in range(3))

    def __init__(self, kernel_size: int, stride: int, padding: int, padding_type: int) -> None:
        super().__init__()
        name = self.get_layer_name()
        if kernel_size < 1 or stride < 1 or padding < 0:
            expected = "kernel_size and stride must be at least 1, padding at least 0"
            raise ValueError(f"{name}: {expected}, got {kernel_size}, {stride}, {padding}")
        if padding_type not in (0, 1, 2):
            raise ValueError(f"{name}: padding_type must be 0, 1 or 2, got {padding_type}")
        if padding and padding_type == 0:
            remedy = "Pass padding_type=1 for all sides, or 2 for below and to the right"
            expected = f"{name}: padding must be 0 for padding_type=0"
            raise ValueError(f"{expected}, got {padding}. {remedy}")
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.padding_type = padding, padding_type

    def _sizes(self) -> Sequence[int]:
        channels, size = (self.in_channels, self.out_channels), (self.out_width, self.out_height)
        return (*channels, *size, self.kernel_size)

    def _cover(self, images: Shape, channels: int) -> Shape:
        """Set input and output shape. Return the output shape (channels, out_height, out_width)."""
        self._over = self._windows(*images[1:])
        self.input_shape = images
        self.output_shape = (channels, self._over.out_height, self._over.out_width)
        return self.output_shape

    def _windows(self, height: int, width: int) -> Windows:
        """Return the windows. Raise ValueError if they do not cover the padded images exactly."""
        before = self.padding if self.padding_type == 1 else 0
        windows = Windows(self.kernel_size, self.stride, before, self.padding, height, width)
        for name, size in (("height", height), ("width", width)):
            remainder = size + before + self.padding - self.kernel_size
            if remainder < 0 or remainder % self.stride:
                raise ValueError(
                    f"expected {name} + padding - kernel_size to be 0 or a multiple of "
                    f"{self.stride}, the stride, got {remainder} for a {name} of {size} with "
                    f"padding {before} before and {self.padding} after it. Change kernel_size, "
                    "stride or padding"
                )
        return windows


def images_of(shape: Shape) -> tuple[int, int, int]:
    """Return the sample shape (channels, height, width), or raise ValueError."""
    if len(shape) != 3:
        raise ValueError(
            f"expected images (channels, height, width), got samples of shape {shape}. Pass an "
            "array [batch, channels, height, width], or in_width and in_height to a convolution"
        )
    return shape


class _Pool(ImageLayer):
    has_state = False
    _slope: Array | None = None
    _like = np.empty((0, 0, 0, 0), REAL)

    def connect(self, shape: Shape) -> Shape:
        images = images_of(shape)
        return self._cover(images, images[0])

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Return the deltas of the input. Each window distributes its deltas to its elements."""
        if not needs_input:
            return None
        shape = self.shape_of_outputs(len(self._like))
        back, back_e = (self._spread(x.reshape(shape), n) for n, x in enumerate((d, e), 1))
        return times_slope(back, back_e, self._slope)

    @abc.abstractmethod
    def _spread(self, deltas: Array, power: int) -> Array:
        """Return the input's deltas of means if ``power`` is 1, of variances if it is 2."""


class AvgPool2d(_Pool):
    """The mean of each window, per channel.

    It maps ``[batch, channels, height, width]`` to ``[batch, channels, out_height, out_width]``.
    With k^2 elements in a window: ``mean = sum(m) / k^2``, ``variance = sum(v) / k^4``. Zeros of
    the padding count as elements.

    Args:
        kernel_size: Height and width of the window.
        stride: Distance between two windows. -1: ``kernel_size``.
        padding, padding_type: See :class:`ImageLayer`.

    Raises:
        ValueError: If an argument is out of range.
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
    """The element with the largest mean of each window, per channel.

    It maps ``[batch, channels, height, width]`` to ``[batch, channels, out_height, out_width]``.
    The output has mean and variance of that element. The first of equal elements is taken, and
    padding is never taken.

    Args:
        kernel_size: Height and width of the window.
        stride: Distance between two windows.
        padding, padding_type: See :class:`ImageLayer`. ``padding`` must be below ``kernel_size``.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, kernel_size: int, stride: int = 1, padding: int = 0, padding_type: int = 0
    ) -> None:
        super().__init__(kernel_size, stride, padding, padding_type)
        if padding >= kernel_size:
            limit = f"kernel_size={kernel_size}"
            raise ValueError(f"MaxPool2d: padding must be below {limit}, got {padding}")
        self._taken = np.empty((0, 0, 0, 0), np.int32)  # index of each window's maximum

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        x = x.shaped(self.input_shape)
        mean, variance, taken = largest(self._over, x.mean, x.variance)
        if self.training:
            self._slope, self._like, self._taken = x.slope, x.mean, taken
        return BaseHiddenStates(mean, variance)

    def _spread(self, deltas: Array, power: int) -> Array:
        return spread_taken(self._over, deltas, self._taken, self._like)


def sum_windows(windows: Windows, images: Array, factor: float) -> Array:
    """Return ``factor`` times the sum of each window, with the memory layout of ``images``."""
    images, _ = readable(images)
    sums = empty_images(images, (images.shape[1], windows.out_height, windows.out_width))
    if call_kernel("sum_windows", windows, None, images, images, sums, *_steps(sums), factor):
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
    """Return images with the shape and memory order of ``like``. Each element is ``factor`` times
    the sum of the deltas of the windows around it."""
    images, deltas = empty_images(like, like.shape[1:]), contiguous_channels(deltas)
    arguments = (deltas, images, *_steps(deltas), factor)
    if call_kernel("spread_windows", windows, None, images, *arguments):
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
    """Return the largest mean of each window, the variance of that element, and its index.

    The first of equal means counts. NaN counts only if all means are NaN. Padding never counts.
    Results are ``[batch, channels, out_height, out_width]`` in the memory order of ``mean``. The
    index is int32, from 0, row by row in the window.
    """
    mean, variance = readable(mean, variance)
    shape = (mean.shape[1], windows.out_height, windows.out_width)
    best, taken = empty_images(mean, shape), empty_images(mean, shape, np.int32)
    best_v = None if variance is None else empty_images(mean, shape)
    results = best, best_v, taken
    if call_kernel("largest", windows, None, mean, mean, variance, *results, *_steps(best)):
        return results
    xp, padded = array_module(mean), windows.padded(mean)
    inside = windows.padded(xp.ones_like(mean[:1, :1], dtype=bool))
    padded_v = None if variance is None else windows.padded(variance)
    best[...] = np.nan
    taken[...] = 0
    for position, (y, x) in enumerate(np.ndindex(windows.kernel, windows.kernel)):
        element = windows.at(padded, y, x)
        better = ((element > best) | xp.isnan(best)) & windows.at(inside, y, x)
        xp.copyto(best, element, where=better)
        xp.copyto(taken, position, where=better)
        if padded_v is not None:
            xp.copyto(best_v, windows.at(padded_v, y, x), where=better)
    return results


def spread_taken(windows: Windows, deltas: Array, taken: Array, like: Array) -> Array:
    """Return images with the shape and memory order of ``like``. Each window adds its delta to the
    element selected by ``taken`` (see :func:`largest`). The other elements are 0."""
    images, deltas = empty_images(like, like.shape[1:]), contiguous_channels(deltas)
    images[...] = 0
    arguments = (deltas, *_steps(deltas), taken, *_steps(taken))
    if call_kernel("spread_taken", windows, None, images, *arguments, images):
        return images
    padded = windows.padded(images)  # NumPy adds in another order than the kernel
    for position, (y, x) in enumerate(np.ndindex(windows.kernel, windows.kernel)):
        windows.at(padded, y, x)[...] += array_module(images).where(taken == position, deltas, 0)
    images[...] = windows.inner(padded)
    return images


def _steps(images: Array) -> tuple[int, int]:
    batch_step, channel_step = (step // images.itemsize for step in images.strides[:2])
    return batch_step, channel_step
