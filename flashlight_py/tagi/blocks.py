"""Layers made of layers: some in a row, and two paths whose results are added."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flashlight_py.device import Array
from flashlight_py.tagi.layer import (
    BaseLayer,
    Deltas,
    Shape,
    backward_through,
    connect_in_row,
    forward_through,
    times_slope,
)
from flashlight_py.tagi.states import BaseHiddenStates


class _Block(BaseLayer):
    """The base of both blocks, of the layers ``parts``."""

    has_state = False

    def __init__(self, *parts: BaseLayer) -> None:
        super().__init__()
        name = self.get_layer_name()
        if not parts:
            raise TypeError(f"{name}: a block needs at least one layer")
        for part in parts:
            if not isinstance(part, BaseLayer):
                raise TypeError(f"{name}: expected layers of fl.tagi, got {type(part).__name__}")
        self._parts = list(parts)
        self.input_shape = parts[0].input_shape

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        for part in self._parts:
            part.set_training(training)

    def to_device(self, device: str) -> None:
        for part in self._parts:
            part.to_device(device)

    def get_max_num_states(self) -> int:
        return max(part.get_max_num_states() for part in self._parts)


class LayerBlock(_Block):
    """Layers in a row, as one layer: a path of a :class:`ResNetBlock`.

    Attributes:
        layers: as passed; blocks may be among them.

    Raises:
        TypeError: something is no layer of ``fl.tagi``, or there is none.
    """

    def __init__(self, *layers: BaseLayer) -> None:
        super().__init__(*layers)
        self.layers = self._parts

    def connect(self, shape: Shape) -> Shape:
        """Connect the layers one after the other."""
        self.input_shape = shape
        self.output_shape = connect_in_row(
            self.layers, shape, "the input of the block", " of the block"
        )
        return self.output_shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        return forward_through(self.layers, x)

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        return backward_through(self.layers, d, e, wanted)

    def named_layers(self, suffix: str) -> Iterator[tuple[str, BaseLayer]]:
        """Yield the layers that it consists of, such as ``"Linear.main.3.0"``."""
        for number, layer in enumerate(self.layers):
            yield from layer.named_layers(f"{suffix}.{number}")


class ResNetBlock(_Block):
    """The sum of two paths from one input: ``main_block(x) + shortcut(x)``, or ``+ x`` itself.

    Means are added, and variances are, as those of independent units (He, Zhang, Ren and Sun, Deep
    residual learning for image recognition, CVPR 2016, for the block).

    Args:
        main_block: a layer, often a :class:`LayerBlock`; blocks may contain blocks.
        shortcut: the same; None: the input is added as it is.

    Raises:
        TypeError: one is no layer of ``fl.tagi``.
    """

    def __init__(self, main_block: BaseLayer, shortcut: BaseLayer | None = None) -> None:
        super().__init__(main_block, *([] if shortcut is None else [shortcut]))
        self.main_block, self.shortcut = main_block, shortcut
        self._shape: Shape = ()  # of the output, with the batch
        self._slopes: tuple[Array | None, Array | None] = (None, None)  # that the paths end with

    def connect(self, shape: Shape) -> Shape:
        """Connect both paths; their results have one shape, or one size where one is flat."""
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


def _connect(path: str, layer: BaseLayer, shape: Shape) -> Shape:
    try:
        return layer.connect(shape)
    except ValueError as error:
        raise ValueError(f"the {path}, {layer}: {error}") from error
