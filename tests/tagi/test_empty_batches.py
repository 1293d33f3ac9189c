"""A batch without samples, such as a rank's share of a small last batch, teaches nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashlight_py.tagi import OutputUpdater
from tests.tagi.helpers import equal, learn, network

# Layers, and the shape of a sample.
NETWORKS: dict[str, tuple[str, tuple[int, ...]]] = {
    "dense": ("Linear(6, 5), ReLU(), LayerNorm(5), Linear(5, 4)", (6,)),
    "images": (
        "Conv2d(2, 3, 3, padding=1), MixtureReLU(), BatchNorm2d(3), MaxPool2d(2, 2), "
        "ConvTranspose2d(3, 2, 2, stride=2), Linear(128, 4)",
        (2, 8, 8),
    ),
    "recurrent": ("LSTM(2, 3, 3), Linear(9, 4), Remax()", (6,)),
    "embedded": ("Embedding(6, 3, 2), Linear(6, 4)", (2,)),
    "block": ("ResNetBlock(LayerBlock(Linear(6, 6))), Linear(6, 4)", (6,)),
}


def observe_all(updater: OutputUpdater, states: Any, deltas: Any) -> None:
    updater.update(states, np.zeros((0, 4)), 0.1, deltas)


def observe_some(updater: OutputUpdater, states: Any, deltas: Any) -> None:
    nodes = np.zeros((0, 2), int)
    updater.update_using_indices(states, np.zeros((0, 2)), 0.1, nodes, deltas)


def observe_pairs(updater: OutputUpdater, states: Any, deltas: Any) -> None:
    updater.update_heteros(states, np.zeros((0, 2)), deltas)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("observe", [observe_all, observe_some, observe_pairs])
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_is_learnt_from_nothing(
    name: str, observe: Callable[..., None], flat: bool
) -> None:
    layers, shape = NETWORKS[name]
    net = network(layers)
    some = np.ones((3, *shape))
    learn(net, some, np.ones(12))  # leaves sums of another batch behind
    before = net.state_dict()
    mean, variance = net(np.zeros(0) if flat else np.zeros((0, *shape)))
    assert mean.shape == variance.shape == ((0,) if flat else (0, 4))
    observe(OutputUpdater(), net.output_z_buffer, net.input_delta_z_buffer)
    net.backward()
    assert not any(bucket.sums.any() for bucket in net.buckets)
    net.step()
    after = net.state_dict()
    for key, arrays in before.items():
        equal(arrays, after[key])
    assert net(some)[0].shape == (3, 4)
