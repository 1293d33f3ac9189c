"""Arithmetic with the same bits on every rank, whatever processor and BLAS each of them has.

Matrix products of BLAS add in an order that depends on the processor and the number of threads.
Here are element by element operations alone, whose results IEEE 754 fixes.
"""

from __future__ import annotations

import math

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy

# What is left of a column after its projections were taken away, as a share of the column: less
# than this is what rounding has left of nothing.
_NOTHING = 1e-12
# Elements of a block that stays in a second-level cache while it is added to.
_BLOCK = 1 << 15


def orthonormal(columns: Array) -> Array:
    """Return a new matrix of the same shape and dtype whose columns are orthonormal.

    The first j of them span the first j of ``columns``; where these are linearly dependent, or
    zero, arbitrary directions take their place, the same on every rank. All NaN where ``columns``
    is not finite. Gram-Schmidt in float64, each column projected twice, which is enough: Giraud,
    Langou, Rozloznik, The loss of orthogonality in the Gram-Schmidt process (2005).

    Args:
        columns: shape ``(n, r)`` with r at most n, float32 or float64.
    """
    xp = array_module(columns)
    if not xp.isfinite(columns).all():
        return xp.full_like(columns, np.nan)  # type: ignore[no-any-return]
    rows = xp.array(columns.T, dtype=np.float64, order="C")
    for number, row in enumerate(rows):
        earlier, attempt = rows[:number], 0
        while not _project_away(row, earlier):
            row[...] = uniform(row, row.shape, number, attempt)
            attempt += 1
    return xp.ascontiguousarray(rows.T, dtype=columns.dtype)  # type: ignore[no-any-return]


def _project_away(row: Array, earlier: Array) -> bool:
    """Make ``row`` orthogonal to ``earlier`` and of length 1; False if nothing is left of it."""
    sqrt = array_module(row).sqrt
    before = sqrt(_dot(row, row))
    for _ in range(2):
        for other in earlier:
            row -= _dot(row, other) * other
    after = sqrt(_dot(row, row))
    if not float(after) > _NOTHING * float(before):
        return False
    row /= after
    return True


def uniform(like: Array, shape: tuple[int, ...], *seed: int) -> Array:
    """Return random numbers from -1 to 1, of the dtype and on the device of ``like``.

    They are made of PCG64's bits, which NumPy promises to stay as they are for a seed; those of
    its distributions may change with a release, and ranks may run different ones.
    """
    bits = np.random.PCG64(list(seed)).random_raw(math.prod(shape))
    numbers = (bits >> np.uint64(11)) * 2.0**-52 - 1
    return array_module(like).asarray(numbers.reshape(shape).astype(like.dtype))  # type: ignore[no-any-return]


def _dot(a: Array, b: Array) -> Array:
    """Return the sum of ``a * b``: the halves are added until one element is left."""
    terms = a * b
    if is_cupy(terms):
        return terms.sum()  # type: ignore[no-any-return]  # one kernel, and GPUs of a job are alike
    while terms.size > 1:
        half = terms.size // 2
        terms[:half] += terms[terms.size - half :]
        terms = terms[: terms.size - half]
    return terms[0]  # type: ignore[no-any-return]


def outer_sum(left: Array, right: Array, out: Array) -> None:
    """Write ``left @ right.T`` into ``out``, in the order of the columns.

    Args:
        left: shape ``(n, r)``, the dtype of ``out``.
        right: shape ``(m, r)``, the dtype of ``out``.
        out: shape ``(n, m)``.
    """
    xp = array_module(out)
    rows = xp.ascontiguousarray(right.T)
    height = len(out) if is_cupy(out) else max(1, _BLOCK // out.shape[1])
    for start in range(0, len(out), height):
        block, weights = out[start : start + height], left[start : start + height]
        xp.multiply(weights[:, :1], rows[0], out=block)
        for column in range(1, len(rows)):
            block += weights[:, column : column + 1] * rows[column]
