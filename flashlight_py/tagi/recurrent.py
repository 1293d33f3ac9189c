"""The LSTM of Gaussian units, and the Rauch-Tung-Striebel smoother of a series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.device import Array, array_module, to_device
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape, times_slope
from flashlight_py.tagi.linear import Linear
from flashlight_py.tagi.lstm import Gates, Pass, States
from flashlight_py.tagi.parameters import FLOOR, Parameter, gaussian, spread
from flashlight_py.tagi.states import REAL, BaseHiddenStates, as_real, host_copy

Window: TypeAlias = Literal["recurrent", "independent"]

WINDOWS = ("recurrent", "independent")


class LSTM(BaseLayer):
    r"""A long short-term memory (LSTM) of Gaussian units.

    It maps ``[batch, seq_len * input_size]`` to ``[batch, seq_len * output_size]``. The time steps
    of a sample are consecutive. The gates f, i, g and o are functions of linear layers of x_t
    joined to h_{t-1}: g is a tanh, the others are sigmoids, all linearised at their means. Then
    ``c_t = f c_{t-1} + i g`` and ``h_t = o tanh(c_t)``. Moments of products include the covariances
    of the factors. Source: Vuong, Nguyen and Goulet, Coupling LSTM neural networks and state-space
    models through analytically tractable inference, International Journal of Forecasting, 2025.

    **Over a window.** h and c start at 0. Each time step passes their prior moments to the next
    step. In the backward pass, let (d_y, e_y) be the deltas of a unit y. As in every layer, the
    deltas of a unit u are the sums of ``k d_y`` and of ``k**2 e_y`` over all units y computed from
    u, with ``k = cov(u, y) / var(u)``. These units y are:

    - Of h_t: the output at t and, through the gates of the next step, c_{t+1} and h_{t+1}.
    - Of c_t: h_t, with ``k = o / cosh(c_t)**2``, and c_{t+1}, with ``k = f_{t+1}``.
    - Of x_t: c_t, through the gates f, i and g, and h_t, through all four gates. In ``k``, the
      contributions of these gates are added before squaring.

    The deltas of the means are the gradient of the linearised network. The deltas of the variances
    treat contributions of h_t and c_{t+1} as independent, like two outputs of a linear layer.

    **From call to call.** With ``seq_len=1`` and a batch of one sample, a call starts with h and c
    of the previous call. After a backward pass, h and c have posterior moments. Other calls start
    with 0. A batch of several samples clears the carried states.

    Args:
        input_size, output_size: Units of one time step, at least 1.
        seq_len: Time steps of a sample, at least 1.
        bias: Whether the gates have biases.
        gain_weight, gain_bias: Factors of the initial standard deviations of the parameters.
        init_method: ``"He"``: means from N(0, 1 / n), n = input_size + output_size. ``"Xavier"``:
            from N(0, 2 / (n + output_size)). Initial variances: the variance of N times gain^2.
        window: ``"recurrent"``: see above. ``"independent"``: every time step starts with h = c =
            0, as in pytagi 0.2.1, which treats the window as a batch.

    The weights are those of f, i, g and o in this order, each ``[output_size, input_size +
    output_size]``. The biases have the same order.

    Raises:
        ValueError: If a size is below 1, or ``init_method`` or ``window`` is unknown.
    """

    def __init__(
        self, input_size: int, output_size: int, seq_len: int, bias: bool = True,
        gain_weight: float = 1.0, gain_bias: float = 1.0, init_method: str = "He", *,
        window: Window = "recurrent",
    ) -> None:  # fmt: skip
        super().__init__()
        if min(input_size, output_size, seq_len) < 1:
            raise ValueError(
                f"{self.get_layer_name()}: sizes and seq_len must be at least 1, got {input_size}, "
                f"{output_size} and {seq_len}"
            )
        if window not in WINDOWS:
            raise ValueError(f"window must be one of {', '.join(WINDOWS)}, got {window!r}")
        self.seq_len, self.window = seq_len, window
        self._independent = window == "independent"
        self._inputs, self._outputs = input_size, output_size  # numbers of units of one time step
        self.input_shape, self.output_shape = (seq_len * input_size,), (seq_len * output_size,)
        width = input_size + output_size
        deviation = spread(init_method, width, output_size)
        self.weight: Parameter = gaussian((4, output_size, width), deviation, gain_weight)
        self.biases = gaussian((4, output_size), deviation, gain_bias) if bias else None
        self._carried: States | None = None  # initial states, each [1, output_size]; None: 0
        self._x = BaseHiddenStates(np.empty((0, self.input_size)))
        empty = np.empty((0, 0, input_size + output_size))
        self._pass = Pass(empty, empty[..., None], False)  # arrays of the last forward pass

    def connect(self, shape: Shape) -> Shape:
        """Return the output shape. A sample must have ``seq_len * input_size`` elements."""
        if int(np.prod(shape)) != self.input_size:
            raise ValueError(
                f"expected {self.input_size} elements per sample, {self.seq_len} time steps of "
                f"{self._inputs}, got shape {shape}"
            )
        return (self.output_size,)

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        x = x.shaped((self.input_size,))
        batch = len(x.mean)
        carry = self.carries_states and batch == 1
        # Independent time steps are computed like samples.
        rows, steps = (batch * self.seq_len, 1) if self._independent else (batch, self.seq_len)
        x_variance = None if x.variance is None else x.variance.reshape(rows, -1)
        start, gates = self._carried if carry else None, Gates(self.weight, self.biases, steps)
        mean, variance, self._carried, arrays = gates.forward(
            x.mean.reshape(rows, -1), x_variance, start, carry
        )
        if self.training:
            self._x, self._pass = x, arrays
        return BaseHiddenStates(mean.reshape(batch, -1), variance.reshape(batch, -1))

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Sum the gates' parameter deltas over batch and time; return the input's deltas."""
        joined, slopes, _ = self._pass
        xp = array_module(joined)
        width = self._outputs if self._independent else self.output_size
        d, e = d.reshape(-1, width), e.reshape(-1, width)
        if self._carried is not None:  # change the states to the posterior
            h, v_h, c, v_c = self._carried
            t = v_c * slopes[0, :, 4]  # cov(h, c)
            h, v_h = h + v_h * d, xp.maximum(v_h + v_h * v_h * e, 0)
            self._carried = States(h, v_h, c + t * d, xp.maximum(v_c + t * t * e, 0))
        gates = Gates(self.weight, self.biases, 1 if self._independent else self.seq_len)
        dz, ez, deltas = gates.backward(self._pass, d, e, needs_input)
        joined, shape = joined.reshape(-1, joined.shape[2]), (dz.shape[1], -1)
        xp.matmul(dz.T, joined, out=self.weight.mean_sum.reshape(shape))
        xp.matmul(ez.T, joined * joined, out=self.weight.variance_sum.reshape(shape))
        self._sum_biases(dz.reshape(-1, 4, self._outputs), ez.reshape(-1, 4, self._outputs), 0)
        if deltas is None:
            return None
        d, e = (delta.reshape(self._x.mean.shape) for delta in deltas)
        return times_slope(d, e, self._x.slope)

    @property
    def carries_states(self) -> bool:
        """Whether a call with one sample starts with h and c of the previous call."""
        return self.seq_len == 1

    def get_states(self) -> States:
        """Return the initial states of the next call: four flat copies on the CPU."""
        if self._carried is None:
            return States(*(np.zeros(self._outputs, REAL) for _ in States._fields))
        return States(*(host_copy(state).reshape(-1) for state in self._carried))

    def set_states(self, states: Sequence[Any] | None) -> None:
        """Set the next call's initial states: four arrays of ``output_size`` elements. None: 0.

        Raises:
            TypeError, ValueError: If the states are not real numbers, or masked.
        """
        if states is None:
            self._carried = None
            return
        copies = (as_real(f"{self}: states", s, "cpu", copy=True).reshape(1, -1) for s in states)
        self._carried = States(*map(array_module(self.weight.mean).asarray, copies))

    def to_device(self, device: str) -> None:
        if self._carried is not None:
            self._carried = States(*(to_device(state, device) for state in self._carried))

    def _sizes(self) -> Sequence[int]:
        return self._inputs, self._outputs


class TimeStep(NamedTuple):
    """The data of one time step for the smoother.

    Attributes:
        prior, posterior: Means and variances of h, then of c, each ``[n]``.
        cell: Covariance of each c with the previous c of the same unit, ``[n]``.
        hidden: Covariances of the previous h (rows) with h (columns), ``[n, n]``.
    """

    prior: States
    posterior: States
    cell: Array
    hidden: Array


class SLSTM(LSTM):
    """An :class:`LSTM` that stores time steps of a series for ``Sequential.smoother()``.

    Each call computes one time step, and each backward pass stores a step: at most the
    ``num_samples`` of the network. The smoother goes back in time. With ``G = cov(step, next) /
    prior_variance(next)``, it adds ``G (smoothed_mean(next) - prior_mean(next))`` to a step's
    posterior mean, and ``G**2 (smoothed_variance(next) - prior_variance(next))`` to its posterior
    variance. G is a vector for the cell state, a matrix for the hidden state; G**2 is elementwise.

    Args:
        input_size, output_size, bias, gain_weight, gain_bias, init_method: See :class:`LSTM`.
        seq_len: Must be 1.

    Raises:
        ValueError: If ``seq_len`` is not 1, or :class:`LSTM` raises it.
    """

    def __init__(
        self, input_size: int, output_size: int, seq_len: int, bias: bool = True,
        gain_weight: float = 1.0, gain_bias: float = 1.0, init_method: str = "He",
    ) -> None:  # fmt: skip
        super().__init__(
            input_size, output_size, seq_len, bias, gain_weight, gain_bias, init_method
        )
        if seq_len != 1:
            raise ValueError(f"SLSTM: seq_len must be 1, one time step per call, got {seq_len}")
        self.num_samples = 0  # number of time steps to keep; 0: none
        self.time_steps: list[TimeStep] = []
        self.smoothed: States | None = None  # ``[time steps, n]`` each
        self._previous: States | None = None  # initial states of the last forward pass

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return moments of the next time step of the series, ``[1, output_size]``.

        Raises:
            ValueError: If the batch does not have exactly one sample.
        """
        if len(x.mean) != 1:
            raise ValueError(
                f"{self}: expected one sample, the next time step of a series, got {len(x.mean)}"
            )
        self._previous = self._carried
        return super().forward(x)

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Run the backward pass of :class:`LSTM` and keep the time step.

        Raises:
            RuntimeError: If ``num_samples`` time steps are kept already.
        """
        if self.num_samples == 0 or self._carried is None:
            return super().backward(d, e, needs_input)
        if len(self.time_steps) == self.num_samples:
            raise RuntimeError(
                f"{self}: expected at most {self.num_samples} time steps (net.num_samples), got "
                "one more. Call smoother() or reset_lstm_states() first"
            )
        prior, (cell, hidden) = self._carried, self._covariances()
        deltas = super().backward(d, e, needs_input)
        prior, posterior = (
            States(*(array[0] for array in states)) for states in (prior, self._carried)
        )
        self.time_steps.append(TimeStep(prior, posterior, cell, hidden))
        return deltas

    def _covariances(self) -> tuple[Array, Array]:
        """Return ``cell`` and ``hidden`` of a :class:`TimeStep` for the last forward pass."""
        k, no = self._pass.slopes[0, 0], self._outputs
        xp = array_module(k)
        if self._previous is None:
            return xp.zeros(no, k.dtype), xp.zeros((no, no), k.dtype)
        gates = k[:4].copy()  # slopes of h with respect to the gate inputs
        gates[:3] *= k[4]
        effect = (gates[:, :, None] * self.weight.mean[:, :, self._inputs :]).sum(axis=0)
        return self._previous[3][0] * k[5], self._previous[1][0][:, None] * effect.T

    def smooth(self) -> BaseHiddenStates:
        """Return moments of the smoothed h, ``[time steps, output_size]``; start a new series.

        Raises:
            RuntimeError: If no time step was kept.
        """
        if not self.time_steps:
            raise RuntimeError(
                f"smoother: {self} has no time steps. Set net.num_samples to their number, and run "
                "forward and backward for each time step"
            )
        after = self.time_steps[-1].posterior
        smoothed = [after]
        for now, step in zip(self.time_steps[-2::-1], self.time_steps[:0:-1], strict=True):
            after = States(
                *_smoothed(step.hidden, now.posterior[:2], step.prior[:2], after[:2]),
                *_smoothed(step.cell, now.posterior[2:], step.prior[2:], after[2:]),
            )
            smoothed.append(after)
        stack = array_module(after[0]).stack
        self.smoothed = States(*(stack(array[::-1]) for array in zip(*smoothed, strict=True)))
        self.set_states(None)
        return BaseHiddenStates(*self.smoothed[:2])

    def set_states(self, states: Sequence[Any] | None) -> None:
        """Set the states like ``LSTM.set_states``. None also starts a new time series."""
        super().set_states(states)
        if states is None:
            self.time_steps = []

    def to_device(self, device: str) -> None:
        """Move the carried states to ``device``, and start a new time series."""
        super().to_device(device)
        self.time_steps, self.smoothed = [], None


def _smoothed(
    covariance: Array, posterior: tuple[Array, ...], prior: tuple[Array, ...],
    after: tuple[Array, ...],
) -> tuple[Array, Array]:  # fmt: skip
    """Return smoothed moments of a time step from its ``posterior`` moments and the next step.

    ``covariance`` with the next step: ``[n]`` for c, ``[n, n]`` for h. ``prior`` and ``after``:
    prior and smoothed moments of the next step.
    """
    xp = array_module(covariance)
    gain = covariance / xp.where(prior[1] > 0, prior[1], FLOOR)
    mean, variance = after[0] - prior[0], after[1] - prior[1]
    if gain.ndim == 2:
        mean, variance = gain @ mean, (gain * gain) @ variance
    else:
        mean, variance = gain * mean, gain * gain * variance
    mean, variance = posterior[0] + mean, posterior[1] + variance
    return mean, xp.where(variance < 0, FLOOR, variance)


class SLinear(Linear):
    """A :class:`Linear` for use after an :class:`SLSTM`. ``smoother()`` computes its outputs."""

    def smooth(self, hidden: BaseHiddenStates) -> BaseHiddenStates:
        """Return the outputs for smoothed ``hidden``, ``[time steps, output_size]``.

        It uses the current parameters. Data kept for a backward pass is unchanged.
        """
        training, self.training = self.training, False
        try:
            return self.forward(hidden)
        finally:
            self.training = training
