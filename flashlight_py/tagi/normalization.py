"""Layers that bring units to mean 0 and variance 1, then to moments that they learn."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy, to_device
from flashlight_py.tagi.activations import Moments
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape, times_slope
from flashlight_py.tagi.native import address, native
from flashlight_py.tagi.parameters import Parameter
from flashlight_py.tagi.states import REAL, BaseHiddenStates

NORM_STATISTICS = ("running_mean", "running_variance", "batch_mean", "batch_variance")


class Normalization(BaseLayer):
    """The base: ``z = w * t + b`` with ``t = (x - mean) / sqrt(variance + eps)``.

    With W and S of the weights, v of the input, r = 1 / sqrt(variance + eps): ``mean = t W + b``,
    ``variance = r^2 v (W^2 + S) + S t^2 + Sb`` (pytagi 0.2.1). The statistics count as constants in
    the backward pass: ``d r W`` and ``e (r W)^2`` go back.

    Samples are looked at as ``[features, positions]``: of an image its channels and its pixels.
    """

    def __init__(self, features: int, eps: float, bias: bool, gains: tuple[float, float]) -> None:
        super().__init__()
        name = self.get_layer_name()
        if features < 1:
            raise ValueError(f"{name}: expected at least 1 feature, got {features}")
        if not eps > 0:
            raise ValueError(f"{name}: eps must be above 0, got {eps}")
        self.eps = eps
        variances = [np.full(features, gain**2 / features) for gain in gains]
        self.weight: Parameter = Parameter(np.ones(features), variances[0])
        self.biases = Parameter(np.zeros(features), variances[1]) if bias else None
        self._positions = 1
        self._slope: Array | None = None  # of the input
        self._t = np.empty((0, features, 1), REAL)
        self._back = self._t  # what deltas are multiplied by

    def _sizes(self) -> tuple[()]:
        return ()

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        rows = (len(x.mean), self.num_weights, self._positions)
        m, v = x.mean.reshape(rows), None if x.variance is None else x.variance.reshape(rows)
        center, spread = self._statistics(m, v)
        scale = (1 / array_module(m).sqrt(spread + self.eps)).astype(REAL)
        t, mean, variance = standardize(m, v, center.astype(REAL), scale, self.weight, self.biases)
        # Also in evaluation: in a network that trains, it may be this layer alone that does not.
        self._t, self._back = t, scale * self.weight.mean
        self._slope = None if x.slope is None else x.slope.reshape(rows)
        return BaseHiddenStates(mean.reshape(x.mean.shape), variance.reshape(x.mean.shape))

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Set sums of ``t d`` and ``t^2 e``; return ``d r W`` and ``e (r W)^2`` times slopes."""
        t = self._t
        deltas = d.reshape(t.shape), e.reshape(t.shape)
        sums, back = standardize_back(t, *deltas, self._slope, self._back, wanted)
        self.weight.mean_sum[...], self.weight.variance_sum[...] = sums[:2]
        if self.biases is not None:
            self.biases.mean_sum[...], self.biases.variance_sum[...] = sums[2:]
        self._sums_are_complete()
        if back is None:
            return None
        shape = self.shape_of_outputs(len(t))
        return back[0].reshape(shape), back[1].reshape(shape)

    @abc.abstractmethod
    def _statistics(self, m: Array, v: Array | None) -> tuple[Array, Array]:
        """Return mean and variance by which to normalize ``[batch, features, positions]``; they
        broadcast to ``[batch, features]``.
        """

    def _connect(self, shape: Shape, positions: int) -> Shape:
        self._positions = positions
        self.input_shape = self.output_shape = shape
        return shape


class BatchNorm2d(Normalization):
    """Normalizes each channel of images, or each feature of flat samples, over the batch.

    With means m and variances v of the n units of a channel (batch, height and width; the batch
    alone of flat samples): mean = sum(m) / n, variance = (sum((m - mean)^2) + sum(v)) / (n - 1); of
    a single unit, v. In evaluation, and only there, running statistics stand in for them, which
    follow each batch of training: ``running = momentum * running + (1 - momentum) * batch``.

    Args:
        num_features: channels of the images, or features of flat samples.
        eps: is added to variances; above 0.
        momentum: of the running statistics, from 0 to 1.
        bias: whether there are biases.
        gain_weight, gain_bias: weights start with mean 1 and biases with mean 0, both with variance
            gain^2 / num_features.

    Attributes:
        running_mean, running_variance: ``[num_features]``, float32; start with 0 and 1.
        add_up: None: the statistics are those of this process's batch. Otherwise it is called once
            in each forward pass of training, with a flat float64 array of 1 + 3 num_features
            elements (n, sum(m), sum(m^2), sum(v)), to which it adds those of the other processes in
            place; the statistics are those of all their batches.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, bias: bool = True,
        gain_weight: float = 1.0, gain_bias: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, bias, (gain_weight, gain_bias))
        if not 0 <= momentum <= 1:
            raise ValueError(f"BatchNorm2d: momentum must be from 0 to 1, got {momentum}")
        self.num_features, self.momentum = num_features, momentum
        self.running_mean = np.zeros(num_features, REAL)
        self.running_variance = np.ones(num_features, REAL)
        self.batch_mean, self.batch_variance = np.zeros((2, num_features), REAL)
        self.add_up: Callable[[Array], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy takes the statistics of its own batches."""
        return super().__getstate__() | {"add_up": None}

    def connect(self, shape: Shape) -> Shape:
        """Take images of ``num_features`` channels, or as many features."""
        if shape[:1] == (self.num_features,):
            return self._connect(shape, math.prod(shape[1:]))
        if math.prod(shape) == self.num_features:
            return self._connect(shape, 1)
        raise ValueError(
            f"expected {self.num_features} channels or features, got samples of shape {shape}"
        )

    def statistics(self) -> list[Array]:
        return [self.running_mean, self.running_variance]

    def to_device(self, device: str) -> None:
        for name in NORM_STATISTICS:
            setattr(self, name, to_device(getattr(self, name), device))

    def _statistics(self, m: Array, v: Array | None) -> tuple[Array, Array]:
        if not self.training:
            return self.running_mean, self.running_variance
        mean, variance = self._of_batch(m, v)
        self._follow(mean, variance)
        return mean, variance

    def _follow(self, mean: Array, variance: Array) -> None:
        self.batch_mean, self.batch_variance = mean.astype(REAL), variance.astype(REAL)
        for running, batch in zip(self.statistics(), (mean, variance), strict=True):
            running[...] = self.momentum * running + (1 - self.momentum) * batch

    def forward_nothing(self) -> None:
        """Follow the other processes' statistics, if there are any."""
        if self.training and self.add_up is not None:
            sums = array_module(self.running_mean).zeros(1 + 3 * self.num_features)
            self.add_up(sums)
            if float(sums[0]):
                self._follow(*_mean_and_variance(sums))

    def _of_batch(self, m: Array, v: Array | None) -> tuple[Array, Array]:
        """Return mean and variance of each feature, float64.

        Squares are those of differences to the mean of this process, and float64 from there on: so
        nothing is lost where means are large beside their differences.
        """
        xp = array_module(m)
        n = float(m.shape[0] * m.shape[2])
        mean = row_sums(m).sum(axis=0) / n
        squares = row_sums(m, mean).sum(axis=0)
        units = xp.zeros_like(mean) if v is None else row_sums(v).sum(axis=0)
        if self.add_up is None:
            return mean, (squares + units) / max(n - 1, 1)
        sums = xp.concatenate([xp.full(1, n), mean * n, squares + mean * mean * n, units])
        self.add_up(sums)
        return _mean_and_variance(sums)


def _mean_and_variance(sums: Array) -> tuple[Array, Array]:
    """Return those of each feature from n and the sums of means, their squares, and variances."""
    xp = array_module(sums)
    total, (more, squares, units) = sums[0], sums[1:].reshape(3, -1)
    mean = more / total
    squares = xp.maximum(squares - mean * mean * total, 0)
    return mean, (squares + units) / xp.maximum(total - 1, 1)


class LayerNorm(Normalization):
    """Normalizes each sample over all its units, in evaluation as in training.

    With means m and variances v of the n units of a sample: mean = sum(m) / n, variance = (sum((m -
    mean)^2) + sum(v)) / (n - 1); of a single unit, v.

    Args:
        normalized_shape: ``n`` or ``(n,)`` for flat samples, with weights for each feature; or
            ``(channels, width, height)`` for images, with weights for each channel.
        eps: is added to variances; above 0.
        bias: whether there are biases.

    Weights start with mean 1, biases with mean 0, both with variance 1 / their number.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-4, bias: bool = True
    ) -> None:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else (*normalized_shape,)
        if len(shape) not in (1, 3) or min(shape) < 1:
            raise ValueError(
                "LayerNorm: normalized_shape is a number of features or (channels, width, "
                f"height), each at least 1; got {normalized_shape}"
            )
        super().__init__(shape[0], eps, bias, (1, 1))
        self.normalized_shape = shape
        self.connect(shape if len(shape) == 1 else (shape[0], shape[2], shape[1]))

    def connect(self, shape: Shape) -> Shape:
        """Take samples of as many units; images have the channels first."""
        images = len(self.normalized_shape) == 3
        channels = not images or len(shape) == 1 or shape[0] == self.num_weights
        if math.prod(shape) != math.prod(self.normalized_shape) or not channels:
            expected = "channels, width, height" if images else "features"
            raise ValueError(
                f"expected ({expected}) of {self.normalized_shape}, got samples of shape {shape}"
            )
        return self._connect(shape, math.prod(self.normalized_shape[1:]))

    def _statistics(self, m: Array, v: Array | None) -> tuple[Array, Array]:
        n = m.shape[1] * m.shape[2]
        mean = row_sums(m).sum(axis=1, keepdims=True) / n
        variance = row_sums(m, mean).sum(axis=1, keepdims=True)
        if v is not None:
            variance += row_sums(v).sum(axis=1, keepdims=True)
        return mean, variance / max(n - 1, 1)


SHORTEST = 8  # positions of rows for which the kernels pay


def row_sums(units: Array, centers: Array | None = None) -> Array:
    """Return the sum of each row, or of squares of its differences to ``centers``; float64."""
    xp, rows = array_module(units), _Rows.of(units)
    if centers is not None:
        centers = xp.broadcast_to(centers.astype(REAL), units.shape[:2])
    if rows is None:
        if centers is None:
            sums: Array = units.sum(axis=2)
        else:
            units = units - centers[:, :, None]
            sums = xp.einsum("bfp,bfp->bf", units, units)
        return sums.astype(np.float64)
    sums = np.empty(units.shape[:2])
    if centers is None:
        rows.call("row_sums", rows.lead, sums)
    else:
        rows.call("row_squares", rows.lead, np.ascontiguousarray(centers), sums)
    return sums


def standardize(
    m: Array, v: Array | None, center: Array, scale: Array, weight: Parameter,
    bias: Parameter | None,
) -> Moments:  # fmt: skip
    """Return t = (m - center) scale, and the moments of t weight + bias; three new arrays.

    ``weight`` and ``bias`` have an element for each feature.
    """
    rows, of_input = _Rows.of(m), scale * scale * (weight.mean * weight.mean + weight.variance)
    if rows is None:  # the kernels' order of operations
        t = m - center[..., None]
        t *= scale[..., None]
        mean, variance = t * weight.mean[:, None], t * t
        variance *= weight.variance[:, None]
        if bias is not None:
            mean += bias.mean[:, None]
            variance += bias.variance[:, None]
        if v is not None:
            variance += v * of_input[..., None]
        return t, mean, variance
    affine = np.empty((*m.shape[:2], 7), REAL)
    affine[..., 0], affine[..., 1], affine[..., 2] = center, scale, weight.mean
    affine[..., 3] = 0 if bias is None else bias.mean
    affine[..., 4], affine[..., 5] = weight.variance, of_input
    affine[..., 6] = 0 if bias is None else bias.variance
    moments = np.empty_like(rows.lead), np.empty_like(rows.lead), np.empty_like(rows.lead)
    rows.call("standardize", rows.lead, v, affine, *moments)
    return moments


def standardize_back(
    t: Array, d: Array, e: Array, slope: Array | None, back: Array, wanted: bool
) -> tuple[Array, Deltas | None]:
    """Return sums, ``[4, features]``, float64: of t d, t^2 e, d, e; and, if ``wanted``, two new
    arrays: d and e times ``back`` and its square, and times ``slope`` and its square.
    """
    xp, rows = array_module(t), _Rows.of(t)
    if rows is None:
        products = xp.einsum("bfp,bfp->bf", t, d), xp.einsum("bfp,bfp->bf", t * t, e)
        parts = (*products, d.sum(axis=2), e.sum(axis=2))
        sums = xp.stack([part.sum(axis=0, dtype=np.float64) for part in parts])
        if not wanted:
            return sums, None
        return sums, times_slope(d * back[..., None], e * (back * back)[..., None], slope)
    sums = np.empty((4, *t.shape[:2]))
    factors = np.ascontiguousarray(np.broadcast_to(back, t.shape[:2]))
    outs = (np.empty_like(rows.lead), np.empty_like(rows.lead)) if wanted else None
    rows.call("standardize_back", rows.lead, d, e, slope, factors, sums, *(outs or (None, None)))
    return sums.sum(axis=1), outs


class _Rows:
    """The rows of an array and how they lie, for the kernels.

    Attributes:
        lead: the array, or a copy without gaps, as which all units of a call lie.
    """

    def __init__(self, module: Any, units: Array) -> None:
        self._module = module
        dense = np.empty_like(units).strides == units.strides
        self.lead = units if dense else units.copy(order="K")
        steps = (step // REAL.itemsize for step in self.lead.strides[:2])
        self._described = module.ffi.new("fl_tagi_rows *", (*units.shape, *steps))

    @classmethod
    def of(cls, units: Array) -> _Rows | None:
        """Return the rows of ``units``, or None where NumPy or CuPy do better."""
        if is_cupy(units) or units.dtype != REAL:
            return None
        if units.shape[2] < SHORTEST or units.strides[2] != REAL.itemsize:
            return None
        module = native()
        return None if module is None else cls(module, units)

    def call(self, name: str, *arrays: Array | None) -> None:
        """Call the kernel with the rows and ``arrays``: units, or contiguous ones of other shapes.

        Rows are so long that nothing else has their shape.
        """
        placed = [None if each is None else self._placed(each) for each in arrays]
        pointers = [address(self._module, each) for each in placed]
        getattr(self._module.lib, f"fl_tagi_{name}")(self._described, *pointers)

    def _placed(self, array: Array) -> Array:
        """Return units as they are or as a copy that lies as ``lead`` does; others as they are."""
        same = array.dtype == REAL and array.strides == self.lead.strides
        if array.shape != self.lead.shape or same:
            return array
        copy = np.empty_like(self.lead)
        copy[...] = array
        return copy
