"""The part of a network for its recurrent layers: states between calls, and the smoother."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.tagi.lstm import States
from flashlight_py.tagi.network import Network, wrong_moments
from flashlight_py.tagi.recurrent import LSTM, SLSTM, SLinear
from flashlight_py.tagi.states import BaseHiddenStates, host_copy, real


class Recurrence(Network):
    """A network with LSTMs, or without: a part of :class:`flashlight_py.tagi.Sequential`."""

    _smoothed: BaseHiddenStates | None = None
    _num_samples = 0

    @property
    def num_samples(self) -> int:
        """How many time steps a smoother keeps; 0: none."""
        return self._num_samples

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        self._num_samples = value
        for _, layer in self.named_layers():
            if isinstance(layer, SLSTM):
                layer.num_samples = value

    def reset_lstm_states(self) -> None:
        """Let h and c of every LSTM begin with 0 in the next call; a smoother's series, too."""
        for layer in self._lstms().values():
            layer.set_states(None)

    def get_lstm_states(self, time_step: int = -1) -> dict[int | str, States]:
        """Return means and variances of h, then of c, of each LSTM that carries them: flat copies.

        By the number of the layer; in a block, by what follows its kind in ``state_dict()``.
        LSTMs with ``seq_len > 1`` carry nothing from call to call.

        Args:
            time_step: -1: what the next call begins with; otherwise the smoothed states of the
                time step, from 0, of each SLSTM.

        Raises:
            ValueError: ``time_step`` was not smoothed.
        """
        if time_step == -1:
            return {key: layer.get_states() for key, layer in self._lstms().items()}
        smoothed = {
            key: layer.smoothed
            for key, layer in self._lstms().items()
            if isinstance(layer, SLSTM) and layer.smoothed is not None
        }
        steps = min((len(each[0]) for each in smoothed.values()), default=0)
        if not 0 <= time_step < steps:
            raise ValueError(
                f"get_lstm_states: time_step is -1 or that of one of {steps} smoothed time steps, "
                f"from 0, got {time_step}"
            )
        return {
            key: States(*(host_copy(each[time_step]) for each in states))
            for key, states in smoothed.items()
        }

    def set_lstm_states(self, states: Mapping[Any, Any]) -> None:
        """Let the next call begin with what ``get_lstm_states()`` has returned, of some layers.

        Raises:
            TypeError: they are no real numbers.
            ValueError: a layer carries no states, has others than ``output_size`` units, or they
                are masked, not finite, or negative variances. Nothing was changed.
        """
        layers, found = self._lstms(), {}
        for key, entry in states.items():
            if key not in layers:
                raise ValueError(
                    f"set_lstm_states: layer {key!r} is no LSTM with seq_len=1; those are "
                    f"{', '.join(map(repr, layers)) or 'none'}"
                )
            name = f"set_lstm_states: layer {key!r}"
            found[key] = [real(name, each, "cpu") for each in entry]
            expected, got = [layers[key].output_size] * 4, [each.size for each in found[key]]
            if got != expected:
                raise ValueError(
                    f"{name}, {layers[key]}: expected means and variances of h and c, {expected} "
                    f"elements, got {got}"
                )
            wrong = wrong_moments(States._fields, found[key])
            if wrong:
                raise ValueError(f"{name}, {layers[key]}: {'; '.join(wrong)}")
        for key, entry in found.items():
            layers[key].set_states(entry)

    def smoother(self) -> tuple[Array, Array]:
        """Go back over the time steps since the last smoother; return the smoothed outputs.

        As :meth:`get_outputs_smoother`. Each SLSTM's h and c by all observations, and the outputs
        by the last SLSTM's h and the parameters as they are now. A new series begins.

        Raises:
            RuntimeError: no time step was kept: ``num_samples`` is 0, or there was no pass.
            ValueError: there is no SLSTM, or another layer than SLSTM and SLinear after one.
        """
        layers = list(self.named_layers())
        kinds = [isinstance(layer, SLSTM) for _, layer in layers]
        if not any(kinds):
            raise ValueError("smoother: the network has no SLSTM")
        layers = layers[kinds.index(True) :]
        for name, layer in layers:
            if not isinstance(layer, SLSTM | SLinear):
                raise ValueError(f"smoother: cannot smooth {name!r}, only SLSTM and SLinear layers")
        hidden = BaseHiddenStates(np.empty((0, 0)))
        for _, layer in layers:
            if isinstance(layer, SLSTM):
                hidden = layer.smooth()
            elif isinstance(layer, SLinear):
                hidden = layer.smooth(hidden)
        self._smoothed = hidden
        return self.get_outputs_smoother()

    def get_outputs_smoother(self) -> tuple[Array, Array]:
        """Return means and variances of the outputs that the last smoother has made.

        ``[time steps * outputs]``, on the CPU; copies.

        Raises:
            RuntimeError: there was none.
        """
        if self._smoothed is None:
            raise RuntimeError("get_outputs_smoother: call smoother() first")
        flat = (self._smoothed.mu_a, self._smoothed.var_a)
        return host_copy(flat[0]), host_copy(flat[1])

    def _lstms(self) -> dict[int | str, LSTM]:
        """Return the layers that carry states."""
        found: dict[int | str, LSTM] = {}
        for name, layer in self.named_layers():
            if isinstance(layer, LSTM) and layer.carries_states:
                suffix = name.split(".", 1)[1]
                found[int(suffix) if suffix.isdecimal() else suffix] = layer
        return found
