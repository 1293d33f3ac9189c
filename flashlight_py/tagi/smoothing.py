"""Layers that keep a series, and go back over it: a smoother of Rauch, Tung and Striebel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import Deltas
from flashlight_py.tagi.linear import Linear
from flashlight_py.tagi.lstm_cell import States
from flashlight_py.tagi.parameters import FLOOR
from flashlight_py.tagi.recurrent import LSTM
from flashlight_py.tagi.states import BaseHiddenStates


class TimeStep(NamedTuple):
    """What a smoother needs of one time step.

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
        self,
        input_size: int,
        output_size: int,
        seq_len: int,
        bias: bool = True,
        gain_weight: float = 1.0,
        gain_bias: float = 1.0,
        init_method: str = "He",
    ) -> None:
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
    covariance: Array,
    posterior: tuple[Array, ...],
    prior: tuple[Array, ...],
    after: tuple[Array, ...],
) -> tuple[Array, Array]:
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

        By the parameters that it has now. What is kept for a backward pass stays as it is.
        """
        training, self.training = self.training, False
        try:
            return self.forward(hidden)
        finally:
            self.training = training
