"""Networks on GPUs compute with the library of their arrays alone; shown with a stand-in for it."""

from typing import Any

import numpy as np
import pytest

from flashlight_py.tagi import OutputUpdater, Sequential
from tests.cupy_stand_in import StandInArray
from tests.tagi.helpers import equal, network

# Layers, and the shape of a sample.
NETWORKS: dict[str, tuple[str, tuple[int, ...]]] = {
    "images": (
        "Conv2d(2, 3, 3, padding=1), MixtureReLU(), BatchNorm2d(3), AvgPool2d(2, 2), "
        "ResNetBlock(LayerBlock(Conv2d(3, 4, 3, padding=1, stride=2, padding_type=2)), "
        "LayerBlock(Conv2d(3, 4, 2, stride=2))), ConvTranspose2d(4, 2, 2, stride=2), "
        "MaxPool2d(2, 2), LayerNorm((2, 2, 2)), Linear(8, 4)",
        (2, 8, 8),
    ),
    "recurrent": ("LSTM(2, 3, 3), LSTM(3, 2, 3), Linear(6, 4)", (6,)),
    "mixtures": (
        "MixtureReLU(), Linear(6, 5), MixtureTanh(), Linear(5, 4), MixtureSigmoid(), Remax()",
        (6,),
    ),
    "activations": (
        "Linear(6, 5), LeakyReLU(), Sigmoid(), Linear(5, 5), Tanh(), Softplus(), Linear(5, 4)",
        (6,),
    ),
    "softmax": ("Linear(6, 5), Softmax(), Linear(5, 4), EvenExp()", (6,)),
    "shares": ("Linear(6, 4), ClosedFormSoftmax()", (6,)),
    "blocks and norms": (
        "BatchNorm2d(2), LayerNorm((2, 3, 2)), Linear(12, 6), ResNetBlock(LayerBlock(Linear(6, 6), "
        "MixtureReLU(), BatchNorm2d(6, bias=False)), ResNetBlock(Linear(6, 6))), Linear(6, 4)",
        (2, 2, 3),
    ),
    "dense": ("Linear(6, 5), ReLU(), Linear(5, 4)", (6,)),
}


def train(net: Sequential, x: Any, update: str) -> Any:
    random = np.random.default_rng(1)
    updater = OutputUpdater(net.device)
    for _ in range(3):
        mean, _ = net(x)
        states, deltas = net.output_z_buffer, net.input_delta_z_buffer
        y = random.standard_normal(mean.size)
        if update == "update":
            updater.update(states, y, np.full(y.size, 0.1), deltas)
        elif update == "indices":
            index = random.integers(1, mean.shape[1] + 1, (len(mean), 2))
            updater.update_using_indices(states, y[: index.size], [0.1], index, deltas)
        else:
            updater.update_heteros(states, y[::2], deltas)
        net.backward()
        net.step()
    net.eval()
    return (*net(x), net.state_dict())


@pytest.mark.parametrize("update", ["update", "indices", "heteros"])
@pytest.mark.parametrize("name", NETWORKS)
def test_training_equals_numpy_s(name: str, update: str, strict: Any) -> None:
    layers, shape = NETWORKS[name]
    x = np.random.default_rng(0).standard_normal((4, *shape), np.float32)
    found = []
    for device in ("cpu", "cuda"):
        net = network(layers)
        net.to_device(device)
        assert net.device == ("cpu" if device == "cpu" else "cuda:0")
        found.append(train(net, x, update))
    (mean, variance, state), (same_mean, same_variance, same_state) = found
    assert isinstance(same_mean, np.ndarray)  # what was passed was one
    equal((same_mean, same_variance, same_state), (mean, variance, state), rtol=1e-5, atol=1e-6)


def test_what_is_passed_on_the_gpu_comes_from_there(strict: Any) -> None:
    net = network("Linear(6, 5), ReLU()")
    net.to_device("cuda")
    mean, variance = net(strict.asarray(np.ones((2, 6))))
    assert isinstance(mean, StandInArray)
    assert isinstance(variance, StandInArray)
    flat, _ = net.get_outputs()
    assert isinstance(flat, np.ndarray)
