"""Classes as the leaves of a binary tree, so that Gaussian outputs can say which it is.

A class is the path from the root to its leaf: at each node on it the output of that node is
observed to be +1 or -1. With L = ceil(log2(classes)) levels, a sample teaches L outputs of about as
many as there are classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.activations import tails
from flashlight_py.tagi.states import REAL, fits, real

# A class is as probable as its path: at each node P(z + error > 0), with this for the error.
ERROR_VARIANCE = 1 / 9


class HRCSoftmax:
    """The tree of some classes; :meth:`Utils.get_hierarchical_softmax` makes it.

    Attributes:
        obs: for each class, what is observed on its path: +1 or -1; flat, ``classes * num_obs``
            elements, float32.
        idx: for each class, the outputs that are observed, counted from 1; as ``obs``, int32.
        num_obs: how many observations a class is, the levels of the tree.
        len: how many outputs the network needs.
    """

    def __init__(self) -> None:
        self.obs: Array = np.empty(0, REAL)
        self.idx: Array = np.empty(0, np.int32)
        self.num_obs = 0
        self.len = 0


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


def observations(labels: Any, num_classes: int) -> tuple[Array, Array, int]:
    """Return what is observed for each label: values and outputs from 1, flat, and how many each.

    The values of a label that is NaN or masked are NaN.

    Raises:
        ValueError: a label is none of the classes.
    """
    tree = tree_of(num_classes)
    chosen = checked_labels(labels, num_classes, missing=np.nan)
    obs, idx = tree.obs.reshape(num_classes, -1)[chosen], tree.idx.reshape(num_classes, -1)[chosen]
    obs[chosen < 0] = np.nan
    return obs.reshape(-1), idx.reshape(-1), tree.num_obs


def checked_labels(labels: Any, num_classes: int, missing: float | None = None) -> Array:
    """Return labels as integers, flat; -1 for those that are NaN or masked, if ``missing`` is NaN.

    Raises:
        ValueError: a label is none of 0 to ``num_classes - 1``.
    """
    array = real("labels", labels, "cpu", missing=missing).reshape(-1)
    absent = np.isnan(array) & (missing is not None)
    right = absent | (array >= 0) & (array < num_classes) & (array == np.floor(array))
    if not right.all():
        raise ValueError(f"labels are from 0 to {num_classes - 1}, got {array[~right][0]:g}")
    return np.where(absent, -1, array).astype(np.int64)


def probabilities(mean: Any, variance: Any, tree: HRCSoftmax) -> Array:
    """Return the probability of each class: ``[batch, classes]``, float32, of NumPy.

    The product of P(node) along the path, as pytagi has it: they add up to 1 only if the number of
    classes is a power of 2.

    Args:
        mean, variance: of the outputs, ``[batch, tree.len]`` or flat; any dtype.
        tree: of the classes.

    Raises:
        ValueError: they are not ``tree.len`` for each sample, or not equally many.
    """
    m, v = real("means", mean, "cpu"), real("variances", variance, "cpu")
    shape = (m.size // tree.len, tree.len)
    if not (fits(m.shape, shape) and fits(v.shape, shape)):
        raise ValueError(
            f"means and variances: expected shape [batch, {tree.len}], the outputs of the tree, or "
            f"flat, got {m.shape} and {v.shape}"
        )
    m, v = (each.reshape(shape).astype(np.float64) for each in (m, v))
    right, left = signs(m / np.sqrt(v + ERROR_VARIANCE))
    obs, idx = tree.obs.reshape(-1, tree.num_obs), tree.idx.reshape(-1, tree.num_obs) - 1
    result = np.ones((len(right), len(obs)))
    for level in range(tree.num_obs):  # not all at once: a batch of 1000 classes is large
        node = idx[:, level]
        result *= np.where(obs[:, level] > 0, right[:, node], left[:, node])
    return result.astype(REAL)


def signs(z: Array) -> tuple[Array, Array]:
    """Return P(x > -z) and P(x > z) of a standard normal x, for float64."""
    xp = array_module(z)
    tail = tails(abs(z))[0]
    return xp.where(z > 0, 1 - tail, tail), xp.where(z > 0, tail, 1 - tail)
