"""The fast path of a group: functions in native code that run most calls without a ``Call``."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

dropped: deque[weakref.ref[Any]] = deque()
"""Groups that were garbage-collected while open. The next call of any group closes them."""


def left_to_python(*arguments: object) -> Any:
    """Return NotImplemented. This is the fast path of a group without native code."""
    return NotImplemented


class EntryPoints:
    """Functions of one group in native code, for the calls of users; see ``csrc/fast``.

    They are replaced when the group is closed or changes. Get the function for each call. A stored
    function would keep the memory of a closed group.

    A function returns NotImplemented, without side effects, if it cannot handle a call: for unusual
    arrays, for invalid arguments, and while a profile or a step is recorded. The caller must then
    use ``Backend.start``.

    Instead of an array, callers may pass ``(address, dtype code, shape, owner)``. The memory must
    be contiguous and writable, and exist as long as ``owner``. ``out`` must then be passed if there
    is a result.

    Args:
        collective: Runs ``collective(code, x, out, op, scale, root, tag, async_op, seconds)``, the
            verb with number ``code``, and returns the result, or a Work if ``async_op``. ``root``
            is the other rank for a message. For an all_reduce of packed arrays, it is a digest of
            their shapes, so that ranks can compare the shapes. If ``x`` is a list of arrays,
            ``out`` is True to pack small arrays (``native_several`` in csrc/fast). ``seconds`` is
            the timeout of a blocking collective. Default: the timeout of the group.
        sendrecv: Runs ``sendrecv(x, dst, out, src, tag, recv_tag)``, or starts messages:
            ``sendrecv(ops)`` with a list of ``P2POp``. The result of the latter has one entry for
            each message: its array if the message has ended, else its Work.
        objects: Runs ``objects(code, value, root)``, the object verb with number ``code``, and
            returns the list of received objects; None if only other ranks receive. If native code
            cannot unpickle, it returns a tuple: the array of all received frames (exchange.py), the
            id of the call, and the frame that this rank sent.

    ``barrier`` is ``collective``; or ``left_to_python`` if a barrier must also wait for GPUs.
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

    def replace_by(self, other: EntryPoints) -> None:
        self.collective, self.sendrecv = other.collective, other.sendrecv
        self.objects, self.barrier = other.objects, other.barrier
