"""What a network's last pass has left: its outputs and deltas, read and set by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py.device import Array, to_device
from flashlight_py.tagi.states import REAL, BaseDeltaStates, BaseHiddenStates, fits, host_copy, real


class Buffers:
    """Methods of a network that look at the ends of a pass.

    Attributes:
        output_z_buffer: the moments that the last forward pass ended with.
        input_delta_z_buffer: the deltas of these, which an updater writes and backward() reads.
        output_delta_z_buffer: the deltas of the network's input, after a backward pass with
            ``input_state_update``, or of which the input was another network's output.
        device: ``"cpu"`` or ``"cuda:<index>"``.
    """

    def __init__(self) -> None:
        self.device = "cpu"
        self.output_z_buffer = BaseHiddenStates(np.empty((0, 0), REAL))
        self.input_delta_z_buffer = BaseDeltaStates()
        self.output_delta_z_buffer = BaseDeltaStates()

    def params_to_device(self) -> None:
        """Do nothing: parameters are where the network is."""

    def params_to_host(self) -> None:
        """Do nothing: what reads parameters copies them."""

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
        shape = self.output_z_buffer.mean.shape
        d = real("set_delta_z: delta_mu", delta_mu, self.device, own=True)
        e = real("set_delta_z: delta_var", delta_var, self.device, own=True)
        if not (fits(d.shape, shape) and fits(e.shape, shape)):
            raise ValueError(
                f"set_delta_z: expected shape {shape}, one element for each output, or "
                f"{self.output_z_buffer.size} elements flat, got {d.shape} and {e.shape}"
            )
        deltas = self.input_delta_z_buffer
        deltas.mean, deltas.variance = d.reshape(shape), e.reshape(shape)

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
        flat = (deltas.delta_mu, deltas.delta_var)
        return host_copy(flat[0]), host_copy(flat[1])


def returned(moments: BaseHiddenStates, flat: bool, on_gpu: bool) -> tuple[Array, Array]:
    """Return copies of means and variances, flat or in their shape, on the CPU or as they lie."""
    both = (moments.mean, moments.variance)
    mean, variance = (np.zeros(moments.mean.shape, REAL) if a is None else a for a in both)
    if not on_gpu:
        mean, variance = to_device(mean, "cpu"), to_device(variance, "cpu")
    shape = (-1,) if flat else mean.shape
    return mean.copy().reshape(shape), variance.copy().reshape(shape)
