"""Communication hooks: the contract on one screen, and the common base of those that compress."""

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

    Until the hook's Work has ended, ``flat`` belongs to the hook, which may compute in it.

    Args:
        index: the bucket's number in the step, from 0. The arrays that have it are the same ones
            in every step and on every rank, so a hook may keep state by it.
        flat: all of them as one array: one dimension, C-contiguous, one dtype, on one device.
        parts: the arrays one by one, as views into ``flat`` with their own shapes.
        scale: factor of the sums.
        group: the ranks.
        inline_bytes: messages of at most this many bytes block, which costs less than a thread.
    """

    index: int
    flat: Array
    parts: Sequence[Array]
    scale: float
    group: ProcessGroup
    inline_bytes: float = 0
    in_background: bool = dataclasses.field(default=False, init=False)  # a message did not block

    def __post_init__(self) -> None:
        self.parts = tuple(self.parts)

    def all_reduce(self, array: Array, blocking: bool = False) -> Work:
        """Sum an array of any shape and dtype over the ranks, times ``scale``, in place."""
        if not (blocking or self._pays_inline(array)):
            return all_reduce(array, self.scale, group=self.group, async_op=True)
        all_reduce(array, self.scale, group=self.group)
        return Done(array)

    def all_gather(self, array: Array) -> Work:
        """Join the ranks' arrays (any shape and dtype) along the first dimension; a new array."""
        if self._pays_inline(array):
            return Done(self.group.all_gather(array))
        return self.group.all_gather(array, async_op=True)

    def _pays_inline(self, array: Array) -> bool:
        inline = array.nbytes <= self.inline_bytes and not is_cupy(array)
        self.in_background |= not inline
        return inline


# A hook starts the reduction of a bucket and returns its Work. After the Work's wait(), bucket.flat
# holds the sum over the ranks times bucket.scale, or what the hook puts in its place: the same bits
# on every rank. A hook is called on every rank for the same buckets in the same order, while the
# backward pass goes on, and calls the same collectives on every rank. Its Works are waited for in
# the order in which it returned them; they may communicate then, too.
CommunicationHook: TypeAlias = Callable[[Bucket], Work]


def views(flat: Array, shapes: Iterable[tuple[int, ...]]) -> list[Array]:
    """Cut an array of one dimension into views of these shapes, one after the other."""
    shapes = list(shapes)
    parts = split_rows(flat, [math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class Compression(abc.ABC):
    """A communication hook that sends less than it is given: float32 or float64 arrays.

    Its result is the same on every rank, bit for bit. Every rank makes it with the same arguments,
    and one instance serves one reducer or module: its memory belongs to their buckets.
    """

    # State is kept by "<name>.<index of the bucket>", or "<name>.<index>.<part>". These names:
    _remembers: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._state: dict[str, Array] = {}
        self._sent: dict[int, int] = {}

    def __call__(self, bucket: Bucket) -> Work:
        """Start reducing ``bucket``; see ``CommunicationHook``.

        Raises:
            TypeError: its dtype is neither float32 nor float64.
            ValueError: what was loaded does not fit the bucket.
        """
        self.check_dtype(bucket.flat.dtype)
        if bucket.index == 0:
            self._sent.clear()
        self._sent[bucket.index] = 0
        return self._start(bucket)

    @abc.abstractmethod
    def _start(self, bucket: Bucket) -> Work:
        """Start reducing ``bucket``, whose dtype is right; count the bytes of each message."""

    def _count(self, bucket: Bucket, message: Array) -> None:
        self._sent[bucket.index] += message.nbytes

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Refuse arrays that this hook does not compress.

        Raises:
            TypeError: the dtype is neither float32 nor float64.
        """
        if dtype.name not in ("float32", "float64"):  # in any byte order
            raise TypeError(
                f"{type(self).__name__} compresses float32 and float64, got {dtype}; reduce these "
                "arrays without a hook, or cast the module"
            )

    @property
    def bytes_per_step(self) -> int:
        """Bytes that this rank passed to collectives in the last step, or in this one so far.

        docs/compression.md says how many bytes a collective then sends between n ranks.
        """
        return sum(self._sent.values())

    def state_dict(self) -> dict[str, Array]:
        """Return copies of what the next step depends on, by name; every rank has its own.

        It is empty for hooks without a state, and before the first step.
        """
        return {name: array.copy() for name, array in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copy what ``state_dict`` of this rank returned; the next step then has the same bits.

        The next step compares the shapes of the arrays with its buckets.

        Raises:
            ValueError: a name is not one of this hook's; nothing was loaded.
            TypeError: a value is no NumPy or CuPy array; nothing was loaded.
        """
        prefix = f"{type(self).__name__}.load_state_dict: nothing was loaded:"
        given: Mapping[str, object] = state
        for name, value in given.items():
            kind, *numbers = name.split(".")
            if kind not in self._remembers or not all(number.isdigit() for number in numbers):
                known = ", ".join(f"{kind}.<bucket>" for kind in self._remembers) or "no state"
                raise ValueError(
                    f"{prefix} it has {known}, got {name!r}; load what state_dict() of the same "
                    "hook returned"
                )
            if not isinstance(value, np.ndarray) and not is_cupy(value):
                raise TypeError(f"{prefix} {name!r} is no array but {type(value).__name__}")
        self._state = {name: array.copy() for name, array in state.items()}


def check_hook(hook: object, parts: Sequence[Sequence[Array]] = ()) -> None:
    """Refuse what is no hook, or a compression of ``parts`` whose dtype it does not take."""
    if not callable(hook) or isinstance(hook, type):
        raise TypeError(
            "a communication hook is called with a bucket, such as fl.Float16Compression(); got "
            f"{hook!r}"
        )
    if isinstance(hook, Compression):
        for arrays in parts:
            hook.check_dtype(arrays[0].dtype)
