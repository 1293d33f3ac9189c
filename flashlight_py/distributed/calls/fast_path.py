"""The fast path of a group: native code that handles plain calls without a ``Call``."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

dropped: deque[weakref.ref[Any]] = deque()
"""Groups that were garbage-collected while open. The next call of any group closes them."""


class FastPath(Protocol):
    """Native entry points of one group for the calls of users; see ``csrc/fast``.

    Each entry point returns NotImplemented, without side effects, if ``Backend.start`` must handle
    the call: for unusual arrays, for invalid arguments, and while a profile or step is recorded.

    Instead of an array, callers may pass ``(address, dtype code, shape, owner)``: contiguous,
    writable memory that exists as long as ``owner``. A result then needs ``out``.
    """

    def collective(
        self,
        code: int,
        x: Any,
        out: Any,
        op: Any,
        scale: float | None,
        root: int,
        tag: int,
        async_op: bool,
        seconds: float = ...,
    ) -> Any:
        """Run the verb with number ``code``, and return the result or a Work.

        For a message, ``root`` is the other rank. For an all_reduce, ``root`` is a digest of the
        shapes of the arrays packed in ``x``, or 0; the ranks compare it. If ``x`` is a list of
        arrays, ``out`` states whether small arrays are packed (``native_several`` in csrc/fast).
        ``seconds`` is the timeout of a blocking collective. Default: the timeout of the group.
        """

    def sendrecv(self, *args: Any) -> Any:
        """Run ``(x, dst, out, src, tag, recv_tag)``, or start ``(ops,)``, a list of messages.

        For a list, return one entry per message: its array if the message has ended, else its Work.
        """

    def objects(self, code: int, value: object, root: int) -> Any:
        """Run the object verb with number ``code`` and return the list of received objects.

        Return None if only other ranks receive. If Python must unpickle, return a tuple: the array
        of all frames (exchange.py), the number of the call, and the frame of this rank.
        """

    barrier: Callable[..., Any]
    """Same as ``collective``; or ``left_to_python`` if a barrier must also wait for GPUs."""


def left_to_python(*arguments: object) -> Any:
    """Return NotImplemented. Groups without native code use it as every entry point."""
    return NotImplemented


class EntryPoints:
    """A ``FastPath`` whose functions are replaced when the group is closed or changes.

    Look up a function for each call: a kept function would keep the native group alive.
    """

    __slots__ = ("barrier", "collective", "objects", "sendrecv")

    def __init__(
        self,
        collective: Callable[..., Any] = left_to_python,
        sendrecv: Callable[..., Any] = left_to_python,
        objects: Callable[..., Any] = left_to_python,
    ) -> None:
        self.collective = self.barrier = collective
        self.sendrecv, self.objects = sendrecv, objects

    def replace_by(self, other: FastPath) -> None:
        """Replace the functions by the functions of ``other``."""
        self.collective, self.sendrecv = other.collective, other.sendrecv
        self.objects, self.barrier = other.objects, other.barrier
