"""Communication hooks: the contract, and compression of arrays to 16 bits or to thin matrices.

NumPy casts a number to float16 in 3 ns. If the number is below 6e-5, like most gradients, the cast
takes 100 ns, because it sets a floating-point flag. The casts here work on bits and take 3 to 5 ns.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flashlight_py.checks import check_integer
from flashlight_py.device import Array, array_module, device_of, is_cupy, to_device
from flashlight_py.distributed.api import all_reduce
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.calls.combining import store_each, views
from flashlight_py.distributed.work import Done, Then, Work

_LARGEST = 65504.0  # the largest float16
# Number of elements that are processed together, so that they stay in a cache: in casts, and in
# products of matrices.
_BLOCK, _SGD_BLOCK = 1 << 14, 1 << 15
# If a projected column is shorter than this fraction of the old length, it is rounding error.
_MIN_LENGTH = 1e-12

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_SMALLEST_NORMAL = np.uint32(0x3880_0000)  # 2**-14, as float32
_HALF = np.uint32(0x3F00_0000)  # 0.5 as float32: the value of its last bit is 2**-24
_REBIAS = np.uint32((127 - 15) << 23)  # difference of the exponent biases


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Bucket:
    """Arrays that are reduced together, such as the gradients of several parameters.

    Until the hook's Work has ended, ``flat`` belongs to the hook, which may overwrite it.

    Args:
        index: Number of the bucket in the step, from 0. A bucket has the same arrays in every step
            and on every rank, so a hook may keep state for it.
        flat: All arrays as one: one-dimensional, C-contiguous, of one dtype, on one device.
        parts: The arrays as views into ``flat`` with their own shapes.
        scale: Factor by which the sum over the ranks is multiplied.
        group: The group of the ranks.
        inline_bytes: Messages up to this number of bytes block, because a thread would take longer.
    """

    index: int
    flat: Array
    parts: Sequence[Array]
    scale: float
    group: ProcessGroup
    inline_bytes: float = 0
    in_background: bool = dataclasses.field(default=False, init=False)  # some messages are async

    def __post_init__(self) -> None:
        self.parts = tuple(self.parts)

    def all_reduce(self, array: Array, blocking: bool = False) -> Work:
        """Sum ``array`` of any shape and dtype over the ranks in place. Multiply by ``scale``."""
        if not (blocking or self._pays_inline(array)):
            return all_reduce(array, self.scale, group=self.group, async_op=True)
        all_reduce(array, self.scale, group=self.group)
        return Done(array)

    def all_gather(self, array: Array) -> Work:
        """Start to concatenate ``array`` of all ranks along the first dimension. Return a Work."""
        if self._pays_inline(array):
            return Done(self.group.all_gather(array))
        return self.group.all_gather(array, async_op=True)

    def _pays_inline(self, array: Array) -> bool:
        inline = array.nbytes <= self.inline_bytes and not is_cupy(array)
        self.in_background |= not inline
        return inline


# A hook starts the reduction of a bucket and returns its Work. After the Work's wait(), bucket.flat
# must contain the sum over the ranks times bucket.scale, or an approximation, with the same bits on
# every rank. Every rank calls the hook for the same buckets in the same order, and the hook must
# call the same collectives on every rank. The caller waits for the Works in this order. wait() may
# also call collectives.
CommunicationHook: TypeAlias = Callable[[Bucket], Work]


class Compression(abc.ABC):
    """Base class of communication hooks that send fewer bytes than a float32 or float64 bucket has.

    The result has the same bits on every rank. Create the hook with equal arguments on all ranks.
    It keeps state for each bucket, so use it for only one reducer or module.
    """

    # Arrays in ``state_dict`` are named "<name>.<bucket>" or "<name>.<bucket>.<part>".
    _state_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._state: dict[str, Array] = {}
        self._sent: dict[int, int] = {}

    def __call__(self, bucket: Bucket) -> Work:
        """Start to reduce ``bucket``; see ``CommunicationHook``.

        Raises:
            TypeError: If the dtype of the bucket is neither float32 nor float64.
            ValueError: If the state from ``load_state_dict`` does not fit the bucket.
        """
        self.check_dtype(bucket.flat.dtype)
        if bucket.index == 0:
            self._sent.clear()
        self._sent[bucket.index] = 0
        return self._start(bucket)

    @abc.abstractmethod
    def _start(self, bucket: Bucket) -> Work:
        """Start to reduce ``bucket``. Call ``_count`` for each message that is sent."""

    def _count(self, bucket: Bucket, message: Array) -> None:
        self._sent[bucket.index] += message.nbytes

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise if this hook does not compress arrays of ``dtype``.

        Raises:
            TypeError: If the dtype is neither float32 nor float64.
        """
        if dtype.name not in ("float32", "float64"):  # in any byte order
            raise TypeError(
                f"{type(self).__name__}: the dtype must be float32 or float64, got {dtype}. Reduce "
                "these arrays without a hook, or cast the module"
            )

    @property
    def bytes_per_step(self) -> int:
        """Bytes that this rank has passed to collectives since the current or latest step began.

        A collective may send more or fewer bytes; see docs/compression.md.
        """
        return sum(self._sent.values())

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the arrays that the next step depends on, by name.

        Each rank has its own state. It is empty before the first step, and for hooks without state.
        """
        return {name: array.copy() for name, array in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore the state that ``state_dict`` of this rank returned. It is copied.

        The next step then has the same bits as without the interruption. If the shapes do not fit
        the buckets, the next step raises ValueError.

        Raises:
            ValueError: If a name does not belong to this hook. Nothing is loaded.
            TypeError: If a value is not a NumPy or CuPy array. Nothing is loaded.
        """
        prefix = f"{type(self).__name__}.load_state_dict: nothing was loaded:"
        entries: Mapping[str, object] = state
        for name, value in entries.items():
            kind, *numbers = name.split(".")
            if kind not in self._state_names or not all(number.isdigit() for number in numbers):
                names = ", ".join(f"{kind}.<bucket>" for kind in self._state_names) or "absent"
                raise ValueError(
                    f"{prefix} names must be {names}, got {name!r}. Load the state_dict() of "
                    "the same hook"
                )
            if not isinstance(value, np.ndarray) and not is_cupy(value):
                raise TypeError(f"{prefix} {name!r} must be an array, got {type(value).__name__}")
        self._state = {name: array.copy() for name, array in state.items()}


class CastCompression(Compression):
    """A hook that casts to ``dtype`` (16 bits), sums over the ranks, and casts back."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self._dtype = dtype
        self._infinity = int(np.array(np.inf).astype(dtype).view(np.uint16))

    def _start(self, bucket: Bucket) -> Work:
        narrow = self._narrow(bucket.flat)
        self._count(bucket, narrow)
        return Then(bucket.all_reduce(narrow), lambda _: self._widen(narrow, bucket.flat))

    def _narrow(self, flat: Array) -> Array:
        """Round to 16 bits. Finite numbers stay finite. Infinities and NaN do not change."""
        if self._dtype == np.float16 and not is_cupy(flat):
            return to_half(flat)
        with np.errstate(all="ignore"):
            narrow: Array = flat.astype(self._dtype)
        bits = narrow.view(np.uint16)
        overflowed = bits & 0x7FFF == self._infinity  # isinf takes 20 times as long
        if overflowed.any():
            bits[overflowed & array_module(flat).isfinite(flat)] -= 1  # largest finite number
        return narrow

    def _widen(self, narrow: Array, out: Array) -> None:
        if self._dtype == np.float16 and not is_cupy(narrow):
            from_half(narrow, out)
        else:
            out[...] = narrow


class Float16Compression(CastCompression):
    """Sends arrays as float16: half the bytes of float32, a quarter of float64.

    Each value is rounded to 11 bits (a relative error of 2**-11), and sent. The ranks sum and scale
    in float32, and round the result once more. A finite number that is too large for float16 is
    sent as +-65504, the largest float16, so that one outlier cannot make parameters infinite.
    Infinities and NaN are sent unchanged. Numbers below 6e-5 lose digits, and numbers below 3e-8
    become 0. For such gradients, use ``Bfloat16Compression`` or multiply the loss by a constant.

    CuPy arrays are summed and scaled by NCCL, which rounds in its own way.

    Example:
        >>> gradient = np.array([1 / 3, 1e6, -np.inf])
        >>> reducer = fl.CoalescingReducer(scale=1.0, hook=fl.Float16Compression())
        >>> reducer.add(gradient)
        >>> reducer.finalize()
        >>> gradient.tolist()
        [0.333251953125, 65504.0, -inf]
    """

    def __init__(self) -> None:
        super().__init__(np.dtype(np.float16))


class Bfloat16Compression(CastCompression):
    """Sends arrays as bfloat16: half the bytes of float32, a quarter of float64.

    Each value is rounded to 8 bits (a relative error of 2**-8), and sent. The ranks sum and scale
    in float32, and round the result once more. The range is that of float32: float64 numbers beyond
    3.4e38 are sent as the largest number. Infinities and NaN are sent unchanged. Needs ml_dtypes,
    and for CuPy arrays a CuPy with bfloat16.

    Raises:
        ImportError: If ml_dtypes is not installed.
    """

    def __init__(self) -> None:
        try:
            from ml_dtypes import bfloat16
        except ImportError as error:
            raise ImportError(
                f"Bfloat16Compression needs ml_dtypes, which cannot be imported ({error}). "
                "Install it with: pip install 'flashlight-py[bfloat16]', or use Float16Compression"
            ) from error
        super().__init__(np.dtype(bfloat16))

    def _narrow(self, flat: Array) -> Array:
        try:
            return super()._narrow(flat)
        except (TypeError, ValueError) as error:
            if not is_cupy(flat):
                raise
            raise TypeError(
                f"Bfloat16Compression: this CuPy has no bfloat16 ({error}). Use Float16Compression"
            ) from error


def to_half(flat: Array) -> NDArray[np.float16]:
    """Return a one-dimensional array (float32 or float64) rounded to the nearest float16.

    Ties round to even. Float64 is rounded to float32 first. A finite number that is too large
    becomes the largest float16. Infinities and NaN do not change.
    """
    half = np.empty(flat.shape, np.float16)
    bits = half.view(np.uint16)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            bits[start : start + _BLOCK] = _half_bits(block)
            finite = np.isfinite(block)
            if not finite.all():
                half[start : start + _BLOCK][~finite] = block[~finite]
    return half


def _half_bits(block: Array) -> NDArray[np.uint32]:
    bits = np.clip(block, -_LARGEST, _LARGEST).astype(np.float32).view(np.uint32)
    magnitude = bits & _MAGNITUDE
    # Below 2**-14, float16 numbers are multiples of 2**-24. Adding 0.5 rounds to such a multiple.
    small = (magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - _HALF
    is_small = magnitude < _SMALLEST_NORMAL
    # Round to 11 bits: to the nearest number, and ties to even.
    magnitude += (magnitude >> np.uint32(13)) & np.uint32(1)
    magnitude += np.uint32(0xFFF)
    magnitude -= _REBIAS
    magnitude >>= np.uint32(13)
    rounded: NDArray[np.uint32] = np.where(is_small, small, magnitude)
    return rounded | (bits >> np.uint32(16)) & np.uint32(0x8000)


def from_half(half: NDArray[np.float16], out: Array) -> None:
    np.take(_numbers(out.dtype), half.view(np.uint16), out=out, mode="clip")


@functools.cache
def _numbers(dtype: DTypeLike) -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(dtype)


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
    height = len(out) if is_cupy(out) else max(1, _SGD_BLOCK // out.shape[1])
    for start in range(0, len(out), height):
        block, weights = out[start : start + height], left[start : start + height]
        xp.multiply(weights[:, :1], rows[0], out=block)
        for column in range(1, len(rows)):
            block += weights[:, column : column + 1] * rows[column]


def check_hook(hook: object, parts: Sequence[Sequence[Array]] = ()) -> None:
    if not callable(hook) or isinstance(hook, type):
        raise TypeError(
            "a communication hook must be callable with a bucket, got "
            f"{hook!r}. Pass an object such as fl.Float16Compression()"
        )
    if isinstance(hook, Compression):
        for arrays in parts:
            hook.check_dtype(arrays[0].dtype)
