"""Layers made of layers: some in a row, and two paths whose results are added."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flashlight_py.device import Array
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape, times_slope
from flashlight_py.tagi.states import BaseHiddenStates


class LayerBlock(BaseLayer):
    """Layers in a row, as one layer: a path of a :class:`ResNetBlock`.

    Attributes:
        layers: as passed; blocks may be among them.

    Raises:
        TypeError: something is no layer of ``fl.tagi``, or there is none.
    """

    has_state = False

    def __init__(self, *layers: BaseLayer) -> None:
        super().__init__()
        if not layers:
            raise TypeError("LayerBlock: a block needs at least one layer")
        _check("LayerBlock", *layers)
        self.layers = list(layers)
        self.input_shape = layers[0].input_shape

    def connect(self, shape: Shape) -> Shape:
        """Connect the layers one after the other.

        Raises:
            ValueError: one cannot take what the one before makes; names both.
        """
        self.input_shape, before = shape, "the input of the block"
        for number, layer in enumerate(self.layers):
            try:
                shape = layer.connect(shape)
            except ValueError as error:
                raise ValueError(
                    f"layer {number} of the block, {layer}, after {before}: {error}"
                ) from error
            before = f"layer {number}, {layer}"
        self.output_shape = shape
        return shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return what the last layer returns."""
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Go back through the layers, the last one first."""
        for number in range(len(self.layers) - 1, -1, -1):
            deltas = self.layers[number].backward(d, e, wanted or number > 0)
            if deltas is not None:
                d, e = deltas
        return (d, e) if wanted else None

    def named_layers(self, suffix: str) -> Iterator[tuple[str, BaseLayer]]:
        """Yield the layers that it consists of, such as ``"Linear.main.3.0"``."""
        for number, layer in enumerate(self.layers):
            yield from layer.named_layers(f"{suffix}.{number}")

    def set_training(self, training: bool) -> None:
        """Switch all layers between training and evaluation."""
        super().set_training(training)
        for layer in self.layers:
            layer.set_training(training)

    def to_device(self, device: str) -> None:
        """Move to ``device`` what the layers keep beside their parameters."""
        for layer in self.layers:
            layer.to_device(device)

    def get_max_num_states(self) -> int:
        """Return how many units a sample has, where it has most inside the block."""
        return max(layer.get_max_num_states() for layer in self.layers)


class ResNetBlock(BaseLayer):
    """The sum of two paths from one input: ``main_block(x) + shortcut(x)``, or ``+ x`` itself.

    Means are added, and variances are, as those of independent units (He, Zhang, Ren and Sun, Deep
    residual learning for image recognition, CVPR 2016, for the block).

    Args:
        main_block: a layer, often a :class:`LayerBlock`; blocks may contain blocks.
        shortcut: the same; None: the input is added as it is.

    Raises:
        TypeError: one is no layer of ``fl.tagi``.
    """

    has_state = False

    def __init__(self, main_block: BaseLayer, shortcut: BaseLayer | None = None) -> None:
        super().__init__()
        _check("ResNetBlock", main_block, *([] if shortcut is None else [shortcut]))
        self.main_block, self.shortcut = main_block, shortcut
        self.input_shape = main_block.input_shape
        self._shape: Shape = ()  # of the output, with the batch
        self._slopes: tuple[Array | None, Array | None] = (None, None)  # that the paths end with

    def connect(self, shape: Shape) -> Shape:
        """Connect both paths. Their results have the same shape, or the same size and one is flat.

        Raises:
            ValueError: a path cannot take the input, or the results do not fit; says both shapes.
        """
        self.input_shape = shape
        main = _connect("main block", self.main_block, shape)
        other = shape if self.shortcut is None else _connect("shortcut", self.shortcut, shape)
        flat = len(main) == 1 or len(other) == 1
        if main != other and not (flat and math.prod(main) == math.prod(other)):
            second = "its input" if self.shortcut is None else f"the shortcut, {self.shortcut},"
            raise ValueError(
                f"the main block, {self.main_block}, makes samples of shape {main}, {second} has "
                f"{other}: they are added, and must have the same"
            )
        self.output_shape = main
        return main

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return the sums of both paths' means and variances."""
        main = self.main_block.forward(x)
        other = x if self.shortcut is None else self.shortcut.forward(x)
        other = other.shaped(main.mean.shape[1:])
        if self.training:
            self._shape, self._slopes = main.mean.shape, (main.slope, other.slope)
        if main.variance is None or other.variance is None:
            variance = other.variance if main.variance is None else main.variance
        else:
            variance = main.variance + other.variance
        return BaseHiddenStates(main.mean + other.mean, variance)

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Go back through both paths, the shortcut first; return the sums of their deltas.

        Of an input that is added as it is, they are ``d`` and ``e`` themselves, times its slope and
        the slope's square.
        """
        d, e = d.reshape(self._shape), e.reshape(self._shape)
        copies = d.copy(), e.copy()  # each path may change what it is passed
        other: Deltas | None = times_slope(*copies, self._slopes[1])
        if self.shortcut is not None:
            other = self.shortcut.backward(*copies, wanted)
        main = self.main_block.backward(*times_slope(d, e, self._slopes[0]), wanted)
        if not wanted or main is None or other is None:
            return None
        d, e = main
        d += other[0].reshape(d.shape)
        e += other[1].reshape(e.shape)
        return d, e

    def named_layers(self, suffix: str) -> Iterator[tuple[str, BaseLayer]]:
        """Yield the layers of both paths, such as ``"Conv2d.shortcut.3"``, the main one first."""
        yield from self.main_block.named_layers(f"main.{suffix}")
        if self.shortcut is not None:
            yield from self.shortcut.named_layers(f"shortcut.{suffix}")

    def set_training(self, training: bool) -> None:
        """Switch both paths between training and evaluation."""
        super().set_training(training)
        for path in self._paths():
            path.set_training(training)

    def to_device(self, device: str) -> None:
        """Move to ``device`` what the paths keep beside their parameters."""
        for path in self._paths():
            path.to_device(device)

    def get_max_num_states(self) -> int:
        """Return how many units a sample has, where it has most inside the block."""
        return max(path.get_max_num_states() for path in self._paths())

    def _paths(self) -> list[BaseLayer]:
        return [self.main_block] if self.shortcut is None else [self.main_block, self.shortcut]


def _check(block: str, *layers: object) -> None:
    for layer in layers:
        if not isinstance(layer, BaseLayer):
            raise TypeError(f"{block}: expected layers of fl.tagi, got {type(layer).__name__}")


def _connect(path: str, layer: BaseLayer, shape: Shape) -> Shape:
    try:
        return layer.connect(shape)
    except ValueError as error:
        raise ValueError(f"the {path}, {layer}: {error}") from error
