"""Recurrent layers, and attention: each query gets a mean of values (Vaswani et al., 2017).

One operation computes all time steps of one direction of a recurrent layer. One matrix product
computes the part of the gates that depends on the inputs of all steps. Then each step adds the part
that depends on the previous state. The gates have torch's order, so that torch's weights can be
used. float16 is computed in float32.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.autograd.functions import dimensions
from flashlight_py.autograd.functions.elementwise import as_variable, check_filled, check_ratio
from flashlight_py.autograd.native import kernel, record_jointly
from flashlight_py.autograd.precision import as_half
from flashlight_py.autograd.variable import Input, Variable, record_all
from flashlight_py.device import Array, array_module, as_packed, narrowed, widened
from flashlight_py.random import generator, keep_mask

_KEYS = 64  # keys per tile, as in csrc/nn/attentions.inc
GATES = {"tanh": 1, "gru": 3, "lstm": 4}
# The backward pass of one step. Arguments: the step, and the gradients of h and c after the step.
# Returns the gradients of ``u`` and ``v`` (one if they are equal), and of h and c before the step.
_Back: TypeAlias = Callable[[int, Array, Any], tuple[Any, Any]]
_Prepare: TypeAlias = Callable[[], _Back]
_Biases: TypeAlias = Sequence[Array]  # bias_ih and bias_hh


def recurrent(
    kind: str, x: Input, weights: Sequence[Input], state: Sequence[Input] = (),
    reverse: bool = False,
) -> tuple[Variable, ...]:  # fmt: skip
    """Return the hidden states of one layer in one direction, and the state after the last step.

    ``u = weight_ih @ x + bias_ih`` and ``v = weight_hh @ h + bias_hh`` are split into gates:

    - ``"tanh"``: ``h = tanh(u + v)``
    - ``"gru"``: ``r, z = sigmoid(u + v)``, ``n = tanh(u + r * v)``, ``h = (1 - z) * n + z * h``
      (Cho et al. 2014)
    - ``"lstm"``: ``i, f, o = sigmoid(u + v)``, ``g = tanh(u + v)`` (order: i, f, g, o),
      ``c = f * c + i * g``, ``h = o * tanh(c)`` (Hochreiter and Schmidhuber 1997)

    Args:
        kind: ``"tanh"``, ``"gru"`` or ``"lstm"``.
        x: Shape ``[batch, time, features]``.
        weights: ``weight_ih [gates * hidden, features]``, ``weight_hh [gates * hidden, hidden]``,
            ``bias_ih`` and ``bias_hh``, both ``[gates * hidden]``.
        state: ``h`` before the first step, and for "lstm" also ``c``. Both have shape ``[batch,
            hidden]``. Default: zeros.
        reverse: Whether to process the steps from the last to the first.

    Returns:
        ``h`` after each step, ``[batch, time, hidden]``; ``h`` after the last processed step; and
        for "lstm" also ``c`` after the last processed step.

    Raises:
        ValueError: If ``kind`` is unknown, or if the shapes do not fit.
    """
    x, begin = as_half(x), [as_half(variable) for variable in state]
    w_ih, w_hh, b_ih, b_hh = params = [as_half(variable) for variable in weights]
    batch, time, hidden = _checked_sizes(kind, x.data, params, begin)
    is_lstm, steps = kind == "lstm", slice(None, None, -1 if reverse else 1)
    rows = widened(x.data).transpose(1, 0, 2)[steps].reshape(time * batch, -1)
    inputs = (rows @ widened(w_ih.data).T).reshape(time, batch, -1)
    xp, biases = array_module(inputs), [widened(b_ih.data), widened(b_hh.data)]
    shape, dtype = inputs.shape, inputs.dtype
    states = xp.zeros((time + 1, batch, hidden), inputs.dtype)
    cells = xp.zeros_like(states) if is_lstm else states
    for variable, array in zip(begin, (states, cells), strict=False):
        array[0] = variable.data
    prepare = _FORWARD[kind](xp, inputs, states, cells, as_packed(widened(w_hh.data).T), biases)
    out = states[1:][steps]
    if is_lstm:  # one array has h of all steps and the last c
        out = xp.concatenate([out, cells[-1:]])

    def through(grad: Array) -> Any:
        wide = widened(grad).transpose(1, 0, 2)
        of_out = wide[:time][steps]
        of_state, of_cell = xp.zeros_like(of_out[0]), wide[time] if is_lstm else None
        w, back = widened(w_hh.data), prepare()
        # "gru" multiplies v by r in n, so that the gradients of u and v differ.
        sides = [xp.empty(shape, dtype) for _ in range(2 if kind == "gru" else 1)]
        for t in reversed(range(time)):
            slopes, (of_state, of_cell) = back(t, of_out[t] + of_state, of_cell)
            for side, slope in zip(sides, slopes, strict=True):
                side[t] = slope
            product = slopes[-1] @ w
            of_state = product if of_state is None else of_state + product
        flat, added = (sides[index].reshape(time * batch, -1) for index in (0, -1))
        of_x = None
        if x._calc_grad:
            of_x = (flat @ widened(w_ih.data)).reshape(time, batch, -1)[steps].transpose(1, 0, 2)
        of_weights = flat.T @ rows, added.T @ states[:-1].reshape(time * batch, -1)
        of_bias = flat.sum(0)
        of_last = added.sum(0) if len(sides) > 1 else of_bias.copy()
        return *of_weights, of_bias, of_last, of_x, of_state, of_cell

    operands = enumerate((*params, x, *begin))
    edges: list[Any] = [(v, lambda grads, index=index: grads[index]) for index, v in operands]
    result = record_all(narrowed(out.transpose(1, 0, 2), x.data), edges, through)
    every = slice(None)
    output = dimensions.index(result, (every, slice(time))) if is_lstm else result
    last = dimensions.index(output, (every, 0 if reverse else time - 1))
    return (output, last, dimensions.index(result, (every, time))) if is_lstm else (output, last)


def _tanh(xp: Any, inputs: Array, states: Array, _: Array, w: Array, biases: _Biases) -> _Prepare:
    bias = biases[0] + biases[1]
    for t in range(len(inputs)):
        states[t + 1] = xp.tanh(inputs[t] + states[t] @ w + bias)
    return lambda: lambda t, grad, _: ((grad * (1 - states[t + 1] ** 2),), (None, None))


# An operation on the arrays of one step is faster than one on the arrays of all steps, which are
# not in the cache. ``gates`` first contains the products of the inputs.
def _lstm(xp: Any, gates: Array, states: Array, cells: Array, w: Array, b: _Biases) -> _Prepare:
    size = states.shape[2]
    i, f, g, o = [slice(k * size, (k + 1) * size) for k in range(4)]
    scale = xp.full(4 * size, 0.5, gates.dtype)  # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2
    scale[g] = 1
    shift = xp.full(4 * size, 0.5, gates.dtype)
    shift[g] = 0
    bias = b[0] + b[1]
    for t in range(len(gates)):
        now, cell = gates[t], cells[t + 1]
        now += states[t] @ w
        now += bias
        now *= scale
        xp.tanh(now, out=now)
        now *= scale
        now += shift
        xp.multiply(now[:, f], cells[t], out=cell)
        cell += now[:, i] * now[:, g]
        xp.multiply(now[:, o], xp.tanh(cell), out=states[t + 1])

    def back(t: int, grad: Array, of_cell: Any) -> Any:
        now, squashed = gates[t], xp.tanh(cells[t + 1])
        of_cell = of_cell + grad * now[:, o] * (1 - squashed * squashed)
        slope = now - shift
        slope *= slope
        slope = scale * scale - slope
        factors = (now[:, g], of_cell), (cells[t], of_cell), (now[:, i], of_cell), (squashed, grad)
        for gate, (factor, of) in zip((i, f, g, o), factors, strict=True):
            part = slope[:, gate]
            part *= factor
            part *= of
        return (slope,), (None, of_cell * now[:, f])

    return lambda: back


def _gru(xp: Any, inputs: Array, states: Array, _: Array, w: Array, biases: _Biases) -> _Prepare:
    size = states.shape[2]
    r, z, n = [slice(k * size, (k + 1) * size) for k in range(3)]
    gates, added = xp.zeros_like(inputs), xp.zeros_like(states)
    inputs += biases[0]
    for t in range(len(inputs)):
        hidden = states[t] @ w + biases[1]
        both = xp.tanh((inputs[t, :, : 2 * size] + hidden[:, : 2 * size]) * 0.5) * 0.5 + 0.5
        new = xp.tanh(inputs[t, :, n] + both[:, r] * hidden[:, n])
        gates[t], added[t] = xp.concatenate([both, new], axis=1), hidden[:, n]
        states[t + 1] = new + both[:, z] * (states[t] - new)

    def back(t: int, grad: Array, _: Any) -> Any:
        now = gates[t]
        reset, update, new = now[:, r], now[:, z], now[:, n]
        of_new = grad * (1 - update) * (1 - new * new)
        of_update = grad * (states[t] - new) * update * (1 - update)
        of_reset = of_new * added[t] * reset * (1 - reset)
        last = of_new, of_new * reset
        slopes = [xp.concatenate([of_reset, of_update, of_n], axis=1) for of_n in last]
        return slopes, (grad * update, None)

    return lambda: back


_FORWARD: dict[str, Callable[..., _Prepare]] = {"tanh": _tanh, "gru": _gru, "lstm": _lstm}


def _checked_sizes(
    kind: str, x: Array, weights: Sequence[Variable], state: Sequence[Variable]
) -> tuple[int, int, int]:
    """Return the batch size, time steps and hidden size. Raises ValueError if a shape is wrong."""
    if kind not in GATES:
        raise ValueError(f"recurrent: kind must be one of {', '.join(GATES)}, got {kind!r}")
    shapes = [variable.shape for variable in weights]
    hidden = shapes[1][-1] if shapes[1] else 0
    rows = GATES[kind] * hidden
    if x.ndim != 3 or not x.size or shapes[0][-1:] != x.shape[2:]:
        raise ValueError(
            "recurrent: expected input [batch, time, features], not empty, for a weight of shape "
            f"{shapes[0]}, got shape {x.shape}"
        )
    if shapes != [(rows, x.shape[2]), (rows, hidden), (rows,), (rows,)]:
        raise ValueError(f"recurrent: {kind} needs {GATES[kind]} gates, got weights of {shapes}")
    if len(state) > 1 + (kind == "lstm") or any(v.shape != (len(x), hidden) for v in state):
        shape = [variable.shape for variable in state]
        raise ValueError(f"recurrent: expected states of shape {(len(x), hidden)}, got {shape}")
    return x.shape[0], x.shape[1], hidden


def attention(
    q: Input, k: Input, v: Input, mask: Input | None = None, causal: bool = False,
    dropout: float = 0.0, scale: float | None = None,
) -> Variable:  # fmt: skip
    """Return ``softmax(scale * q @ k.T + mask) @ v`` for each head of each sample.

    The full matrix of weights is never stored. The forward pass computes it tile by tile, and the
    backward pass computes the tiles again (Dao et al., FlashAttention, 2022). If a query may not
    attend to any key, its result is 0.

    Args:
        q: Shape ``[batch, heads, queries, width]``, with any strides.
        k: Shape ``[batch, heads, keys, width]``.
        v: Shape ``[batch, heads, keys, value width]``.
        mask: Broadcasts to ``[batch, heads, queries, keys]``. A Boolean mask is True if a query may
            attend to a key. A mask of numbers is added to the scores. A mask gets no gradient.
        causal: If True, query i attends only to keys 0 .. i.
        dropout: Probability of zeroing a weight, seeded by ``set_seed``. Other weights are scaled
            up.
        scale: Factor of the scores. Default: ``1 / sqrt(width)``.

    Returns:
        ``[batch, heads, queries, value width]``, a transposed view of a contiguous array ``[batch,
        queries, heads, value width]``.

    Raises:
        ValueError: If the shapes do not fit together or are empty, or unless ``0 <= dropout < 1``.
    """
    q, k, v = as_half(q), as_half(k), as_half(v)
    shapes = [x.shape for x in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes) or not (
        shapes[0][:2] == shapes[1][:2] == shapes[2][:2]
        and shapes[0][3] == shapes[1][3]
        and shapes[1][2] == shapes[2][2]
    ):
        raise ValueError(
            "attention: expected q [batch, heads, queries, width], k [batch, heads, keys, width] "
            f"and v [batch, heads, keys, any width], got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    check_filled("attention", q, k, v)
    work = _Attention([widened(x.data) for x in (q, k, v)], mask, causal, dropout, scale)
    return record_jointly("attention", narrowed(work.forward(), q.data), work.backward, q, k, v)


def self_attention(
    x: Input, heads: int, mask: Input | None = None, causal: bool = False, dropout: float = 0.0
) -> Variable:
    """Return :func:`attention` of q, k and v, which are adjacent in the last dimension of ``x``.

    ``x`` has shape ``[batch, positions, 3 * width]``, and the result ``[batch, positions, width]``.
    Each head gets ``width / heads`` elements. See ``attention`` for the other arguments.

    Raises:
        ValueError: If ``x`` has another shape, or as in ``attention``.
    """
    x = as_half(x)
    if x.ndim != 3 or heads < 1 or x.shape[2] % (3 * heads):
        raise ValueError(
            "self_attention: expected [batch, positions, 3 * width] with a width that is divisible "
            f"by {heads} heads, got {x.shape}"
        )
    check_filled("self_attention", x)
    batch, positions, width = x.shape
    packed = as_packed(widened(x.data))
    parts = packed.reshape(batch, positions, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    work = _Attention(list(parts), mask, causal, dropout, None, packed)
    out = work.forward().transpose(0, 2, 1, 3).reshape(batch, positions, width // 3)

    def back(grad: Array) -> Any:
        grad = grad.reshape(batch, positions, heads, -1).transpose(0, 2, 1, 3)
        grads = work.backward(grad)
        if len(grads) > 1:
            xp = array_module(grad)
            grads = (xp.stack(grads).transpose(1, 3, 0, 2, 4).reshape(x.shape),)
        return grads

    return record_jointly("self_attention", narrowed(out, x.data), back, x)


class _Attention:
    """Arrays and options of an attention call. ``packed``: one array with q, k and v, or None."""

    def __init__(
        self, arrays: list[Array], mask: Input | None, causal: bool, dropout: float,
        scale: float | None, packed: Array | None = None,
    ) -> None:  # fmt: skip
        check_ratio(dropout)
        q, k, v = arrays
        self.shape = *q.shape[:3], k.shape[2]
        self.mask = None if mask is None else self._masking(as_variable(mask).data, q.dtype)
        self.arrays, self.packed, self.causal = arrays, packed, causal
        self.scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        self.numbers = self.scale, dropout
        xp = array_module(q)
        self.seed = generator(xp).integers(0, 2**63 - 1, 1, dtype=np.int64) if dropout else None
        self.native = kernel("attention", q) if q.dtype == k.dtype == v.dtype else None

    def _masking(self, mask: Array, dtype: Any) -> Array:
        padded = mask.reshape((1,) * (4 - mask.ndim) + mask.shape) if mask.ndim < 4 else mask
        fits = all(n in (1, all_) for n, all_ in zip(padded.shape, self.shape, strict=True))
        if mask.ndim > 4 or not fits:
            raise ValueError(
                "attention: expected a mask that broadcasts to [batch, heads, queries, keys] = "
                f"{self.shape}, got shape {mask.shape}"
            )
        mask = padded if padded.dtype == np.bool_ else padded.astype(dtype, copy=False)
        return as_packed(mask)

    def forward(self) -> Array:
        q, _, v = self.arrays
        batch, heads, queries, _ = self.shape
        if self.native is None:
            return self._forward_of_arrays()
        width, of_values = q.shape[3], v.shape[3]
        if self.packed is not None:
            step = heads * width
            steps = [(n * step, 3 * queries * step, width, 3 * step) for n in range(3)]
            self.inputs = [self.packed] * 3
        else:
            laid_out = [_laid_out(array) for array in self.arrays]
            self.inputs = [array for array, _, _ in laid_out]
            steps = [array for _, array, _ in laid_out]
            self.across = [array for _, _, array in laid_out]
        mask, kind, mask_steps, mask_bytes = self.mask, 0, (0, 0, 0, 0), 0
        if mask is not None:
            kind, of, mask_bytes = 1 if mask.dtype == np.bool_ else 2, mask.shape, mask.nbytes
            dense = of[1] * of[2] * of[3], of[2] * of[3], of[3], 1
            mask_steps = tuple(s if n > 1 else 0 for s, n in zip(dense, of, strict=True))  # type: ignore[assignment]
        begin = *self.shape, width, of_values, int(self.causal), kind
        self.sizes: tuple[int, ...] = *begin, *chain(*steps), *mask_steps, mask_bytes
        made = ((batch, queries, heads, of_values), q.dtype), ((batch, heads, queries, 2), q.dtype)
        inputs = *self.inputs, mask, self.seed
        self.out, self.saved = self.native(made, self.sizes, self.numbers, *inputs)
        return self.out.transpose(0, 2, 1, 3)  # type: ignore[no-any-return]

    def backward(self, grad: Array) -> tuple[Array, ...]:
        """Return the gradients of q, k and v, or if ``packed`` is set, only its gradient."""
        grad = widened(grad)
        if self.native is None:
            return self._backward_of_arrays(grad)
        grad = as_packed(grad.transpose(0, 2, 1, 3))
        packed, q = self.packed, self.arrays[0]
        back: Any = kernel("attention_back" if packed is None else "packed_attention_back", q)
        inputs = grad, self.out, self.saved, *self.inputs, self.mask, self.seed
        if packed is not None:
            return (back(((packed.shape, q.dtype),), self.sizes, self.numbers, *inputs),)
        made = [(array.shape, q.dtype) for array in self.inputs]
        pairs = zip(back(made, self.sizes, self.numbers, *inputs), self.across, strict=True)
        return tuple(part.transpose(0, 2, 1, 3) if across else part for part, across in pairs)

    # Array operations, one sample at a time -------------------------------------------------------

    def _weights(self, sample: int) -> tuple[Array, Array | float]:
        """Return weights [heads, queries, keys] of ``sample``, and their dropout factors."""
        q, k = self.arrays[0][sample], self.arrays[1][sample]
        xp = array_module(q)
        _, heads, queries, keys = self.shape
        scores = q @ k.swapaxes(-1, -2) * self.scale
        if self.mask is not None:
            mask = self.mask[sample if len(self.mask) > 1 else 0]
            scores = xp.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
        if self.causal:
            before = xp.arange(keys) <= xp.arange(queries)[:, None]
            scores = xp.where(before, scores, -np.inf)
        best = scores.max(-1, keepdims=True)
        weights = xp.exp(scores - xp.where(best == -np.inf, 0, best))
        sums = weights.sum(-1, keepdims=True)
        weights /= xp.where(sums == 0, 1, sums)
        if self.seed is None:
            return weights, 1.0
        rows = heads * queries
        ratio = self.numbers[1]
        kept = keep_mask(self.seed, sample * rows, rows, keys, _KEYS, ratio)
        return weights, kept.reshape(weights.shape) * weights.dtype.type(1 / (1 - ratio))

    def _forward_of_arrays(self) -> Array:
        v, of = self.arrays[2], map(self._weights, range(self.shape[0]))
        results = [(weights * kept) @ part for (weights, kept), part in zip(of, v, strict=True)]
        return array_module(v).stack(results)  # type: ignore[no-any-return]

    def _backward_of_arrays(self, grad: Array) -> tuple[Array, ...]:
        q, k, v = self.arrays
        grads = []
        for sample in range(self.shape[0]):
            weights, kept = self._weights(sample)
            dv = (weights * kept).swapaxes(-1, -2) @ grad[sample]
            slope = grad[sample] @ v[sample].swapaxes(-1, -2) * kept
            slope -= (slope * weights).sum(-1, keepdims=True)
            slope *= weights * weights.dtype.type(self.scale)
            grads.append((slope @ k[sample], slope.swapaxes(-1, -2) @ q[sample], dv))
        return tuple(array_module(q).stack(parts) for parts in zip(*grads, strict=True))


def _laid_out(x: Array) -> tuple[Array, tuple[int, int, int, int], bool]:
    """Return ``x`` as a contiguous array, its strides, and whether rows precede heads in memory."""
    _, heads, rows, width = x.shape
    across = x.transpose(0, 2, 1, 3)
    if across.flags.c_contiguous:
        return as_packed(across), (0, heads * rows * width, width, heads * width), True
    return as_packed(x), (0, heads * rows * width, rows * width, width), False
