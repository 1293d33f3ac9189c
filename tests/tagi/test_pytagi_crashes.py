"""Cases in which pytagi 0.2.1 crashes or is silently wrong."""

from pathlib import Path
from typing import Any

import numpy as np

from flashlight_py.tagi import nn
from tests.tagi.helpers import equal, network, observe

RNG = np.random.default_rng(0)

IMAGES = RNG.standard_normal((6, 1, 8, 8)).astype(np.float32)


def step(net: nn.Sequential, x: Any, y: Any = None, var_x: Any = None) -> list[np.ndarray]:
    """Run a step and return all parameters, which must be finite."""
    mean, _ = net(x, var_x)
    y = np.sin(np.arange(mean.size)) if y is None else y
    observe(net, y)
    net.step()
    arrays = [array for entry in net.parameters() for array in entry]
    assert all(np.isfinite(array).all() for array in arrays)
    return arrays


CNN = "Conv2d(1, 4, 3, padding=1, in_width=8, in_height=8), ReLU(), AvgPool2d(2), Linear(64, 2)"


def test_network_accepts_an_activation_as_first_layer() -> None:
    net = network("ReLU(), Linear(3, 2)")
    mean, _ = net(np.array([[-1.0, 2.0, 3.0]]))
    alone = network("Linear(3, 2)")
    equal(mean, alone(np.array([[0.0, 2.0, 3.0]]))[0])
    step(net, RNG.standard_normal((5, 3)))


def test_preinit_layer_has_no_effect() -> None:
    prepared, other = network(CNN), network(CNN)
    prepared.preinit_layer()
    equal(step(prepared, IMAGES), step(other, IMAGES))


def test_set_threads_has_no_effect_on_results() -> None:
    """In pytagi, the first batch of a BatchNorm2d depends on the number of threads."""
    one, four = (network("Linear(3, 4), BatchNorm2d(4), Linear(4, 1)") for _ in range(2))
    one.set_threads(1)
    four.set_threads(4)
    x = RNG.standard_normal((6, 3))
    equal(step(one, x), step(four, x))
    equal(one.state_dict(), four.state_dict())


def test_get_norm_mean_var_returns_statistics() -> None:
    net = network("Linear(8, 4), LayerNorm((4,)), BatchNorm2d(4), Linear(4, 1)")
    step(net, IMAGES.reshape(-1, 8))
    assert list(net.get_norm_mean_var()) == ["BatchNorm2d()_2"]


def test_batch_norm2d_after_linear_layers_has_correct_deltas() -> None:
    behind = network(
        "Conv2d(1, 2, 8, in_width=8, in_height=8), Linear(2, 3), BatchNorm2d(3), ReLU()"
    )
    alone = network("Linear(64, 2), Linear(2, 3), BatchNorm2d(3), ReLU()")  # as a matrix
    for name, entry in behind.state_dict().items():
        other = {"Conv2d.0": "Linear.0"}.get(name, name)
        alone.load_state_dict(alone.state_dict() | {other: entry})
    y = RNG.standard_normal((6, 3))
    equal(step(behind, IMAGES, y), step(alone, IMAGES, y), 1e-5, 1e-5)


def test_step_is_finite_if_mean_and_variance_are_zero() -> None:
    """In pytagi the slope of MixtureReLU is NaN, for example after the padding of an Embedding."""
    step(network("MixtureReLU(), Linear(3, 2)"), np.zeros((2, 3)), var_x=np.zeros((2, 3)))
    padded = network("Embedding(5, 3, 4, padding_idx=0), MixtureReLU(), Linear(12, 2)")
    step(padded, np.array([[0, 0, 1, 2], [0, 0, 0, 0]]))


def test_load_reads_a_file_with_a_layer_norm(tmp_path: Path) -> None:
    """In pytagi this depends on the size of the last batch."""
    net = network("Linear(3, 4), LayerNorm((4,)), Linear(4, 1)")
    step(net, RNG.standard_normal((6, 3)))
    net.save(tmp_path / "net")
    other = network("Linear(3, 4), LayerNorm((4,)), Linear(4, 1)")
    other.load(tmp_path / "net")
    x = RNG.standard_normal((2, 3))
    equal(list(net(x)), list(other(x)))
