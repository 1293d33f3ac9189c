"""Networks of all layers: GPUs, empty batches, layouts, copies, files, and invalid arguments.

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


# Arguments of networks and blocks that are not layers.
NO_LAYERS: dict[str, str] = {
    "": "expected at least one layer",
    "ReLU(), 3": r"expected layers of fl\.tagi, got int as layer 1",
    "LayerBlock()": "at least one layer",
    "LayerBlock('ReLU')": r"LayerBlock: expected layers of fl\.tagi, got str",
    "ResNetBlock(ReLU(), 'ReLU')": r"ResNetBlock: expected layers of fl\.tagi, got str",
}
# Invalid layers.
LAYERS: dict[str, str] = {
    "Linear(0, 2)": "Linear: sizes must be at least 1, got",
    "Linear(3, 0)": "Linear: sizes must be at least 1, got",
    "Linear(-1, 2)": "Linear: sizes must be at least 1, got",
    "Linear(3, 2, init_method='Glorot')": "init_method must be one of He, Xavier, got 'Glorot'",
    "Linear(4, 8), ReLU(), Linear(7, 2)": (
        r"layer 2, Linear\(7,2\), after layer 1, ReLU\(\): expected 7 features .* \(8,\)"),
    "Linear(2, 3), EvenExp()": r"even number of units, got samples of \(3,\)",
    "ResNetBlock(Linear(4, 5))": r"got \(5,\) for the main block, .*, and \(4,\) for the input",
    "ResNetBlock(Linear(4, 5), Linear(4, 6))": r"and \(6,\) for the shortcut, Linear\(4,6\)",
    "ResNetBlock(LayerBlock(Linear(4, 5), Linear(4, 5)))": (
        "main block, .*layer 1 of the block.*expected 4"),
    "Conv2d(0, 1, 3)": "numbers of channels must be at least 1, got 0, 1",
    "Conv2d(1, 1, 0)": "kernel_size and stride must be at least 1",
    "Conv2d(1, 1, 3, padding_type=3)": "padding_type must be 0, 1 or 2, got 3",
    "Conv2d(1, 1, 3, padding=1, padding_type=0)": "padding must be 0 for padding_type=0",
    "Conv2d(1, 1, 3, in_width=4)": "must be both positive or both 0",
    "Conv2d(1, 1, 3, init_method='Glorot')": "init_method must be one of",
    "Conv2d(1, 1, 2, stride=2, in_width=4, in_height=5)": (
        r"layer 0, Conv2d\(1,1,0,0,2\), after the input: expected height .* multiple of 2, .*"
        "height of 5"),
    "Conv2d(1, 1, 5, in_width=4, in_height=4)": "got -1 for a height of 4",
    "Conv2d(1, 2, 3, in_width=6, in_height=5), Conv2d(2, 1, 2, in_width=3, in_height=4)": (
        r"expected height and width \(4, 3\), got images of \(2, 3, 4\)"),
    "Linear(5, 7), Conv2d(1, 1, 3, in_width=4, in_height=4)": (
        r"expected 16 elements per sample for \(1, 4, 4\), got \(7,\)"),
    "ConvTranspose2d(1, 1, 2, padding=2, in_width=2, in_height=2)": "padding must leave at least",
    "AvgPool2d(0)": "AvgPool2d: kernel_size and stride must be at least 1",
    "AvgPool2d(2, 0)": "kernel_size and stride must be at least 1",
    "AvgPool2d(2, 2, 1)": "padding must be 0 for padding_type=0, got 1",
    "MaxPool2d(2, 2, 2, 1)": "MaxPool2d: padding must be below kernel_size=2, got 2",
    "Linear(2, 4), AvgPool2d(2)": "expected images",
    "BatchNorm2d(0)": "at least 1 feature, got 0",
    "BatchNorm2d(2, eps=0)": "eps must be above 0",
    "BatchNorm2d(2, momentum=1.5)": "momentum must be from 0 to 1, got 1.5",
    "LayerNorm((2, 3))": r"channels, width, height\).*got \(2, 3\)",
    "Linear(2, 4), LayerNorm(5)": r"\(features\) = \(5,\), got",
    "Embedding(0, 2)": "Embedding: expected 1 to 16777216 embeddings",
    "Embedding(3, 0)": "Embedding: expected 1 to 16777216 embeddings",
    "Embedding(3, 2, -1)": "Embedding: expected 1 to 16777216 embeddings",
    "Embedding(2**24 + 1, 1)": "Embedding: expected 1 to 16777216 embeddings",
    "Embedding(3, 2, padding_idx=-2)": "padding_idx must be from 0 to 2, .* got -2",
    "Embedding(3, 2, padding_idx=3)": "padding_idx must be from 0 to 2, .* got 3",
    "Linear(2, 2), Embedding(3, 2)": "must be the first layer, not layer 1",
    "LSTM(0, 1, 1)": "LSTM: sizes and seq_len must be at least 1, got",
    "LSTM(1, 0, 1)": "LSTM: sizes and seq_len must be at least 1, got",
    "LSTM(1, 1, 0)": "LSTM: sizes and seq_len must be at least 1, got",
    "LSTM(1, 1, 1, window='x')": "window must be one of recurrent, independent, got 'x'",
    "Linear(2, 3), LSTM(2, 3, 5)": r"layer 1, LSTM\(2,3\), after layer 0",
    "SLSTM(2, 4, 5)": "SLSTM: seq_len must be 1, one time step per call, got",
    "SLSTM(0, 4, 1)": "SLSTM: sizes and seq_len must be at least 1",
}  # fmt: skip
# Layers, and a batch of the wrong shape.
BATCHES: dict[tuple[str, tuple[int, ...]], str] = {
    ("Conv2d(1, 1, 3)", (16,)): "expected an array with the batch first",
    ("Conv2d(1, 1, 3)", (1, 16)): (
        "expected images .channels, height, width., got samples of shape .16,.. Pass an array"),
    ("Conv2d(2, 1, 3)", (1, 3, 5, 5)): "expected 2 channels, got images of shape",
    ("AvgPool2d(2)", (1, 1, 5, 4)): "a height of 5",
    ("AvgPool2d(2)", (1, 1, 4, 5)): "a width of 5",
    ("BatchNorm2d(2)", (1, 3, 4, 4)): "expected 2 channels or features",
    ("LayerNorm((2, 3, 4))", (1, 3, 2, 4)): r"= \(2, 3, 4\), got",
    ("Embedding(3, 2, 4), Linear(8, 1)", (2, 3)): "expected 4 indices per sample, got shape",
    ("LSTM(2, 3, 5), Linear(15, 1)", (4, 9)): "expected 10 elements per sample, 5 time steps of 2",
    ("SLSTM(2, 4, 1)", (3, 2)): r"SLSTM\(2,4\): expected one sample, the next time step",
}  # fmt: skip


@for_each("layers", NO_LAYERS)
def test_network_raises_type_error_for_arguments_that_are_no_layers(layers: str) -> None:
    with pytest.raises(TypeError, match=NO_LAYERS[layers]):
        network(layers)


@for_each("layers", LAYERS)
def test_layer_raises_value_error_for_invalid_arguments(layers: str) -> None:
    with pytest.raises(ValueError, match=LAYERS[layers]):
        network(layers)


@for_each("inputs words", BATCHES.items())
def test_network_raises_value_error_for_batches_of_wrong_shape(inputs: Any, words: str) -> None:
    net, batch = network(inputs[0]), np.zeros(inputs[1])
    with pytest.raises(ValueError, match=words):
        net(batch)
