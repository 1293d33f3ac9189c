"""Communication hooks: the contract, and the base class of compressing hooks."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.api import all_reduce
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.calls.combining import split_rows
from flashlight_py.distributed.work import Done, Work


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


def views(flat: Array, shapes: Iterable[tuple[int, ...]]) -> list[Array]:
    shapes = list(shapes)
    parts = split_rows(flat, [math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


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


def check_hook(hook: object, parts: Sequence[Sequence[Array]] = ()) -> None:
    if not callable(hook) or isinstance(hook, type):
        raise TypeError(
            "a communication hook must be callable with a bucket, got "
            f"{hook!r}. Pass an object such as fl.Float16Compression()"
        )
    if isinstance(hook, Compression):
        for arrays in parts:
            hook.check_dtype(arrays[0].dtype)
