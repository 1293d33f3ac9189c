"""A network as a chain of layers: forward and backward passes, and steps."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, device_of, is_cupy, to_device
from flashlight_py.tagi import states
from flashlight_py.tagi.layer import FLOOR, BaseLayer, LayerBlock, ParameterBucket, cap_factor
from flashlight_py.tagi.network import Network
from flashlight_py.tagi.normalization import NORM_STATISTICS, BatchNorm2d
from flashlight_py.tagi.states import REAL, BaseDeltaStates, BaseHiddenStates, as_real, host_copy


class Sequential(Network):
    """A chain of layers, trained by observations of its outputs, without gradients.

    A training step is ``net(x)``, a method of :class:`OutputUpdater`, ``net.backward()`` and
    ``net.step()``. Inputs are flat, as in pytagi, or have the batch first. Outputs are flat if the
    inputs are flat. Inputs of any dtype are converted to float32.

    Attributes:
        layers: The layers.
        output_z_buffer: Moments of the outputs of the last forward pass.
        input_delta_z_buffer: Deltas of the outputs. An updater writes them for backward().
        output_delta_z_buffer: Deltas of the input. A backward pass sets them if
            ``input_state_update`` is True or the input was the output of another network.
        input_state_update: Whether a backward pass computes the deltas of the input.
        samples: Number of samples of the last forward pass. 0: the pass has no effect on a step.
        learnt: Number of samples of the last backward pass, on all ranks of data-parallel training.
        device: ``"cpu"`` or ``"cuda:<index>"``.

    Raises:
        TypeError: If an argument is not a layer of ``fl.tagi``, or there is no argument.
        ValueError: If a layer cannot accept the output of its predecessor (the message names both
            layers), an ``Embedding`` is not the first layer, or a layer occurs twice and is no
            activation.
    """

    def __init__(self, *layers: BaseLayer) -> None:
        for number, layer in enumerate(layers):
            if not isinstance(layer, BaseLayer):
                raise TypeError(
                    f"Sequential: expected layers of fl.tagi, got {type(layer).__name__} as "
                    f"layer {number}"
                )
            if number and layer.first_only:
                raise ValueError(f"Sequential: {layer} must be the first layer, not layer {number}")
        if not layers:
            raise TypeError("Sequential: expected at least one layer, got 0")
        self._row = LayerBlock(*layers)
        self.layers = self._row.layers
        self.device = "cpu"
        self.output_z_buffer = BaseHiddenStates(np.empty((0, 0), REAL))
        self.input_delta_z_buffer = BaseDeltaStates()
        self.output_delta_z_buffer = BaseDeltaStates()
        self.training = True
        self.input_state_update = False
        self._shape: tuple[int, ...] | None = None  # shape of one sample; None: not known yet
        self._from_states = False  # whether the last input was another network's output
        self.samples = self.learnt = 0
        self._is_recorded = False  # whether the layers have kept the data for a backward pass
        names: dict[int, str] = {}
        for name, layer in self.named_layers():
            first = names.setdefault(id(layer), name)
            if first != name and layer.keeps_input:
                remedy = "Create one layer for each position"
                raise ValueError(f"Sequential: {first} and {name} are the same object. {remedy}")
        self.gather_parameters()
        if self.layers[0].input_shape is not None:
            self._connect(self.layers[0].input_shape)

    def __call__(self, mu_x: Any, var_x: Any = None) -> tuple[Array, Array]:
        """Return means and variances of the outputs; see :meth:`forward`."""
        return self.forward(mu_x, var_x)

    def forward(self, mu_x: Any, var_x: Any = None) -> tuple[Array, Array]:
        """Return means and variances of the outputs for a batch of inputs.

        Args:
            mu_x: Means, ``[batch, *shape]`` or flat, of any dtype and strides; or the
                ``output_z_buffer`` of another network on the same device.
            var_x: Variances of the same shape. None: the inputs are exact.

        Returns:
            Two new float32 arrays, ``[batch, *shape]``, or flat if ``mu_x`` is flat. They are CuPy
            arrays if ``mu_x`` is a CuPy array.

        Raises:
            ValueError: If the size does not match the network, a variance is negative, or an
                element is masked. Pass a large variance for an unknown input.
            TypeError: If the inputs are not real numbers.
        """
        x = mu_x if isinstance(mu_x, BaseHiddenStates) else self._input(mu_x, var_x)
        self._from_states = x is mu_x
        self.samples = x.block_size
        self._is_recorded = self.training
        flat = not self._from_states and np.ndim(mu_x) == 1
        if self._from_states:
            x = x.shaped(self._shape_of_samples(x.mean.shape))
        if self.samples:
            x = self._row.forward(x)
        else:
            for _, layer in self.named_layers():
                layer.forward_nothing()
            shape = self.layers[-1].shape_of_outputs(0)
            x = BaseHiddenStates(array_module(x.mean).empty(shape, REAL))
        self.output_z_buffer = x
        self.input_delta_z_buffer.mean = None
        return output_copies(x, flat, is_cupy(mu_x))  # other threads may replace the buffer

    def backward(self) -> None:
        """Compute ``mean_sum`` and ``variance_sum`` of each parameter from the outputs' deltas.

        Raises:
            RuntimeError: If there are no deltas since the last forward pass, or that pass ran in
                evaluation.
            ValueError: If the number of deltas differs from the number of outputs.
        """
        deltas = self.check_deltas()
        needs_input = self.input_state_update or self._from_states
        if self.samples:
            result = self._row.backward(*deltas, needs_input) or deltas
        else:
            result = deltas
            for _, layer in reversed([*self.named_layers()]):
                layer.backward_nothing()
        self.output_delta_z_buffer = BaseDeltaStates(*result) if needs_input else BaseDeltaStates()
        self.learnt = self.samples
        self.input_delta_z_buffer.mean = None  # layers may have overwritten the arrays

    def check_deltas(self) -> tuple[Array, Array]:
        """Return the deltas for a backward pass.

        Raises:
            RuntimeError, ValueError: See :meth:`backward`.
        """
        d, e = self.input_delta_z_buffer.mean, self.input_delta_z_buffer.variance
        if d is None or e is None:
            raise RuntimeError(
                "backward: no deltas since the last forward pass. Call a method of OutputUpdater "
                "with net.output_z_buffer and net.input_delta_z_buffer first"
            )
        if not self._is_recorded:
            problem = "the last forward pass ran in evaluation and kept no inputs"
            raise RuntimeError(f"backward: {problem}. Call train() before net(x)")
        if not d.shape == e.shape == self.output_z_buffer.mean.shape:
            d, e = (self._deltas("backward: deltas", delta) for delta in (d, e))
        return d, e

    def step(self) -> None:
        """Change every parameter in place by the result of the last backward pass.

        The change is at most the standard deviation divided by a cap: 0.1 for one sample, 2 for a
        batch of 2 to 255 samples, and 3 for larger batches. Raises RuntimeError if another network
        was created with one of the layers.
        """
        cap = cap_factor(self.learnt)
        for bucket in self.buckets:
            bucket.step(cap)

    def train(self) -> None:
        """Switch to training (the default): use batch statistics, and keep inputs."""
        self._set_training(True)

    def eval(self) -> None:
        """Switch to evaluation: use running statistics, and keep no inputs."""
        self._set_training(False)

    def _set_training(self, training: bool) -> None:
        self.training = training
        self._row.set_training(training)

    def to_device(self, device: str) -> None:
        """Move parameters and statistics to ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.

        Blocks until done. Raises ValueError and BackendUnavailableError like ``device.to_device``.
        """
        self.device = device_of(to_device(np.empty(0, REAL), device))
        self.gather_parameters()
        self._row.to_device(self.device)

    def gather_parameters(
        self, make: Callable[[list[BaseLayer]], list[ParameterBucket]] | None = None
    ) -> None:
        """Move the parameters to the buckets that ``make`` returns. None: move them to one bucket.

        ``make`` receives the layers that have parameters. The last layer is the first item, because
        a backward pass completes its sums first.
        """
        layers = [layer for _, layer in self.named_layers() if layer.parameters_in_use][::-1]
        if make is None:
            parameters = [parameter for layer in layers for parameter in layer.parameters_in_use]
            self.buckets = [ParameterBucket(parameters, self.device)]
        else:
            self.buckets = make(layers)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without buckets, because a copy makes its own buckets."""
        return {name: value for name, value in self.__dict__.items() if name != "buckets"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gather_parameters()

    def __copy__(self) -> "Sequential":
        """Return a deep copy, because two networks cannot share parameters."""
        return copy.deepcopy(self)

    def parameters(self) -> list[tuple[Array, Array, Array, Array]]:
        """Return mean and variance of weights, then of biases, of each layer with parameters.

        The arrays are flat copies on the CPU. Layers in blocks are included.
        """
        return [(mw, sw, mb, sb) for mw, sw, mb, sb, *_ in self.state_dict().values()]

    def params_from(self, other: "Sequential") -> None:
        """Copy parameters and running statistics from ``other``, a network with the same layers.

        Raises ValueError, without changes, if the layers differ.
        """
        self.load_state_dict(other.state_dict())

    def params_to_device(self) -> None:
        """Do nothing: the parameters are always on the network's device."""

    params_to_host = preinit_layer = params_to_device

    def get_outputs(self) -> tuple[Array, Array]:
        """Return means and variances of the last forward pass: flat copies on the CPU."""
        return output_copies(self.output_z_buffer, True, False)

    def output_to_host(self) -> Array:
        """Return the means of the last forward pass: a flat copy on the CPU."""
        return self.get_outputs()[0]

    def delta_z_to_host(self) -> Array:
        """Return the deltas of the outputs' means: a flat copy on the CPU."""
        return host_copy(self.input_delta_z_buffer.delta_mu)

    def set_delta_z(self, delta_mu: Any, delta_var: Any) -> None:
        """Set the deltas of the outputs for the next backward pass.

        Raises:
            TypeError: If the deltas are not real numbers.
            ValueError: If they are masked, or have neither the shape nor the flat size of the
                outputs of the last forward pass.
        """
        d = self._deltas("set_delta_z: delta_mu", delta_mu, copy=True)
        e = self._deltas("set_delta_z: delta_var", delta_var, copy=True)
        self.input_delta_z_buffer.mean, self.input_delta_z_buffer.variance = d, e

    def _deltas(self, name: str, values: Any, copy: bool = False) -> Array:
        return as_real(name, values, self.device, copy, shape=self.output_z_buffer.mean.shape)

    def get_input_states(self) -> tuple[Array, Array]:
        """Return the deltas of the input's means and variances: flat copies on the CPU.

        Raises:
            RuntimeError: If the last backward pass ran without ``input_state_update``.
        """
        deltas = self.output_delta_z_buffer
        if deltas.mean is None:
            raise RuntimeError(
                "get_input_states: the last backward pass did not compute deltas of the input. Set "
                "net.input_state_update = True before it"
            )
        return host_copy(deltas.delta_mu), host_copy(deltas.delta_var)

    def get_neg_var_w_counter(self) -> dict[str, int]:
        """Return the number of weights of each layer whose variance is the minimum, 1e-5.

        A step sets a variance to this minimum if it would not be positive.
        """
        return {
            f"{name}: {layer.get_layer_info()}": int(np.count_nonzero(layer.var_w == FLOOR))
            for name, layer in self.named_layers()
        }

    def get_norm_mean_var(self) -> dict[str, tuple[list[Array], ...]]:
        """Return the statistics of batch normalisation layers: copies on the CPU.

        A key has the info and the number of a layer that is, or contains, a batch normalisation,
        for example ``"BatchNorm2d()_1"``. Values are four lists, with one array per layer: running
        means, running variances, and means and variances of the last training batch.
        """
        statistics = {}
        for number, layer in enumerate(self.layers):
            norms = [inner for _, inner in layer.named_layers("") if isinstance(inner, BatchNorm2d)]
            if norms:
                statistics[f"{layer.get_layer_info()}_{number}"] = tuple(
                    [host_copy(getattr(norm, name)) for norm in norms] for name in NORM_STATISTICS
                )
        return statistics

    def get_layer_stack_info(self) -> str:
        """Return ``get_layer_info()`` of each layer, one line per layer."""
        return "\n".join(f"{n}: {layer.get_layer_info()}" for n, layer in enumerate(self.layers))

    def set_threads(self, num_threads: int) -> None:
        """Do nothing: OPENBLAS_NUM_THREADS sets the threads of NumPy's BLAS."""

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.layers))})"

    def _input(self, mu_x: Any, var_x: Any) -> BaseHiddenStates:
        mean = as_real("mu_x", mu_x, self.device, copy=True)
        mean = mean.reshape(-1, *self._shape_of_samples(mean.shape))
        if var_x is None:
            return BaseHiddenStates(mean)
        variance = as_real("var_x", var_x, self.device, copy=True, shape=mean.shape)
        if variance.size and not variance.min() >= 0:
            raise ValueError(f"var_x: variances must be at least 0, got {variance.min()}")
        return BaseHiddenStates(mean, variance)

    def _shape_of_samples(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sample shape of a batch of ``shape``. If it is new, connect the layers."""
        size = math.prod(shape)
        if not shape or 0 in shape[1:]:
            raise ValueError(f"{self.layers[0]}: expected a batch of samples, got {shape}")
        sample, connected = shape[1:], self._shape
        if connected is not None and (
            (len(shape) == 1 and size % math.prod(connected) == 0)
            or (math.prod(sample) == math.prod(connected) and states.reads_as(sample, connected))
        ):
            return connected
        if len(shape) == 1:
            multiple = f"a multiple of {math.prod(connected)} elements" if connected else ""
            expected = multiple or "an array with the batch first"
            raise ValueError(f"{self.layers[0]}: expected {expected}, got {size} flat elements")
        self._connect(sample)
        return sample

    def _connect(self, sample: tuple[int, ...]) -> None:
        """Connect the layers for the shape ``sample``. If that fails, restore the old ones."""
        try:
            self._row.connect(sample, "")
        except ValueError:
            if self._shape is not None:
                self._connect(self._shape)
            raise
        self._shape = sample


def output_copies(moments: BaseHiddenStates, flat: bool, on_gpu: bool) -> tuple[Array, Array]:
    """Return copies of means and variances, flat if ``flat``, on the CPU unless ``on_gpu``."""
    both = (moments.mean, moments.variance)
    mean, variance = (np.zeros(moments.mean.shape, REAL) if a is None else a for a in both)
    if not on_gpu:
        mean, variance = to_device(mean, "cpu"), to_device(variance, "cpu")
    shape = (-1,) if flat else mean.shape
    return mean.copy().reshape(shape), variance.copy().reshape(shape)
