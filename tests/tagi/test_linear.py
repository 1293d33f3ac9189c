"""Linear and ReLU beside the real pytagi, and beside draws."""

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from tests.tagi.helpers import equal, observe
from tests.tagi.oracle import compare

MLP = "Sequential(Linear(3, 8), ReLU(), Linear(8, 8, gain_weight=0.3), ReLU(), Linear(8, 2))"


def batch(size: int, inputs: int = 3, outputs: int = 2) -> tuple[np.ndarray, ...]:
    """Return inputs, targets and their variances."""
    rng = np.random.default_rng(size)
    x = rng.standard_normal((size, inputs))
    y = np.stack([np.sin(x).sum(1), x[:, 0] * x[:, 1]], 1)[:, :outputs]
    return x, y, rng.uniform(0.05, 0.2, y.shape)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("size", [1, 2, 16, 255, 256])
def test_a_network_steps_as_pytagi_s_does(size: int, steps: int) -> None:
    compare(MLP, *batch(size), steps=steps, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        "Linear(3, 2, bias=False)",
        "Linear(3, 2, gain_bias=0.1)",
        "Linear(3, 2, True, 2.0, 0.5, 'Xavier')",
    ],
)
def test_arguments_mean_what_they_do_in_pytagi(layer: str) -> None:
    there, _ = compare(f"Sequential({layer})", *batch(7))
    own = nn.__dict__["Sequential"](eval(layer, dict(vars(nn)))).state_dict()
    for number in (1, 3):  # the variances that it begins with
        equal(own["Linear.0"][number], there.before["Linear.0"][number], 1e-6)


@pytest.mark.slow
def test_inputs_may_be_uncertain() -> None:
    x, y, errors = batch(9)
    compare(MLP, x, y, errors, var_x=np.full(x.shape, 0.3))


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
    equal(mean, [[0, 3, 0]])
    equal(variance, [[0, 2, 0]])
    equal(net.output_z_buffer.jcb, [0, 1, 0])


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
