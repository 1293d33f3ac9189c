"""Steps of networks and arguments of layers, compared with the real pytagi."""

from typing import Any

import numpy as np
import pytest

from tests.tagi.helpers import equal, network
from tests.tagi.oracle import compare

pytestmark = pytest.mark.slow

MLP = "Linear(3, 8), ReLU(), Linear(8, 8, gain_weight=0.3), ReLU(), Linear(8, 2)"
PADDED = "Conv2d(2, 3, 3, padding=1, in_width=6, in_height=6)"
WIDER = "Conv2d(2, 3, 3, padding=1, in_width=7, in_height=7)"
IMAGES = "Conv2d(2, 3, 3, in_width=6, in_height=6)"
# Layers, and the shape of a sample.
CONVOLUTIONS: list[tuple[str, tuple[int, ...]]] = [
    (IMAGES, (2, 6, 6)),
    (f"{PADDED}, ReLU(), Conv2d(3, 2, 3)", (2, 6, 6)),
    (f"{PADDED[:-1]}, bias=False), ReLU(), Conv2d(3, 2, 3, False)", (2, 6, 6)),
    (f"{PADDED}, ReLU(), Conv2d(3, 2, 3, True, 2, 1, 2)", (2, 6, 6)),
    (f"{PADDED}, ReLU(), Conv2d(3, 2, 2, stride=2)", (2, 6, 6)),
    (f"{PADDED}, ReLU(), Conv2d(3, 2, 1)", (2, 6, 6)),
    ("Conv2d(1, 2, 4, padding=3, in_width=5, in_height=5), ReLU(), Linear(128, 3)", (1, 5, 5)),
    ("ConvTranspose2d(2, 3, 3, in_width=4, in_height=4)", (2, 4, 4)),
    (f"{PADDED}, ReLU(), ConvTranspose2d(3, 2, 3, True, 2, 1, 2)", (2, 6, 6)),
    (f"{PADDED}, ReLU(), ConvTranspose2d(3, 2, 4, False, 2, 1, 1)", (2, 6, 6)),
    (f"{PADDED}, ReLU(), ConvTranspose2d(3, 2, 3, padding=1)", (2, 6, 6)),
    ("Linear(5, 48), ReLU(), ConvTranspose2d(3, 2, 3, stride=2, padding=1, padding_type=2, "
     "in_width=4, in_height=4), ReLU(), ConvTranspose2d(2, 1, 3, padding=1)", (5,)),
]  # fmt: skip
POOLS = [
    "AvgPool2d(3, 2), Linear(27, 4)",
    "AvgPool2d(3, 1), Conv2d(3, 2, 2)",
    "AvgPool2d(7), Linear(3, 4)",
    "AvgPool2d(3, 2, 1, 1), Linear(48, 4)",
    "AvgPool2d(3, 2, 2, 2), Linear(48, 4)",
    "MaxPool2d(3, 2), Linear(27, 4)",
    "MaxPool2d(3), Conv2d(3, 2, 2)",
    "MaxPool2d(3, 2, 1, 1), Linear(48, 4)",
    "AvgPool2d(2, 1), MaxPool2d(2, 2), Linear(27, 4)",
    "AvgPool2d(4, 1), AvgPool2d(2, 2), Linear(12, 4)",
]
NORMS = [
    ("Linear(4, 6), BatchNorm2d(6), ReLU(), Linear(6, 2)", (4,)),
    ("Linear(4, 6), LayerNorm((6,)), ReLU(), Linear(6, 2)", (4,)),
    ("Linear(4, 6), ReLU(), BatchNorm2d(6), Linear(6, 2)", (4,)),
    ("Linear(4, 6), LayerNorm((6,), bias=False), Linear(6, 2)", (4,)),
    (f"{IMAGES}, BatchNorm2d(3), ReLU(), Linear(48, 2)", (2, 6, 6)),
    (f"{IMAGES}, LayerNorm((3, 4, 4)), ReLU(), Linear(48, 2)", (2, 6, 6)),
    (f"{IMAGES}, ReLU(), ResNetBlock(LayerBlock(Conv2d(3, 3, 3, padding=1, bias=False), ReLU(), "
     "BatchNorm2d(3)), LayerBlock(Conv2d(3, 3, 1, bias=False), BatchNorm2d(3))), ReLU(), "
     "Linear(48, 2)", (2, 6, 6)),
]  # fmt: skip
ACTIVATIONS = "ReLU", "Sigmoid", "Tanh", "MixtureReLU", "MixtureSigmoid", "MixtureTanh"
ROWS: list[tuple[str, tuple[int, ...], int, dict[str, Any]]] = [
    *[(MLP, (3,), size, {"steps": steps}) for size in (1, 2, 16, 255, 256) for steps in (1, 5)],
    *[(layers, shape, size, {"steps": 2}) for layers, shape in CONVOLUTIONS for size in (1, 5)],
    *[(f"{WIDER}{end}, {rest}", (2, 7, 7), 4, {}) for end in ("", ", ReLU()") for rest in POOLS],
    *[(layers, shape, 8, {"rtol": 1e-5, "atol": 1e-5}) for layers, shape in NORMS],
    *[(f"Linear(4, 6), {name}(), Linear(6, 5), {name}(), Linear(5, 2)", (4,), 8, {"atol": 1e-5})
      for name in ACTIVATIONS],
]  # fmt: skip


def batch(layers: str, shape: tuple[int, ...], size: int = 3) -> tuple[np.ndarray, ...]:
    """Return inputs, targets and their variances."""
    rng = np.random.default_rng(size)
    x = rng.standard_normal((size, *shape))
    outputs = network(layers)(x)[0].shape
    return x, rng.standard_normal(outputs), rng.uniform(0.1, 0.5, outputs)


@pytest.mark.parametrize(("layers", "shape", "size", "options"), ROWS)
def test_network_steps_equal_pytagi(
    layers: str, shape: tuple[int, ...], size: int, options: dict[str, Any]
) -> None:
    tolerance = {"rtol": 1e-4, "atol": 2e-5, **options}
    compare(f"Sequential({layers})", *batch(layers, shape, size), **tolerance)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (MLP, (3,)),
        (f"{PADDED}, ReLU(), Conv2d(3, 2, 3)", (2, 6, 6)),
        (f"ConvTranspose2d{PADDED[6:]}, ReLU(), ConvTranspose2d(3, 2, 3)", (2, 6, 6)),
    ],
)
def test_steps_with_uncertain_inputs_equal_pytagi(layers: str, shape: tuple[int, ...]) -> None:
    x, y, errors = batch(layers, shape, 9)
    var_x = np.full(x.shape, 0.3)
    compare(f"Sequential({layers})", x, y, errors, var_x=var_x, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        ("Linear(3, 2, bias=False)", (3,)),
        ("Linear(3, 2, gain_bias=0.1)", (3,)),
        ("Linear(3, 2, True, 2.0, 0.5, 'Xavier')", (3,)),
        ("Conv2d(3, 2, 3, True, 1, 0, 1, 6, 6, 2.0, 0.5, 'Xavier')", (3, 6, 6)),
        ("LSTM(2, 3, 1, True, 0.5, 0.2, 'Xavier')", (2,)),
        ("LSTM(2, 3, 1, False)", (2,)),
        ("LSTM(2, 3, 1, False, 2.0)", (2,)),
        ("LSTM(2, 3, 1, True, 1.0, 1.0, 'He')", (2,)),
    ],
)
def test_layer_arguments_have_the_meaning_of_pytagi(layer: str, shape: tuple[int, ...]) -> None:
    layers = f"{layer}, Linear(3, 2)" if layer.startswith("LSTM") else layer
    reference, _ = compare(f"Sequential({layers})", *batch(layers, shape, 6), rtol=1e-4, atol=2e-5)
    (name, entry), *_ = network(layers).state_dict().items()
    for number in (1, 3):  # initial variances
        equal(entry[number], reference.before[name][number], 1e-6)
