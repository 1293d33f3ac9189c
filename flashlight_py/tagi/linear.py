"""Layers with a matrix of Gaussian weights: linear layers, embeddings and convolutions."""

import threading
from typing import ClassVar

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.tagi import layer, windows
from flashlight_py.tagi.layer import BaseLayer, Deltas, Parameter, Shape, times_slope
from flashlight_py.tagi.states import REAL, BaseHiddenStates

FEW = 100  # a batch with fewer samples is small
EXACT = 2**24  # integers up to this value are exact in float32, the dtype of indices
# CACHED: bytes of a chunk's columns on the CPU, the cache size of a core. CACHED_ON_GPU: bytes on a
# GPU, enough to occupy it. COLUMNS: minimum columns, because each chunk reads all weights.
CACHED, CACHED_ON_GPU, COLUMNS = 1 << 21, 1 << 28, 256


class Linear(BaseLayer):
    """Linear layer ``z = x @ W.T + b`` with independent Gaussian inputs and parameters.

    It maps ``[batch, input_size]`` to ``[batch, output_size]``. Samples of other shapes are
    flattened. Let m, W and b be the means of inputs, weights and biases, and v, S and Sb their
    variances. Outputs have ``mean = m @ W.T + b`` and ``variance = v @ (W**2 + S).T + m**2 @ S.T +
    Sb``. Source: Goulet, Nguyen and Amiri, JMLR 2021, equations 8 to 10.

    Args:
        input_size, output_size: Numbers of units, at least 1.
        bias: Whether the layer has biases.
        gain_weight, gain_bias: Factors of the initial standard deviations of the parameters.
        init_method: ``"He"``: means from N(0, 1 / input_size). ``"Xavier"``: from N(0, 2 /
            (input_size + output_size)). The initial variance is the variance of N times the squared
            gain.

    Raises:
        ValueError: If a size is below 1 or ``init_method`` is unknown.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, gain_weight: float = 1.0,
        gain_bias: float = 1.0, init_method: str = "He",
    ) -> None:  # fmt: skip
        super().__init__()
        if input_size < 1 or output_size < 1:
            raise ValueError(f"Linear: sizes must be at least 1, got {input_size}, {output_size}")
        self.input_shape, self.output_shape = (input_size,), (output_size,)
        deviation = layer.spread(init_method, input_size, output_size)
        self.weight: Parameter = layer.gaussian((output_size, input_size), deviation, gain_weight)
        self.biases = layer.gaussian((output_size,), deviation, gain_bias) if bias else None
        self._x = BaseHiddenStates(np.empty((0, input_size)))
        self._squares = self._x.mean  # squares of the input means
        self._square: Array | None = None  # squares of the means of the weights, if computed

    def connect(self, shape: Shape) -> Shape:
        """Return the output shape. A sample must have ``input_size`` elements, in any shape."""
        if int(np.prod(shape)) != self.input_size:
            raise ValueError(f"expected {self.input_size} features per sample, got shape {shape}")
        return (self.output_size,)

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        x = x.shaped((self.input_size,))
        weight, biases = self.weight, self.biases
        mean = _times_transposed(x.mean, weight.mean)
        squares = x.mean * x.mean
        square = None
        if x.variance is None:
            variance = _times_transposed(squares, weight.variance)
        else:
            square = array_module(x.mean).square(weight.mean)
            variance = _times_transposed(x.variance, square)
            variance += _times_transposed(squares + x.variance, weight.variance)
        if biases is not None:
            mean += biases.mean
            variance += biases.variance
        if self.training:
            self._x, self._squares, self._square = x, squares, square
        return BaseHiddenStates(mean, variance)

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Set the weights' sums to ``d.T @ m`` and ``e.T @ m**2``. Return the input's deltas."""
        x, weight = self._x, self.weight
        xp = array_module(x.mean)
        d, e = d.reshape(len(x.mean), -1), e.reshape(len(x.mean), -1)
        xp.matmul(d.T, x.mean, out=weight.mean_sum)
        xp.matmul(e.T, self._squares, out=weight.variance_sum)
        self._sum_biases(d, e, 0)
        if not needs_input:
            return None
        square = xp.square(weight.mean) if self._square is None else self._square
        return times_slope(d @ weight.mean, e @ square, x.slope)


def _times_transposed(x: Array, matrix: Array) -> Array:
    """Return ``x @ matrix.T``. For small batches, ``(matrix @ x.T).T`` is faster in BLAS."""
    if len(x) < FEW:
        return (matrix @ x.T).T
    return x @ matrix.T


class Embedding(BaseLayer):
    """A table of vectors that replaces each index by a row. It must be the first layer.

    It maps indices ``[batch, input_size]`` of any dtype to ``[batch, input_size * embedding_dim]``.
    The deltas of a row are summed over all its occurrences in the batch.

    Args:
        num_embeddings: Number of rows, 1 to 2**24.
        embedding_dim: Elements of a row, at least 1.
        input_size: Number of indices of a sample. 0: taken from the first batch.
        scale: Standard deviation of the rows' means around 0. Their variances are scale**2.
        padding_idx: Index of a row that is exactly 0 and does not learn. -1: no such row.

    Raises:
        ValueError: If a size is out of range or ``padding_idx`` is not an index; in a forward pass,
            if an element is not an index or has a variance.
    """

    first_only: ClassVar[bool] = True

    def __init__(
        self, num_embeddings: int, embedding_dim: int, input_size: int = 0, scale: float = 1.0,
        padding_idx: int = -1,
    ) -> None:  # fmt: skip
        super().__init__()
        if not 1 <= num_embeddings <= EXACT or embedding_dim < 1 or input_size < 0:
            raise ValueError(
                f"Embedding: expected 1 to {EXACT} embeddings of at least 1 element and an "
                f"input_size of at least 0, got {num_embeddings}, {embedding_dim} and {input_size}"
            )
        if not -1 <= padding_idx < num_embeddings:
            indices = f"from 0 to {num_embeddings - 1}, or -1 (no padding)"
            raise ValueError(f"Embedding: padding_idx must be {indices}, got {padding_idx}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self._size = input_size
        if input_size:
            self.connect((input_size,))
        self.weight: Parameter = layer.gaussian((num_embeddings, embedding_dim), scale, 1.0)
        if padding_idx >= 0:
            self.weight.mean[padding_idx] = 0
        self._indices = np.empty((0, input_size), np.int64)

    def connect(self, shape: Shape) -> Shape:
        """Return the output shape. Samples must have ``input_size`` indices unless that is 0."""
        size = int(np.prod(shape))
        if self._size and size != self._size:
            raise ValueError(f"expected {self._size} indices per sample, got shape {shape}")
        self.input_shape = (size,)
        self.output_shape = (size * self.embedding_dim,)
        return self.output_shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return the rows of the indices: ``[batch, input_size * embedding_dim]``.

        Raises:
            ValueError: If an element is not an index or has a variance. The layer is unchanged.
        """
        xp, values = array_module(x.mean), x.mean.reshape(len(x.mean), -1)
        if x.variance is not None and x.variance.any():
            raise ValueError(f"{self}: expected indices without variances, got variances above 0")
        valid = (values >= 0) & (values < self.num_embeddings) & (values == xp.floor(values))
        if not valid.all():
            last, invalid = self.num_embeddings - 1, float(values[~valid][0])
            raise ValueError(f"{self}: indices must be integers from 0 to {last}, got {invalid:g}")
        indices = values.astype(np.int64)
        mean, variance = self.weight.mean[indices], self.weight.variance[indices]
        if self.padding_idx >= 0:
            is_padding = indices == self.padding_idx
            mean[is_padding] = 0
            variance[is_padding] = 0
        if self.training:
            self._indices = indices
        return BaseHiddenStates(mean.reshape(len(values), -1), variance.reshape(len(values), -1))

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Sum ``d`` and ``e`` of each row over the batch. Return zeros: indices do not learn."""
        indices = self._indices
        xp = array_module(indices)
        d, e = (array.reshape(-1, self.embedding_dim) for array in (d, e))
        rows = indices.reshape(-1, 1)
        if self.padding_idx >= 0:
            learning = rows[:, 0] != self.padding_idx
            d, e, rows = d[learning], e[learning], rows[learning]
        positions = (rows * self.embedding_dim + xp.arange(self.embedding_dim)).reshape(-1)
        for deltas, sums in ((d, self.weight.mean_sum), (e, self.weight.variance_sum)):
            totals = xp.bincount(positions, deltas.reshape(-1), self.num_weights)
            sums[...] = totals.reshape(sums.shape)
        self._sums_are_complete()
        if not needs_input:
            return None
        return xp.zeros(indices.shape, REAL), xp.zeros(indices.shape, REAL)

    def to_device(self, device: str) -> None:
        """Delete the indices of the last batch, because they are on the old device."""
        self._indices = np.empty((0, 0), np.int64)

    def get_layer_info(self) -> str:
        """Return class name and table sizes, such as ``"Embedding(10->4)"``."""
        return f"{self.get_layer_name()}({self.num_embeddings}->{self.embedding_dim})"


class _Convolution(windows.ImageLayer):
    """Base class of a convolution and its transpose: parameters and image shapes."""

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
            got = f"{in_channels}, {out_channels}"
            raise ValueError(f"{name}: numbers of channels must be at least 1, got {got}")
        if in_width < 0 or in_height < 0 or bool(in_width) != bool(in_height):
            expected = "in_width and in_height must be both positive or both 0"
            raise ValueError(f"{name}: {expected}, got {in_width} and {in_height}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self._declared = (in_height, in_width) if in_width else None
        if self._declared is not None:
            self.input_shape = (in_channels, *self._declared)
        area = kernel_size**2
        deviation = layer.spread(init_method, area * in_channels, area * out_channels)
        channels = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        shape = (*channels, kernel_size, kernel_size)
        self.weight: Parameter = layer.gaussian(shape, deviation, gain_weight)
        self.biases = layer.gaussian((out_channels,), deviation, gain_bias) if bias else None
        self._x = BaseHiddenStates(np.empty((0, in_channels, 0, 0), REAL))
        self._square = np.empty((0, 0), REAL)  # squares of the means of the weights

    def _input_images(self, shape: Shape) -> tuple[int, int, int]:
        declared = self.input_shape
        if len(shape) == 1 and declared is not None:
            if shape[0] != self.input_size:
                size = f"{self.input_size} elements per sample"
                raise ValueError(f"expected {size} for {declared}, got {shape}")
            return windows.images_of(declared)
        images = windows.images_of(shape)
        if images[0] != self.in_channels:
            raise ValueError(f"expected {self.in_channels} channels, got images of shape {shape}")
        if self._declared not in (None, images[1:]):
            raise ValueError(f"expected height and width {self._declared}, got images of {images}")
        return images

    def _add_biases(self, mean: Array, variance: Array) -> None:
        if self.biases is not None:
            mean += self.biases.mean[:, None]
            variance += self.biases.variance[:, None]

    def _set_sums(self, sums: Array, d: Array, e: Array) -> None:
        """Set the sums of the weights' deltas to ``sums``. Sum ``d`` and ``e`` for the biases."""
        targets = self.weight.mean_sum, self.weight.variance_sum
        for array, values in zip(targets, sums, strict=True):
            array[...] = values.reshape(array.shape)
        self._sum_biases(d, e, 1)

    def _matrices(self) -> tuple[Array, Array]:
        mean, variance = self.weight.mean, self.weight.variance
        return mean.reshape(len(mean), -1), variance.reshape(len(mean), -1)


class Conv2d(_Convolution):
    """A convolution: each output is a sum over a window of inputs times weights, plus a bias.

    It maps ``[batch, in_channels, height, width]`` to ``[batch, out_channels, out_height,
    out_width]``. Each window has the moments of :class:`Linear`. Padding has mean and variance 0.
    An output has ``(size + total padding - kernel_size) / stride + 1`` rows and columns.

    Args:
        in_channels, out_channels: Numbers of channels, at least 1.
        kernel_size: Height and width of the window.
        bias: Whether each output channel has a bias.
        stride, padding, padding_type: See :class:`ImageLayer`.
        in_width, in_height: Size of the input images. Required if samples are flat. 0: the size of
            the first batch.
        gain_weight, gain_bias: Factors of the initial standard deviations of the parameters.
        init_method: ``"He"``: means from N(0, 1 / fan_in). ``"Xavier"``: from N(0, 2 / (fan_in +
            fan_out)). ``fan_in = in_channels * kernel_size**2``, and ``fan_out = out_channels *
            kernel_size**2``.

    Attributes:
        weight: ``[out_channels, in_channels, kernel_size, kernel_size]``.

    Raises:
        ValueError: If a size is out of range, only one of ``in_width`` and ``in_height`` is 0, or
            ``init_method`` is unknown.
    """

    def connect(self, shape: Shape) -> Shape:
        """Return the output shape. Raises ValueError if windows do not cover the images exactly."""
        return self._cover(self._input_images(shape), self.out_channels)

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return moments of shape ``[batch, *output_shape]``, with channels first in memory."""
        x = x.shaped(self.input_shape)
        xp, shape = array_module(x.mean), self.shape_of_outputs(len(x.mean))
        weight, variance = self._matrices()
        means, variances = windows.readable(x.mean, x.variance)
        square = xp.square(weight)
        # One product computes both terms of the variance.
        both = variance if variances is None else xp.concatenate((square, variance), axis=1)
        z, zv = (xp.empty((len(weight), shape[0] * shape[2] * shape[3]), REAL) for _ in range(2))
        matrices = 2 if variances is None else 3
        for part, columns in _columns(self._over, len(means), weight.shape[1], matrices, means):
            windows.patches(self._over, part, means, variances, tuple(columns))
            xp.matmul(weight, columns[0], out=z[:, part.columns])
            xp.matmul(both, columns[1:].reshape(-1, columns.shape[2]), out=zv[:, part.columns])
        self._add_biases(z, zv)
        if self.training:
            self._x, self._square = BaseHiddenStates(means, None, x.slope), square
        return BaseHiddenStates(windows.batch_first(z, shape), windows.batch_first(zv, shape))

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Sum the weights' deltas: ``d`` times input means, and ``e`` times their squares.

        Return the deltas of the input: ``d @ W`` and ``e @ W**2`` of each window, times the input's
        slope and squared slope. Overlapping windows are added.
        """
        x, over = self._x, self._over
        xp, batch = array_module(x.mean), len(x.mean)
        weight, _ = self._matrices()
        inputs = weight.shape[1]
        shape = self.shape_of_outputs(batch)
        d, e = (windows.channel_first(array.reshape(shape)) for array in (d, e))
        sums = xp.zeros((2, inputs, len(weight)), REAL)
        for part, columns in _columns(over, batch, inputs, 2, x.mean):
            windows.patches(over, part, x.mean, None, tuple(columns))
            sums[0] += columns[0] @ d[:, part.columns].T
            sums[1] += columns[1] @ e[:, part.columns].T
        self._set_sums(sums.transpose(0, 2, 1), d, e)
        if not needs_input:
            return None
        back, back_e = xp.zeros_like(x.mean), xp.zeros_like(x.mean)
        for part, columns in _columns(over, batch, inputs, 1, x.mean):
            for matrix, deltas, target in ((weight, d, back), (self._square, e, back_e)):
                xp.matmul(matrix.T, deltas[:, part.columns], out=columns[0])
                windows.add_patches(over, part, columns[0], target)
        return times_slope(back, back_e, x.slope)


class ConvTranspose2d(_Convolution):
    """The transpose of :class:`Conv2d`: each input is spread over a window of the output.

    It maps ``[batch, in_channels, height, width]`` to ``[batch, out_channels, out_height,
    out_width]`` and adds overlapping windows. An output has ``(size - 1) * stride + kernel_size -
    total padding`` rows and columns.

    Args: See :class:`Conv2d`.

    Attributes:
        weight: ``[in_channels, out_channels, kernel_size, kernel_size]``.

    Raises:
        ValueError: See :class:`Conv2d`.
    """

    transposed = True

    def connect(self, shape: Shape) -> Shape:
        """Return the output shape. Flat samples require ``in_width`` and ``in_height``."""
        images = self._input_images(shape)
        less = (2 if self.padding_type == 1 else 1) * self.padding
        height, width = ((size - 1) * self.stride + self.kernel_size - less for size in images[1:])
        if height < 1 or width < 1:
            expected = f"padding must leave at least 1 row and column of images {images}"
            got = f"{self.padding}, which leaves {height} rows and {width} columns"
            raise ValueError(f"{expected}, got {got}")
        self._over = self._windows(height, width)
        self.input_shape = images
        self.output_shape = (self.out_channels, height, width)
        return self.output_shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        x = x.shaped(self.input_shape)
        over, batch = self._over, len(x.mean)
        xp, shape = array_module(x.mean), self.shape_of_outputs(batch)
        weight, variance = self._matrices()
        square = xp.square(weight)
        m = windows.channel_first(x.mean)
        second, both = m * m, variance
        if x.variance is not None:
            v = windows.channel_first(x.variance)
            second, both = xp.concatenate((v, second + v)), xp.concatenate((square, variance))
        z, zv = (xp.zeros((self.out_channels, batch * shape[2] * shape[3]), REAL) for _ in range(2))
        images, images_v = windows.batch_first(z, shape), windows.batch_first(zv, shape)
        for part, columns in _columns(over, batch, weight.shape[1], 1, x.mean):
            for matrix, moments, target in ((weight, m, images), (both, second, images_v)):
                xp.matmul(matrix.T, moments[:, part.columns], out=columns[0])
                windows.add_patches(over, part, columns[0], target)
        self._add_biases(z, zv)
        if self.training:
            self._x, self._square = BaseHiddenStates(x.mean, None, x.slope), square
        return BaseHiddenStates(images, images_v)

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Sum the weights' deltas: input means times ``d``, and their squares times ``e``.

        Return the deltas of the input: the sums over each window of ``d * W`` and of ``e * W**2``,
        times the input's slope and squared slope.
        """
        x, over, batch = self._x, self._over, len(self._x.mean)
        xp, shape = array_module(x.mean), self.shape_of_outputs(batch)
        weight, _ = self._matrices()
        d, e = (windows.readable(array.reshape(shape))[0] for array in (d, e))
        m = windows.channel_first(x.mean)
        sums, back = xp.zeros((2, *weight.shape), REAL), xp.empty((2, *m.shape), REAL)
        for part, columns in _columns(over, batch, weight.shape[1], 1, x.mean):
            span = part.columns
            units = m[:, span]
            for number, (matrix, deltas) in enumerate(((weight, d), (self._square, e))):
                windows.patches(over, part, deltas, None, tuple(columns))
                sums[number] += (units * units if number else units) @ columns[0].T
                if needs_input:
                    xp.matmul(matrix, columns[0], out=back[number, :, span])
        self._set_sums(sums, windows.channel_first(d), windows.channel_first(e))
        if not needs_input:
            return None
        back_d, back_e = (windows.batch_first(array, x.mean.shape) for array in back)
        return times_slope(back_d, back_e, x.slope)


def _columns(
    over: windows.Windows, batch: int, inputs: int, matrices: int, like: Array
) -> list[tuple[windows.WindowPart, Array]]:
    """Divide the windows ``over`` into chunks. Return each chunk with an array for its columns.

    Arrays are ``[matrices, inputs, columns]``. All arrays of a thread use the same memory.
    """
    memory = CACHED_ON_GPU if is_cupy(like) else CACHED
    parts = list(over.parts(batch, max(COLUMNS, memory // (REAL.itemsize * inputs * matrices))))
    counts = [part.columns.stop - part.columns.start for part in parts]
    size = matrices * inputs * max(counts)
    if is_cupy(like):
        shared = array_module(like).empty(size, REAL)  # CuPy caches memory
    else:
        if _scratch.memory.size < size:
            _scratch.memory = np.empty(size, REAL)
        shared = _scratch.memory
    return [
        (part, shared[: matrices * inputs * count].reshape(matrices, inputs, count))
        for part, count in zip(parts, counts, strict=True)
    ]


class _Scratch(threading.local):
    """Memory that each thread reuses, because the system is slow to provide new memory."""

    memory = np.empty(0, REAL)


_scratch = _Scratch()
