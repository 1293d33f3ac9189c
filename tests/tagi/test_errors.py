"""Errors of invalid layers, networks and batches, one per row."""

from typing import Any

import numpy as np
import pytest

from tests.tables import for_each
from tests.tagi.helpers import network

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
