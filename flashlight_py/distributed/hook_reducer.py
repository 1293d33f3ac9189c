"""A reducer that gives what it reduces to a communication hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.group import ProcessGroup
from flashlight_py.distributed.hooks.bucket import Bucket, CommunicationHook, call_hook
from flashlight_py.distributed.hooks.compression import check_hook
from flashlight_py.distributed.reducer import INLINE_BYTES, Reducer
from flashlight_py.distributed.work import Work
from flashlight_py.distributed.world import group_or_world

__all__ = ["HookReducer"]


class HookReducer(Reducer):
    """Lets ``hook`` start each flat array when it is added, and waits in ``finalize``.

    Args:
        scale: factor of every sum, such as 1 / world size for the mean.
        hook: what reduces them.
        parts: for each array, in the order in which they will be added, the views into it.
        inline_bytes: messages of at most so many bytes block, as in ``EagerReducer``.
        group: the process group, default the world.

    Raises:
        TypeError: ``hook`` is not callable, or does not compress arrays of this dtype.
    """

    def __init__(
        self,
        scale: float,
        hook: CommunicationHook,
        parts: Sequence[Sequence[Array]],
        inline_bytes: int = INLINE_BYTES,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(scale, group)
        check_hook(hook, parts)
        self._hook = hook
        self._parts = parts
        self._inline_bytes = inline_bytes
        self._in_background = False
        self._works: list[Work] = []

    def add(self, array: Any) -> None:
        """Start reducing the next flat array, in place; it must not be used until ``finalize``.

        Its shape and dtype are those of its parts, one after the other.

        Raises:
            TypeError, ValueError, DistributedError: as the hook does.
        """
        index = len(self._works)
        group = group_or_world(self.group)
        inline = 0 if self._in_background else self._inline_bytes
        bucket = Bucket(index, array, self._parts[index], self.scale, group, inline)
        self._works.append(call_hook(self._hook, bucket))
        self._in_background |= bucket.in_background

    def finalize(self) -> None:
        """Block until everything has been reduced.

        Raises:
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        works = self._works
        self.abandon()
        for work in works:
            work.wait()

    def abandon(self) -> None:
        """Forget what is on its way; it cannot be called back."""
        self._works, self._in_background = [], False
