"""Recurrent layers."""

from __future__ import annotations

from typing import Any

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.elementwise import as_variable, check_ratio
from flashlight_py.autograd.functions.recurrent import GATES
from flashlight_py.nn import init
from flashlight_py.nn.layers import Plain, check_sizes

_NAMES = "weight_ih", "weight_hh", "bias_ih", "bias_hh"


class RNN(Plain):
    """Recurrent layers: ``[batch, time, input_size]`` to ``[batch, time, directions * hidden]``.

    The equations are those of ``functions.recurrent``. The parameters have torch's names and
    shapes, for layer k ``weight_ih_l<k>``, ``weight_hh_l<k>``, ``bias_ih_l<k>``, ``bias_hh_l<k>``,
    with ``_reverse`` behind for the second direction, and start uniform within ``1 /
    sqrt(hidden_size)`` of 0.

    Args:
        kind: ``"lstm"``, ``"gru"`` or ``"tanh"``.
        input_size: the last dimension of the input, at least 1.
        hidden_size: the length of the state, at least 1.
        layers: how many, each of which takes both directions of the one below.
        bidirectional: whether each layer goes backward too, with weights of its own.
        dropout: the ratio between layers while training, at least 0 and below 1.
        dtype: of the parameters.

    Raises:
        ValueError: an unknown kind, or a number out of range; when called: the shapes do not fit.
        TypeError: a size is no integer.
    """

    def __init__(
        self, kind: str, input_size: int, hidden_size: int, layers: int = 1,
        bidirectional: bool = False, dropout: float = 0.0, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        if kind not in GATES:
            raise ValueError(f"RNN: kind must be one of {', '.join(GATES)}, got {kind!r}")
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "layers": layers}
        input_size, hidden_size, layers = check_sizes("RNN", **sizes)
        check_ratio(dropout)
        self.kind, self.input_size, self.hidden_size = kind, input_size, hidden_size
        self.layers, self.bidirectional, self.dropout = layers, bidirectional, dropout
        bound, rows = hidden_size**-0.5, GATES[kind] * hidden_size
        for layer in range(layers):
            features = hidden_size * (1 + bidirectional) if layer else input_size
            shapes = (rows, features), (rows, hidden_size), (rows,), (rows,)
            for end in self._ends():
                for name, shape in zip(_NAMES, shapes, strict=True):
                    array = init.uniform(shape, -bound, bound, dtype)
                    setattr(self, f"{name}_l{layer}{end}", param(array))

    def _ends(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def forward(self, x: Variable, state: Any = None) -> tuple[Variable, Any]:
        """Return the hidden states of the last layer after each step, and the last state of each.

        ``state``, given (None: zeros) and returned, is ``h`` of shape ``[layers * directions,
        batch, hidden_size]``, for "lstm" a tuple of ``h`` and ``c``.
        """
        x = as_variable(x)
        if x.ndim != 3 or x.shape[2] != self.input_size:
            raise ValueError(f"RNN: expected [batch, time, {self.input_size}], got {x.shape}")
        is_lstm, ends = self.kind == "lstm", self._ends()
        first = () if state is None else tuple(state) if is_lstm else (state,)
        expected = self.layers * len(ends), x.shape[0], self.hidden_size
        if first and [each.shape for each in first] != [expected] * (1 + is_lstm):
            raise ValueError(
                f"RNN: expected {1 + is_lstm} state(s) of shape {expected}, got "
                f"{[each.shape for each in first]}"
            )
        last: list[tuple[Variable, ...]] = []
        for layer in range(self.layers):
            if layer and self.training:
                x = F.dropout(x, self.dropout)
            outputs = []
            for end in ends:
                weights = [getattr(self, f"{name}_l{layer}{end}") for name in _NAMES]
                begin = [F.index(each, len(last)) for each in first]
                output, *ended = F.recurrent(self.kind, x, weights, begin, bool(end))
                outputs.append(output)
                last.append(tuple(ended))
            x = F.concatenate(outputs, -1) if len(outputs) > 1 else outputs[0]
        states = tuple(F.stack(each) for each in zip(*last, strict=True))
        return x, states if is_lstm else states[0]
