"""Helpers of pytagi scripts: class trees, data sets, normalisation and schedules."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.tagi.activations import tails
from flashlight_py.tagi.states import REAL, as_real, fits_in, unmasked

FileName = str | os.PathLike[str]

IMAGES, LABELS = 2051, 2049  # magic numbers of MNIST files
CIFAR_IMAGE = 3 * 32 * 32  # bytes of an image, after one byte of the label
SMALL = 1e-10  # added to scales, as in pytagi, to avoid a division by 0
# Variance of the error in P(z + error > 0), the probability of a branch.
ERROR_VARIANCE = 1 / 9


class HRCSoftmax:
    """A binary tree whose leaves are classes, for class probabilities from Gaussian outputs.

    A class corresponds to the path from the root to its leaf. Each node has one output of the
    network. At each node of the path, this output is observed as +1 or -1. A sample therefore
    observes L outputs, with L = ceil(log2(classes)) levels; the network has about ``classes``
    outputs. :meth:`Utils.get_hierarchical_softmax` creates a tree.

    Attributes:
        obs: Observations of each class, +1 or -1: flat, ``classes * num_obs`` elements, float32.
        idx: Numbers of the observed outputs of each class, from 1: the same shape, int32.
        num_obs: Number of observations per class, equal to the number of levels.
        len: Number of outputs that the network needs.
    """

    def __init__(self) -> None:
        self.obs, self.idx = np.empty(0, REAL), np.empty(0, np.int32)
        self.num_obs = self.len = 0


def tree_of(num_classes: int) -> HRCSoftmax:
    """Return the tree of ``num_classes`` classes.

    The bits of a class, the highest first, are its path: 0 is observed as +1, and 1 as -1. Nodes
    are numbered level by level, from the root.

    Raises:
        ValueError: If ``num_classes`` is below 2.
    """
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    levels = (num_classes - 1).bit_length()
    sizes = [num_classes]
    for _ in range(levels):
        sizes.insert(0, -(-sizes[0] // 2))
    # Node of each class at each level: the leading bits of the class.
    nodes = np.arange(num_classes)[:, None] >> np.arange(levels, -1, -1)
    idx = nodes[:, :-1] + 1
    idx[:, 1:] += np.cumsum(sizes)[: levels - 1]
    obs = 1 - 2 * (nodes[:, 1:] & 1)
    tree = HRCSoftmax()
    tree.obs, tree.idx = obs.astype(REAL).reshape(-1), idx.astype(np.int32).reshape(-1)
    tree.num_obs, tree.len = levels, int(idx.max())
    return tree


def _checked_labels(labels: Any, num_classes: int, missing: float | None = None) -> Array:
    """Return labels as flat integers. If ``missing`` is NaN, NaN or masked labels become -1."""
    array = as_real("labels", labels, "cpu", missing=missing).reshape(-1)
    is_missing = np.isnan(array) & (missing is not None)
    is_valid = is_missing | (array >= 0) & (array < num_classes) & (array == np.floor(array))
    if not is_valid.all():
        raise ValueError(f"labels must be from 0 to {num_classes - 1}, got {array[~is_valid][0]:g}")
    return np.where(is_missing, -1, array).astype(np.int64)


def probabilities(mean: Any, variance: Any, tree: HRCSoftmax) -> Array:
    """Return the probability of each class: NumPy float32 ``[batch, classes]``.

    It is the product of the probabilities of the branches on the class's path, as in pytagi. The
    sum is 1 only if the number of classes is a power of 2. Means and variances of the outputs are
    ``[batch, tree.len]`` or flat, of any dtype.
    """
    m, v = as_real("means", mean, "cpu"), as_real("variances", variance, "cpu")
    shape = (m.size // tree.len, tree.len)
    if not (fits_in(m.shape, shape) and fits_in(v.shape, shape)):
        expected = f"shape [batch, {tree.len}] (outputs of the tree) or flat"
        raise ValueError(f"means and variances: expected {expected}, got {m.shape} and {v.shape}")
    m, v = (array.reshape(shape).astype(np.float64) for array in (m, v))
    z = m / np.sqrt(v + ERROR_VARIANCE)
    tail = tails(abs(z))[0]
    right, left = np.where(z > 0, 1 - tail, tail), np.where(z > 0, tail, 1 - tail)
    obs, idx = tree.obs.reshape(-1, tree.num_obs), tree.idx.reshape(-1, tree.num_obs) - 1
    result = np.ones((len(right), len(obs)))
    for level in range(tree.num_obs):  # one level at a time, to limit memory for many classes
        node = idx[:, level]
        result *= np.where(obs[:, level] > 0, right[:, node], left[:, node])
    return result.astype(REAL)


class Utils:
    """Functions for class labels, data sets and time series, with pytagi's names.

    Labels count from 0, and there are at least 2 classes.
    """

    def label_to_obs(self, labels: Any, num_classes: int) -> tuple[Array, Array, int]:
        """Return the observations of each label for ``update_using_indices``.

        Labels have any shape. NaN and masked labels are unobserved. Raises ValueError if another
        label is not a class, or ``num_classes`` is below 2.

        Returns:
            Observed values (+1, -1, or NaN for an unobserved label), float32; indices of the
            observed outputs, from 1, int32; and the number of observations per label. Both arrays
            are flat.
        """
        tree = tree_of(num_classes)
        classes = _checked_labels(labels, num_classes, missing=np.nan)
        obs, idx = (array.reshape(num_classes, -1)[classes] for array in (tree.obs, tree.idx))
        obs[classes < 0] = np.nan
        return obs.reshape(-1), idx.reshape(-1), tree.num_obs

    def label_to_one_hot(self, labels: Any, num_classes: int) -> Array:
        """Return one-hot vectors of labels: flat float32, ``labels * num_classes`` elements.

        A NaN or masked label gives a vector of NaN. Raises ValueError if another label is invalid.
        """
        classes = _checked_labels(labels, num_classes, missing=np.nan)
        hot: Array = np.zeros((classes.size, num_classes), REAL)
        hot[np.arange(classes.size), classes] = 1
        hot[classes < 0] = np.nan
        return hot.reshape(-1)

    def get_labels(
        self, ma: Any, Sa: Any, hr_softmax: HRCSoftmax, num_classes: int, batch_size: int
    ) -> tuple[Array, Array]:
        """Return the most probable class of each sample, and the probabilities of all classes.

        Args:
            ma, Sa: Means and variances of the outputs, ``[batch, outputs]`` or flat.
            hr_softmax, num_classes: The tree and its number of classes.
            batch_size: Number of samples.

        Returns:
            Classes, int32 ``[batch_size]``; probabilities, float32 ``[batch_size * num_classes]``.

        Raises:
            ValueError: If the sizes do not match the tree and the batch.
        """
        values = self._probabilities(ma, Sa, hr_softmax, num_classes)
        if len(values) != batch_size:
            raise ValueError(f"expected outputs of {batch_size} samples, got {len(values)} samples")
        return values.argmax(axis=1).astype(np.int32), values.reshape(-1)

    def get_errors(
        self, ma: Any, Sa: Any, labels: Any, hr_softmax: HRCSoftmax, num_classes: int,
        batch_size: int,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return 1 for each sample whose most probable class differs from its label, otherwise 0.

        ``labels`` has shape ``[batch_size]``. For the other arguments see :meth:`get_labels`.
        Returns int32 ``[batch_size]``, and the probabilities of :meth:`get_labels`.

        Raises:
            ValueError: If :meth:`get_labels` raises it, or a label is NaN, masked or not a class.
                ``HRCSoftmaxMetric.error_rate`` ignores NaN and masked labels.
        """
        predicted, values = self.get_labels(ma, Sa, hr_softmax, num_classes, batch_size)
        classes = _checked_labels(labels, num_classes)
        if classes.size != batch_size:
            raise ValueError(f"expected {batch_size} labels, got {classes.size}")
        return (predicted != classes).astype(np.int32), values

    get_hierarchical_softmax = staticmethod(tree_of)

    def obs_to_label_prob(
        self, ma: Any, Sa: Any, hr_softmax: HRCSoftmax, num_classes: int
    ) -> Array:
        """Return the probabilities of all classes: float32 ``[samples * num_classes]``.

        See :meth:`get_labels` for arguments and ValueError. Any number of samples is accepted.
        """
        return self._probabilities(ma, Sa, hr_softmax, num_classes).reshape(-1)

    def load_mnist_images(
        self, image_file: FileName, label_file: FileName, num_images: int
    ) -> tuple[Array, Array]:
        """Return the first ``num_images`` images of MNIST files. 0: all.

        Returns:
            Flat float32 pixels from 0 to 1, and int32 labels.

        Raises:
            ValueError: If a file has another format or is truncated, or the lengths differ.
            OSError: If a file cannot be read.
        """
        images, labels = _idx(Path(image_file), IMAGES, 3), _idx(Path(label_file), LABELS, 1)
        if len(images) != len(labels):
            expected = f"{len(images)} labels for {image_file}"
            raise ValueError(f"{label_file}: expected {expected}, got {len(labels)}")
        count = num_images or len(images)
        return images[:count].reshape(-1) / REAL.type(255), labels[:count].astype(np.int32)

    def load_cifar_images(self, image_file: FileName, num: int) -> tuple[Array, Array]:
        """Return the first ``num`` images of a CIFAR-10 file (binary version). 0: all.

        Returns:
            Flat float32 pixels from 0 to 1, channels first, and int32 labels.

        Raises:
            ValueError: If the file has another format.
            OSError: If the file cannot be read.
        """
        data = np.fromfile(image_file, np.uint8)
        if data.size == 0 or data.size % (1 + CIFAR_IMAGE):
            expected = f"CIFAR-10 (binary version), a multiple of {1 + CIFAR_IMAGE} bytes"
            raise ValueError(f"{image_file}: expected {expected}, got {data.size} bytes")
        rows = data.reshape(-1, 1 + CIFAR_IMAGE)
        rows = rows[: num or len(rows)]
        return rows[:, 1:].reshape(-1) / REAL.type(255), rows[:, 0].astype(np.int32)

    def create_rolling_window(
        self, data: Any, output_col: Sequence[int] | Array, input_seq_len: int, output_seq_len: int,
        num_features: int, stride: int,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return windows of a time series, and the values that follow each window.

        Args:
            data: Array of shape ``[steps, num_features]`` or flat; masked values become NaN.
            output_col: Indices of the features to predict, from 0.
            input_seq_len, output_seq_len: Number of steps of a window, and of steps after it.
            num_features: Features of a step.
            stride: Steps between the starts of two windows.

        Returns:
            ``[windows, input_seq_len * num_features]`` and ``[windows, output_seq_len *
            len(output_col)]``, float32.

        Raises:
            ValueError: If the data are shorter than one window, or a column is not a feature or is
                masked.
        """
        values = as_real("data", data, "cpu", missing=np.nan)
        columns = np.asarray(unmasked("output_col", output_col), np.int64).reshape(-1)
        if not fits_in(values.shape, (values.size // num_features, num_features)):
            expected = f"shape [steps, {num_features}], or the same elements flat"
            raise ValueError(f"data: expected {expected}, got {values.shape}")
        if columns.size and not (columns.min() >= 0 and columns.max() < num_features):
            raise ValueError(f"output_col must be from 0 to {num_features - 1}, got {output_col}")
        steps = values.reshape(-1, num_features)
        count = (len(steps) - input_seq_len - output_seq_len) // stride + 1
        if count < 1:
            least = input_seq_len + output_seq_len
            raise ValueError(f"data: expected at least {least} steps, got {len(steps)}")
        begin = np.arange(count)[:, None] * stride
        seen = steps[begin + np.arange(input_seq_len)]
        ahead = steps[begin + input_seq_len + np.arange(output_seq_len)][:, :, columns]
        return seen.reshape(count, -1), ahead.reshape(count, -1)

    def get_upper_triu_cov(self, batch_size: int, num_data: int, sigma: float) -> Array:
        """Return covariance matrices of independent elements as upper triangles, row by row.

        The result is flat float32, with ``sigma ** 2`` on the diagonals and 0 elsewhere. It has
        ``batch_size`` matrices of ``num_data`` rows.
        """
        triangle = np.eye(num_data, dtype=REAL)[np.triu_indices(num_data)] * REAL.type(sigma) ** 2
        return np.tile(triangle, batch_size)

    @staticmethod
    def _probabilities(ma: Any, Sa: Any, hr_softmax: HRCSoftmax, num_classes: int) -> Array:
        if hr_softmax.obs.size != num_classes * hr_softmax.num_obs or not hr_softmax.len:
            raise ValueError(f"hr_softmax: expected the tree of {num_classes} classes, got another")
        return probabilities(ma, Sa, hr_softmax)


def _idx(path: Path, number: int, dimensions: int) -> Array:
    """Return the array in an MNIST file with magic number ``number`` and ``dimensions`` axes."""
    data = path.read_bytes()
    head = 4 * (1 + dimensions)
    sizes = np.frombuffer(data[:head], ">i4").tolist() if len(data) >= head else [0]
    if sizes[0] != number or len(data) != head + int(np.prod(sizes[1:])):
        expected = f"a complete MNIST file with magic number {number} and {dimensions} sizes"
        raise ValueError(f"{path}: expected {expected}, got {len(data)} bytes with {sizes}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(sizes[1:])


def exponential_scheduler(
    curr_v: float, min_v: float, decaying_factor: float, curr_iter: int
) -> float:
    """Return ``curr_v * decaying_factor ** curr_iter``, at least ``min_v``."""
    return float(np.maximum(curr_v * decaying_factor**curr_iter, min_v))


class Normalizer:
    """Scaling of data and its inverse. Arrays broadcast like NumPy's; each result is new.

    Args:
        method: Stored and not used.
    """

    def __init__(self, method: str | None = None) -> None:
        self.method = method

    @staticmethod
    def standardize(data: Array, mu: Array, std: Array) -> Array:
        """Return ``(data - mu) / std`` with the broadcast shape."""
        return (data - mu) / (std + SMALL)

    @staticmethod
    def unstandardize(norm_data: Array, mu: Array, std: Array) -> Array:
        """Return ``norm_data * std + mu``: the original data in the broadcast shape."""
        return norm_data * (std + SMALL) + mu

    @staticmethod
    def unstandardize_std(norm_std: Array, std: Array) -> Array:
        """Convert standard deviations of standardised data, of any shape, to the original scale."""
        return norm_std * (std + SMALL)

    @staticmethod
    def max_min_norm(data: Array, max_value: Array, min_value: Array) -> Array:
        """Return data, of any shape, with ``min_value`` scaled to 0 and ``max_value`` to 1.

        Raises:
            ValueError: If a maximum is below its minimum.
        """
        if not np.all(np.greater_equal(max_value, min_value)):
            raise ValueError("max_min_norm: expected max_value >= min_value, got a smaller maximum")
        return (data - min_value) / (max_value - min_value + SMALL)

    @staticmethod
    def max_min_unnorm(norm_data: Array, max_value: Array, min_value: Array) -> Array:
        """Return the original of data scaled by :meth:`max_min_norm`, of the same shape."""
        return norm_data * (max_value - min_value + SMALL) + min_value

    @staticmethod
    def max_min_unnorm_std(norm_std: Array, max_value: Array, min_value: Array) -> Array:
        """Convert standard deviations of scaled data, of any shape, to the original scale."""
        return norm_std * (max_value - min_value + SMALL)

    @staticmethod
    def compute_mean_std(data: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation along axis 0, ignoring NaN and masked elements."""
        data = unmasked("data", data, np.nan)
        return np.nanmean(data, axis=0), np.nanstd(data, axis=0)

    @staticmethod
    def compute_max_min(data: Array) -> tuple[Array, Array]:
        """Return maximum and minimum along axis 0, ignoring NaN and masked elements."""
        data = unmasked("data", data, np.nan)
        return np.nanmax(data, axis=0), np.nanmin(data, axis=0)
