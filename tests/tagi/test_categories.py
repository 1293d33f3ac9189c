"""Embeddings of indices, and nodes, observations and probabilities of the class tree."""

from typing import Any

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from flashlight_py.tagi.utilities import probabilities, tree_of
from tests.tables import for_each
from tests.tagi.helpers import equal, learn, observe
from tests.tagi.oracle import equal_programs, oracle_step, own_step

NETWORK = "Sequential(Embedding(7, 3, 2, 0.5, {padding}), Linear(6, 1))"
INDICES = np.array([[0, 6], [3, 3], [6, 1], [0, 2]])


@pytest.mark.slow
@pytest.mark.parametrize("padding", [-1, 3])
def test_embedding_first_step_equals_pytagi(padding: int) -> None:
    """pytagi's deltas of variances lack a factor, and its sums are never cleared: not compared."""
    network = NETWORK.format(padding=padding)
    y, errors = np.array([[0.5], [-1.0], [2.0], [0.0]]), np.full((4, 1), 0.3)
    reference = oracle_step(network, INDICES, y, var_y=errors)
    ours = own_step(network, reference.before, INDICES, y, var_y=errors)
    equal((ours.mu, ours.var), (reference.mu, reference.var), 1e-5, 1e-6)
    for which in (0, 2):
        equal(ours.deltas["Embedding.0"][which], reference.deltas["Embedding.0"][which], 1e-4, 1e-6)
    variances = reference.before["Embedding.0"][1]
    np.testing.assert_allclose(  # the factor that pytagi lacks
        ours.deltas["Embedding.0"][1], reference.deltas["Embedding.0"][1] * variances, 1e-4, 1e-6
    )
    for which in range(4):
        equal(ours.after["Linear.1"][which], reference.after["Linear.1"][which], 1e-4, 1e-5)


def test_embedding_rows_sum_deltas_of_all_occurrences() -> None:
    """Compared with a Linear of one-hot inputs for each occurrence."""
    tagi.manual_seed(1)
    layer = nn.Embedding(5, 2, 3)
    net = nn.Sequential(layer)
    x = np.array([[0, 4, 4], [2, 0, 4]])
    mean, variance = net(x)
    equal((mean, variance), (layer.mu_w.reshape(5, 2)[x].reshape(2, 6), np.ones((2, 6))))
    rng = np.random.default_rng(0)
    for indices in (x, x[:, ::-1] // 2):  # a pass sets the sums of all rows
        d, e = rng.normal(size=(2, 2, 3, 2))
        net(indices)
        net.set_delta_z(d, e)
        net.backward()
        for sums, deltas in ((layer.delta_mu_w, d), (layer.delta_var_w, e)):
            expected = np.einsum("bpk,bpj->kj", np.eye(5)[indices], deltas)
            equal(sums.reshape(5, 2), expected, rtol=1e-5)


def test_embedding_padding_row_is_zero_and_does_not_learn() -> None:
    tagi.manual_seed(3)
    layer = nn.Embedding(4, 3, padding_idx=2)
    net = nn.Sequential(layer, nn.Linear(6, 2))
    x = np.array([[2, 1], [3, 2]])
    layer.var_w = rows = np.random.default_rng(0).uniform(0.5, 1, 12).astype(np.float32)
    before = layer.mu_w.reshape(4, 3)
    equal(before[2], 0)
    for _ in range(3):
        learn(net, x, np.ones(4))
    moments = nn.Sequential(layer)(x)
    for array in moments:
        equal(array.reshape(2, 2, 3)[[0, 1], [0, 1]], 0)
    after, variances = layer.mu_w.reshape(4, 3), layer.var_w.reshape(4, 3)
    for row in (0, 2):  # no sample has index 0
        equal((after[row], variances[row]), (before[row], rows.reshape(4, 3)[row]))
    for row in (1, 3):
        assert (after[row] != before[row]).any()


@for_each("dtype", [np.int8, np.uint64, np.float16, np.float64, bool])
def test_embedding_accepts_indices_of_any_dtype_and_strides(dtype: type) -> None:
    net = nn.Sequential(nn.Embedding(2, 3))
    x = np.array([[0, 1, 1], [1, 0, 0]])
    expected = net(x)[0]
    indices = np.asfortranarray(x.astype(dtype))
    equal(net(indices)[0], expected)
    equal(net(x.ravel().astype(dtype))[0], expected.ravel())


@for_each("wrong", [-1, 7, 1.5, np.nan, np.inf, 1e30])
def test_embedding_rejects_invalid_indices_and_variances(wrong: float, strict: Any) -> None:
    layer = nn.Embedding(7, 2, 2)
    net = nn.Sequential(layer, nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"Embedding\(7->2\): indices must be integers from 0 to"):
        net(np.array([[0, 1], [wrong, 2]]))
    net.to_device("cuda")
    with pytest.raises(ValueError, match="indices must be integers from 0 to 6"):
        net(np.array([[0, 1], [wrong, 2]]))
    with pytest.raises(ValueError, match="expected indices without variances"):
        net(np.array([[1, 2]]), np.array([[0.1, 0.1]]))


def test_embedding_takes_input_size_from_the_first_batch() -> None:
    net = nn.Sequential(nn.Embedding(3, 2), nn.Linear(8, 1))
    assert net(np.zeros((5, 4)))[0].shape == (5, 1)
    assert net(np.zeros((9, 4)))[0].shape == (9, 1)
    with pytest.raises(ValueError, match="expected 8 features"):
        net(np.zeros((5, 3)))
    net.input_state_update = True
    net(np.zeros((5, 4)))
    observe(net, np.ones(5))
    equal(net.get_input_states(), np.zeros((2, 20)))


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
