"""Embedding: lookup, learning of rows, and rejected indices."""

from typing import Any

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from tests.tables import for_each
from tests.tagi.helpers import equal, learn, observe
from tests.tagi.oracle import oracle_step, own_step

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
