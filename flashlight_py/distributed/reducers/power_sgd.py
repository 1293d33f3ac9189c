"""Compression of each gradient matrix to a product of two thin matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from flashlight_py.checks import check_integer
from flashlight_py.device import Array, array_module, device_of, is_cupy, to_device
from flashlight_py.distributed.calls.combining import store_each, views
from flashlight_py.distributed.reducers.hook import Bucket, Compression
from flashlight_py.distributed.work import Then, Work

# If a projected column is shorter than this fraction of the old length, it is rounding error.
_MIN_LENGTH = 1e-12
# Number of elements that are processed together, so that they stay in the second-level cache.
_BLOCK = 1 << 15


class PowerSGDCompression(Compression):
    """Sends each gradient matrix as a product of two thin matrices of ``rank`` columns.

    Algorithms 1 and 2 of Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization (2019).

    A gradient of two or more dimensions is used as a matrix M with ``shape[0]`` rows. A step
    computes ``P = orthonormal(sum of M Q)`` over the ranks, then ``Q' = sum of M.T P``, and returns
    ``P Q'.T``. The next step uses ``orthonormal(Q')`` as Q. Each rank adds its error ``M - P P.T
    M`` to its next gradient. The first step is exact if the matrix rank of the sum of all M is at
    most ``rank``. Gradients of one dimension and small matrices are sent exactly, in the same
    message as all ``M Q``.

    The result has the same bits on all ranks, even if their processors or BLAS libraries differ.
    The hook needs memory for one more copy of the gradients. If a matrix has NaN or infinities on
    one rank, it becomes NaN on all ranks, and the state of its bucket is dropped.

    Args:
        rank: Columns of the thin matrices, at least 1. With more columns, the result is more exact
            and more bytes are sent.
        start_step: Number of first steps without compression. Early gradients change fast, and some
            hundred exact steps often help.
        min_compression: Minimum ratio of bytes without and with compression, at least 1. Matrices
            with a smaller ratio are sent exactly.
        seed: Seed of the random Q in the first step, the same on every rank.

    Raises:
        TypeError: If ``rank``, ``start_step`` or ``seed`` is not an integer, or ``min_compression``
            is not a number.
        ValueError: If an argument is too small or not finite.

    Example:
        >>> hook = fl.PowerSGDCompression(rank=1)
        >>> gradient = np.outer(np.arange(40.0), np.arange(30.0))
        >>> reducer = fl.CoalescingReducer(scale=0.5, hook=hook)
        >>> reducer.add(gradient)
        >>> reducer.finalize()
        >>> bool(np.allclose(gradient, 0.5 * np.outer(np.arange(40.0), np.arange(30.0))))
        True
        >>> hook.bytes_per_step  # of 9600
        560
    """

    _state_names = ("residual", "factor", "step")

    def __init__(
        self, rank: int = 2, start_step: int = 0, min_compression: float = 2.0, seed: int = 0
    ) -> None:
        super().__init__()
        name = "PowerSGDCompression"
        self.rank = check_integer(name, "rank", rank, least=1)
        self.start_step = check_integer(name, "start_step", start_step)
        self.seed = check_integer(name, "seed", seed)
        if isinstance(min_compression, bool) or not isinstance(min_compression, (int, float)):
            kind = type(min_compression).__name__
            raise TypeError(f"PowerSGDCompression: min_compression must be a number, got {kind}")
        if not 1 <= min_compression < math.inf:
            raise ValueError(
                f"PowerSGDCompression: min_compression must be finite and at least 1, got "
                f"{min_compression}"
            )
        self.min_compression = float(min_compression)

    def _start(self, bucket: Bucket) -> Work:
        selected = [number for number, part in enumerate(bucket.parts) if self._pays(part.shape)]
        name = f"step.{bucket.index}"
        step = int(self._state.get(name, 0))
        self._state[name] = np.array(step + 1)
        if step < self.start_step or not selected:
            self._count(bucket, bucket.flat)
            return bucket.all_reduce(bucket.flat)
        return self._start_products(bucket, selected)

    def _pays(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2 or not math.prod(shape):
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return rows * columns >= self.min_compression * self.rank * (rows + columns)

    def _start_products(self, bucket: Bucket, selected: Sequence[int]) -> Work:
        """Compress the parts with indices in ``selected``, and send the other parts unchanged."""
        xp = array_module(bucket.flat)
        residual_views = views(self._residual(bucket), [part.shape for part in bucket.parts])
        residuals = [_matrix(residual_views[part]) for part in selected]
        matrices = [_matrix(bucket.parts[part]) for part in selected]
        pairs = zip(selected, matrices, strict=True)
        factors = [self._factor(bucket, part, matrix.shape[1]) for part, matrix in pairs]
        other_parts = [part for number, part in enumerate(bucket.parts) if number not in selected]
        shapes = [(len(matrix), self.rank) for matrix in matrices]
        message, parts = self._message(bucket, shapes + [part.shape for part in other_parts])
        lefts, exact = parts[: len(shapes)], parts[len(shapes) :]
        with np.errstate(all="ignore"):
            for number, residual in enumerate(residuals):
                matrices[number] += residual
                xp.matmul(matrices[number], factors[number], out=lefts[number])
        store_each(exact, other_parts)

        def finish(_: object) -> None:
            shapes = [(matrix.shape[1], self.rank) for matrix in matrices]
            message, rights = self._message(bucket, shapes)
            bases = [orthonormal(left) for left in lefts]
            products = list(zip(bases, rights, matrices, strict=True))
            with np.errstate(all="ignore"):
                for (base, right, matrix), residual in zip(products, residuals, strict=True):
                    xp.matmul(matrix.T, base, out=right)
                    xp.matmul(base, right.T, out=residual)  # temporarily the product P P.T M
                    xp.subtract(matrix, residual, out=residual)
            bucket.all_reduce(message, blocking=True).wait()
            for base, right, matrix in products:
                outer_sum(base, right, out=matrix)
            store_each(other_parts, exact)
            is_finite = xp.isfinite(message).all()
            if not is_finite:
                self._residual(bucket)[...] = 0
            for number, right in zip(selected, rights, strict=True):
                name = f"factor.{bucket.index}.{number}"
                if is_finite:
                    self._state[name] = orthonormal(right)
                else:
                    self._state.pop(name, None)

        return Then(bucket.all_reduce(message), finish)

    def _residual(self, bucket: Bucket) -> Array:
        zeros = functools.partial(array_module(bucket.flat).zeros_like, bucket.flat)
        return self._get_state(f"residual.{bucket.index}", bucket.flat.shape, bucket.flat, zeros)

    def _factor(self, bucket: Bucket, part: int, columns: int) -> Array:
        shape, flat = (columns, self.rank), bucket.flat
        create = functools.partial(uniform_numbers, flat, shape, self.seed, bucket.index, part)
        return self._get_state(f"factor.{bucket.index}.{part}", shape, flat, create)

    def _get_state(
        self, name: str, shape: tuple[int, ...], like: Array, create: Callable[[], Array]
    ) -> Array:
        """Return the state ``name``, on the device of ``like``. If it is missing, create it."""
        state = self._state.get(name)
        if state is None:
            state = create()
        if state.shape != shape or state.dtype != like.dtype:
            raise ValueError(
                f"{type(self).__name__}: {name} must be {like.dtype} {shape} for this bucket, got "
                f"{state.dtype} {state.shape}. Load the state of the same arrays, and use one hook "
                "for each reducer"
            )
        if device_of(state) != device_of(like):
            state = to_device(state, device_of(like))
        self._state[name] = state
        return state

    def _message(
        self, bucket: Bucket, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Array, list[Array]]:
        size = sum(math.prod(shape) for shape in shapes)
        message = array_module(bucket.flat).empty(size, bucket.flat.dtype)
        self._count(bucket, message)
        return message, views(message, shapes)


def _matrix(array: Array) -> Array:
    return array.reshape(len(array), -1)


def orthonormal(columns: Array) -> Array:
    """Return a new matrix (n, r), r <= n, whose columns are an orthonormal basis of ``columns``.

    For every j, its first j columns span the same space as the first j of ``columns``. If columns
    are zero or linearly dependent, random directions replace them, the same on every rank. The
    result is NaN if ``columns`` is not finite. The method is Gram-Schmidt in float64. Each column
    is projected twice, which is enough: Giraud, Langou, Rozloznik, The loss of orthogonality in the
    Gram-Schmidt process (2005).
    """
    xp = array_module(columns)
    if not xp.isfinite(columns).all():
        return xp.full_like(columns, np.nan)  # type: ignore[no-any-return]
    rows = xp.array(columns.T, dtype=np.float64, order="C")
    for number, row in enumerate(rows):
        earlier, attempt = rows[:number], 0
        while not _project_away(row, earlier):
            row[...] = uniform_numbers(row, row.shape, number, attempt)
            attempt += 1
    return xp.ascontiguousarray(rows.T, dtype=columns.dtype)  # type: ignore[no-any-return]


def _project_away(row: Array, earlier: Array) -> bool:
    """Make ``row`` orthogonal to ``earlier``, with length 1. Return False if it becomes zero."""
    sqrt = array_module(row).sqrt
    before = sqrt(_dot(row, row))
    for _ in range(2):
        for other in earlier:
            row -= _dot(row, other) * other
    after = sqrt(_dot(row, row))
    if not float(after) > _MIN_LENGTH * float(before):
        return False
    row /= after
    return True


def uniform_numbers(like: Array, shape: tuple[int, ...], *seed: int) -> Array:
    """Return random numbers in [-1, 1), of the dtype and on the device of ``like``.

    They are computed from the bits of PCG64, because NumPy guarantees only these bits for a seed.
    The ranks may use different releases of NumPy.
    """
    bits = np.random.PCG64(list(seed)).random_raw(math.prod(shape))
    numbers = (bits >> np.uint64(11)) * 2.0**-52 - 1
    return array_module(like).asarray(numbers.reshape(shape).astype(like.dtype))  # type: ignore[no-any-return]


def _dot(a: Array, b: Array) -> Array:
    """Return the sum of ``a * b``, in an order that does not depend on the processor."""
    terms = a * b
    if is_cupy(terms):
        return terms.sum()  # type: ignore[no-any-return]  # one kernel, and GPUs of a job are alike
    while terms.size > 1:
        half = terms.size // 2
        terms[:half] += terms[terms.size - half :]
        terms = terms[: terms.size - half]
    return terms[0]  # type: ignore[no-any-return]


def outer_sum(left: Array, right: Array, out: Array) -> None:
    """Write ``left @ right.T`` to ``out``. Terms are added in column order on every rank."""
    xp = array_module(out)
    rows = xp.ascontiguousarray(right.T)
    height = len(out) if is_cupy(out) else max(1, _BLOCK // out.shape[1])
    for start in range(0, len(out), height):
        block, weights = out[start : start + height], left[start : start + height]
        xp.multiply(weights[:, :1], rows[0], out=block)
        for column in range(1, len(rows)):
            block += weights[:, column : column + 1] * rows[column]
