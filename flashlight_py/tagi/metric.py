"""How good predictions are, of arrays of one shape, or flat, of any dtype.

Values that are NaN or masked (``np.ma``) among observations and labels count as not observed, and
are left out. A ValueError is raised if the arrays have different shapes, and none is flat with as
many elements; one element goes with all but labels.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from flashlight_py.device import Array, to_device
from flashlight_py.tagi.states import fits, unmasked
from flashlight_py.tagi.utilities import probabilities, tree_of


class HRCSoftmaxMetric:
    """Predicted classes, and how many are wrong, of a network whose outputs are a tree's nodes.

    Args:
        num_classes: at least 2.

    Attributes:
        hrc_softmax: the tree; ``hrc_softmax.len`` is how many outputs the network needs.

    Raises:
        ValueError: there are fewer than two classes.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.hrc_softmax = tree_of(num_classes)

    def error_rate(self, m_pred: Any, v_pred: Any, label: Any) -> float:
        """Return the share of samples whose most probable class is not their label, 0 to 1.

        Args:
            m_pred, v_pred: means and variances of the outputs, ``[batch, outputs]`` or flat.
            label: ``[batch]``, from 0; samples whose label is NaN or masked are left out.

        Sizes that differ from what the tree needs are a ValueError.
        """
        return classification_error(self.get_predicted_labels(m_pred, v_pred), label)

    def get_predicted_labels(self, m_pred: Any, v_pred: Any) -> Array:
        """Return the most probable class of each sample, ``[batch]``, int32.

        Sizes that differ from what the tree needs are a ValueError.
        """
        probable: Array = probabilities(m_pred, v_pred, self.hrc_softmax).argmax(axis=1)
        return probable.astype(np.int32)


def mse(prediction: Any, observation: Any) -> float:
    """Return the mean of the squared errors; shapes that do not fit are a ValueError."""
    predicted, observed = _alike("mse", prediction=prediction, observation=observation)
    return float(np.nanmean((predicted - observed) ** 2))


def rmse(prediction: Any, observation: Any) -> float:
    """Return the root of the mean of the squared errors; with the ValueError of :func:`mse`."""
    predicted, observed = _alike("rmse", prediction=prediction, observation=observation)
    return float(np.sqrt(np.nanmean((predicted - observed) ** 2)))


def log_likelihood(prediction: Any, observation: Any, std: Any) -> float:
    """Return the mean logarithm of the observations' density, with the ValueError of :func:`mse`.

    Args:
        prediction: means of the predicted distributions.
        observation: what was observed.
        std: standard deviations of the predictions, the observations' errors included.
    """
    predicted, observed, deviation = _alike(
        "log_likelihood", prediction=prediction, observation=observation, std=std
    )
    densities = -0.5 * np.log(2 * np.pi * deviation**2)
    return float(np.nanmean(densities - 0.5 * ((observed - predicted) / deviation) ** 2))


def classification_error(prediction: Any, label: Any) -> float:
    """Return the share of predicted classes that are not the labels, 0 to 1.

    Raises:
        ValueError: as the module says, or a prediction is masked.
    """
    predicted = np.asarray(to_device(unmasked("prediction", prediction), "cpu"))
    labels = np.asarray(to_device(unmasked("label", label, np.nan), "cpu"))
    if not _alike_in_order(predicted, labels):
        raise ValueError(
            f"classification_error: predictions of shape {predicted.shape} and labels of shape "
            f"{labels.shape}; expected one shape, or flat ones of as many elements"
        )
    predicted, labels = predicted.reshape(-1), labels.reshape(-1)
    known = np.equal(labels, labels)  # NaN is not
    return float(np.mean(predicted[known] != labels[known]))


def _alike(what: str, **arrays: Any) -> list[Array]:
    """Return the arrays flat, float64: NumPy broadcasts ``(n,)`` with ``(n, 1)`` to a square."""
    found = [
        np.asarray(to_device(unmasked(name, each, np.nan), "cpu"), np.float64)
        for name, each in arrays.items()
    ]
    if not all(
        _alike_in_order(*pair) for pair in combinations(found, 2) if 1 not in map(np.size, pair)
    ):
        sizes = ", ".join(f"{name} {np.shape(values)}" for name, values in arrays.items())
        raise ValueError(
            f"{what}: arrays of different shapes: {sizes}; expected one shape, or flat ones of as "
            "many elements, or single numbers"
        )
    return [each.reshape(-1) for each in found]


def _alike_in_order(a: Array, b: Array) -> bool:
    return fits(a.shape, b.shape) or fits(b.shape, a.shape)
