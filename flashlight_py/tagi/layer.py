"""The layer: moments in, moments out; deltas in, sums for its parameters and deltas out.

And layers made of layers: some in a row, and two paths whose results are added.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from flashlight_py.device import Array
from flashlight_py.tagi.parameters import Parameter
from flashlight_py.tagi.states import REAL, BaseHiddenStates, host_copy, unmasked

Shape: TypeAlias = tuple[int, ...]
Deltas: TypeAlias = tuple[Array, Array]  # of the means and of the variances


class _Flat:
    """An attribute of a layer: an array of its weights or biases, as a flat copy on the CPU.

    Assigning as many finite values, of any shape, sets them in place. It is empty where the layer
    has none.
    """

    def __init__(self, of: str, which: str) -> None:
        self._of, self._which = of, which

    def __get__(self, layer: BaseLayer | None, owner: object = None) -> Any:
        if layer is None:
            return self
        parameter: Parameter | None = getattr(layer, self._of)
        if parameter is None:
            return np.empty(0, REAL)
        return host_copy(getattr(parameter, self._which)).reshape(-1)

    def __set__(self, layer: BaseLayer, values: Array) -> None:
        parameter: Parameter | None = getattr(layer, self._of)
        name, had = f"{layer}: {self._of}", 0 if parameter is None else parameter.mean.size
        if np.size(values) != had:
            raise ValueError(f"{name} has {had} elements, got {np.size(values)}")
        if parameter is not None:
            found = np.asarray(unmasked(name, values), REAL)
            if not np.isfinite(found).all():  # could be saved, and never loaded
                raise ValueError(f"{name}: {self._which} is not finite")
            parameter.put(self._which, found)


class BaseLayer(abc.ABC):
    """The base of all layers.

    A subclass sets ``weight`` and ``biases`` if it has some, and writes ``connect``, ``forward``
    and ``backward``. Arrays have the batch first and are float32; those that a layer is passed
    may have any strides, and must not be changed.

    Attributes:
        weight, biases: its parameters; None: it has none.
        input_shape, output_shape: of one sample; None until :meth:`connect`. A layer that is made
            with all it needs to know of its input has its ``input_shape`` from then on.
        training: whether statistics of batches are taken, and inputs kept for a backward pass.
        on_sums: is called with the layer, in each backward pass, when the sums of its parameters
            are complete; before the deltas of its input are computed, where that can be.
    """

    # Layers without parameters are left out of files and dictionaries of parameters.
    has_state: ClassVar[bool] = True
    # Those that keep nothing for the backward pass may stand in several places.
    keeps_input: ClassVar[bool] = True
    # Whether its inputs are no units, such as indices, which no other layer can make.
    first_only: ClassVar[bool] = False

    mu_w, var_w = _Flat("weight", "mean"), _Flat("weight", "variance")
    mu_b, var_b = _Flat("biases", "mean"), _Flat("biases", "variance")
    delta_mu_w, delta_var_w = _Flat("weight", "mean_delta"), _Flat("weight", "variance_delta")
    delta_mu_b, delta_var_b = _Flat("biases", "mean_delta"), _Flat("biases", "variance_delta")

    def __init__(self) -> None:
        self.weight: Parameter | None = None
        self.biases: Parameter | None = None
        self.input_shape: Shape | None = None
        self.output_shape: Shape | None = None
        self.training = True
        self.on_sums: Callable[[BaseLayer], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is no part of the training that the layer takes part in."""
        return self.__dict__ | {"on_sums": None}

    @abc.abstractmethod
    def connect(self, shape: Shape) -> Shape:
        """Return the shape of a sample of the output for inputs of ``shape``.

        Raises:
            ValueError: the layer cannot take such inputs; says what it expects.
        """

    @abc.abstractmethod
    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return the moments of the output: ``[batch, *input_shape]`` to ``[batch,
        *output_shape]``. Keeps ``x`` for the backward pass, if ``training``.
        """

    @abc.abstractmethod
    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Set the sums of the parameters, call ``on_sums``; return the deltas of the input.

        Args:
            d, e: deltas of the output's means and variances, ``[batch, *output_shape]`` or another
                shape of as many elements, float32. They may be changed.
            wanted: whether the deltas of the input are needed; if not, it returns None. They are
                those of the units *before* the activation that made the input: multiplied by its
                slope and its square.
        """

    def forward_nothing(self) -> None:  # noqa: B027  (most do nothing together)
        """Take part in the collective work of a forward pass, without any sample."""

    def backward_nothing(self) -> None:
        """Set the sums of the parameters for a batch without samples; call ``on_sums``."""
        for parameter in self.parameters_in_use:
            parameter.mean_sum[...] = parameter.variance_sum[...] = 0
        self._sums_are_complete()

    @property
    def parameters_in_use(self) -> list[Parameter]:
        """The parameters that the layer has, the weight first."""
        return [each for each in (self.weight, self.biases) if each is not None]

    def statistics(self) -> list[Array]:
        """Return the rest of its state beside its parameters, such as running means; not copies."""
        return []

    def named_layers(self, suffix: str) -> Iterator[tuple[str, BaseLayer]]:
        """Yield the layers that it consists of with the names that pytagi gives them."""
        yield f"{self.get_layer_name()}.{suffix}", self

    def set_training(self, training: bool) -> None:
        """Switch between training and evaluation."""
        self.training = training

    def to_device(self, device: str) -> None:  # noqa: B027  (most have nothing but parameters)
        """Move the arrays that the layer keeps beside its parameters to ``device``."""

    def get_layer_name(self) -> str:
        """Return the name of its kind, as in the keys of ``state_dict()``."""
        return type(self).__name__

    def get_layer_info(self) -> str:
        """Return its kind and sizes, such as ``"Linear(784,128)"`` and ``"ReLU()"``."""
        return f"{self.get_layer_name()}({','.join(map(str, self._sizes()))})"

    def _sizes(self) -> Sequence[int]:
        return self.input_size, self.output_size

    def get_max_num_states(self) -> int:
        """Return how many units a sample has, before it or after it, whichever are more."""
        return max(self.input_size, self.output_size)

    @property
    def input_size(self) -> int:
        """How many units a sample of the input has; 0 until it is known."""
        return 0 if self.input_shape is None else math.prod(self.input_shape)

    @property
    def output_size(self) -> int:
        """How many units a sample of the output has; 0 until it is known."""
        return 0 if self.output_shape is None else math.prod(self.output_shape)

    def shape_of_outputs(self, batch: int) -> Shape:
        """Return the shape of the outputs for so many samples; the layer is connected."""
        assert self.output_shape is not None
        return (batch, *self.output_shape)

    @property
    def bias(self) -> bool:
        """Whether it has biases."""
        return self.biases is not None

    @property
    def num_weights(self) -> int:
        """How many weights it has."""
        return 0 if self.weight is None else int(self.weight.mean.size)

    @property
    def num_biases(self) -> int:
        """How many biases it has."""
        return 0 if self.biases is None else int(self.biases.mean.size)

    def _sum_biases(self, d: Array, e: Array, axis: int) -> None:
        """Set the sums of the biases, over an axis of their units' deltas; the others are set."""
        if self.biases is not None:
            d.sum(axis=axis, out=self.biases.mean_sum)
            e.sum(axis=axis, out=self.biases.variance_sum)
        self._sums_are_complete()

    def _sums_are_complete(self) -> None:
        if self.on_sums is not None:
            self.on_sums(self)

    def __repr__(self) -> str:
        return self.get_layer_info()


def times_slope(d: Array, e: Array, slope: Array | None) -> Deltas:
    """Return the deltas of an activation's input from those of its output, in place."""
    if slope is not None:
        d *= slope
        e *= slope
        e *= slope
    return d, e


class _Block(BaseLayer):
    """The base of both blocks, of ``layers``."""

    has_state = False

    def __init__(self, *layers: BaseLayer) -> None:
        super().__init__()
        name = self.get_layer_name()
        if not layers:
            raise TypeError(f"{name}: a block needs at least one layer")
        for layer in layers:
            if not isinstance(layer, BaseLayer):
                raise TypeError(f"{name}: expected layers of fl.tagi, got {type(layer).__name__}")
        self.layers = list(layers)
        self.input_shape = layers[0].input_shape

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        for layer in self.layers:
            layer.set_training(training)

    def to_device(self, device: str) -> None:
        for layer in self.layers:
            layer.to_device(device)

    def get_max_num_states(self) -> int:
        return max(layer.get_max_num_states() for layer in self.layers)


class LayerBlock(_Block):
    """Layers in a row, as one layer: a path of a :class:`ResNetBlock`.

    Attributes:
        layers: as passed; blocks may be among them.

    Raises:
        TypeError: something is no layer of ``fl.tagi``, or there is none.
    """

    def connect(self, shape: Shape, within: str = " of the block") -> Shape:
        """Connect the layers one after the other.

        A ValueError names one that cannot take the output of the one before, and that.
        """
        self.input_shape, before = shape, f"the input{within}"
        for number, layer in enumerate(self.layers):
            try:
                shape = layer.connect(shape)
            except ValueError as error:
                name = f"layer {number}{within}, {layer}"
                raise ValueError(f"{name}, after {before}: {error}") from error
            before = f"layer {number}, {layer}"
        self.output_shape = shape
        return shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        for number in range(len(self.layers) - 1, -1, -1):
            deltas = self.layers[number].backward(d, e, wanted or number > 0)
            if deltas is not None:
                d, e = deltas
        return (d, e) if wanted else None

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
