"""Base classes of layers, their parameters, and layers that combine layers.

A network gathers the :class:`Parameter` objects of its layers in :class:`ParameterBucket` objects,
in the order in which a backward pass computes their deltas. A bucket has three arrays: all means,
all variances, and all sums of deltas over the batch. A step is therefore one kernel call, and the
sums are sent to other processes without a copy.
"""

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from flashlight_py import kernels
from flashlight_py.device import Array, array_module, is_cupy, to_device
from flashlight_py.random import generator
from flashlight_py.tagi import states
from flashlight_py.tagi.states import REAL, BaseHiddenStates

FLOOR = np.float32(1e-5)  # replaces variances that a step would make zero or negative
METHODS = ("He", "Xavier")


class Parameter:
    """An array of independent Gaussian parameters, and sums that a backward pass computes.

    Attributes:
        mean, variance: Float32 arrays of one shape.
        mean_sum, variance_sum: Sums of deltas over the batch. A step changes the mean by ``variance
            * mean_sum`` and the variance by ``variance ** 2 * variance_sum``, both bounded.
    """

    __slots__ = ("mean", "mean_sum", "variance", "variance_sum")

    def __init__(self, mean: Array, variance: Array) -> None:
        self.mean = np.ascontiguousarray(mean, REAL)
        self.variance = np.ascontiguousarray(variance, REAL)
        self.mean_sum = np.zeros_like(self.mean)
        self.variance_sum = np.zeros_like(self.mean)

    @property
    def mean_delta(self) -> Array:
        """Change of the mean in the next step, before it is bounded; a new array."""
        return self.variance * self.mean_sum

    @property
    def variance_delta(self) -> Array:
        """Change of the variance in the next step, before it is bounded; a new array."""
        return self.variance * self.variance * self.variance_sum

    def put(self, moment: str, values: Array) -> None:
        """Set ``mean`` or ``variance`` in place from values of the same size and any shape."""
        if moment not in ("mean", "variance"):
            raise AttributeError(f"{moment} is read-only: a backward pass computes it")
        target: Array = getattr(self, moment)
        array = np.asarray(values, REAL)
        if moment == "variance" and not (array >= 0).all():
            raise ValueError(f"variances must be at least 0, got {array.min()}")
        target[...] = array_module(target).asarray(array).reshape(target.shape)


def spread(method: str, fan_in: int, fan_out: int) -> float:
    """Return the standard deviation of initial means for ``method``, "He" or "Xavier"."""
    if method not in METHODS:
        raise ValueError(f"init_method must be one of {', '.join(METHODS)}, got {method!r}")
    return math.sqrt(1 / fan_in if method == "He" else 2 / (fan_in + fan_out))


def gaussian(shape: tuple[int, ...], deviation: float, gain: float) -> Parameter:
    """Draw means with standard deviation ``deviation``; variances ``(gain * deviation) ** 2``."""
    mean = generator().standard_normal(shape, REAL) * REAL.type(deviation)
    return Parameter(mean, np.full(shape, (gain * deviation) ** 2, REAL))


class ParameterBucket:
    """Parameters whose arrays are consecutive views of flat arrays on ``device``.

    ``sums`` is a function that makes the array of this name; None: an array of zeros.

    Attributes:
        mean, variance: Flat arrays of all parameters.
        sums: All ``mean_sum``, then all ``variance_sum``, then ``extra`` elements, in which
            data-parallel training stores the number of samples.
    """

    def __init__(
        self, parameters: Sequence[Parameter], device: str,
        sums: Callable[[int], Array] | None = None, extra: int = 0,
    ) -> None:  # fmt: skip
        self.parameters = tuple(parameters)
        self.size = sum(int(parameter.mean.size) for parameter in parameters)
        zeros: Any = lambda size: to_device(np.zeros(size, REAL), device)  # noqa: E731
        self.mean, self.variance = zeros(self.size), zeros(self.size)
        self.sums = (sums or zeros)(2 * self.size + extra)
        self.extra = self.sums[2 * self.size :]
        start = 0
        for parameter in parameters:
            end, shape = start + int(parameter.mean.size), parameter.mean.shape
            mean, variance = parameter.mean, parameter.variance
            parameter.mean = self.mean[start:end].reshape(shape)
            parameter.variance = self.variance[start:end].reshape(shape)
            parameter.put("mean", to_device(mean, "cpu"))
            parameter.put("variance", to_device(variance, "cpu"))
            parameter.mean_sum = self.sums[start:end].reshape(shape)
            parameter.variance_sum = self.sums[self.size + start : self.size + end].reshape(shape)
            start = end
        self._homes = [parameter.mean for parameter in parameters]
        # Views of the sums. Pointers to the four arrays are stored, because making pointers takes
        # longer than a small step.
        of_means, of_variances = self.sums[: self.size], self.sums[self.size : 2 * self.size]
        self._arrays = (self.mean, self.variance, of_means, of_variances)
        self._native = states.native_for(self.mean)
        if self._native is not None:
            self._pointers = [states.floats(self._native, array) for array in self._arrays]

    def step(self, cap: float) -> None:
        """Change means and variances in place, each by at most ``sqrt(variance) / cap``.

        With d = ``mean_sum``, e = ``variance_sum`` and the variance s, the mean changes by ``clip(s
        d, +-sqrt(s) / cap)`` and the variance by ``clip(s^2 e, +-sqrt(s) / cap)``. A variance that
        would not be positive becomes 1e-5. Both bounds are equal although their units differ:
        pytagi's published accuracies were measured with these bounds.

        Raises:
            RuntimeError: If the parameters were moved to other buckets.
        """
        pairs = zip(self.parameters, self._homes, strict=True)
        if any(parameter.mean is not home for parameter, home in pairs):
            raise RuntimeError(
                "step: another network was created with the same layers and owns their parameters. "
                "Step that network, or create each network with new layers"
            )
        if self._native is not None:
            self._native.lib.fl_tagi_step(*self._pointers, self.size, 1 / cap)
        elif is_cupy(self.mean):
            kernels.capped_step(*self._arrays, 1 / cap)
        else:
            step_in_numpy(*self._arrays, 1 / cap)


def step_in_numpy(
    mean: Array, variance: Array, mean_sum: Array, variance_sum: Array, inverse_cap: float
) -> None:
    """Take the step of :meth:`ParameterBucket.step` with the kernels' order of operations."""
    bound = np.sqrt(variance) * REAL.type(inverse_cap)
    d = variance * mean_sum
    e = variance * variance * variance_sum
    mean += np.clip(d, -bound, bound)
    variance += np.clip(e, -bound, bound)
    variance[~(variance > 0)] = FLOOR  # also NaN


def cap_factor(batch: int) -> float:
    """Return the divisor ``cap`` of a step's bound for ``batch`` samples, as in pytagi."""
    if batch <= 1:
        return 0.1
    return 2.0 if batch < 256 else 3.0


Shape: TypeAlias = tuple[int, ...]
Deltas: TypeAlias = tuple[Array, Array]  # deltas of means and of variances


class _Flat:
    """Attribute of a layer: a flat copy on the CPU of one array of its weights or biases.

    Assigning the same number of finite values, of any shape, sets the array in place. The copy is
    empty if the layer has no such parameter.
    """

    def __init__(self, name: str, moment: str) -> None:
        self._name, self._moment = name, moment

    def __get__(self, layer: "BaseLayer | None", owner: object = None) -> Any:
        if layer is None:
            return self
        parameter: Parameter | None = getattr(layer, self._name)
        if parameter is None:
            return np.empty(0, REAL)
        return states.host_copy(getattr(parameter, self._moment)).reshape(-1)

    def __set__(self, layer: "BaseLayer", values: Array) -> None:
        parameter: Parameter | None = getattr(layer, self._name)
        label, size = f"{layer}: {self._name}", 0 if parameter is None else parameter.mean.size
        if np.size(values) != size:
            raise ValueError(f"{label}: expected {size} elements, got {np.size(values)}")
        if parameter is not None:
            array = np.asarray(states.unmasked(label, values), REAL)
            if not np.isfinite(array).all():  # load() would reject a saved network with NaN
                raise ValueError(f"{label}: {self._moment} must be finite, got NaN or infinity")
            parameter.put(self._moment, array)


class BaseLayer(abc.ABC):
    """Base class of all layers.

    A subclass sets ``weight`` and ``biases`` if it has them, and defines ``connect``, ``forward``
    and ``backward``. Arrays are float32 with the batch first. Input arrays may have any strides and
    must not be changed.

    Attributes:
        weight, biases: Parameters of the layer, or None.
        input_shape, output_shape: Shapes of one sample; None before :meth:`connect`. A layer whose
            arguments determine the shape of its input has ``input_shape`` from the start.
        training: Whether the layer is in training: it uses batch statistics and keeps its inputs.
        on_sums: None, or a function that ``backward`` calls with the layer as argument after it has
            set ``mean_sum`` and ``variance_sum`` of the parameters. Most layers call ``on_sums``
            before they compute the deltas of the input.
    """

    # Whether files and dictionaries of parameters have an entry for the layer.
    has_state: ClassVar[bool] = True
    # Whether the layer keeps data for the backward pass. Otherwise it may occur twice in a network.
    keeps_input: ClassVar[bool] = True
    # Whether the layer must be the first, because its inputs are not units (for example indices).
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
        """Return the attributes for a copy. The copy's ``on_sums`` is None."""
        return self.__dict__ | {"on_sums": None}

    @abc.abstractmethod
    def connect(self, shape: Shape) -> Shape:
        """Return the output shape of a sample with the input shape ``shape``.

        Raises:
            ValueError: If the layer cannot accept this shape. The message has the expected shape.
        """

    @abc.abstractmethod
    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return the moments of the output, ``[batch, *output_shape]``.

        ``x`` has shape ``[batch, *input_shape]``. In training, the layer keeps ``x``.
        """

    @abc.abstractmethod
    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Set each parameter's ``mean_sum`` and ``variance_sum``; return the deltas of the input.

        Args:
            d, e: Deltas of the means and variances of the output: float32, ``[batch,
                *output_shape]`` or another shape of this size. They may be overwritten.
            needs_input: Whether to return the deltas of the input instead of None. If an activation
                computed the input, return the deltas of the activation's input: deltas of means
                times the activation's slope, and deltas of variances times the squared slope.
        """

    def forward_nothing(self) -> None:  # noqa: B027 (most layers have no collective work)
        """Join the collective calls of a forward pass on a rank without samples."""

    def backward_nothing(self) -> None:
        """For an empty batch: set each ``mean_sum`` and ``variance_sum`` to 0; call ``on_sums``."""
        for parameter in self.parameters_in_use:
            parameter.mean_sum[...] = parameter.variance_sum[...] = 0
        self._sums_are_complete()

    @property
    def parameters_in_use(self) -> list[Parameter]:
        """The parameters of the layer, the weight first."""
        return [parameter for parameter in (self.weight, self.biases) if parameter is not None]

    def statistics(self) -> list[Array]:
        """Return state that is not a parameter, such as running means: the arrays, no copies."""
        return []

    def named_layers(self, suffix: str) -> "Iterator[tuple[str, BaseLayer]]":
        """Yield (name, layer) of this layer or of a block's layers. Names end in ``suffix``."""
        yield f"{self.get_layer_name()}.{suffix}", self

    def set_training(self, training: bool) -> None:
        """Switch between training and evaluation."""
        self.training = training

    def to_device(self, device: str) -> None:  # noqa: B027 (most layers have only parameters)
        """Move arrays other than parameters to ``device``."""

    def get_layer_name(self) -> str:
        """Return the class name, as in the keys of ``state_dict()``."""
        return type(self).__name__

    def get_layer_info(self) -> str:
        """Return class name and sizes, such as ``"Linear(784,128)"`` and ``"ReLU()"``."""
        return f"{self.get_layer_name()}({','.join(map(str, self._sizes()))})"

    def _sizes(self) -> Sequence[int]:
        return self.input_size, self.output_size

    def get_max_num_states(self) -> int:
        """Return ``input_size`` or ``output_size``, whichever is larger."""
        return max(self.input_size, self.output_size)

    @property
    def input_size(self) -> int:
        """Number of units of an input sample; 0 until it is known."""
        return 0 if self.input_shape is None else math.prod(self.input_shape)

    @property
    def output_size(self) -> int:
        """Number of units of an output sample; 0 until it is known."""
        return 0 if self.output_shape is None else math.prod(self.output_shape)

    def shape_of_outputs(self, batch: int) -> Shape:
        """Return the output shape for ``batch`` samples of a connected layer."""
        assert self.output_shape is not None
        return (batch, *self.output_shape)

    @property
    def bias(self) -> bool:
        """Whether the layer has biases."""
        return self.biases is not None

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return 0 if self.weight is None else int(self.weight.mean.size)

    @property
    def num_biases(self) -> int:
        """Number of biases."""
        return 0 if self.biases is None else int(self.biases.mean.size)

    def _sum_biases(self, d: Array, e: Array, axis: int) -> None:
        """Set the biases' sums. Then call ``on_sums``: the weights' sums are set already."""
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
    """Return ``d * slope`` and ``e * slope**2``. ``d`` and ``e`` are changed in place."""
    if slope is not None:
        d *= slope
        e *= slope
        e *= slope
    return d, e


class _Block(BaseLayer):
    has_state = False

    def __init__(self, *layers: BaseLayer) -> None:
        super().__init__()
        name = self.get_layer_name()
        if not layers:
            raise TypeError(f"{name}: expected at least one layer, got 0")
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
    """A chain of layers as one layer, for example a path of a :class:`ResNetBlock`.

    Attributes:
        layers: The layers. Blocks are allowed.

    Raises:
        TypeError: If an argument is not a layer of ``fl.tagi``, or there is no argument.
    """

    def connect(self, shape: Shape, within: str = " of the block") -> Shape:
        """Set the shapes of all layers, and return the output shape of the last layer.

        If a layer cannot accept the output of its predecessor, ValueError names both layers. In the
        text, ``within`` follows the layer's number.
        """
        self.input_shape, previous = shape, f"the input{within}"
        for number, layer in enumerate(self.layers):
            try:
                shape = layer.connect(shape)
            except ValueError as error:
                name = f"layer {number}{within}, {layer}"
                raise ValueError(f"{name}, after {previous}: {error}") from error
            previous = f"layer {number}, {layer}"
        self.output_shape = shape
        return shape

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        for number in range(len(self.layers) - 1, -1, -1):
            deltas = self.layers[number].backward(d, e, needs_input or number > 0)
            if deltas is not None:
                d, e = deltas
        return (d, e) if needs_input else None

    def named_layers(self, suffix: str) -> Iterator[tuple[str, BaseLayer]]:
        """Yield the layers of the block, with names such as ``"Linear.main.3.0"``."""
        for number, layer in enumerate(self.layers):
            yield from layer.named_layers(f"{suffix}.{number}")


class ResNetBlock(_Block):
    """The sum of two paths: ``main_block(x) + shortcut(x)``, or ``main_block(x) + x``.

    Means and variances are added, as for independent units. Source: He, Zhang, Ren and Sun, Deep
    residual learning for image recognition, CVPR 2016.

    Args:
        main_block: A layer, often a :class:`LayerBlock`. Blocks may be nested.
        shortcut: A layer. None: the input itself is added.

    Raises:
        TypeError: If an argument is not a layer of ``fl.tagi``.
    """

    def __init__(self, main_block: BaseLayer, shortcut: BaseLayer | None = None) -> None:
        super().__init__(main_block, *([] if shortcut is None else [shortcut]))
        self.main_block, self.shortcut = main_block, shortcut
        self._shape: Shape = ()  # output shape with the batch
        self._slopes: tuple[Array | None, Array | None] = (None, None)  # slopes of both outputs

    def connect(self, shape: Shape) -> Shape:
        """Return the output shape. Paths must have equal shapes, or equal sizes if one is flat."""
        self.input_shape = shape
        main = _connect("main block", self.main_block, shape)
        other = shape if self.shortcut is None else _connect("shortcut", self.shortcut, shape)
        flat = len(main) == 1 or len(other) == 1
        if main != other and not (flat and math.prod(main) == math.prod(other)):
            name = "the input" if self.shortcut is None else f"the shortcut, {self.shortcut}"
            raise ValueError(
                f"expected the same output shape of both paths, got {main} for the main block, "
                f"{self.main_block}, and {other} for {name}"
            )
        self.output_shape = main
        return main

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
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

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Run both paths backward, the shortcut first, and return the sums of their deltas.

        Without a shortcut, the second path has the deltas ``d * slope`` and ``e * slope**2``.
        """
        d, e = d.reshape(self._shape), e.reshape(self._shape)
        copies = d.copy(), e.copy()  # each path may overwrite its arguments
        other: Deltas | None = times_slope(*copies, self._slopes[1])
        if self.shortcut is not None:
            other = self.shortcut.backward(*copies, needs_input)
        main = self.main_block.backward(*times_slope(d, e, self._slopes[0]), needs_input)
        if not needs_input or main is None or other is None:
            return None
        d, e = main
        d += other[0].reshape(d.shape)
        e += other[1].reshape(e.shape)
        return d, e

    def named_layers(self, suffix: str) -> Iterator[tuple[str, BaseLayer]]:
        """Yield the layers of both paths, such as ``"Conv2d.shortcut.3"``, the main path first."""
        yield from self.main_block.named_layers(f"main.{suffix}")
        if self.shortcut is not None:
            yield from self.shortcut.named_layers(f"shortcut.{suffix}")


def _connect(path: str, layer: BaseLayer, shape: Shape) -> Shape:
    try:
        return layer.connect(shape)
    except ValueError as error:
        raise ValueError(f"the {path}, {layer}: {error}") from error
