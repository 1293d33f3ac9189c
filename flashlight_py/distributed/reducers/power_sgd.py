"""Sending gradient matrices as products of two thin ones, with the same bits on every rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from flashlight_py.device import Array, array_module, device_of, is_cupy, to_device
from flashlight_py.distributed.calls.checks import check_integer
from flashlight_py.distributed.reducers.hook import Bucket, Compression, views
from flashlight_py.distributed.work import Then, Work

# What is left of a column after its projections were taken away, as a share of the column: less
# than this is what rounding has left of nothing.
_NOTHING = 1e-12
# Elements of a block that stays in a second-level cache while it is added to.
_BLOCK = 1 << 15


class PowerSGDCompression(Compression):
    """Sends each matrix as a product of rank ``rank``, found by one step of power iteration.

    A gradient of two or more dimensions counts as a matrix of ``shape[0]`` rows. For matrices M of
    the ranks, ``P = orthonormal(sum of M Q)`` and ``Q = sum of M.T P``; the result is ``P Q.T``,
    and each rank adds what its own ``P P.T M`` lacks to its next gradient (error feedback). The
    next step begins with this Q (warm start). Matrices whose sum has no larger rank are exact in
    the first step. Gradients of one dimension, and matrices too small to pay, are sent exactly, in
    the same message as all ``M Q``.

    Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization (2019), algorithms 1 and 2.

    All ranks get the same bits, also if their processors or BLAS libraries differ. Takes memory for
    one more gradient. A matrix with NaN or infinities on one rank becomes NaN on all, and the state
    of its bucket is dropped.

    Args:
        rank: columns of the thin matrices, at least 1. More are more exact, and more bytes.
        start_step: steps (from 0) that are reduced exactly before compression begins. Early
            gradients change fast; some hundred exact steps often help.
        min_compression: a matrix is compressed if that makes it smaller by this factor or more,
            at least 1.
        seed: of the random Q in the first step, the same on every rank.

    Raises:
        TypeError: ``rank``, ``start_step`` or ``seed`` is no integer, or ``min_compression`` no
            number.
        ValueError: one of them is too small, or not finite.

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

    _remembers = ("residual", "factor", "step")

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
        chosen = [number for number, part in enumerate(bucket.parts) if self._pays(part.shape)]
        name = f"step.{bucket.index}"
        step = int(self._state.get(name, 0))
        self._state[name] = np.array(step + 1)
        if step < self.start_step or not chosen:
            self._count(bucket, bucket.flat)
            return bucket.all_reduce(bucket.flat)
        return self._start_products(bucket, chosen)

    def _pays(self, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2 or not math.prod(shape):
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return rows * columns >= self.min_compression * self.rank * (rows + columns)

    def _start_products(self, bucket: Bucket, chosen: Sequence[int]) -> Work:
        """Send ``M Q`` of the matrices ``chosen``, and all else; when it has come, ``M.T P``."""
        xp = array_module(bucket.flat)
        left_over = views(self._residual(bucket), [part.shape for part in bucket.parts])
        residuals = [_matrix(left_over[part]) for part in chosen]
        matrices = [_matrix(bucket.parts[part]) for part in chosen]
        pairs = zip(chosen, matrices, strict=True)
        factors = [self._factor(bucket, part, matrix.shape[1]) for part, matrix in pairs]
        rest = [part for number, part in enumerate(bucket.parts) if number not in chosen]
        shapes = [(len(matrix), self.rank) for matrix in matrices]
        message, parts = self._message(bucket, shapes + [part.shape for part in rest])
        lefts, exact = parts[: len(shapes)], parts[len(shapes) :]
        with np.errstate(all="ignore"):
            for number, residual in enumerate(residuals):
                matrices[number] += residual
                xp.matmul(matrices[number], factors[number], out=lefts[number])
        for sent, part in zip(exact, rest, strict=True):
            sent[...] = part

        def finish(_: object) -> None:
            """Put the products where the gradients were."""
            shapes = [(matrix.shape[1], self.rank) for matrix in matrices]
            message, rights = self._message(bucket, shapes)
            bases = [orthonormal(left) for left in lefts]
            products = list(zip(bases, rights, matrices, strict=True))
            with np.errstate(all="ignore"):
                for (base, right, matrix), residual in zip(products, residuals, strict=True):
                    xp.matmul(matrix.T, base, out=right)
                    xp.matmul(base, right.T, out=residual)  # what the product lacks
                    xp.subtract(matrix, residual, out=residual)
            bucket.all_reduce(message, blocking=True).wait()
            for base, right, matrix in products:
                outer_sum(base, right, out=matrix)
            for sent, part in zip(exact, rest, strict=True):
                part[...] = sent
            is_finite = xp.isfinite(message).all()
            if not is_finite:
                self._residual(bucket)[...] = 0
            for number, right in zip(chosen, rights, strict=True):
                name = f"factor.{bucket.index}.{number}"
                if is_finite:
                    self._state[name] = orthonormal(right)
                else:
                    self._state.pop(name, None)

        return Then(bucket.all_reduce(message), finish)

    def _residual(self, bucket: Bucket) -> Array:
        """Return what earlier steps have left of the bucket unsent, to be changed in place."""
        zeros = functools.partial(array_module(bucket.flat).zeros_like, bucket.flat)
        return self._recall(f"residual.{bucket.index}", bucket.flat.shape, bucket.flat, zeros)

    def _factor(self, bucket: Bucket, part: int, columns: int) -> Array:
        """Return the Q with which the power iteration of this part continues."""
        shape, flat = (columns, self.rank), bucket.flat
        first = functools.partial(uniform, flat, shape, self.seed, bucket.index, part)
        return self._recall(f"factor.{bucket.index}.{part}", shape, flat, first)

    def _recall(
        self, name: str, shape: tuple[int, ...], like: Array, first: Callable[[], Array]
    ) -> Array:
        """Return the state ``name``, at first ``first()``, on the device of ``like``.

        Raises ValueError if it has another shape, or another dtype than ``like``.
        """
        found = self._state.get(name)
        if found is None:
            found = first()
        if found.shape != shape or found.dtype != like.dtype:
            raise ValueError(
                f"{type(self).__name__}: {name} is {found.dtype} {found.shape} and the bucket "
                f"needs {like.dtype} {shape}; the state is that of other arrays, or this hook "
                "serves two reducers: give each one of its own"
            )
        if device_of(found) != device_of(like):
            found = to_device(found, device_of(like))
        self._state[name] = found
        return found

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
    """Return a new matrix with orthonormal columns, like ``columns`` of shape (n, r), r <= n.

    The first j of them span the first j of ``columns``; where these are linearly dependent, or
    zero, arbitrary directions take their place, the same on every rank. All NaN where ``columns``
    is not finite. Gram-Schmidt in float64, each column projected twice, which is enough: Giraud,
    Langou, Rozloznik, The loss of orthogonality in the Gram-Schmidt process (2005).
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
    """Write ``left @ right.T`` into ``out`` (n, m), of one dtype, in the order of the columns."""
    xp = array_module(out)
    rows = xp.ascontiguousarray(right.T)
    height = len(out) if is_cupy(out) else max(1, _BLOCK // out.shape[1])
    for start in range(0, len(out), height):
        block, weights = out[start : start + height], left[start : start + height]
        xp.multiply(weights[:, :1], rows[0], out=block)
        for column in range(1, len(rows)):
            block += weights[:, column : column + 1] * rows[column]
