"""The layers of a matrix of Gaussians: sums of products with units, and its rows by index."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape, times_slope
from flashlight_py.tagi.parameters import Parameter, gaussian, spread
from flashlight_py.tagi.states import REAL, BaseHiddenStates

FEW = 100  # samples
EXACT = 2**24  # whole numbers up to here are exact in float32, as which indices arrive


class Linear(BaseLayer):
    """``z = x @ W.T + b`` of independent Gaussians: ``[batch, input_size]`` to ``[batch,
    output_size]``; inputs of other shapes are flattened, sample by sample.

    With means m and variances v of the input, W and S of the weights:
    ``mean = m @ W.T + b``; ``variance = v @ (W**2 + S).T + m**2 @ S.T + Sb`` (Goulet, Nguyen and
    Amiri, JMLR 2021, equations 8 to 10).

    Args:
        input_size, output_size: at least 1.
        bias: whether there are biases.
        gain_weight, gain_bias: factors of the standard deviations that the parameters start with.
        init_method: ``"He"``: means of N(0, 1 / input_size); ``"Xavier"``: of N(0, 2 /
            (input_size + output_size)). Variances are theirs times the squares of the gains.

    Raises:
        ValueError: a size is below 1, or ``init_method`` is neither.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, gain_weight: float = 1.0,
        gain_bias: float = 1.0, init_method: str = "He",
    ) -> None:  # fmt: skip
        super().__init__()
        if input_size < 1 or output_size < 1:
            raise ValueError(f"Linear: sizes must be at least 1, got {input_size}, {output_size}")
        self.input_shape, self.output_shape = (input_size,), (output_size,)
        deviation = spread(init_method, input_size, output_size)
        self.weight: Parameter = gaussian((output_size, input_size), deviation, gain_weight)
        self.biases = gaussian((output_size,), deviation, gain_bias) if bias else None
        self._x = BaseHiddenStates(np.empty((0, input_size)))
        self._squares = self._x.mean  # of the inputs' means
        self._square: Array | None = None  # of the weights' means, until the backward pass

    def connect(self, shape: Shape) -> Shape:
        """Take inputs of ``input_size`` elements of any shape."""
        if int(np.prod(shape)) != self.input_size:
            raise ValueError(f"expected {self.input_size} features a sample, got shape {shape}")
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

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Set ``d.T @ m`` and ``e.T @ m**2``; return ``d @ W`` and ``e @ W**2`` times slopes."""
        x, weight = self._x, self.weight
        xp = array_module(x.mean)
        d, e = d.reshape(len(x.mean), -1), e.reshape(len(x.mean), -1)
        xp.matmul(d.T, x.mean, out=weight.mean_sum)
        xp.matmul(e.T, self._squares, out=weight.variance_sum)
        self._sum_biases(d, e, 0)
        if not wanted:
            return None
        square = xp.square(weight.mean) if self._square is None else self._square
        return times_slope(d @ weight.mean, e @ square, x.slope)


def _times_transposed(x: Array, matrix: Array) -> Array:
    """Return ``x @ matrix.T``, the other way round where BLAS is faster so: for small batches."""
    if len(x) < FEW:
        return (matrix @ x.T).T
    return x @ matrix.T


class Embedding(BaseLayer):
    """A table of vectors: indices ``[batch, input_size]`` to ``[batch, input_size *
    embedding_dim]``, of each index its row. It is the first layer of a network.

    Indices are whole numbers of any dtype. The deltas of a row are the sums over all places of the
    batch where its index stands.

    Args:
        num_embeddings: how many rows there are, 1 to 2**24.
        embedding_dim: how many elements a row has, at least 1.
        input_size: how many indices a sample has; 0: what the first batch has.
        scale: the rows' means are of N(0, scale), their variances scale**2.
        padding_idx: the index that stands for nothing: its row is 0, exactly, and learns nothing.
            -1: there is none.

    Raises:
        ValueError: when made: a size is out of range, or ``padding_idx`` is no index. In a forward
            pass: something is no index, or known with a variance.
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
                f"Embedding: padding_idx is an index below {num_embeddings}, or -1 for none, got "
                f"{padding_idx}"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self._fixed = input_size
        if input_size:
            self.connect((input_size,))
        self.weight: Parameter = gaussian((num_embeddings, embedding_dim), scale, 1.0)
        if padding_idx >= 0:
            self.weight.mean[padding_idx] = 0
        self._indices = np.empty((0, input_size), np.int64)

    def connect(self, shape: Shape) -> Shape:
        """Take ``input_size`` indices; any number, if that is 0."""
        size = int(np.prod(shape))
        if self._fixed and size != self._fixed:
            raise ValueError(f"expected {self._fixed} indices a sample, got shape {shape}")
        self.input_shape = (size,)
        self.output_shape = (size * self.embedding_dim,)
        return self.output_shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return ``[batch, input_size * embedding_dim]``.

        Raises:
            ValueError: as the class says, before anything else.
        """
        xp, given = array_module(x.mean), x.mean.reshape(len(x.mean), -1)
        if x.variance is not None and x.variance.any():
            raise ValueError(f"{self}: indices are known exactly; they have no variances")
        valid = (given >= 0) & (given < self.num_embeddings) & (given == xp.floor(given))
        if not valid.all():
            raise ValueError(
                f"{self}: indices are whole numbers from 0 to {self.num_embeddings - 1}, got "
                f"{float(given[~valid][0]):g}"
            )
        indices = given.astype(np.int64)
        mean, variance = self.weight.mean[indices], self.weight.variance[indices]
        if self.padding_idx >= 0:
            nothing = indices == self.padding_idx
            mean[nothing] = 0
            variance[nothing] = 0
        if self.training:
            self._indices = indices
        return BaseHiddenStates(mean.reshape(len(given), -1), variance.reshape(len(given), -1))

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Set the sums of d and of e of each row; the indices themselves learn nothing."""
        indices = self._indices
        xp = array_module(indices)
        d, e = (each.reshape(-1, self.embedding_dim) for each in (d, e))
        rows = indices.reshape(-1, 1)
        if self.padding_idx >= 0:
            learning = rows[:, 0] != self.padding_idx
            d, e, rows = d[learning], e[learning], rows[learning]
        places = (rows * self.embedding_dim + xp.arange(self.embedding_dim)).reshape(-1)
        for deltas, sums in ((d, self.weight.mean_sum), (e, self.weight.variance_sum)):
            found = xp.bincount(places, deltas.reshape(-1), self.num_weights)
            sums[...] = found.reshape(sums.shape)
        self._sums_are_complete()
        if not wanted:
            return None
        return xp.zeros(indices.shape, REAL), xp.zeros(indices.shape, REAL)

    def to_device(self, device: str) -> None:
        """Keep nothing: indices are where the inputs are."""
        self._indices = np.empty((0, 0), np.int64)

    def get_layer_info(self) -> str:
        """Return its kind and the sizes of its table, such as ``"Embedding(10->4)"``."""
        return f"{self.get_layer_name()}({self.num_embeddings}->{self.embedding_dim})"
