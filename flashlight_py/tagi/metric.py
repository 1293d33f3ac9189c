"""Quality measures of predictions. Arrays may have any dtype.

Arrays must have equal shapes, or equal sizes if one is flat; otherwise ValueError is raised. An
array of one element, except labels, matches any shape. Observations and labels that are NaN or
masked (``np.ma``) are ignored.
"""

from itertools import combinations
from typing import Any

import numpy as np

from flashlight_py.device import Array, to_device
from flashlight_py.tagi.states import fits_in, unmasked
from flashlight_py.tagi.utilities import probabilities, tree_of


class HRCSoftmaxMetric:
    """Predicted classes and error rate of a network whose outputs are the nodes of a class tree.

    Args:
        num_classes: Number of classes, at least 2.

    Attributes:
        hrc_softmax: The class tree. The network needs ``hrc_softmax.len`` outputs.

    Raises:
        ValueError: If ``num_classes`` is below 2.
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.hrc_softmax = tree_of(num_classes)

    def error_rate(self, m_pred: Any, v_pred: Any, label: Any) -> float:
        """Return the share of samples, 0 to 1, whose most probable class is wrong.

        Args:
            m_pred, v_pred: Means and variances of the outputs, ``[batch, outputs]`` or flat.
            label: Classes from 0, ``[batch]``. NaN or masked labels are ignored.

        Raises ValueError if the sizes do not match the tree.
        """
        return classification_error(self.get_predicted_labels(m_pred, v_pred), label)

    def get_predicted_labels(self, m_pred: Any, v_pred: Any) -> Array:
        """Return the most probable class of each sample: int32 ``[batch]``.

        Raises ValueError if the sizes do not match the tree.
        """
        probable: Array = probabilities(m_pred, v_pred, self.hrc_softmax).argmax(axis=1)
        return probable.astype(np.int32)


def mse(prediction: Any, observation: Any) -> float:
    """Return the mean squared error; ValueError if the shapes do not match."""
    predicted, observed = _matching("mse", prediction=prediction, observation=observation)
    return float(np.nanmean((predicted - observed) ** 2))


def rmse(prediction: Any, observation: Any) -> float:
    """Return the root mean squared error; ValueError if the shapes do not match."""
    predicted, observed = _matching("rmse", prediction=prediction, observation=observation)
    return float(np.sqrt(np.nanmean((predicted - observed) ** 2)))


def log_likelihood(prediction: Any, observation: Any, std: Any) -> float:
    """Return the mean log density of observations; ValueError if the shapes do not match.

    Args:
        prediction: Means of the predicted distributions.
        observation: Observed values.
        std: Standard deviations of the predictions, including the observation errors.
    """
    arrays = _matching("log_likelihood", prediction=prediction, observation=observation, std=std)
    predicted, observed, deviation = arrays
    densities = -0.5 * np.log(2 * np.pi * deviation**2)
    return float(np.nanmean(densities - 0.5 * ((observed - predicted) / deviation) ** 2))


def classification_error(prediction: Any, label: Any) -> float:
    """Return the share of predicted classes, 0 to 1, that differ from the labels.

    Raises:
        ValueError: If the shapes do not match, or a prediction is masked.
    """
    predicted = np.asarray(to_device(unmasked("prediction", prediction), "cpu"))
    labels = np.asarray(to_device(unmasked("label", label, np.nan), "cpu"))
    if not _same_order(predicted, labels):
        shapes = f"{predicted.shape}, as predictions, or the same elements flat, got {labels.shape}"
        raise ValueError(f"classification_error: expected labels of shape {shapes}")
    predicted, labels = predicted.reshape(-1), labels.reshape(-1)
    is_known = np.equal(labels, labels)  # False for NaN
    return float(np.mean(predicted[is_known] != labels[is_known]))


def _matching(metric: str, **arrays: Any) -> list[Array]:
    """Return flat float64 arrays, or raise ValueError if their shapes do not match."""
    flat = [
        np.asarray(to_device(unmasked(name, values, np.nan), "cpu"), np.float64)
        for name, values in arrays.items()
    ]
    if not all(_same_order(*pair) for pair in combinations(flat, 2) if 1 not in map(np.size, pair)):
        sizes = ", ".join(f"{name} {np.shape(values)}" for name, values in arrays.items())
        expected = "expected arrays of one shape, flat arrays of one size, or single numbers"
        raise ValueError(f"{metric}: {expected}, got {sizes}")
    return [values.reshape(-1) for values in flat]


def _same_order(a: Array, b: Array) -> bool:
    return fits_in(a.shape, b.shape) or fits_in(b.shape, a.shape)
