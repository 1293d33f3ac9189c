"""Linear and ReLU beside draws, and what they refuse."""

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from tests.tagi.helpers import equal, observe


def test_moments_and_deltas_are_those_of_draws() -> None:
    """The outputs are exactly what draws have; the deltas exactly their covariances'."""
    tagi.manual_seed(3)
    layer = nn.Linear(3, 2)
    net = nn.Sequential(layer)
    x, var_x = np.array([[0.5, -1.0, 2.0]]), np.array([[0.2, 0.1, 0.4]])
    mean, variance = net(x, var_x)
    rng = np.random.default_rng(0)
    draws = 400_000
    w = rng.normal(layer.mu_w, np.sqrt(layer.var_w), (draws, 6)).reshape(draws, 2, 3)
    b = rng.normal(layer.mu_b, np.sqrt(layer.var_b), (draws, 2))
    units = rng.normal(x, np.sqrt(var_x), (draws, 3))
    z = np.einsum("noi,ni->no", w, units) + b
    equal(mean[0], z.mean(0), atol=0.01)
    equal(variance[0], z.var(0), rtol=0.01)
    # The posterior of a weight by its covariance with the output, as of jointly Gaussian ones.
    y, error = np.array([[1.0, -0.5]]), 0.1
    observe(net, y, error)
    covariances = np.stack([np.cov(w[:, o, i], z[:, o])[0, 1] for o in range(2) for i in range(3)])
    gain = covariances / np.repeat(variance[0] + error, 3)
    equal(layer.delta_mu_w, gain * np.repeat(y[0] - mean[0], 3), rtol=0.02, atol=0.01)
    equal(layer.delta_var_w, -gain * covariances, rtol=0.04, atol=0.002)


def test_relu_is_linearised_at_the_mean() -> None:
    net = nn.Sequential(nn.ReLU())
    mean, variance = net(np.array([[-2.0, 3.0, 0.0]]), np.array([[1.0, 2.0, 3.0]]))
    equal((mean, variance, net.output_z_buffer.jcb), ([[0, 3, 0]], [[0, 2, 0]], [0, 1, 0]))


@pytest.mark.parametrize("sizes", [(0, 2), (3, 0), (-1, 2)])
def test_sizes_are_at_least_one(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"Linear: sizes must be at least 1, got"):
        nn.Linear(*sizes)


def test_methods_of_initialisation_are_two() -> None:
    with pytest.raises(ValueError, match="init_method must be one of He, Xavier, got 'Glorot'"):
        nn.Linear(3, 2, init_method="Glorot")


def test_parameters_that_are_assigned_are_numbers() -> None:
    layer = nn.Linear(2, 2)
    before = layer.var_w
    for which, one in (("mu_w", np.nan), ("mu_b", -np.inf), ("var_w", np.inf), ("var_b", np.nan)):
        values = np.full(getattr(layer, which).size, one)
        with pytest.raises(ValueError, match=r"^Linear\(2,2\): \w+: .* is not finite"):
            setattr(layer, which, values)
    with pytest.raises(ValueError, match="variances are not negative, got -1"):
        layer.var_w = -np.ones(4)
    with pytest.raises(ValueError, match=r"Linear\(2,2\): weight: 1 of 4 elements are masked"):
        layer.var_w = np.ma.masked_less(np.arange(4), 1)
    equal(layer.var_w, before)
