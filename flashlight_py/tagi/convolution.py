"""Convolutions of Gaussian images with Gaussian kernels, as products of matrices."""

from __future__ import annotations

import threading

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.tagi.layer import Deltas, Shape, times_slope
from flashlight_py.tagi.parameters import Parameter, gaussian, spread
from flashlight_py.tagi.states import REAL, BaseHiddenStates
from flashlight_py.tagi.windows import (
    ImageLayer,
    WindowPart,
    Windows,
    add_patches,
    batch_first,
    channel_first,
    images_of,
    patches,
    readable,
)

# How many bytes of columns are made before they are used: what the cache of a core holds; on a GPU,
# what keeps it busy. But at least so many columns, as each part reads all weights.
CACHED, CACHED_ON_GPU, COLUMNS = 1 << 21, 1 << 28, 256


class _Convolution(ImageLayer):
    """The base of a convolution and its transpose: parameters, and the shape of images."""

    transposed = False

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, bias: bool = True,
        stride: int = 1, padding: int = 0, padding_type: int = 1, in_width: int = 0,
        in_height: int = 0, gain_weight: float = 1.0, gain_bias: float = 1.0,
        init_method: str = "He",
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, padding_type)
        name = self.get_layer_name()
        if in_channels < 1 or out_channels < 1:
            raise ValueError(
                f"{name}: numbers of channels must be at least 1, got {in_channels}, {out_channels}"
            )
        if in_width < 0 or in_height < 0 or bool(in_width) != bool(in_height):
            raise ValueError(
                f"{name}: in_width and in_height are both sizes of the images, or both 0, got "
                f"{in_width} and {in_height}"
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self._stated = (in_height, in_width) if in_width else None
        if self._stated is not None:
            self.input_shape = (in_channels, *self._stated)
        deviation = spread(init_method, kernel_size**2 * in_channels, kernel_size**2 * out_channels)
        channels = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        shape = (*channels, kernel_size, kernel_size)
        self.weight: Parameter = gaussian(shape, deviation, gain_weight)
        self.biases = gaussian((out_channels,), deviation, gain_bias) if bias else None
        self._x = BaseHiddenStates(np.empty((0, in_channels, 0, 0), REAL))
        self._square = np.empty((0, 0), REAL)  # of the weights' means, until the backward pass

    def _input_images(self, shape: Shape) -> tuple[int, int, int]:
        """Return the shape of input images for samples of ``shape``."""
        known = self.input_shape
        if len(shape) == 1 and known is not None:
            if shape[0] != self.input_size:
                raise ValueError(
                    f"expected {self.input_size} elements a sample, images of {known}, got {shape}"
                )
            return images_of(known)
        images = images_of(shape)
        if images[0] != self.in_channels:
            raise ValueError(f"expected {self.in_channels} channels, got images of shape {shape}")
        if self._stated not in (None, images[1:]):
            raise ValueError(f"in_height and in_width are {self._stated}, got images of {images}")
        return images

    def _add_biases(self, mean: Array, variance: Array) -> None:
        if self.biases is not None:
            mean += self.biases.mean[:, None]
            variance += self.biases.variance[:, None]

    def _take_sums(self, sums: Array, d: Array, e: Array) -> None:
        """Set the sums of the weights, and those of the biases from deltas channel by channel."""
        for home, found in zip((self.weight.mean_sum, self.weight.variance_sum), sums, strict=True):
            home[...] = found.reshape(home.shape)
        self._sum_biases(d, e, 1)

    def _matrices(self) -> tuple[Array, Array]:
        """Return means and variances of the weights as matrices; views."""
        mean, variance = self.weight.mean, self.weight.variance
        return mean.reshape(len(mean), -1), variance.reshape(len(mean), -1)


class Conv2d(_Convolution):
    """Each output is the sum over a window, of all channels, of inputs times weights, plus a bias:
    ``[batch, in_channels, height, width]`` to ``[batch, out_channels, out_height, out_width]``.

    The moments are those of :class:`Linear` for the inputs of each window; around the images, where
    windows reach over them, units are 0 for certain. An output image has ``(size + padding -
    kernel_size) / stride + 1`` rows and columns, with the padding of both sides.

    Args:
        in_channels, out_channels: at least 1.
        kernel_size: height and width of the window.
        bias: whether there is a bias for each output channel.
        stride, padding, padding_type: see :class:`ImageLayer`.
        in_width, in_height: of the input images; needed where the samples that the layer is passed
            are flat, otherwise 0.
        gain_weight, gain_bias: factors of the standard deviations that the parameters start with.
        init_method: ``"He"``: means of N(0, 1 / fan_in); ``"Xavier"``: of N(0, 2 / (fan_in +
            fan_out)), with ``fan_in = in_channels * kernel_size**2``, ``fan_out`` alike.

    Attributes:
        weight: ``[out_channels, in_channels, kernel_size, kernel_size]``.

    Raises:
        ValueError: a size is out of range; one of ``in_width`` and ``in_height`` is 0 and the other
            is not; ``init_method`` is neither.
    """

    def connect(self, shape: Shape) -> Shape:
        """Take images, or flat samples where the layer knows width and height, that the windows
        cover exactly.
        """
        return self._cover(self._input_images(shape), self.out_channels)

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return ``[batch, *output_shape]``, which lie channel by channel."""
        x = x.shaped(self.input_shape)
        xp, shape = array_module(x.mean), self.shape_of_outputs(len(x.mean))
        weight, variance = self._matrices()
        means, variances = readable(x.mean, x.variance)
        square = xp.square(weight)
        # With the columns of variances above those of mean^2 + variance: one product for both.
        both = variance if variances is None else xp.concatenate((square, variance), axis=1)
        z, zv = (xp.empty((len(weight), shape[0] * shape[2] * shape[3]), REAL) for _ in range(2))
        kinds = 2 if variances is None else 3
        for part, columns in _columns(self._over, len(means), weight.shape[1], kinds, means):
            patches(self._over, part, means, variances, tuple(columns))
            xp.matmul(weight, columns[0], out=z[:, part.columns])
            xp.matmul(both, columns[1:].reshape(-1, columns.shape[2]), out=zv[:, part.columns])
        self._add_biases(z, zv)
        if self.training:
            self._x, self._square = BaseHiddenStates(means, None, x.slope), square
        return BaseHiddenStates(batch_first(z, shape), batch_first(zv, shape))

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Set the sums over windows of ``d`` times means, of ``e`` times their squares; return the
        windows' ``d @ W`` and ``e @ W**2``, added where they overlap, times slopes.
        """
        x, over = self._x, self._over
        xp, batch = array_module(x.mean), len(x.mean)
        weight, _ = self._matrices()
        inputs = weight.shape[1]
        shape = self.shape_of_outputs(batch)
        d, e = (channel_first(each.reshape(shape)) for each in (d, e))
        sums = xp.zeros((2, inputs, len(weight)), REAL)
        for part, columns in _columns(over, batch, inputs, 2, x.mean):
            patches(over, part, x.mean, None, tuple(columns))
            sums[0] += columns[0] @ d[:, part.columns].T
            sums[1] += columns[1] @ e[:, part.columns].T
        self._take_sums(sums.transpose(0, 2, 1), d, e)
        if not wanted:
            return None
        back, back_e = xp.zeros_like(x.mean), xp.zeros_like(x.mean)
        for part, columns in _columns(over, batch, inputs, 1, x.mean):
            for matrix, deltas, to in ((weight, d, back), (self._square, e, back_e)):
                xp.matmul(matrix.T, deltas[:, part.columns], out=columns[0])
                add_patches(over, part, columns[0], to)
        return times_slope(back, back_e, x.slope)


class ConvTranspose2d(_Convolution):
    """The transpose of :class:`Conv2d`: each input is spread over a window of the output, times
    weights, and added where windows overlap: ``[batch, in_channels, height, width]`` to ``[batch,
    out_channels, out_height, out_width]``.

    An output image has ``(size - 1) * stride + kernel_size - padding`` rows and columns, with the
    padding of both sides: the images that a convolution makes the input's size of.

    Args: those of :class:`Conv2d`.

    Attributes:
        weight: ``[in_channels, out_channels, kernel_size, kernel_size]``.

    Raises:
        ValueError: as :class:`Conv2d`.
    """

    transposed = True

    def connect(self, shape: Shape) -> Shape:
        """Take images, or flat samples where the layer knows width and height."""
        images = self._input_images(shape)
        less = (2 if self.padding_type == 1 else 1) * self.padding
        height, width = ((size - 1) * self.stride + self.kernel_size - less for size in images[1:])
        if height < 1 or width < 1:
            raise ValueError(
                f"nothing is left of images of {images} with padding {self.padding}: outputs would "
                f"have {height} rows and {width} columns"
            )
        self._over = self._windows(height, width)
        self.input_shape = images
        self.output_shape = (self.out_channels, height, width)
        return self.output_shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return ``[batch, *output_shape]``, which lie channel by channel."""
        x = x.shaped(self.input_shape)
        over, batch = self._over, len(x.mean)
        xp, shape = array_module(x.mean), self.shape_of_outputs(batch)
        weight, variance = self._matrices()
        square = xp.square(weight)
        m = channel_first(x.mean)
        second, both = m * m, variance
        if x.variance is not None:
            v = channel_first(x.variance)
            second, both = xp.concatenate((v, second + v)), xp.concatenate((square, variance))
        z, zv = (xp.zeros((self.out_channels, batch * shape[2] * shape[3]), REAL) for _ in range(2))
        images, images_v = batch_first(z, shape), batch_first(zv, shape)
        for part, columns in _columns(over, batch, weight.shape[1], 1, x.mean):
            for matrix, moments, to in ((weight, m, images), (both, second, images_v)):
                xp.matmul(matrix.T, moments[:, part.columns], out=columns[0])
                add_patches(over, part, columns[0], to)
        self._add_biases(z, zv)
        if self.training:
            self._x, self._square = BaseHiddenStates(x.mean, None, x.slope), square
        return BaseHiddenStates(images, images_v)

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Set the sums of means times windows of ``d``, of squares times those of ``e``; return
        the windows' sums of ``d`` times W and ``e`` times W**2, times slopes.
        """
        x, over, batch = self._x, self._over, len(self._x.mean)
        xp, shape = array_module(x.mean), self.shape_of_outputs(batch)
        weight, _ = self._matrices()
        d, e = (readable(each.reshape(shape))[0] for each in (d, e))
        m = channel_first(x.mean)
        sums, back = xp.zeros((2, *weight.shape), REAL), xp.empty((2, *m.shape), REAL)
        for part, columns in _columns(over, batch, weight.shape[1], 1, x.mean):
            at = part.columns
            units = m[:, at]
            for number, (matrix, deltas) in enumerate(((weight, d), (self._square, e))):
                patches(over, part, deltas, None, tuple(columns))
                sums[number] += (units * units if number else units) @ columns[0].T
                if wanted:
                    xp.matmul(matrix, columns[0], out=back[number, :, at])
        self._take_sums(sums, channel_first(d), channel_first(e))
        if not wanted:
            return None
        back_d, back_e = (batch_first(each, x.mean.shape) for each in back)
        return times_slope(back_d, back_e, x.slope)


def _columns(
    windows: Windows, batch: int, inputs: int, kinds: int, like: Array
) -> list[tuple[WindowPart, Array]]:
    """Divide the windows into parts; with each, memory for ``kinds`` matrices of its columns,
    ``[kinds, inputs, columns]``, which all parts share, until the next call on this thread.
    """
    memory = CACHED_ON_GPU if is_cupy(like) else CACHED
    columns = max(COLUMNS, memory // (REAL.itemsize * inputs * kinds))
    parts = list(windows.parts(batch, columns))
    counts = [part.columns.stop - part.columns.start for part in parts]
    size = kinds * inputs * max(counts)
    if is_cupy(like):
        shared = array_module(like).empty(size, REAL)  # CuPy keeps memory itself
    else:
        if _kept.memory.size < size:
            _kept.memory = np.empty(size, REAL)
        shared = _kept.memory
    return [
        (part, shared[: kinds * inputs * count].reshape(kinds, inputs, count))
        for part, count in zip(parts, counts, strict=True)
    ]


class _Kept(threading.local):
    """Memory that a thread keeps: to map its pages each time takes as long as to fill them."""

    memory = np.empty(0, REAL)


_kept = _Kept()
