"""Attention: each query gets a weighted mean of the values (Vaswani et al., 2017)."""

import math
from itertools import chain
from typing import Any

import numpy as np

from flashlight_py.autograd.functions.elementwise import as_variable, check_filled, check_ratio
from flashlight_py.autograd.native import kernel, record_jointly
from flashlight_py.autograd.precision import as_half
from flashlight_py.autograd.variable import Input, Variable
from flashlight_py.device import Array, array_module, as_packed, narrowed, widened
from flashlight_py.random import generator, keep_mask

_KEYS = 64  # keys per tile, as in csrc/nn/attentions.inc


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
