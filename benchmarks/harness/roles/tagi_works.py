"""The networks of fl.tagi and pytagi that are timed, with common initial parameters.

A step is: forward, observe the outputs on the paths of the labels in a class tree, backward, step.
The networks are
expressions of names that both libraries have.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
State = dict[str, tuple[Floats, ...]]

CLASSES = 10
ERROR_VARIANCE = 0.25
FIRST_STEPS = 3  # number of steps whose outputs are compared

MLP = "Sequential(Linear(784, 128), ReLU(), Linear(128, 128), ReLU(), Linear(128, 11))"
CNN = (
    "Sequential(Conv2d(1, 16, 4, padding=1, in_width=28, in_height=28), ReLU(), AvgPool2d(3, 2), "
    "Conv2d(16, 32, 5), ReLU(), AvgPool2d(3, 2), Linear(512, 100), ReLU(), Linear(100, 11))"
)
RESNET = (
    "Sequential(Conv2d(3, 64, 3, bias=False, padding=1, in_width=32, in_height=32), MixtureReLU(), "
    "BatchNorm2d(64), ResNetBlock(LayerBlock(Conv2d(64, 64, 3, bias=False, padding=1), "
    "MixtureReLU(), BatchNorm2d(64), Conv2d(64, 64, 3, bias=False, padding=1), MixtureReLU(), "
    "BatchNorm2d(64))), AvgPool2d(32), Linear(64, 11))"
)


@dataclass(frozen=True)
class Work:
    """A network, the shape of a sample, and the number of samples of a step."""

    title: str
    network: str
    inputs: int
    batch: int


WORKS = {
    "mlp-16": Work("MLP 784-128-128-11", MLP, 784, 16),
    "mlp-64": Work("MLP 784-128-128-11", MLP, 784, 64),
    "cnn-16": Work("CNN of pytagi's example, 28 x 28", CNN, 784, 16),
    "resnet-4": Work("conv 3-64 and a ResNet block of 64, 32 x 32", RESNET, 3072, 4),
    "mlp-256": Work("MLP 784-128-128-11", MLP, 784, 256),
}
CLOCKS: Mapping[str, Callable[[], float]] = {
    "cpu": time.process_time,
    "wall": time.perf_counter,
}


def batch_of(work: Work) -> tuple[Floats, NDArray[np.int64]]:
    """Return inputs, flat, and labels."""
    random = np.random.default_rng(1)
    x = random.standard_normal(work.batch * work.inputs, np.float32)
    return x, random.integers(0, CLASSES, work.batch)


def beginning(state: Mapping[str, Any]) -> State:
    """Return parameters for a network with this state, the same for both libraries."""
    random = np.random.default_rng(2)
    result: State = {}
    for name in sorted(state):
        mean, variance, bias, bias_variance = (
            np.asarray(values, np.float32) for values in state[name][:4]
        )
        if "Norm" not in name:  # normalisations start with 1 and 0
            mean = random.standard_normal(mean.size, np.float32) * np.sqrt(variance)
            bias = random.standard_normal(bias.size, np.float32) * np.sqrt(bias_variance)
        result[name] = (mean, variance, bias, bias_variance)
    return result
