"""Messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flashlight_py.device import deferred
from flashlight_py.distributed.api.messaging import P2POp, begin_all, ends_of, exchange, run
from flashlight_py.distributed.api.running import refusing
from flashlight_py.distributed.calls.checks import check_rank
from flashlight_py.distributed.groups.membership import native, native_sendrecv, of
from flashlight_py.distributed.verbs import RECV, SEND
from flashlight_py.distributed.work import AllOf, Done, Work

if TYPE_CHECKING:
    from flashlight_py.distributed.api.group import ProcessGroup

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send", "sendrecv"]

X = TypeVar("X")


def send(x: Any, dst: int, tag: int = 0, group: ProcessGroup | None = None) -> None:
    """Send array ``x`` (any shape and dtype) to rank ``dst``. Blocks until it has been received.

    ``tag`` is a number from 0 to 2**31 - 1 that the receiver must ask for. Messages from one rank
    to another are matched by tag; those under one tag in the order in which they were sent.

    Raises:
        ValueError: ``dst`` is no other rank of the group, or ``tag`` is out of range.
        CollectiveTimeoutError: ``dst`` did not ask for it in time; names the tag that it asks for.
        MismatchError: ``dst`` receives another shape or dtype; raised on both.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    if native(group)(SEND.code, x, None, None, None, dst, tag, False) is not NotImplemented:
        return
    if deferred(send, x, dst, tag, group) is not NotImplemented:
        return
    members, op = of(group), P2POp("send", x, dst, tag)
    with refusing(members, "send", [op.end], [x]):
        run(members, op)


def recv(
    x: X, src: int | None, tag: int = 0, group: ProcessGroup | None = None, partial: bool = False
) -> X:
    """Fill array ``x``, in place, with what rank ``src`` sends under ``tag``. Blocks; returns x.

    Shape and dtype must be those of the array that is sent. NumPy arrays only can be received from
    any rank, or in part.

    Args:
        x: array to fill.
        src: rank in the group; None: any other one. Such a receive takes the oldest message with
            ``tag`` of a rank from which no other receive waits for one, from each rank in the order
            in which it sent them. Who it was is said by :func:`irecv`: ``work = fl.irecv(x,
            None)``, ``work.wait()``, ``work.source``. All ranks must stay until it has ended.
        tag: a number from 0 to 2**31 - 1.
        group: the process group, default the world.
        partial: what is sent may have a shorter first dimension than ``x``; it fills the first
            rows.

    Returns:
        ``x``; with ``partial`` the rows that were filled, a view of the array of ``x``.

    Raises:
        ValueError: ``src`` is no other rank of the group, ``tag`` is out of range, or with
            ``partial`` the array has no dimension.
        PeerLostError: ``src`` is gone, or where that is None any rank is and nothing else was sent.
        CollectiveTimeoutError: ``src`` did not send it in time; names the tag that it sends.
        MismatchError: ``src`` sends another shape or dtype; raised on both.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    if not partial:
        y = native(group)(RECV.code, x, None, None, None, src, tag, False)
        if y is NotImplemented:
            y = deferred(recv, x, src, tag, group)
        if y is not NotImplemented:
            return y
    members, op = of(group), P2POp("recv", x, src, tag, partial)
    with refusing(members, "recv", [op.end], [x]):
        filled: X = run(members, op)
        return filled


def isend(x: X, dst: int, tag: int = 0, group: ProcessGroup | None = None) -> Work[X]:
    """Begin to send array ``x`` to rank ``dst``, and return a ``Work`` at once.

    As :func:`send`, but it runs beside collectives and other messages. ``x`` must not change until
    ``wait()`` has returned, which is when it has been received; the result is ``x``. A message to
    this rank itself is copied at once. CuPy arrays are the exception: the call blocks until the
    peer has called too, and an exchange needs :func:`sendrecv` or :func:`batch_isend_irecv`.

    Raises:
        TypeError, ValueError, DistributedError: as for :func:`send`.
    """
    y = native(group)(SEND.code, x, None, None, None, dst, tag, True)
    if y is NotImplemented:
        y = deferred(isend, x, dst, tag, group)
    if y is not NotImplemented:
        return y
    members, op = of(group), P2POp("send", x, dst, tag)
    with refusing(members, "isend", [op.end], [x]):
        return begin_all(members, [op])[0]


def irecv(
    x: X, src: int | None, tag: int = 0, group: ProcessGroup | None = None, partial: bool = False
) -> Work[X]:
    """Begin to fill array ``x`` with what rank ``src`` sends, and return a ``Work`` at once.

    As :func:`recv`, but it runs beside collectives and other messages. ``x`` must not be used
    until ``wait()`` has returned what :func:`recv` returns; ``source`` of the ``Work`` is then the
    rank that has sent. Receives from any rank under one tag are filled in the order of the calls.

    Raises:
        TypeError, ValueError, DistributedError: as for :func:`recv`.
    """
    if not partial:
        y = native(group)(RECV.code, x, None, None, None, src, tag, True)
        if y is NotImplemented:
            y = deferred(irecv, x, src, tag, group)
        if y is not NotImplemented:
            return y
    members, op = of(group), P2POp("recv", x, src, tag, partial)
    with refusing(members, "irecv", [op.end], [x]):
        work = begin_all(members, [op])[0]
        work.source = op.peer
        return work


def sendrecv(
    x: Any,
    dst: int,
    out: X,
    src: int,
    tag: int = 0,
    recv_tag: int | None = None,
    group: ProcessGroup | None = None,
) -> X:
    """Send ``x`` to rank ``dst`` and fill ``out``, in place, with what rank ``src`` sends.

    Both at once, so that rings and exchanges need no order; blocks until both have ended. ``dst``
    and ``src`` may be this rank itself, and ``out`` may share memory with ``x``.

    Args:
        x: array to send.
        dst: rank in the group that gets it.
        out: array to fill, of the shape and dtype that ``src`` sends.
        src: rank in the group that sends it.
        tag: of what is sent.
        recv_tag: of what is received; default ``tag``.
        group: the process group, default the world.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError, DistributedError: as for :func:`send` and :func:`recv`.

    Example:
        >>> x, out = np.arange(3), np.zeros(3, int)
        >>> size, rank = fl.get_world_size(), fl.get_world_rank()
        >>> fl.sendrecv(x, (rank + 1) % size, out, (rank - 1) % size)  # a ring of one
        array([0, 1, 2])
    """
    other = tag if recv_tag is None else recv_tag
    y = native_sendrecv(group)(x, dst, out, src, tag, other)
    if y is NotImplemented:
        y = deferred(sendrecv, x, dst, out, src, tag, recv_tag, group)
    if y is not NotImplemented:
        return y
    members, sending = of(group), P2POp("send", x, dst, tag)
    receiving = P2POp("recv", out, src, other)
    with refusing(members, "sendrecv", [sending.end, receiving.end], [x, out]):
        check_rank(members.size, "sendrecv", "src", src)
        filled: X = exchange(members, sending, receiving)
        return filled


def batch_isend_irecv(ops: Sequence[P2POp], group: ProcessGroup | None = None) -> Work[list[Any]]:
    """Begin several messages at once; the ``Work``'s result is the list of their arrays.

    Every one is checked before any begins.

    Args:
        ops: sends and receives, in any order.
        group: the process group, default the world.

    Raises:
        ValueError: an array that is filled shares memory with another one, or as for :func:`recv`.
        TypeError, DistributedError: as for :func:`send` and :func:`recv`.
    """
    begun = native_sendrecv(group)(ops)
    if begun is not NotImplemented:
        return AllOf([one if isinstance(one, Work) else Done(one) for one in begun])
    members, given = of(group), [getattr(op, "x", None) for op in ops]
    with refusing(members, "batch_isend_irecv", ends_of(ops), given):
        return AllOf(begin_all(members, ops))
