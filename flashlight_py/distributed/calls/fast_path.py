"""The fast path of a group: native code that does plain calls without a ``Call``."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

dropped: deque[weakref.ref[Any]] = deque()
"""Groups that were collected and not closed: the next call of any group closes them."""


class FastPath(Protocol):
    """Native entry points of one group for the calls of users; see ``csrc/fast``.

    Each returns NotImplemented, without side effects, if ``Backend.start`` must do the call: if an
    array is not plain, an argument is wrong, or a profile or a captured step is recorded.

    In place of an array ``(address, dtype code, shape, owner)`` describes contiguous, writable
    memory that exists as long as ``owner``; a result then needs ``out``.
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
        """Do the verb with this code, also a message to or from ``root``; return result or Work.

        For an all_reduce, ``root`` is a digest of the shapes of the arrays that are packed in
        ``x``, or 0; the ranks compare it. If ``x`` is a list of arrays, ``out`` says whether small
        ones are packed (``native_several`` in csrc/fast). A collective that blocks may take
        ``seconds``; default: the timeout of the group.
        """

    def sendrecv(self, *args: Any) -> Any:
        """Do ``(x, dst, out, src, tag, recv_tag)``, or begin ``(ops,)``, a list of messages.

        For a list, return the array of each message that has ended and the Work of each other one.
        """

    def objects(self, code: int, value: object, root: int) -> Any:
        """Do the verb of objects with this code and return the list of the received objects.

        Return None if only other ranks receive. May return the array of all frames (exchange.py),
        the number of the call and the frame of this rank (or None): the caller does the rest.
        """

    barrier: Callable[..., Any]
    """``collective``, or ``left_to_python`` if a barrier also waits for GPUs."""


def left_to_python(*arguments: object) -> Any:
    """Return NotImplemented, as the entry points of a group without native code do."""
    return NotImplemented


class EntryPoints:
    """A ``FastPath`` whose functions are replaced when the group is closed or changes.

    A caller looks up a function here for each call and does not keep it: a function keeps the
    native group from being freed.
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
        """Use the functions of ``other`` from now on."""
        self.collective, self.sendrecv = other.collective, other.sendrecv
        self.objects, self.barrier = other.objects, other.barrier
