"""Communication hooks: the contract, and compression of arrays, such as to 16 bits per number.

NumPy casts a number to float16 in 3 ns. If the number is below 6e-5, like most gradients, the cast
takes 100 ns, because it sets a floating-point flag. The casts here work on bits and take 3 to 5 ns.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.api import all_reduce
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.work import Done, Then, Work

LARGEST = 65504.0
# Number of elements that are processed together, so that they stay in a cache.
_BLOCK = 1 << 14

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
    bits = np.clip(block, -LARGEST, LARGEST).astype(np.float32).view(np.uint32)
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


def check_hook(hook: object, parts: Sequence[Sequence[Array]] = ()) -> None:
    if not callable(hook) or isinstance(hook, type):
        raise TypeError(
            "a communication hook must be callable with a bucket, got "
            f"{hook!r}. Pass an object such as fl.Float16Compression()"
        )
    if isinstance(hook, Compression):
        for arrays in parts:
            hook.check_dtype(arrays[0].dtype)
