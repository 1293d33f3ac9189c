"""Recurrent layers, and attention: each query gets a mean of values (Vaswani et al., 2017).

One operation computes all time steps of one direction of a recurrent layer. The gates have torch's
order, so that torch's weights can be used. float16 is computed in float32.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from flashlight_py.autograd.functions import dimensions
from flashlight_py.autograd.functions.elementwise import (
    as_variable,
    check_filled,
    check_ratio,
    sigmoid_of,
)
from flashlight_py.autograd.native import kernel, record_jointly
from flashlight_py.autograd.precision import as_half
from flashlight_py.autograd.variable import Input, Variable
from flashlight_py.device import Array, array_module, as_packed, narrowed, widened
from flashlight_py.random import generator, keep_mask

_KEYS = 64  # keys per tile, as in csrc/nn/attentions.inc
GATES = {"tanh": 1, "gru": 3, "lstm": 4}


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
    params = [as_half(variable) for variable in weights]
    batch, time, hidden = _checked_sizes(kind, x.data, params, begin)
    dtype = np.result_type(*(v.dtype for v in (x, *params)))
    steps = slice(None, None, -1 if reverse else 1)

    def read(*variables: Variable) -> list[Array]:
        arrays = [as_packed(widened(v.data.astype(dtype, copy=False))) for v in variables]
        return arrays + [array_module(arrays[0]).zeros((batch, hidden), arrays[0].dtype)] * 2

    rows = as_packed(read(x)[0][:, steps])
    forward = _by_arrays if kernel(kind, rows) is None else _by_kernels
    states, back = forward(kind, rows, read(*params, *begin)[:6])

    def through(grad: Array) -> Any:
        # A sharded weight is not kept, to save memory. The backward pass reads it again.
        arrays = as_packed(widened(grad)), *read(*params, *begin)[:6]
        slopes, of_x, *of_state = back(arrays, x._calc_grad)
        of_u, of_v = slopes, slopes[:, : GATES[kind] * hidden]
        if kind == "gru":
            of_u = array_module(slopes).concatenate((of_v[:, : 2 * hidden], slopes[:, -hidden:]), 1)
        of_x = (of_u @ arrays[1]).reshape(batch, time, -1) if of_x is None else of_x
        past = states[:, :time].reshape(batch * time, hidden)
        of_weights = of_u.T @ rows.reshape(batch * time, -1), of_v.T @ past
        of_bias = of_u.sum(0)
        of_last = of_bias.copy() if of_u is slopes else of_v.sum(0)
        return of_x[:, steps], *of_weights, of_bias, of_last, *of_state

    result = record_jointly("recurrent", narrowed(states, x.data), through, x, *params, *begin)
    part = slice(time, 0, -1) if reverse else slice(1, time + 1)
    ends = (part, time, time + 1)[: 2 + (kind == "lstm")]
    return tuple(dimensions.index(result, (slice(None), at)) for at in ends)


def _by_kernels(kind: str, x: Array, constants: Sequence[Array]) -> tuple[Array, Any]:
    """Return the states and the backward pass. ``constants``: weights, biases, first h, first c.

    The states ``[batch, time + 2, hidden]`` contain h before the first step, h after each step, and
    the last c. The arguments of the backward pass are the gradient of the states, and
    ``constants``. It returns slopes, and the gradients of x (None: not computed), h and c. The
    slopes ``[batch * time, ...]`` are the gradient of v, which is also the gradient of u. For
    "gru", n's part of u has another gradient, which follows.
    """
    (batch, time, features), (gates, hidden) = x.shape, constants[1].shape
    of_saved, width = {"tanh": (1, 1), "gru": (4, 4), "lstm": (5, 4)}[kind]
    native: Any = [kernel(f"{kind}{end}", x) for end in ("", "_back")]
    sizes = batch, time, hidden, gates, of_saved * hidden, features, time + 2
    made = [((batch, n, m), x.dtype) for n, m in ((time + 2, hidden), (time, of_saved * hidden))]
    states, saved = native[0](made, sizes, (), x, *constants)

    def back(arrays: Sequence[Array], with_x: bool) -> Any:
        grad, w_ih, w_hh, *_, c = arrays
        of_x = (batch, time, features) if with_x else (1, 1, 1)
        shapes = (batch * time, width * hidden), of_x, *[(batch, hidden)] * 2
        numbers = *sizes, width * hidden, features * with_x
        made = [(shape, grad.dtype) for shape in shapes]
        return native[1](made, numbers, (), grad, saved, states, w_ih, w_hh, c)

    return states, back


def _by_arrays(kind: str, x: Array, constants: Sequence[Array]) -> tuple[Array, Any]:
    """Do the same as ``_by_kernels`` by array operations."""
    xp, (w_ih, w_hh, b_ih, b_hh, h, c) = array_module(x), constants
    inputs, states, backs = x @ w_ih.T + b_ih, [h], []
    for t in range(x.shape[1]):
        h, c, back_of_step = _CELLS[kind](xp, inputs[:, t], h @ w_hh.T + b_hh, h, c)
        states.append(h)
        backs.append(back_of_step)

    def back(arrays: Sequence[Array], with_x: bool) -> Any:
        grad, _, w_hh, *_ = arrays
        of_h, of_c, parts = xp.zeros_like(grad[:, 0]), grad[:, -1], list[Array]()
        for t in reversed(range(len(backs))):
            part, of_h, of_c = backs[t](grad[:, t + 1] + of_h, of_c)
            of_h = part[:, : len(w_hh)] @ w_hh + of_h
            parts.insert(0, part)
        return xp.stack(parts, 1).reshape(-1, part.shape[1]), None if with_x else grad, of_h, of_c

    return xp.stack([*states, c], 1), back


# One step. Arguments: u, v, and h and c before the step. Returns h and c after it, and its backward
# pass, which maps the gradients of h and c to slopes, and gradients of the arguments h and c.
def _tanh(xp: Any, u: Array, v: Array, _: Array, c: Array) -> Any:
    out = xp.tanh(u + v)
    return out, c, lambda of_h, of_c: (of_h * (1 - out * out), 0, of_c)


def _gru(xp: Any, u: Array, v: Array, h: Array, c: Array) -> Any:
    size = h.shape[1]
    both, v_n = sigmoid_of(xp, (u + v)[:, : 2 * size]), v[:, 2 * size :]
    r, z, n = both[:, :size], both[:, size:], u[:, 2 * size :]
    n = xp.tanh(n + r * v_n)

    def back(of_h: Array, of_c: Array) -> Any:
        of_n = of_h * (1 - z) * (1 - n * n)
        parts = of_n * v_n * r * (1 - r), of_h * (h - n) * z * (1 - z), of_n * r, of_n
        return xp.concatenate(parts, 1), of_h * z, of_c

    return n + z * (h - n), c, back


def _lstm(xp: Any, u: Array, v: Array, _: Array, c: Array) -> Any:
    size, total = c.shape[1], u + v
    i, f, g, o = [total[:, k * size : (k + 1) * size] for k in range(4)]
    i, f, g, o = sigmoid_of(xp, i), sigmoid_of(xp, f), xp.tanh(g), sigmoid_of(xp, o)
    cell = f * c + i * g
    squashed = xp.tanh(cell)

    def back(of_h: Array, of_c: Array) -> Any:
        of_cell = of_c + of_h * o * (1 - squashed * squashed)
        factors = g * (i - i * i), c * (f - f * f), i * (1 - g * g)
        parts = *(of_cell * factor for factor in factors), of_h * squashed * (o - o * o)
        return xp.concatenate(parts, 1), 0, of_cell * f

    return o * squashed, cell, back


_CELLS: dict[str, Callable[..., Any]] = {"tanh": _tanh, "gru": _gru, "lstm": _lstm}


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
            grads = (array_module(grad).stack(grads).transpose(1, 3, 0, 2, 4).reshape(x.shape),)
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
