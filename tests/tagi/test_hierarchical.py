"""The class tree: nodes, observations and probabilities."""

from typing import Any

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from flashlight_py.tagi.utilities import probabilities, tree_of
from tests.tables import for_each
from tests.tagi.helpers import equal
from tests.tagi.oracle import equal_programs

CLASSES = [2, 3, 4, 5, 7, 8, 9, 10, 15, 16, 17, 31, 33, 100, 127, 128, 129, 1000]

TREES = """
    utils = pytagi.Utils()
    result = {}
    for n in classes:
        tree = utils.get_hierarchical_softmax(n)
        m = np.random.default_rng(n).standard_normal((3, tree.len)).astype(np.float32)
        v = np.random.default_rng(n + 1).uniform(0, 2, (3, tree.len)).astype(np.float32)
        found = utils.get_labels(m.ravel(), v.ravel(), tree, n, 3)
        y = [0, 1, 1]
        # The get_errors() of pytagi calls this with an argument too many.
        wrong, _ = (utils._cpp_backend.get_error_wrapper(m.ravel(), v.ravel(), y, n, 3)
                    if hasattr(utils, "_cpp_backend") else utils.get_errors(m, v, y, tree, n, 3))
        one = utils.obs_to_label_prob(m[1], v[1], tree, n)
        obs = utils.label_to_obs([n - 1, 0, n // 2], n)
        hot = utils.label_to_one_hot([n - 1, 0, n // 2], n)
        result[n] = (np.array(tree.obs), np.array(tree.idx), tree.num_obs, tree.len, found,
                     wrong, one, obs, hot)
"""


@pytest.mark.slow
def test_class_tree_and_probabilities_equal_pytagi() -> None:
    equal_programs(TREES, 1e-5, 1e-8, classes=CLASSES)


@for_each("n outputs", [(2, 1), (3, 3), (4, 3), (10, 11), (100, 102), (1000, 1001)])
def test_class_tree_length_is_close_to_the_number_of_classes(n: int, outputs: int) -> None:
    tree = tree_of(n)
    assert tree.len == outputs
    paths = set(map(tuple, np.stack([tree.idx, tree.obs], 1).reshape(n, -1).tolist()))
    assert len(paths) == n  # classes are distinct
    assert tree.idx.min() == 1
    assert set(tree.obs.tolist()) == {-1, 1}


def test_probabilities_match_random_draws() -> None:
    """A class is drawn if output plus error has the sign of its path at each node."""
    rng, n, draws = np.random.default_rng(0), 5, 200_000
    tree = tree_of(n)
    m, v = rng.standard_normal(tree.len), rng.uniform(0.1, 2, tree.len)
    z = rng.normal(m, np.sqrt(v + 1 / 9), (draws, tree.len))
    obs, idx = tree.obs.reshape(n, -1), tree.idx.reshape(n, -1) - 1
    shares = [np.mean((np.sign(z[:, idx[c]]) == obs[c]).all(1)) for c in range(n)]
    equal(probabilities(m, v, tree)[0], shares, atol=0.005)


def test_get_labels_returns_observed_labels() -> None:
    n, tree, utils = 10, tree_of(10), tagi.Utils()
    labels = np.arange(n)
    obs, idx, count = utils.label_to_obs(labels, n)
    outputs = np.zeros((n, tree.len))
    np.put_along_axis(outputs, idx.reshape(n, count) - 1, obs.reshape(n, count), 1)
    metric = tagi.HRCSoftmaxMetric(n)
    equal(metric.get_predicted_labels(outputs, 0.01 + 0 * outputs), labels)
    assert metric.error_rate(outputs.ravel(), 0.01 + 0 * outputs.ravel(), labels) == 0
    assert metric.error_rate(outputs, 0.01 + 0 * outputs, labels[::-1]) == 1


@for_each("labels", [[10], [-1], [0.5], [np.inf, np.nan], np.full((2, 2), 11)])
def test_label_functions_reject_labels_that_are_no_class(labels: Any) -> None:
    """pytagi reads beyond the end of the tree."""
    with pytest.raises(ValueError, match="labels must be from 0 to 9, got"):
        tagi.Utils().label_to_obs(labels, 10)
    with pytest.raises(ValueError, match="labels must be from 0 to 9, got"):
        tagi.Utils().label_to_one_hot(labels, 10)


def test_missing_labels_are_unobserved() -> None:
    utils, tree, nan = tagi.Utils(), tree_of(3), np.nan
    outputs = np.zeros((3, tree.len), np.float32)
    for labels, refusal in (
        (np.ma.array([0, 9, 2], mask=[0, 1, 0]), "labels: expected no masked elements, got 1 of 3"),
        ([0, nan, 2], "labels must be from 0 to 2, got nan"),
    ):
        obs, idx, _ = utils.label_to_obs(labels, 3)
        equal(obs, [1, 1, nan, nan, -1, 1])
        assert set(idx) <= set(range(1, tree.len + 1))
        deltas = nn.BaseDeltaStates()
        nn.OutputUpdater().update_using_indices(
            nn.BaseHiddenStates(outputs, outputs + 1), obs, 0.1, idx, deltas
        )
        equal(deltas.delta_mu.reshape(3, -1).any(axis=1), [True, False, True])
        hot = utils.label_to_one_hot(labels, 3)
        equal(hot.reshape(3, 3), [[1, 0, 0], [nan] * 3, [0, 0, 1]])
        with pytest.raises(ValueError, match=refusal):
            utils.get_errors(outputs, outputs + 1, labels, tree, 3, 3)


def test_label_functions_reject_sizes_that_differ_from_the_tree() -> None:
    utils, tree = tagi.Utils(), tree_of(10)
    m = np.zeros((2, 11))
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        tagi.HRCSoftmaxMetric(1)
    with pytest.raises(ValueError, match=r"means and .* \[batch, 11\].* \(2, 10\) and"):
        utils.get_labels(np.zeros((2, 10)), np.zeros((2, 10)), tree, 10, 2)
    with pytest.raises(ValueError, match=r"means .* \[batch, 11\].* got \(2, 11\) and \(11,\)"):
        utils.get_labels(m, m[0], tree, 10, 2)
    with pytest.raises(ValueError, match=r"\[batch, 11\].* got \(11, 2\) and \(2, 11\)"):
        utils.get_labels(m.T, m, tree, 10, 2)
    with pytest.raises(ValueError, match="expected outputs of 3 samples, got 2"):
        utils.get_labels(m, m, tree, 10, 3)
    with pytest.raises(ValueError, match="expected the tree of 9 classes"):
        utils.get_labels(m, m, tree, 9, 2)
    with pytest.raises(ValueError, match="expected the tree of 9 classes"):
        utils.obs_to_label_prob(m, m, tagi.HRCSoftmax(), 9)
    with pytest.raises(ValueError, match="expected 2 labels, got 3"):
        utils.get_errors(m, m, [1, 2, 3], tree, 10, 2)
