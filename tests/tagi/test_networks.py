"""Networks of all layers: GPUs, empty batches, layouts, copies and files.

A stand-in for CuPy represents the GPU.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.tagi import OutputUpdater, Sequential
from tests.cupy_stand_in import StandInArray
from tests.tables import for_each
from tests.tagi.helpers import equal, network

# Layers with 4 outputs, and the shape of a sample.
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
    "dense": ("Linear(6, 5), ReLU(), LayerNorm(5), Linear(5, 4)", (6,)),
    "embedded": ("Embedding(6, 3, 2, padding_idx=1), Linear(6, 4)", (2,)),
}
EACH = for_each("name", NETWORKS)
UPDATES = "update", "indices", "heteros"
# Updates read only the outputs, so that each network needs one of them.
IN_TURN = [(name, UPDATES[number % 3]) for number, name in enumerate(NETWORKS)]


def made(name: str, seed: int = 0) -> Sequential:
    return network(NETWORKS[name][0], seed)


def batch(name: str, size: int = 4) -> np.ndarray:
    random, shape = np.random.default_rng(0), (size, *NETWORKS[name][1])
    if name == "embedded":
        return random.integers(0, 6, shape).astype(np.float32)
    return random.standard_normal(shape, np.float32)


def learn(net: Sequential, x: Any, steps: int, update: str = "update") -> None:
    """Observe all outputs, some outputs, or values with their variances."""
    random, updater = np.random.default_rng(1), OutputUpdater(net.device)
    for _ in range(steps):
        size = net(x)[0].size // 4
        states, deltas, y = (
            net.output_z_buffer,
            net.input_delta_z_buffer,
            random.normal(size=(size, 4)),
        )
        if update == "update":
            updater.update(states, y, np.full(y.shape, 0.1), deltas)
        elif update == "indices":
            index = random.integers(1, 5, (size, 2))
            updater.update_using_indices(states, y[:, :2], [0.1], index, deltas)
        else:
            updater.update_heteros(states, y[:, ::2], deltas)
        net.backward()
        net.step()


def results(net: Sequential, x: Any) -> Any:
    net.eval()
    return (*net(x), net.state_dict())


@for_each("name update", IN_TURN)
def test_training_on_a_gpu_equals_numpy(name: str, update: str, strict: Any) -> None:
    outcomes = []
    for device in ("cpu", "cuda"):
        net = made(name)
        net.to_device(device)
        assert net.device == ("cpu" if device == "cpu" else "cuda:0")
        learn(net, batch(name), 3, update)
        outcomes.append(results(net, batch(name)))
    assert isinstance(outcomes[1][0], np.ndarray)  # the input was a NumPy array
    equal(outcomes[1], outcomes[0], rtol=1e-4, atol=1e-5)


def test_outputs_are_on_the_gpu_if_inputs_are(strict: Any) -> None:
    net = network("Linear(6, 5), ReLU()")
    net.to_device("cuda")
    mean, variance = net(strict.asarray(np.ones((2, 6))))
    assert isinstance(mean, StandInArray)
    assert isinstance(variance, StandInArray)
    flat, _ = net.get_outputs()
    assert isinstance(flat, np.ndarray)


@for_each("flat", [False, True])
@for_each("name update", IN_TURN)
def test_empty_batch_changes_nothing(name: str, update: str, flat: bool) -> None:
    """For example, a rank's share of a small last batch."""
    net, empty = made(name), np.zeros(0) if flat else batch(name, 0)
    learn(net, batch(name), 1)  # leaves the sums of another batch
    before = net.state_dict()
    mean, variance = net(empty)
    assert mean.shape == variance.shape == ((0,) if flat else (0, 4))
    learn(net, empty, 1, update)
    assert not any(bucket.sums.any() for bucket in net.buckets)
    equal(net.state_dict(), before)
    assert net(batch(name))[0].shape == (4, 4)


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


LAYOUTS: dict[str, Callable[[np.ndarray], Any]] = {
    "Fortran": np.asfortranarray,
    "float64": lambda x: x.astype(np.float64),
    "reversed": lambda x: x[::-1].copy()[::-1],
    "read-only": read_only,
    "list": lambda x: x.tolist(),
    "channels last": lambda x: np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1),
    "gaps": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
}


@for_each("layout", LAYOUTS)
@EACH
def test_inputs_of_any_layout_and_dtype_give_the_same_step(name: str, layout: str) -> None:
    """pytagi ignores strides, and rejects float64 by a list of C++ signatures."""
    plain, other = made(name), made(name)
    learn(plain, batch(name), 1)
    learn(other, LAYOUTS[layout](batch(name)), 1)
    equal(other.state_dict(), plain.state_dict())


@for_each("dtype", ["float16", "int8", "int64", "bool"])
def test_inputs_of_narrow_dtypes_give_the_same_step(dtype: str) -> None:
    plain, other, x = made("dense"), made("dense"), batch("dense") > 0
    learn(plain, x.astype(np.float32), 1)
    learn(other, x.astype(dtype), 1)
    equal(other.state_dict(), plain.state_dict())


@for_each("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@EACH
def test_copy_of_a_network_is_independent(name: str, copied: Callable[[Any], Any]) -> None:
    net, x = made(name), batch(name)
    learn(net, x, 1)
    other, before = copied(net), net.state_dict()
    learn(other, x, 1)
    equal(net.state_dict(), before)
    learn(net, x, 1)
    equal(net.state_dict(), other.state_dict())


@for_each("name", ["images", "recurrent", "embedded"])
def test_network_resumes_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    uninterrupted, resumed, x = made(name), made(name, 1), batch(name)
    learn(uninterrupted, x, 2)
    fl.save(tmp_path / name, uninterrupted, step=3)
    checkpoint = fl.load(tmp_path / name, resumed)
    assert checkpoint is not None
    assert checkpoint.step == 3
    for net in (uninterrupted, resumed):
        learn(net, x, 2)
    equal(results(resumed, x), results(uninterrupted, x))  # includes running statistics


NORM = "Linear(3, 5), ReLU(), BatchNorm2d(5), Linear(5, 2, bias=False)"


def test_checkpoint_of_a_diverged_network_is_rejected(tmp_path: Path) -> None:
    net, other = network(NORM), network(NORM, 1)
    net.layers[2].statistics()[1][...] = np.inf
    path = fl.save(tmp_path, net)
    expected = other.state_dict()
    with pytest.raises(
        ValueError, match=r"'BatchNorm2d\.2': running_variance is not finite"
    ) as raised:
        fl.load(tmp_path, other)
    assert str(raised.value).startswith(f"load: the module of {path}: ")
    equal(other.state_dict(), expected)


def test_checkpoint_of_another_network_is_rejected(tmp_path: Path) -> None:
    fl.save(tmp_path, network(NORM))
    other = network(NORM.replace("5", "6"))
    expected = other.state_dict()
    with pytest.raises(ValueError, match=r"'Linear\.0': expected arrays of \[18, 18"):
        fl.load(tmp_path, other)
    with pytest.raises(ValueError, match=r"nothing was loaded: unexpected"):
        fl.load(tmp_path, network("Linear(3, 5)"))
    equal(other.state_dict(), expected)
