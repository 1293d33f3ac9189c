"""The layer of a matrix: sums of products of Gaussian units and Gaussian weights."""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape, times_slope
from flashlight_py.tagi.parameters import Parameter, gaussian, spread
from flashlight_py.tagi.states import BaseHiddenStates

FEW = 100  # samples


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
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gain_weight: float = 1.0,
        gain_bias: float = 1.0,
        init_method: str = "He",
    ) -> None:
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
        x, weight, biases = self._x, self.weight, self.biases
        xp = array_module(x.mean)
        d, e = d.reshape(len(x.mean), -1), e.reshape(len(x.mean), -1)
        xp.matmul(d.T, x.mean, out=weight.mean_sum)
        xp.matmul(e.T, self._squares, out=weight.variance_sum)
        if biases is not None:
            d.sum(axis=0, out=biases.mean_sum)
            e.sum(axis=0, out=biases.variance_sum)
        self._sums_are_complete()
        if not wanted:
            return None
        square = xp.square(weight.mean) if self._square is None else self._square
        return times_slope(d @ weight.mean, e @ square, x.slope)


def _times_transposed(x: Array, matrix: Array) -> Array:
    """Return ``x @ matrix.T``, the other way round where BLAS is faster so: for small batches."""
    if len(x) < FEW:
        product: Array = (matrix @ x.T).T
        return product
    return x @ matrix.T
