"""Layers that normalise units to mean 0 and variance 1, then scale and shift them."""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy, to_device
from flashlight_py.tagi.activations import Moments
from flashlight_py.tagi.layer import BaseLayer, Deltas, Parameter, Shape, times_slope
from flashlight_py.tagi.states import REAL, BaseHiddenStates, data_pointer, tagi_kernels

NORM_STATISTICS = ("running_mean", "running_variance", "batch_mean", "batch_variance")


class Normalization(BaseLayer):
    """Base class: ``z = w * t + b`` with ``t = (x - mean) / sqrt(variance + eps)``.

    Subclasses compute the statistics ``mean`` and ``variance``. Weights have means W and variances
    S, biases have b and Sb. Inputs have variances v. With r = 1 / sqrt(variance + eps), outputs
    have mean ``t W + b`` and variance ``r^2 v (W^2 + S) + S t^2 + Sb``, as in pytagi 0.2.1. The
    backward pass treats the statistics as constants: deltas are ``d r W`` and ``e (r W)^2``.

    A sample is viewed as ``[features, positions]``. For images, these are channels and pixels.
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
        self._slope: Array | None = None  # slope of the input
        self._t = np.empty((0, features, 1), REAL)
        self._back = self._t  # r W, the factors of the deltas

    def _sizes(self) -> tuple[()]:
        return ()

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        rows = (len(x.mean), self.num_weights, self._positions)
        m, v = x.mean.reshape(rows), None if x.variance is None else x.variance.reshape(rows)
        center, spread = self._statistics(m, v)
        scale = (1 / array_module(m).sqrt(spread + self.eps)).astype(REAL)
        t, mean, variance = standardize(m, v, center.astype(REAL), scale, self.weight, self.biases)
        # Kept in evaluation too, because other layers of the network may be in training.
        self._t, self._back = t, scale * self.weight.mean
        self._slope = None if x.slope is None else x.slope.reshape(rows)
        return BaseHiddenStates(mean.reshape(x.mean.shape), variance.reshape(x.mean.shape))

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Sum the parameters' deltas. Return ``d r W s``, ``e (r W s)^2``; s: the input's slope."""
        t = self._t
        deltas = d.reshape(t.shape), e.reshape(t.shape)
        sums, back = standardize_back(t, *deltas, self._slope, self._back, needs_input)
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
        """Return mean and variance of the units, which broadcast to ``[batch, features]``."""

    def _connect(self, shape: Shape, positions: int) -> Shape:
        self._positions = positions
        self.input_shape = self.output_shape = shape
        return shape


class BatchNorm2d(Normalization):
    """Normalisation over the batch of each channel of images, or each feature of flat samples.

    A channel has n units, the pixels of all images; a feature has n units, one per sample. With
    means m and variances v of the units, mean = sum(m) / n and variance = (sum((m - mean)^2) +
    sum(v)) / (n - 1); if n = 1, the variance is v. Evaluation uses running statistics, which each
    batch of training updates: ``running = momentum * running + (1 - momentum) * batch``.

    Args:
        num_features: Channels of the images, or features of flat samples.
        eps: Positive number that is added to variances.
        momentum: Momentum of the running statistics, from 0 to 1.
        bias: Whether the layer has biases.
        gain_weight, gain_bias: Gains of the initial variances, gain^2 / num_features. Initial means
            are 1 for weights and 0 for biases.

    Attributes:
        running_mean, running_variance: ``[num_features]``, float32; initially 0 and 1.
        add_up: None, or a function that adds an array over processes in place. Each forward pass in
            training then calls it once with a flat float64 array of 1 + 3 num_features elements (n,
            sum(m), sum(m^2), sum(v)), and uses the statistics of all processes.

    Raises:
        ValueError: If an argument is out of its range.
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
        """Return the attributes. ``add_up`` is None: a copy does not communicate."""
        return super().__getstate__() | {"add_up": None}

    def connect(self, shape: Shape) -> Shape:
        """Return ``shape``: it must have ``num_features`` channels, or ``num_features`` units."""
        if shape[:1] == (self.num_features,):
            return self._connect(shape, math.prod(shape[1:]))
        if math.prod(shape) == self.num_features:
            return self._connect(shape, 1)
        expected = f"{self.num_features} channels or features"
        raise ValueError(f"expected {expected}, got samples of shape {shape}")

    def statistics(self) -> list[Array]:
        return [self.running_mean, self.running_variance]

    def to_device(self, device: str) -> None:
        for name in NORM_STATISTICS:
            setattr(self, name, to_device(getattr(self, name), device))

    def _statistics(self, m: Array, v: Array | None) -> tuple[Array, Array]:
        if not self.training:
            return self.running_mean, self.running_variance
        mean, variance = self._batch_statistics(m, v)
        self._update_running(mean, variance)
        return mean, variance

    def _update_running(self, mean: Array, variance: Array) -> None:
        self.batch_mean, self.batch_variance = mean.astype(REAL), variance.astype(REAL)
        for running, batch in zip(self.statistics(), (mean, variance), strict=True):
            running[...] = self.momentum * running + (1 - self.momentum) * batch

    def forward_nothing(self) -> None:
        """Update the running statistics from the samples of other processes, if they have any."""
        if self.training and self.add_up is not None:
            sums = array_module(self.running_mean).zeros(1 + 3 * self.num_features)
            self.add_up(sums)
            if float(sums[0]):
                self._update_running(*_mean_and_variance(sums))

    def _batch_statistics(self, m: Array, v: Array | None) -> tuple[Array, Array]:
        """Return mean and variance of each feature in float64.

        It sums squared differences from the mean of this process. Plain squares would lose
        precision if means are large compared with their differences.
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
    """Return mean and variance of each feature from n, sum(m), sum(m^2) and sum(v)."""
    xp = array_module(sums)
    total, (means, squares, units) = sums[0], sums[1:].reshape(3, -1)
    mean = means / total
    squares = xp.maximum(squares - mean * mean * total, 0)
    return mean, (squares + units) / xp.maximum(total - 1, 1)


class LayerNorm(Normalization):
    """Normalisation of each sample over all its units, in training and evaluation.

    With means m and variances v of the n units of a sample, mean = sum(m) / n and variance =
    (sum((m - mean)^2) + sum(v)) / (n - 1); if n = 1, the variance is v. Initial means are 1 for
    weights and 0 for biases.

    Args:
        normalized_shape: ``n`` or ``(n,)`` for flat samples, with one weight per feature; or
            ``(channels, width, height)`` for images, with one weight per channel.
        eps: Positive number that is added to variances.
        bias: Whether the layer has biases.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-4, bias: bool = True
    ) -> None:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else (*normalized_shape,)
        if len(shape) not in (1, 3) or min(shape) < 1:
            raise ValueError(
                "LayerNorm: normalized_shape must be a number of features or (channels, width, "
                f"height), each at least 1, got {normalized_shape}"
            )
        super().__init__(shape[0], eps, bias, (1, 1))
        self.normalized_shape = shape
        self.connect(shape if len(shape) == 1 else (shape[0], shape[2], shape[1]))

    def connect(self, shape: Shape) -> Shape:
        """Return ``shape``. It must have the size of ``normalized_shape``, with channels first."""
        images = len(self.normalized_shape) == 3
        channels = not images or len(shape) == 1 or shape[0] == self.num_weights
        if math.prod(shape) != math.prod(self.normalized_shape) or not channels:
            expected = "channels, width, height" if images else "features"
            expected = f"({expected}) = {self.normalized_shape}"
            raise ValueError(f"expected samples {expected}, got shape {shape}")
        return self._connect(shape, math.prod(self.normalized_shape[1:]))

    def _statistics(self, m: Array, v: Array | None) -> tuple[Array, Array]:
        n = m.shape[1] * m.shape[2]
        mean = row_sums(m).sum(axis=1, keepdims=True) / n
        variance = row_sums(m, mean).sum(axis=1, keepdims=True)
        if v is not None:
            variance += row_sums(v).sum(axis=1, keepdims=True)
        return mean, variance / max(n - 1, 1)


SHORTEST = 8  # minimum positions per row for which the kernels are faster


def row_sums(units: Array, centers: Array | None = None) -> Array:
    """Return the float64 sum of each row, or of its squared differences from ``centers``."""
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
    used = None if centers is None else np.ascontiguousarray(centers)
    rows.call("row_sums", rows.lead, used, sums)
    return sums


def standardize(
    m: Array, v: Array | None, center: Array, scale: Array, weight: Parameter,
    bias: Parameter | None,
) -> Moments:  # fmt: skip
    """Return new arrays: t = (m - center) * scale, means and variances of t * weight + bias."""
    rows, input_factor = _Rows.of(m), scale * scale * (weight.mean * weight.mean + weight.variance)
    if rows is None:  # the same order of operations as in the kernels
        t = m - center[..., None]
        t *= scale[..., None]
        mean, variance = t * weight.mean[:, None], t * t
        variance *= weight.variance[:, None]
        if bias is not None:
            mean += bias.mean[:, None]
            variance += bias.variance[:, None]
        if v is not None:
            variance += v * input_factor[..., None]
        return t, mean, variance
    affine = np.empty((*m.shape[:2], 7), REAL)
    affine[..., 0], affine[..., 1], affine[..., 2] = center, scale, weight.mean
    affine[..., 3] = 0 if bias is None else bias.mean
    affine[..., 4], affine[..., 5] = weight.variance, input_factor
    affine[..., 6] = 0 if bias is None else bias.variance
    moments = np.empty_like(rows.lead), np.empty_like(rows.lead), np.empty_like(rows.lead)
    rows.call("standardize", rows.lead, v, affine, *moments)
    return moments


def standardize_back(
    t: Array, d: Array, e: Array, slope: Array | None, back: Array, needs_input: bool
) -> tuple[Array, Deltas | None]:
    """Return the sums of the parameters' deltas, and the input's deltas if ``needs_input``.

    The sums of t d, t^2 e, d and e are float64 ``[4, features]``. The input's deltas are new: ``d *
    back * slope`` and ``e * back^2 * slope^2``.
    """
    xp, rows = array_module(t), _Rows.of(t)
    if rows is None:
        products = xp.einsum("bfp,bfp->bf", t, d), xp.einsum("bfp,bfp->bf", t * t, e)
        parts = (*products, d.sum(axis=2), e.sum(axis=2))
        sums = xp.stack([part.sum(axis=0, dtype=np.float64) for part in parts])
        if not needs_input:
            return sums, None
        return sums, times_slope(d * back[..., None], e * (back * back)[..., None], slope)
    sums = np.empty((4, *t.shape[:2]))
    factors = np.ascontiguousarray(np.broadcast_to(back, t.shape[:2]))
    outs = (np.empty_like(rows.lead), np.empty_like(rows.lead)) if needs_input else None
    rows.call("standardize_back", rows.lead, d, e, slope, factors, sums, *(outs or (None, None)))
    return sums.sum(axis=1), outs


class _Rows:
    """The rows of an array. Kernels use arrays of the shape and the memory layout of ``lead``.

    ``lead`` is the array, or a copy without gaps.
    """

    def __init__(self, module: Any, units: Array) -> None:
        self._module = module
        dense = np.empty_like(units).strides == units.strides
        self.lead = units if dense else units.copy(order="K")
        steps = (step // REAL.itemsize for step in self.lead.strides[:2])
        self._description = (*units.shape, *steps)

    @classmethod
    def of(cls, units: Array) -> "_Rows | None":
        """Return the rows of ``units``; None if the kernels cannot read them or are slower."""
        if is_cupy(units) or units.dtype != REAL:
            return None
        if units.shape[2] < SHORTEST or units.strides[2] != REAL.itemsize:
            return None
        module = tagi_kernels()
        return None if module is None else cls(module, units)

    def call(self, name: str, *arrays: Array | None) -> None:
        """Call the kernel ``name``. Copies arrays with the shape, but not the layout, of ``lead``.

        Arrays of other shapes must be contiguous.
        """
        arranged = [None if array is None else self._with_layout(array) for array in arrays]
        pointers = [data_pointer(self._module, array) for array in arranged]
        getattr(self._module.lib, f"fl_tagi_{name}")(self._description, *pointers)

    def _with_layout(self, array: Array) -> Array:
        is_laid_out = array.dtype == REAL and array.strides == self.lead.strides
        if array.shape != self.lead.shape or is_laid_out:
            return array
        copy = np.empty_like(self.lead)
        copy[...] = array
        return copy
