"""A network: layers in a row, from moments to moments, and back from deltas to a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, device_of, is_cupy, to_device
from flashlight_py.tagi.layer import BaseLayer, LayerBlock, Shape
from flashlight_py.tagi.network import Network
from flashlight_py.tagi.normalization import NORM_STATISTICS, BatchNorm2d
from flashlight_py.tagi.parameters import FLOOR, ParameterBucket, cap_factor, on_device
from flashlight_py.tagi.states import (
    REAL,
    BaseDeltaStates,
    BaseHiddenStates,
    host_copy,
    reads_as,
    real,
)


class Sequential(Network):
    """A network of layers in a row, trained by observing its outputs, without gradients.

    A step of training is ``net(x)``, a method of :class:`OutputUpdater`, ``net.backward()``,
    ``net.step()``. Inputs may be flat, as pytagi's are, or have the batch first; outputs are flat
    where the inputs are. They may be of any dtype, and be computed with in float32.

    Attributes:
        layers: as passed.
        output_z_buffer: the moments that the last forward pass ended with.
        input_delta_z_buffer: the deltas of these, which an updater writes and backward() reads.
        output_delta_z_buffer: the deltas of the network's input, after a backward pass with
            ``input_state_update``, or of which the input was another network's output.
        input_state_update: whether a backward pass goes on to the input.
        samples: how many the last forward pass had. One without any teaches nothing.
        learnt: samples of the last backward pass, with those of other processes where it added
            theirs.
        device: ``"cpu"`` or ``"cuda:<index>"``.

    Raises:
        TypeError: something is no layer of ``fl.tagi``, or there is none.
        ValueError: a layer cannot take what the one before makes; names both. Or one that must
            be the first is not, or one stands in two places.
    """

    def __init__(self, *layers: BaseLayer) -> None:
        for number, layer in enumerate(layers):
            if not isinstance(layer, BaseLayer):
                raise TypeError(
                    f"Sequential: expected layers of fl.tagi, got {type(layer).__name__} as "
                    f"number {number}"
                )
            if number and layer.first_only:
                raise ValueError(
                    f"Sequential: {layer} must be the first layer, not number {number}"
                )
        if not layers:
            raise TypeError("Sequential: a network needs at least one layer")
        self._row = LayerBlock(*layers)
        self.layers = self._row.layers
        self.device = "cpu"
        self.output_z_buffer = BaseHiddenStates(np.empty((0, 0), REAL))
        self.input_delta_z_buffer = BaseDeltaStates()
        self.output_delta_z_buffer = BaseDeltaStates()
        self.training = True
        self.input_state_update = False
        self._shape: Shape | None = None  # of one sample, once the layers are connected
        self._from_states = False  # whether the last input was another network's output
        self.samples = self.learnt = 0
        self._kept = False  # whether the layers have kept what a backward pass needs
        names: dict[int, str] = {}
        for name, layer in self.named_layers():
            first = names.setdefault(id(layer), name)
            if first != name and layer.keeps_input:
                raise ValueError(
                    f"Sequential: {first} and {name} are the same object; make a layer for each "
                    "place"
                )
        self.gather_parameters()
        if self.layers[0].input_shape is not None:
            self._connect(self.layers[0].input_shape)

    def __call__(self, mu_x: Any, var_x: Any = None) -> tuple[Array, Array]:
        """Return means and variances of the outputs; see :meth:`forward`."""
        return self.forward(mu_x, var_x)

    def forward(self, mu_x: Any, var_x: Any = None) -> tuple[Array, Array]:
        """Return means and variances of the outputs for a batch of inputs.

        Args:
            mu_x: means, ``[batch, *shape]`` or flat; any dtype and strides. Or the
                ``output_z_buffer`` of another network, on the same device.
            var_x: variances, the same shape; None: the inputs are known exactly.

        Returns:
            Two new float32 arrays, ``[batch, *shape]``, flat where ``mu_x`` is; of CuPy where it
            is.

        Raises:
            ValueError: the number of elements does not fit the network, a variance is negative, or
                something is masked: of a unit that is not known, pass a large variance.
            TypeError: they are no real numbers.
        """
        x = mu_x if isinstance(mu_x, BaseHiddenStates) else self._input(mu_x, var_x)
        self._from_states = x is mu_x
        self.samples = x.block_size
        self._kept = self.training
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
        return returned(x, flat, is_cupy(mu_x))  # x: other threads may evaluate meanwhile

    def backward(self) -> None:
        """Go back from the deltas of the outputs to the sums of every parameter.

        Raises:
            RuntimeError: there are none since the last forward pass, or it was one of evaluation.
            ValueError: there are others than outputs.
        """
        deltas = self.check_deltas()
        wanted = self.input_state_update or self._from_states
        if self.samples:
            found = self._row.backward(*deltas, wanted) or deltas
        else:
            found = deltas
            for _, layer in reversed([*self.named_layers()]):
                layer.backward_nothing()
        self.output_delta_z_buffer = BaseDeltaStates(*found) if wanted else BaseDeltaStates()
        self.learnt = self.samples
        self.input_delta_z_buffer.mean = None  # layers may have changed the arrays

    def check_deltas(self) -> tuple[Array, Array]:
        """Return what a backward pass begins with, or raise the errors of :meth:`backward`.

        Raises:
            RuntimeError, ValueError: see there.
        """
        d, e = self.input_delta_z_buffer.mean, self.input_delta_z_buffer.variance
        if d is None or e is None:
            raise RuntimeError(
                "backward: no deltas since the last forward pass; call a method of OutputUpdater "
                "with net.output_z_buffer and net.input_delta_z_buffer first"
            )
        if not self._kept:
            raise RuntimeError(
                "backward: the last forward pass was one of evaluation, which keeps nothing; call "
                "train() before net(x)"
            )
        if not d.shape == e.shape == self.output_z_buffer.mean.shape:
            d, e = (self._deltas("backward: deltas", each) for each in (d, e))
        return d, e

    def step(self) -> None:
        """Change every parameter by what the last backward pass has found, in place.

        Each by at most its standard deviation over 0.1 for one sample, over 2 for batches below 256
        samples, and over 3 from there on. If another network was made of one of the layers since,
        it is a RuntimeError.
        """
        cap = cap_factor(self.learnt)
        for bucket in self.buckets:
            bucket.step(cap)

    def train(self) -> None:
        """Take statistics of batches, and keep inputs for backward passes: the default."""
        self._set_training(True)

    def eval(self) -> None:
        """Use the running statistics, and keep nothing for a backward pass."""
        self._set_training(False)

    def _set_training(self, training: bool) -> None:
        self.training = training
        self._row.set_training(training)

    def to_device(self, device: str) -> None:
        """Move parameters and statistics to ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``, blocking.

        It raises the ValueError and BackendUnavailableError of ``flashlight_py.device.to_device``.
        """
        self.device = device_of(to_device(np.empty(0, REAL), device))
        self.gather_parameters()
        self._row.to_device(self.device)

    def gather_parameters(
        self, make: Callable[[list[BaseLayer]], list[ParameterBucket]] | None = None
    ) -> None:
        """Let the parameters lie in the buckets that ``make`` returns; None: in one.

        ``make`` is passed the layers with parameters, in the order in which a backward pass
        completes their sums.
        """
        layers = [layer for _, layer in self.named_layers() if layer.parameters_in_use][::-1]
        if make is None:
            parameters = [each for layer in layers for each in layer.parameters_in_use]
            self.buckets = [ParameterBucket(parameters, on_device(self.device))]
        else:
            self.buckets = make(layers)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the buckets: in a copy, layers would no longer be parts of these."""
        return {name: value for name, value in self.__dict__.items() if name != "buckets"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.gather_parameters()

    def __copy__(self) -> Sequential:
        """Return a deep copy: parameters lie in the buckets of one network alone."""
        return copy.deepcopy(self)

    def parameters(self) -> list[tuple[Array, Array, Array, Array]]:
        """Return mean and variance of weights, then of biases, of each layer that has some.

        Flat copies on the CPU, in the order of the layers; blocks are entered.
        """
        return [(mw, sw, mb, sb) for mw, sw, mb, sb, *_ in self.state_dict().values()]

    def params_from(self, other: Sequential) -> None:
        """Take the parameters and running statistics of another network of the same layers.

        Other layers are a ValueError, and nothing is changed.
        """
        self.load_state_dict(other.state_dict())

    def params_to_device(self) -> None:
        """Do nothing: parameters exist from the start, where the network is; reading copies."""

    params_to_host = preinit_layer = params_to_device

    def get_outputs(self) -> tuple[Array, Array]:
        """Return the means and variances of the last forward pass, flat, on the CPU; copies."""
        return returned(self.output_z_buffer, True, False)

    def output_to_host(self) -> Array:
        """Return the means of the last forward pass, flat, on the CPU; a copy."""
        return self.get_outputs()[0]

    def delta_z_to_host(self) -> Array:
        """Return the deltas of the outputs' means, flat, on the CPU; a copy."""
        return host_copy(self.input_delta_z_buffer.delta_mu)

    def set_delta_z(self, delta_mu: Any, delta_var: Any) -> None:
        """Set the deltas of the outputs by hand, for the next backward pass.

        Raises:
            TypeError: they are no real numbers.
            ValueError: they have another shape than the outputs of the last forward pass and are
                not flat, or something is masked.
        """
        d = self._deltas("set_delta_z: delta_mu", delta_mu, own=True)
        e = self._deltas("set_delta_z: delta_var", delta_var, own=True)
        self.input_delta_z_buffer.mean, self.input_delta_z_buffer.variance = d, e

    def _deltas(self, name: str, values: Any, own: bool = False) -> Array:
        return real(name, values, self.device, own, shape=self.output_z_buffer.mean.shape)

    def get_input_states(self) -> tuple[Array, Array]:
        """Return the deltas of the input's means and variances, flat, on the CPU; copies.

        Raises:
            RuntimeError: the last backward pass did not go so far; set ``input_state_update``.
        """
        deltas = self.output_delta_z_buffer
        if deltas.mean is None:
            raise RuntimeError(
                "get_input_states: the last backward pass ended at the first layer; set "
                "net.input_state_update = True before it"
            )
        return host_copy(deltas.delta_mu), host_copy(deltas.delta_var)

    def get_neg_var_w_counter(self) -> dict[str, int]:
        """Return how many weights of each layer are at the floor of the variance, 1e-5.

        A step puts those there whose variance would not be positive.
        """
        return {
            f"{name}: {layer.get_layer_info()}": int(np.count_nonzero(layer.var_w == FLOOR))
            for name, layer in self.named_layers()
        }

    def get_norm_mean_var(self) -> dict[str, tuple[list[Array], ...]]:
        """Return the statistics of the layers that normalize over the batch; copies, on the CPU.

        By the info and number of each layer that is one, or a block that has some, such as
        ``"BatchNorm2d()_1"``: lists of running means, running variances, means and variances of the
        last batch of training, with an array for each.
        """
        found = {}
        for number, layer in enumerate(self.layers):
            norms = [each for _, each in layer.named_layers("") if isinstance(each, BatchNorm2d)]
            if norms:
                found[f"{layer.get_layer_info()}_{number}"] = tuple(
                    [host_copy(getattr(norm, which)) for norm in norms] for which in NORM_STATISTICS
                )
        return found

    def get_layer_stack_info(self) -> str:
        """Return a line for each layer."""
        return "\n".join(f"{n}: {layer.get_layer_info()}" for n, layer in enumerate(self.layers))

    def set_threads(self, num_threads: int) -> None:
        """Do nothing: NumPy's BLAS has the threads, as many as OPENBLAS_NUM_THREADS says."""

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.layers))})"

    def _input(self, mu_x: Any, var_x: Any) -> BaseHiddenStates:
        mean = real("mu_x", mu_x, self.device, own=True)
        own = self._shape_of_samples(mean.shape)
        mean = mean.reshape(-1, *own)
        if var_x is None:
            return BaseHiddenStates(mean)
        variance = real("var_x", var_x, self.device, own=True, shape=mean.shape)
        if variance.size and not variance.min() >= 0:
            raise ValueError("var_x: variances are not negative, and not NaN")
        return BaseHiddenStates(mean, variance)

    def _shape_of_samples(self, shape: tuple[int, ...]) -> Shape:
        """Connect the layers, if need be, for an input of ``shape``; return that of a sample."""
        size = math.prod(shape)
        if not shape or 0 in shape[1:]:
            raise ValueError(f"{self.layers[0]}: expected a batch of samples, got {shape}")
        own, known = shape[1:], self._shape
        if known is not None and (
            (len(shape) == 1 and size % math.prod(known) == 0)
            or (math.prod(own) == math.prod(known) and reads_as(own, known))
        ):
            return known
        if len(shape) == 1:
            raise ValueError(
                f"{self.layers[0]}: {size} elements are no whole number of samples"
                + (f" of shape {known}" if known else "; pass an array with the batch first")
            )
        self._connect(own)
        return own

    def _connect(self, own: Shape) -> None:
        """Connect the layers for samples of this shape, or leave them as they were."""
        try:
            self._row.connect(own, "")
        except ValueError:
            if self._shape is not None:
                self._connect(self._shape)
            raise
        self._shape = own


def returned(moments: BaseHiddenStates, flat: bool, on_gpu: bool) -> tuple[Array, Array]:
    """Return copies of means and variances, flat or in their shape, on the CPU or as they lie."""
    both = (moments.mean, moments.variance)
    mean, variance = (np.zeros(moments.mean.shape, REAL) if a is None else a for a in both)
    if not on_gpu:
        mean, variance = to_device(mean, "cpu"), to_device(variance, "cpu")
    shape = (-1,) if flat else mean.shape
    return mean.copy().reshape(shape), variance.copy().reshape(shape)
