"""The LSTM of Gaussian units, and the smoother of a series (Rauch, Tung and Striebel)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.device import Array, array_module, to_device
from flashlight_py.tagi.layer import BaseLayer, Deltas, Shape, times_slope
from flashlight_py.tagi.linear import Linear
from flashlight_py.tagi.lstm import Gates, Pass, States
from flashlight_py.tagi.parameters import FLOOR, Parameter, gaussian, spread
from flashlight_py.tagi.states import REAL, BaseHiddenStates, host_copy, real

Window: TypeAlias = Literal["recurrent", "independent"]

WINDOWS = ("recurrent", "independent")


class LSTM(BaseLayer):
    r"""A long short-term memory: ``[batch, seq_len * input_size]`` to ``[batch, seq_len *
    output_size]``, the time steps of a sample one after the other.

    With x\ :sub:`t` joined to h\ :sub:`t-1`, the gates f, i and o are sigmoids, g a tanh, of
    linear layers, linearised at their means; ``c_t = f c_{t-1} + i g`` and ``h_t = o tanh(c_t)``.
    Means and variances of the products contain the covariances of their factors
    (:mod:`flashlight_py.tagi.lstm`; Vuong, Nguyen and Goulet, Coupling LSTM neural
    networks and state-space models through analytically tractable inference, International Journal
    of Forecasting, 2025).

    **Over a window.** h and c flow from step to step with their prior moments, from 0 at the first.
    Back through time: let (d, e) be the deltas of a unit. Those of a unit u are the sums over the
    units y computed from it of ``k d_y`` and ``k**2 e_y``, with ``k = cov(u, y) / var(u)``, as in
    every layer. h_t is read by the output at t and, through all gates of the next step, by c_{t+1}
    and h_{t+1}. c_t is read by h_t, with ``k = o / cosh(c_t)**2``, and by c_{t+1}, with ``k =
    f_{t+1}``. An input x_t is read by the same units as h_{t-1}. Its effect on h_t goes through
    four gates and is added before it is squared; so is what it does to c_t, beside h_t, through
    three. The means' deltas are the gradient of the linearised network; the variances' take what
    comes by h_t and by c_{t+1} for independent, as those of two outputs of a linear layer are.

    **From call to call.** With ``seq_len=1`` and a batch of one sample, a call begins with the h
    and c that the call before it left: their posterior moments, if there was a backward pass. Other
    batches begin with 0, and a batch of more samples clears what was carried.

    Args:
        input_size, output_size: of one time step; at least 1.
        seq_len: how many time steps a sample has; at least 1.
        bias: whether the gates have biases.
        gain_weight, gain_bias: factors of the standard deviations that the parameters start with.
        init_method: ``"He"``: means of N(0, 1 / n), n = input_size + output_size; ``"Xavier"``: of
            N(0, 2 / (n + output_size)). Variances are theirs times the squares of the gains.
        window: ``"independent"``: every time step of a window begins with h = c = 0, as in pytagi
            0.2.1, which makes the window a batch.

    The weights are those of f, i, g and o, one after the other, each ``[output_size, input_size +
    output_size]``; so are the biases.

    Raises:
        ValueError: a size is below 1, or ``init_method`` or ``window`` is none of those.
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
        self._apart = window == "independent"
        self._inputs, self._outputs = input_size, output_size  # of one time step
        self.input_shape, self.output_shape = (seq_len * input_size,), (seq_len * output_size,)
        both = input_size + output_size
        deviation = spread(init_method, both, output_size)
        self.weight: Parameter = gaussian((4, output_size, both), deviation, gain_weight)
        self.biases = gaussian((4, output_size), deviation, gain_bias) if bias else None
        self._carried: States | None = None  # [1, output_size] each; None: 0
        self._x = BaseHiddenStates(np.empty((0, self.input_size)))
        nothing = np.empty((0, 0, input_size + output_size))
        self._kept = Pass(nothing, nothing[..., None], False)  # of the last forward pass

    def connect(self, shape: Shape) -> Shape:
        """Take inputs of ``seq_len * input_size`` elements of any shape."""
        if int(np.prod(shape)) != self.input_size:
            raise ValueError(
                f"expected {self.input_size} elements a sample, {self.seq_len} time steps of "
                f"{self._inputs}, got shape {shape}"
            )
        return (self.output_size,)

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        x = x.shaped((self.input_size,))
        batch = len(x.mean)
        carry = self.carries_states and batch == 1
        # Time steps that are independent are samples.
        rows, steps = (batch * self.seq_len, 1) if self._apart else (batch, self.seq_len)
        own = None if x.variance is None else x.variance.reshape(rows, -1)
        before, gates = self._carried if carry else None, Gates(self.weight, self.biases, steps)
        mean, variance, self._carried, kept = gates.forward(
            x.mean.reshape(rows, -1), own, before, carry
        )
        if self.training:
            self._x, self._kept = x, kept
        return BaseHiddenStates(mean.reshape(batch, -1), variance.reshape(batch, -1))

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """Set the sums of the gates' parameters over batch and time; return deltas of the input."""
        joined, slopes, _ = self._kept
        xp = array_module(joined)
        width = self._outputs if self._apart else self.output_size
        d, e = d.reshape(-1, width), e.reshape(-1, width)
        if self._carried is not None:  # the posterior by the deltas of h
            h, v_h, c, v_c = self._carried
            t = v_c * slopes[0, :, 4]  # cov(h, c)
            h, v_h = h + v_h * d, xp.maximum(v_h + v_h * v_h * e, 0)
            self._carried = States(h, v_h, c + t * d, xp.maximum(v_c + t * t * e, 0))
        gates = Gates(self.weight, self.biases, 1 if self._apart else self.seq_len)
        dz, ez, deltas = gates.backward(self._kept, d, e, wanted)
        joined, shape = joined.reshape(-1, joined.shape[2]), (dz.shape[1], -1)
        xp.matmul(dz.T, joined, out=self.weight.mean_sum.reshape(shape))
        xp.matmul(ez.T, joined * joined, out=self.weight.variance_sum.reshape(shape))
        self._sum_biases(dz.reshape(-1, 4, self._outputs), ez.reshape(-1, 4, self._outputs), 0)
        if deltas is None:
            return None
        d, e = (each.reshape(self._x.mean.shape) for each in deltas)
        return times_slope(d, e, self._x.slope)

    @property
    def carries_states(self) -> bool:
        """Whether h and c go from call to call, where the batch is one sample."""
        return self.seq_len == 1

    def get_states(self) -> States:
        """Return what the next call begins with: four flat copies on the CPU."""
        if self._carried is None:
            return States(*(np.zeros(self._outputs, REAL) for _ in States._fields))
        return States(*(host_copy(each).reshape(-1) for each in self._carried))

    def set_states(self, states: Sequence[Any] | None) -> None:
        """Let the next call begin with these; None: with 0. ``output_size`` elements each.

        Raises:
            TypeError, ValueError: they are no real numbers, or masked.
        """
        if states is None:
            self._carried = None
            return
        copies = (real(f"{self}: states", s, "cpu", own=True).reshape(1, -1) for s in states)
        self._carried = States(*map(array_module(self.weight.mean).asarray, copies))

    def to_device(self, device: str) -> None:
        if self._carried is not None:
            self._carried = States(*(to_device(each, device) for each in self._carried))

    def _sizes(self) -> Sequence[int]:
        return self._inputs, self._outputs


class TimeStep(NamedTuple):
    """One time step as a smoother needs it.

    Attributes:
        prior, posterior: means and variances of h, then of c, ``[n]`` each.
        cell: covariances of c with the c before, element by element, ``[n]``.
        hidden: covariances of the h before with h, ``[n before, n]``.
    """

    prior: States
    posterior: States
    cell: Array
    hidden: Array


class SLSTM(LSTM):
    """An :class:`LSTM` of one time step and one sample that keeps ``num_samples`` time steps.

    A time step is kept by its backward pass, for ``Sequential.smoother()``. With priors, and
    posteriors by what was observed at the step, ``G = cov(before, now) / var_prior(now)``:
    ``mean = posterior + G (smoothed - prior)`` of the step after, ``variance = posterior +
    G**2 (...)``, for c element by element, for h the sums over all h of the step after.

    Args:
        input_size, output_size, bias, gain_weight, gain_bias, init_method: as of :class:`LSTM`.
        seq_len: 1.

    Raises:
        ValueError: ``seq_len`` is not 1, or as :class:`LSTM`.
    """

    def __init__(
        self, input_size: int, output_size: int, seq_len: int, bias: bool = True,
        gain_weight: float = 1.0, gain_bias: float = 1.0, init_method: str = "He",
    ) -> None:  # fmt: skip
        super().__init__(
            input_size, output_size, seq_len, bias, gain_weight, gain_bias, init_method
        )
        if seq_len != 1:
            raise ValueError(f"SLSTM: seq_len must be 1, a time step of a series, got {seq_len}")
        self.num_samples = 0  # how many time steps are kept; 0: none
        self.kept: list[TimeStep] = []
        self.smoothed: States | None = None  # ``[time steps, n]`` each
        self._before: States | None = None  # what the last forward pass began with

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return ``[1, output_size]``.

        Raises:
            ValueError: there are more samples: they are no time step of one series.
        """
        if len(x.mean) != 1:
            raise ValueError(
                f"{self}: expected one sample, the next time step of a series, got {len(x.mean)}"
            )
        self._before = self._carried
        return super().forward(x)

    def backward(self, d: Array, e: Array, wanted: bool) -> Deltas | None:
        """As :class:`LSTM`; keeps the time step.

        Raises:
            RuntimeError: ``num_samples`` time steps are kept already.
        """
        if self.num_samples == 0 or self._carried is None:
            return super().backward(d, e, wanted)
        if len(self.kept) == self.num_samples:
            raise RuntimeError(
                f"{self}: {self.num_samples} time steps are kept, as many as net.num_samples; call "
                "smoother() or reset_lstm_states() before the next"
            )
        prior, (cell, hidden) = self._carried, self._covariances()
        deltas = super().backward(d, e, wanted)
        prior, posterior = (
            States(*(each[0] for each in states)) for states in (prior, self._carried)
        )
        self.kept.append(TimeStep(prior, posterior, cell, hidden))
        return deltas

    def _covariances(self) -> tuple[Array, Array]:
        """Return those of the last forward pass, as a :class:`TimeStep` has them."""
        k, no = self._kept.slopes[0, 0], self._outputs
        xp = array_module(k)
        if self._before is None:
            return xp.zeros(no, k.dtype), xp.zeros((no, no), k.dtype)
        gates = k[:4].copy()  # slopes of h by the inputs of the gates
        gates[:3] *= k[4]
        effect = (gates[:, :, None] * self.weight.mean[:, :, self._inputs :]).sum(axis=0)
        return self._before[3][0] * k[5], self._before[1][0][:, None] * effect.T

    def smooth(self) -> BaseHiddenStates:
        """Return h, ``[time steps, output_size]``, smoothed; begin a new series.

        Raises:
            RuntimeError: no time step is kept.
        """
        if not self.kept:
            raise RuntimeError(
                f"smoother: {self} has kept no time step; set net.num_samples to how many there "
                "are, and go forward and backward once for each"
            )
        after = self.kept[-1].posterior
        smoothed = [after]
        for now, step in zip(self.kept[-2::-1], self.kept[:0:-1], strict=True):
            after = States(
                *_smoothed(step.hidden, now.posterior[:2], step.prior[:2], after[:2]),
                *_smoothed(step.cell, now.posterior[2:], step.prior[2:], after[2:]),
            )
            smoothed.append(after)
        stack = array_module(after[0]).stack
        self.smoothed = States(*(stack(each[::-1]) for each in zip(*smoothed, strict=True)))
        self.set_states(None)
        return BaseHiddenStates(*self.smoothed[:2])

    def set_states(self, states: Sequence[Any] | None) -> None:
        """As :class:`LSTM`; None also begins a new series."""
        super().set_states(states)
        if states is None:
            self.kept = []

    def to_device(self, device: str) -> None:
        """Move the states that are carried; the series begins anew."""
        super().to_device(device)
        self.kept, self.smoothed = [], None


def _smoothed(
    covariance: Array, posterior: tuple[Array, ...], prior: tuple[Array, ...],
    after: tuple[Array, ...],
) -> tuple[Array, Array]:  # fmt: skip
    """Return moments of a time step by those of the one after.

    ``covariance`` has one element for each unit, or one for each pair.
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
    """A :class:`Linear` after an :class:`SLSTM`, which ``Sequential.smoother()`` ends with."""

    def smooth(self, hidden: BaseHiddenStates) -> BaseHiddenStates:
        """Return the outputs of a whole series, ``[time steps, output_size]``.

        By the parameters that it has now. Arrays kept for a backward pass stay as they are.
        """
        training, self.training = self.training, False
        try:
            return self.forward(hidden)
        finally:
            self.training = training
