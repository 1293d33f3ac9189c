"""Recurrent layers, attention and transformers, with torch's parameters."""

import math
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.elementwise import as_variable, check_filled, check_ratio
from flashlight_py.autograd.functions.sequences import GATES
from flashlight_py.nn import init
from flashlight_py.nn.layers import LayerNorm, Linear, Plain, Sequential, check_sizes
from flashlight_py.nn.module import Module

_NAMES = "weight_ih", "weight_hh", "bias_ih", "bias_hh"


class RNN(Plain):
    """Recurrent layers for inputs ``[batch, time, input_size]``. See ``functions.recurrent``.

    A call returns the hidden states ``[batch, time, directions * hidden_size]`` and the final
    state. The parameters have torch's names and shapes. Layer k has ``weight_ih_l<k>``,
    ``weight_hh_l<k>``, ``bias_ih_l<k>`` and ``bias_hh_l<k>``, with the suffix ``_reverse`` for the
    second direction. Initial values are uniform within ``1 / sqrt(hidden_size)`` of 0.

    Args:
        kind: ``"lstm"``, ``"gru"`` or ``"tanh"``.
        input_size: Last dimension of the input, at least 1.
        hidden_size: Length of the state, at least 1.
        layers: Number of layers. A layer reads both directions of the previous layer.
        bidirectional: Whether each layer also runs backward, with separate weights.
        dropout: Dropout ratio between layers in training, at least 0 and below 1.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: If ``kind`` is unknown, a number is out of range, or shapes in a call do not
            fit.
        TypeError: If a size is not an integer.
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
        self._ends = ("", "_reverse") if bidirectional else ("",)
        bound, rows = hidden_size**-0.5, GATES[kind] * hidden_size
        for layer in range(layers):
            features = hidden_size * (1 + bidirectional) if layer else input_size
            shapes = (rows, features), (rows, hidden_size), (rows,), (rows,)
            for end in self._ends:
                for name, shape in zip(_NAMES, shapes, strict=True):
                    array = init.uniform(shape, -bound, bound, dtype)
                    setattr(self, f"{name}_l{layer}{end}", param(array))

    def forward(self, x: Variable, state: Any = None) -> tuple[Variable, Any]:
        """Return the last layer's hidden states of all steps, and the final state of all layers.

        ``state`` (default: zeros) and the returned state are ``h`` of shape ``[layers * directions,
        batch, hidden_size]``. For "lstm" they are tuples of ``h`` and ``c``.
        """
        x = as_variable(x)
        if x.ndim != 3 or x.shape[2] != self.input_size:
            raise ValueError(f"RNN: expected [batch, time, {self.input_size}], got {x.shape}")
        is_lstm, ends = self.kind == "lstm", self._ends
        first = () if state is None else tuple(state) if is_lstm else (state,)
        expected = self.layers * len(ends), x.shape[0], self.hidden_size
        if first and [array.shape for array in first] != [expected] * (1 + is_lstm):
            raise ValueError(
                f"RNN: expected {1 + is_lstm} state(s) of shape {expected}, got "
                f"{[array.shape for array in first]}"
            )
        last: list[tuple[Variable, ...]] = []
        for layer in range(self.layers):
            if layer and self.training:
                x = F.dropout(x, self.dropout)
            outputs = []
            for end in ends:
                weights = [getattr(self, f"{name}_l{layer}{end}") for name in _NAMES]
                begin = [F.index(array, len(last)) for array in first]
                output, *ended = F.recurrent(self.kind, x, weights, begin, bool(end))
                outputs.append(output)
                last.append(tuple(ended))
            x = F.concatenate(outputs, -1) if len(outputs) > 1 else outputs[0]
        states = tuple(F.stack(array) for array in zip(*last, strict=True))
        return x, states if is_lstm else states[0]


class MultiheadAttention(Plain):
    """Multi-head attention (Vaswani et al., 2017), with linear maps of its inputs and its result.

    ``layer(x)`` and ``layer(x, mask)`` compute self-attention of ``x`` ``[batch, positions, dim]``.
    ``layer(q, k, v)`` and ``layer(q, k, v, mask)`` let queries ``q`` attend to keys ``k`` and
    values ``v``, both ``[batch, keys, dim]``. The result has the shape of the first argument. See
    ``functions.attention`` for ``mask``, ``causal`` and ``dropout`` (only in training). ``bias``
    states whether the linear maps have biases.

    Raises:
        ValueError: If ``heads`` does not divide ``dim``, or, in a call, if shapes do not fit.
    """

    def __init__(
        self, dim: int, heads: int, dropout: float = 0.0, causal: bool = False, bias: bool = True
    ) -> None:
        dim, heads = check_sizes("MultiheadAttention", dim=dim, heads=heads)
        check_ratio(dropout)
        if dim % heads:
            raise ValueError(f"MultiheadAttention: heads must divide dim {dim}, got {heads}")
        self.in_proj_weight = param(init.glorot_uniform((3 * dim, dim), dim, 3 * dim))
        self.in_proj_bias = param(np.zeros(3 * dim, np.float32)) if bias else None
        self.out_proj = Linear(dim, dim, bias)
        self.dim, self.heads, self.dropout, self.causal = dim, heads, dropout, causal

    def forward(self, *inputs: Any) -> Variable:
        count = 3 if len(inputs) > 2 else 1
        mask = (*inputs, None)[count]
        first, *others = variables = [as_variable(x) for x in inputs[:count]]
        for x in variables:
            if x.ndim != 3 or x.shape[2] != self.dim:
                raise ValueError(
                    "MultiheadAttention: expected inputs of shape [batch, positions, "
                    f"{self.dim}], got {x.shape}"
                )
        options = mask, self.causal, self.dropout if self.training else 0.0
        if not others:
            projected = F.linear(first, self.in_proj_weight, self.in_proj_bias)
            return self.out_proj(F.self_attention(projected, self.heads, *options))
        biases = [None] * 3 if self.in_proj_bias is None else F.split(self.in_proj_bias, 3)
        q, k, v = map(self._projected, variables, F.split(self.in_proj_weight, 3), biases)
        joined = F.transpose(F.attention(q, k, v, *options), (0, 2, 1, 3))
        return self.out_proj(F.reshape(joined, first.shape))

    def _projected(self, x: Variable, weight: Variable, bias: Variable | None) -> Variable:
        shape = *x.shape[:2], self.heads, self.dim // self.heads
        return F.transpose(F.reshape(F.linear(x, weight, bias), shape), (0, 2, 1, 3))


_ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class TransformerLayer(Module):
    """One block of a :class:`Transformer`."""

    def __init__(
        self, dim: int, heads: int, hidden: int, dropout: float, causal: bool, activation: str,
        norm: str,
    ) -> None:  # fmt: skip
        self.self_attn = MultiheadAttention(dim, heads, dropout, causal)
        self.linear1, self.linear2 = Linear(dim, hidden), Linear(hidden, dim)
        self.norm1, self.norm2 = LayerNorm(dim), LayerNorm(dim)
        self.dropout, self.activation, self.norm = dropout, activation, norm

    def forward(self, x: Variable, mask: Any = None) -> Variable:
        ratio = self.dropout if self.training else 0.0
        activation = _ACTIVATIONS[self.activation]

        def attended(x: Variable) -> Variable:
            return F.dropout(self.self_attn(x, mask), ratio)

        def fed(x: Variable) -> Variable:
            return F.dropout(self.linear2(F.dropout(activation(self.linear1(x)), ratio)), ratio)

        if self.norm == "pre":
            x = x + attended(self.norm1(x))
            return x + fed(self.norm2(x))
        x = self.norm1(x + attended(x))
        return self.norm2(x + fed(x))


class Transformer(Module):
    """Blocks of self-attention and a small network for each position (Vaswani et al., 2017).

    The state dict has the names of ``torch.nn.TransformerEncoder`` without its optional norm.

    Args:
        dim: Last dimension of ``x`` ``[batch, positions, dim]`` and of the result.
        heads: Number of attention heads, a divisor of ``dim``.
        hidden: Size between the two linear maps of the network. Default: ``4 * dim``.
        layers: Number of blocks.
        dropout: Dropout ratio in training, for attention weights, results of attention, and the
            hidden elements and results of the network.
        causal: If True, position i attends only to positions 0 .. i.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        norm: ``"pre"`` normalizes the inputs of attention and network. ``"post"`` normalizes the
            sum of input and result of each.

    Raises:
        ValueError: If ``heads`` does not divide ``dim``, or if an option is unknown.
    """

    def __init__(
        self, dim: int, heads: int, hidden: int | None = None, layers: int = 1,
        dropout: float = 0.0, causal: bool = False, activation: str = "gelu", norm: str = "pre",
    ) -> None:  # fmt: skip
        dim, heads, layers = check_sizes("Transformer", dim=dim, heads=heads, layers=layers)
        (hidden,) = check_sizes("Transformer", hidden=4 * dim if hidden is None else hidden)
        choices = ("activation", activation, (*_ACTIVATIONS,)), ("norm", norm, ("pre", "post"))
        for name, value, allowed in choices:
            if value not in allowed:
                raise ValueError(f"Transformer: {name} must be one of {allowed}, got {value!r}")
        options = hidden, dropout, causal, activation, norm
        self._shown = f"{dim}, {heads}, hidden={hidden}, layers={layers}"
        self.layers = Sequential(*(TransformerLayer(dim, heads, *options) for _ in range(layers)))

    def forward(self, x: Variable, mask: Any = None) -> Variable:
        """Return the last block's result. All blocks use ``mask`` (see ``functions.attention``)."""
        for _, layer in self.layers.children():
            x = layer(x) if mask is None else layer(x, mask)
        return x

    def __repr__(self) -> str:
        return f"Transformer({self._shown})"


class PositionEmbedding(Module):
    """A learned vector for each position, added to the input ``[batch, length, dim]``.

    ``length`` is at most ``positions``. Raises ValueError if a size is below 1, or, in a call, if
    the input does not fit.
    """

    def __init__(self, positions: int, dim: int) -> None:
        shape = check_sizes("PositionEmbedding", positions=positions, dim=dim)
        self.weight = param(init.normal(shape, 0.0, 0.02))

    def forward(self, x: Variable) -> Variable:
        x, (most, dim) = as_variable(x), self.weight.shape
        if x.ndim != 3 or x.shape[1] > most or x.shape[2] != dim:
            raise ValueError(
                f"{type(self).__name__}: expected input of shape [batch, at most {most}, {dim}], "
                f"got {x.shape}"
            )
        check_filled(type(self).__name__, x)
        return x + self.weight[: x.shape[1]]


class SinusoidalPositionEmbedding(PositionEmbedding):
    """Sines and cosines of each position, added to the input (Vaswani et al., 2017).

    The layer has no parameters.

    Raises:
        ValueError: If a size is below 1, or if ``dim`` is odd.
    """

    def __init__(self, positions: int, dim: int) -> None:
        super().__init__(positions, dim)
        positions, dim = self.weight.shape
        if dim % 2:
            raise ValueError(f"SinusoidalPositionEmbedding: dim must be even, got {dim}")
        angles = np.arange(positions)[:, None] * np.exp(np.arange(0, dim, 2) * -math.log(1e4) / dim)
        waves = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
        self.weight = Variable(waves.reshape(positions, dim).astype(np.float32))
