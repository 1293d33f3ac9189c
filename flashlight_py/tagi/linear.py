"""Layers with a matrix of Gaussian weights: ``Linear`` and ``Embedding``."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi import layer
from flashlight_py.tagi.layer import BaseLayer, Deltas, Parameter, Shape, times_slope
from flashlight_py.tagi.states import REAL, BaseHiddenStates

FEW = 100  # a batch with fewer samples is small
EXACT = 2**24  # integers up to this value are exact in float32, the dtype of indices


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
            raise ValueError(
                f"Embedding: padding_idx must be from 0 to {num_embeddings - 1}, or -1 (no "
                f"padding), got {padding_idx}"
            )
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
            raise ValueError(
                f"{self}: indices must be integers from 0 to {self.num_embeddings - 1}, got "
                f"{float(values[~valid][0]):g}"
            )
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
