"""Helpers of pytagi's scripts beside networks: class trees, data sets, scales, schedules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.tagi.activations import tails
from flashlight_py.tagi.states import REAL, fits, real, unmasked

FileName = str | os.PathLike[str]

IMAGES, LABELS = 2051, 2049  # the numbers that MNIST's files begin with
CIFAR_IMAGE = 3 * 32 * 32  # bytes, behind one of the label
SMALL = 1e-10  # what pytagi adds to scales, so that nothing is divided by 0
# A class is as probable as its path: at each node P(z + error > 0), with this for the error.
ERROR_VARIANCE = 1 / 9


class HRCSoftmax:
    """A binary tree with classes as its leaves, so that Gaussian outputs can say which it is.

    A class is the path from the root to its leaf: at each node on it the output of that node is
    observed to be +1 or -1. With L = ceil(log2(classes)) levels, a sample teaches L outputs of
    about as many as there are classes. :meth:`Utils.get_hierarchical_softmax` makes it.

    Attributes:
        obs: for each class, what is observed on its path: +1 or -1; flat, ``classes * num_obs``
            elements, float32.
        idx: for each class, the outputs that are observed, counted from 1; as ``obs``, int32.
        num_obs: how many observations a class is, the levels of the tree.
        len: how many outputs the network needs.
    """

    def __init__(self) -> None:
        self.obs, self.idx = np.empty(0, REAL), np.empty(0, np.int32)
        self.num_obs = self.len = 0


def tree_of(num_classes: int) -> HRCSoftmax:
    """Return the tree of ``num_classes`` classes.

    The bits of a class, the highest first, are its path: 0 is observed as +1. The nodes of each
    level follow those of the level above.

    Raises:
        ValueError: there are fewer than two classes.
    """
    if num_classes < 2:
        raise ValueError(f"a tree has at least 2 classes, got {num_classes}")
    levels = (num_classes - 1).bit_length()
    sizes = [num_classes]
    for _ in range(levels):
        sizes.insert(0, -(-sizes[0] // 2))
    # Of each class, the number of the node that it reaches at each level: its first bits.
    nodes = np.arange(num_classes)[:, None] >> np.arange(levels, -1, -1)
    idx = nodes[:, :-1] + 1
    idx[:, 1:] += np.cumsum(sizes)[: levels - 1]
    obs = 1 - 2 * (nodes[:, 1:] & 1)
    tree = HRCSoftmax()
    tree.obs, tree.idx = obs.astype(REAL).reshape(-1), idx.astype(np.int32).reshape(-1)
    tree.num_obs, tree.len = levels, int(idx.max())
    return tree


def _checked_labels(labels: Any, num_classes: int, missing: float | None = None) -> Array:
    """Return labels as integers, flat; -1 for NaN or masked ones, if ``missing`` is NaN."""
    array = real("labels", labels, "cpu", missing=missing).reshape(-1)
    absent = np.isnan(array) & (missing is not None)
    right = absent | (array >= 0) & (array < num_classes) & (array == np.floor(array))
    if not right.all():
        raise ValueError(f"labels are from 0 to {num_classes - 1}, got {array[~right][0]:g}")
    return np.where(absent, -1, array).astype(np.int64)


def probabilities(mean: Any, variance: Any, tree: HRCSoftmax) -> Array:
    """Return the probability of each class: ``[batch, classes]``, float32, of NumPy.

    The product of P(node) along the path, as pytagi has it: they add up to 1 only if the number of
    classes is a power of 2. Means and variances of the outputs are ``[batch, tree.len]`` or flat,
    of any dtype.
    """
    m, v = real("means", mean, "cpu"), real("variances", variance, "cpu")
    shape = (m.size // tree.len, tree.len)
    if not (fits(m.shape, shape) and fits(v.shape, shape)):
        raise ValueError(
            f"means and variances: expected shape [batch, {tree.len}], the outputs of the tree, or "
            f"flat, got {m.shape} and {v.shape}"
        )
    m, v = (each.reshape(shape).astype(np.float64) for each in (m, v))
    z = m / np.sqrt(v + ERROR_VARIANCE)
    tail = tails(abs(z))[0]
    right, left = np.where(z > 0, 1 - tail, tail), np.where(z > 0, tail, 1 - tail)
    obs, idx = tree.obs.reshape(-1, tree.num_obs), tree.idx.reshape(-1, tree.num_obs) - 1
    result = np.ones((len(right), len(obs)))
    for level in range(tree.num_obs):  # not all at once: a batch of 1000 classes is large
        node = idx[:, level]
        result *= np.where(obs[:, level] > 0, right[:, node], left[:, node])
    return result.astype(REAL)


class Utils:
    """Functions for labels of a class tree, data sets and time series, named as pytagi's.

    Labels count from 0, and there are at least 2 classes.
    """

    def label_to_obs(self, labels: Any, num_classes: int) -> tuple[Array, Array, int]:
        """Return what to observe for each label, for ``update_using_indices``.

        Labels have any shape; one that is NaN or masked is not observed. Another one that is no
        class, or fewer than two classes, are a ValueError.

        Returns:
            Values, +1 or -1, or NaN of a label that is missing, float32; outputs, from 1, int32;
            and how many there are for each label. The two arrays are flat, sample by sample.
        """
        tree = tree_of(num_classes)
        chosen = _checked_labels(labels, num_classes, missing=np.nan)
        obs, idx = (each.reshape(num_classes, -1)[chosen] for each in (tree.obs, tree.idx))
        obs[chosen < 0] = np.nan
        return obs.reshape(-1), idx.reshape(-1), tree.num_obs

    def label_to_one_hot(self, labels: Any, num_classes: int) -> Array:
        """Return 1 at each label's place, else 0: ``labels * num_classes``, flat, float32.

        All are NaN of a label that is NaN or masked; another one that is no class is a ValueError.
        """
        chosen = _checked_labels(labels, num_classes, missing=np.nan)
        hot: Array = np.zeros((chosen.size, num_classes), REAL)
        hot[np.arange(chosen.size), chosen] = 1
        hot[chosen < 0] = np.nan
        return hot.reshape(-1)

    def get_labels(
        self, ma: Any, Sa: Any, hr_softmax: HRCSoftmax, num_classes: int, batch_size: int
    ) -> tuple[Array, Array]:
        """Return the most probable class of each sample, and the probability of every class.

        Args:
            ma, Sa: means and variances of the outputs, ``[batch, outputs]`` or flat.
            hr_softmax, num_classes: the tree, and how many classes it has.
            batch_size: how many samples there are.

        Returns:
            ``[batch_size]``, int32, and ``[batch_size * num_classes]``, float32.

        Raises:
            ValueError: sizes are not those of the tree and the batch.
        """
        values = self._probabilities(ma, Sa, hr_softmax, num_classes)
        if len(values) != batch_size:
            raise ValueError(f"expected outputs of {batch_size} samples, got {len(values)}")
        return values.argmax(axis=1).astype(np.int32), values.reshape(-1)

    def get_errors(
        self, ma: Any, Sa: Any, labels: Any, hr_softmax: HRCSoftmax, num_classes: int,
        batch_size: int,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return 1 for each sample whose most probable class is not its label, else 0.

        Arguments are those of :meth:`get_labels`, and ``labels``, ``[batch_size]``. The result is
        ``[batch_size]``, int32, and the probabilities as from :meth:`get_labels`.

        Raises:
            ValueError: as :meth:`get_labels`, or a label is none of the classes, NaN or masked;
                ``HRCSoftmaxMetric.error_rate`` leaves the last two out.
        """
        predicted, values = self.get_labels(ma, Sa, hr_softmax, num_classes, batch_size)
        right = _checked_labels(labels, num_classes)
        if right.size != batch_size:
            raise ValueError(f"expected {batch_size} labels, got {right.size}")
        return (predicted != right).astype(np.int32), values

    get_hierarchical_softmax = staticmethod(tree_of)

    def obs_to_label_prob(
        self, ma: Any, Sa: Any, hr_softmax: HRCSoftmax, num_classes: int
    ) -> Array:
        """Return the probability of every class, ``[samples * num_classes]``, float32.

        Arguments, and the ValueError, are those of :meth:`get_labels`; of one sample or more.
        """
        return self._probabilities(ma, Sa, hr_softmax, num_classes).reshape(-1)

    def load_mnist_images(
        self, image_file: FileName, label_file: FileName, num_images: int
    ) -> tuple[Array, Array]:
        """Return the first ``num_images`` images of MNIST's files; 0: all.

        Returns:
            Pixels, flat, float32 from 0 to 1, and labels, int32.

        Raises:
            ValueError: a file is no such file, is cut off, or they have different numbers.
            OSError: a file cannot be read.
        """
        images, labels = _idx(Path(image_file), IMAGES, 3), _idx(Path(label_file), LABELS, 1)
        if len(images) != len(labels):
            raise ValueError(
                f"{image_file} has {len(images)} images, {label_file} {len(labels)} labels"
            )
        count = num_images or len(images)
        return images[:count].reshape(-1) / REAL.type(255), labels[:count].astype(np.int32)

    def load_cifar_images(self, image_file: FileName, num: int) -> tuple[Array, Array]:
        """Return the first ``num`` images of a file of CIFAR-10's binary version; 0: all.

        Returns:
            Pixels, flat, channels first, float32 from 0 to 1, and labels, int32.

        Raises:
            ValueError: it is no such file.
            OSError: it cannot be read.
        """
        data = np.fromfile(image_file, np.uint8)
        if data.size == 0 or data.size % (1 + CIFAR_IMAGE):
            raise ValueError(
                f"{image_file} is no file of CIFAR-10's binary version: expected images of "
                f"{1 + CIFAR_IMAGE} bytes, got {data.size} bytes"
            )
        rows = data.reshape(-1, 1 + CIFAR_IMAGE)
        rows = rows[: num or len(rows)]
        return rows[:, 1:].reshape(-1) / REAL.type(255), rows[:, 0].astype(np.int32)

    def create_rolling_window(
        self, data: Any, output_col: Sequence[int] | Array, input_seq_len: int, output_seq_len: int,
        num_features: int, stride: int,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return what a window sees, and what follows it, as it moves over a time series.

        Args:
            data: shape ``[steps, num_features]`` or flat; masked values become NaN.
            output_col: which features are to be predicted, from 0.
            input_seq_len, output_seq_len: steps of the window, and of what follows.
            num_features: of a step.
            stride: steps from one window to the next.

        Returns:
            ``[windows, input_seq_len * num_features]`` and ``[windows, output_seq_len *
            len(output_col)]``, float32.

        Raises:
            ValueError: there is not one window in the data, or a column is none of its features or
                is masked.
        """
        values = real("data", data, "cpu", missing=np.nan)
        columns = np.asarray(unmasked("output_col", output_col), np.int64).reshape(-1)
        if not fits(values.shape, (values.size // num_features, num_features)):
            raise ValueError(
                f"data: expected shape [steps, {num_features}], or whole steps flat, got "
                f"{values.shape}"
            )
        if columns.size and not (columns.min() >= 0 and columns.max() < num_features):
            raise ValueError(f"output_col: columns are from 0 to {num_features - 1}")
        steps = values.reshape(-1, num_features)
        count = (len(steps) - input_seq_len - output_seq_len) // stride + 1
        if count < 1:
            raise ValueError(
                f"{len(steps)} steps are no window of {input_seq_len} and {output_seq_len} more"
            )
        begin = np.arange(count)[:, None] * stride
        seen = steps[begin + np.arange(input_seq_len)]
        ahead = steps[begin + input_seq_len + np.arange(output_seq_len)][:, :, columns]
        return seen.reshape(count, -1), ahead.reshape(count, -1)

    def get_upper_triu_cov(self, batch_size: int, num_data: int, sigma: float) -> Array:
        """Return covariance matrices of independent elements, their upper triangles row by row.

        ``sigma ** 2`` on the diagonal, 0 beside it; flat, float32, one after the other for
        ``batch_size`` samples of ``num_data`` elements.
        """
        triangle = np.eye(num_data, dtype=REAL)[np.triu_indices(num_data)] * REAL.type(sigma) ** 2
        return np.tile(triangle, batch_size)

    @staticmethod
    def _probabilities(ma: Any, Sa: Any, hr_softmax: HRCSoftmax, num_classes: int) -> Array:
        if hr_softmax.obs.size != num_classes * hr_softmax.num_obs or not hr_softmax.len:
            raise ValueError(f"the tree is not of {num_classes} classes")
        return probabilities(ma, Sa, hr_softmax)


def _idx(path: Path, number: int, dimensions: int) -> Array:
    """Return what a file of MNIST's format has, uint8."""
    data = path.read_bytes()
    head = 4 * (1 + dimensions)
    sizes = np.frombuffer(data[:head], ">i4").tolist() if len(data) >= head else [0]
    if sizes[0] != number or len(data) != head + int(np.prod(sizes[1:])):
        raise ValueError(
            f"{path} is no whole file of MNIST's format: expected the number {number} and "
            f"{dimensions} sizes, then as many bytes; got {len(data)} bytes, {sizes}"
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(sizes[1:])


def exponential_scheduler(
    curr_v: float, min_v: float, decaying_factor: float, curr_iter: int
) -> float:
    """Return ``curr_v * decaying_factor ** curr_iter``, at least ``min_v``."""
    return float(np.maximum(curr_v * decaying_factor**curr_iter, min_v))


class Normalizer:
    """Scales of data, and the way back. Arrays broadcast as NumPy's; each result is new.

    Args:
        method: what it is for; kept, and not used.
    """

    def __init__(self, method: str | None = None) -> None:
        self.method = method

    @staticmethod
    def standardize(data: Array, mu: Array, std: Array) -> Array:
        """Return ``(data - mu) / std``, of the shape that these have together."""
        return (data - mu) / (std + SMALL)

    @staticmethod
    def unstandardize(norm_data: Array, mu: Array, std: Array) -> Array:
        """Return what was standardised: ``norm_data * std + mu``, of their common shape."""
        return norm_data * (std + SMALL) + mu

    @staticmethod
    def unstandardize_std(norm_std: Array, std: Array) -> Array:
        """Return deviations of standardised data, any shape, in the scale of the data."""
        return norm_std * (std + SMALL)

    @staticmethod
    def max_min_norm(data: Array, max_value: Array, min_value: Array) -> Array:
        """Return data, any shape, scaled so that ``min_value`` becomes 0 and ``max_value`` 1.

        Raises:
            ValueError: a maximum is below its minimum.
        """
        if not np.all(np.greater_equal(max_value, min_value)):
            raise ValueError("max_min_norm: a maximum is below its minimum")
        return (data - min_value) / (max_value - min_value + SMALL)

    @staticmethod
    def max_min_unnorm(norm_data: Array, max_value: Array, min_value: Array) -> Array:
        """Return what was scaled by :meth:`max_min_norm`, of the same shape."""
        return norm_data * (max_value - min_value + SMALL) + min_value

    @staticmethod
    def max_min_unnorm_std(norm_std: Array, max_value: Array, min_value: Array) -> Array:
        """Return deviations of scaled data, any shape, in the scale of the data."""
        return norm_std * (max_value - min_value + SMALL)

    @staticmethod
    def compute_mean_std(data: Array) -> tuple[Array, Array]:
        """Return mean and deviation along the first dimension; NaN and masked ones are left out."""
        data = unmasked("data", data, np.nan)
        return np.nanmean(data, axis=0), np.nanstd(data, axis=0)

    @staticmethod
    def compute_max_min(data: Array) -> tuple[Array, Array]:
        """Return the largest and smallest along the first dimension, not of NaN and masked ones."""
        data = unmasked("data", data, np.nan)
        return np.nanmax(data, axis=0), np.nanmin(data, axis=0)
