"""Messages: one rank sends an array and another receives it; the checks, the start, the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.api.verb_call import (
    Group,
    Output,
    finish,
    native,
    packed_natively,
    refusing,
)
from flashlight_py.distributed.calls.arrays import as_array, may_overlap, pack
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched, P2POp
from flashlight_py.distributed.calls.checks import Apart, check_rank
from flashlight_py.distributed.calls.journal import SENDRECV
from flashlight_py.distributed.calls.kinds import returned
from flashlight_py.distributed.groups.membership import Membership, of, world_fast
from flashlight_py.distributed.verbs import RECV, SEND
from flashlight_py.distributed.work import AllOf, Done, Then, Work

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send", "sendrecv"]

X = TypeVar("X")


@native(SEND, op=None)
def send(x: Any, dst: int, tag: int = 0, *, group: Group = None) -> None:
    """Send array ``x`` (any shape and dtype) to rank ``dst``. Blocks until ``x`` may be changed.

    A small array (up to 16 KB in a world of one host) may be changed when it has been copied. A
    larger one, and every one with ``FLASHLIGHT_CHECKS=sync``, when it has been received.

    ``tag`` is a number from 0 to 2**31 - 1 that the receiver must ask for. Messages from one rank
    to another are matched by tag, and under one tag in the order in which they were sent.

    Raises:
        ValueError: ``dst`` is no other rank of the group, or ``tag`` is out of range.
        CollectiveTimeoutError: ``dst`` did not ask for it in time; names the tag that it asks for.
        MismatchError: ``dst`` receives another shape or dtype; raised on both, here by the next
            call of the group if the send had ended.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    _message(send, x, dst, tag, group)


@native(RECV)
def recv(x: X, src: int | None, tag: int = 0, *, partial: bool = False, group: Group = None) -> X:
    """Fill array ``x``, in place, with what rank ``src`` sends under ``tag``. Blocks; returns x.

    Args:
        x: array to fill, of the shape and dtype of the array that is sent.
        src: rank in the group; None: any other one, for NumPy arrays. A message goes to the receive
            that was called first of those that it fits. Of messages that have arrived before, a
            receive from any rank takes the oldest of one rank, of each in turn. :func:`irecv` tells
            the sender: ``work = fl.irecv(x, None)``, ``work.wait()``, ``work.source``. All ranks
            must stay until it has ended.
        tag: a number from 0 to 2**31 - 1.
        partial: for NumPy arrays: the message may have a shorter first dimension than ``x``; it
            fills the first rows.
        group: the process group, default the world.

    Returns:
        ``x``, or a new array of JAX; with ``partial`` the rows that were filled, a view of it.

    Raises:
        ValueError: ``src`` is no other rank of the group, ``tag`` is out of range, or with
            ``partial`` the array has no dimension.
        PeerLostError: ``src`` is gone, or for None any rank is and no other message was sent.
        CollectiveTimeoutError: ``src`` did not send it in time; names the tag that it sends.
        MismatchError: ``src`` sends another shape or dtype; raised on both.
        TypeError, DistributedError: as for :func:`all_reduce`.
    """
    return _message(recv, x, src, tag, group, partial)


@native(SEND, op=None, async_op=True)
def isend(x: X, dst: int, tag: int = 0, *, group: Group = None) -> Work[X]:
    """Begin to send array ``x`` to rank ``dst``, and return a ``Work`` at once.

    Like :func:`send`, at the same time as collectives and other messages. ``x`` must not change
    until ``wait()`` has returned; the result is ``x``. A message to this rank itself is copied at
    once. With CuPy arrays the call blocks until the peer has called too, and an exchange needs
    :func:`sendrecv` or :func:`batch_isend_irecv`.

    Raises:
        TypeError, ValueError, DistributedError: as for :func:`send`.
    """
    return _message(isend, x, dst, tag, group)


@native(RECV, async_op=True)
def irecv(
    x: X, src: int | None, tag: int = 0, *, partial: bool = False, group: Group = None
) -> Work[X]:
    """Begin to fill array ``x`` with what rank ``src`` sends, and return a ``Work`` at once.

    Like :func:`recv`, at the same time as collectives and other messages. ``x`` must not be used
    until ``wait()`` has returned what :func:`recv` returns; ``source`` of the ``Work`` is then the
    rank that has sent. Receives under one tag, also from any rank, are filled in the order of the
    calls.

    Raises:
        TypeError, ValueError, DistributedError: as for :func:`recv`.
    """
    return _message(irecv, x, src, tag, group, partial)


@native(SENDRECV)
def sendrecv(
    x: Any,
    dst: int | None,
    *,
    src: int | None,
    out: X,
    tag: int = 0,
    recv_tag: int | None = None,
    group: Group = None,
) -> X:
    """Send ``x`` to rank ``dst`` and fill ``out``, in place, with what rank ``src`` sends.

    Both at once, so that rings and exchanges need no order; blocks until both have ended. ``dst``
    and ``src`` may be this rank itself, and ``out`` may share memory with ``x``.

    Args:
        x: array to send.
        dst: rank in the group that receives ``x``. If None, nothing is sent (MPI's PROC_NULL).
        src: rank in the group that sends to this rank. If None, ``out`` stays unchanged, so the
            edges of a :func:`grid` need no special case.
        out: array to fill, of the shape and dtype that ``src`` sends.
        tag: tag of the sent message.
        recv_tag: tag of the received message, default ``tag``.
        group: the process group, default the world.

    Returns:
        ``out``, or a new array of JAX.

    Raises:
        TypeError, ValueError, DistributedError: as for :func:`send` and :func:`recv`.

    Example:
        >>> x, out = np.arange(3), np.zeros(3, int)
        >>> size, rank = fl.get_world_size(), fl.get_world_rank()
        >>> fl.sendrecv(x, (rank + 1) % size, src=(rank - 1) % size, out=out)  # a ring of one
        array([0, 1, 2])
    """
    other = tag if recv_tag is None else recv_tag
    members, both_ops = of(group), (P2POp("send", x, dst, tag), P2POp("recv", out, src, other))
    ops = [op for op in both_ops if op.peer is not None]
    with refusing(members, "sendrecv", ops, [x, out]):
        members.backend()  # raises if the group is closed
        both = [_prepare(members, "sendrecv", op, True) for op in ops]
        calls = [message.call for message in both]
        is_pair = len(both) == 2
        if is_pair and may_overlap(calls[0].array, both[1].array):
            calls[0].array = calls[0].array.copy()
        on_gpu = any(is_cupy(message.array) for message in both)
        if not is_pair or members.rank in (dst, src) or on_gpu:
            for call in calls:
                call.blocking = False
            ended = AllOf(_begin_all(members, both[::-1])).wait()
            return out if src is None else ended[0]
        y = members.fast.sendrecv(calls[0].array, dst, calls[1].array, src, tag, other)
        work = members.run_many(calls, "sendrecv") if y is NotImplemented else Done(y)
        return _home(members, both[1], work)


def batch_isend_irecv(ops: Sequence[P2POp], *, group: Group = None) -> Work[list[Any]]:
    """Begin several messages at once; the ``Work``'s result is the list of their arrays.

    Args:
        ops: sends and receives, all checked before any begins; receives begin in the order of the
            list. One whose ``peer`` is None does nothing, and its array stays as it is.
        group: the process group, default the world.

    Raises:
        ValueError: an array that is filled shares memory with another one, or as for :func:`recv`.
        TypeError: one of ``ops`` is no ``P2POp``, or as for :func:`send`.
        DistributedError: as for :func:`send` and :func:`recv`.
    """
    work: Work = (world_fast if group is None else of(group).fast).sendrecv(ops)
    if work is not NotImplemented:
        return work
    members, ops = of(group), list(ops)
    given = [getattr(op, "x", None) for op in ops]
    known = all(isinstance(op, P2POp) for op in ops)
    begun = [op for op in ops if op.peer is not None] if known else []
    with refusing(members, "batch_isend_irecv", begun, given):
        for op in ops:
            if not isinstance(op, P2POp):
                raise TypeError(
                    "batch_isend_irecv takes flashlight_py.P2POp('send' or 'recv', x, peer), got "
                    f"{type(op).__name__}"
                )
        members.backend()
        messages = [_prepare(members, f"i{op.kind}", op, blocking=False) for op in begun]
        apart = Apart("batch_isend_irecv")
        for message in messages:
            apart.add(message.array, writes=not message.op.sends)
        works = iter(_begin_all(members, messages))
        return AllOf([Done(op.x) if op.peer is None else next(works) for op in ops])


class _Message(NamedTuple):
    """A message that has been checked: the user's array, and the call, which may have a copy."""

    op: P2POp
    array: Array
    call: Call


def _message(
    function: Callable[..., Any], x: Any, peer: Any, tag: int, group: Group, partial: bool = False
) -> Any:
    """Do what a public ``function`` does for one message, if there is no fast path."""
    verb, members = function.__name__, of(group)
    op = P2POp("recv" if verb.endswith("recv") else "send", x, peer, tag, partial)
    if verb == op.kind and not partial:
        row = SEND if op.sends else RECV
        y = packed_natively(members, row, x, None, None, None, op.peer, op.tag, False)
        if y is not NotImplemented:
            return y
    with refusing(members, verb, [op], [x]):
        message = _prepare(members, verb, op, blocking=verb == op.kind)
        if not message.call.blocking:
            work = _begin_all(members, [message])[0]
            work.source = None if op.sends else op.peer
            return work
        if op.peer == members.rank:
            name = "dst" if op.sends else "src"
            raise ValueError(
                f"{verb}: {name}={op.peer} is this rank itself, and would wait for itself; use "
                "isend and irecv, or sendrecv"
            )
        return _home(members, message, members.run(message.call))


def _begin_all(members: Membership, messages: Sequence[_Message]) -> list[Work]:
    """Begin messages in their order: several of one device together, GPUs' last."""
    calls = [message.call for message in messages]

    def place(i: int) -> int:  # to this rank, then to others, then of GPUs
        return 0 if calls[i].peer == members.rank else 1 + is_cupy(calls[i].array)

    works: dict[int, Work] = {}
    ordered = sorted(range(len(calls)), key=place)
    for (where, is_open), indices in groupby(ordered, lambda i: (place(i), calls[i].is_open)):
        batch = list(indices)
        if where == 0 or is_open or (where == 1 and len(batch) == 1):
            works |= {i: _begin(members, calls[i]) for i in batch}
            continue
        ops = [
            P2POp(messages[i].op.kind, calls[i].array, calls[i].peer, calls[i].tag) for i in batch
        ]
        together = members.fast.sendrecv(ops)
        if together is NotImplemented:
            together = members.run_many([calls[i] for i in batch], "batch_isend_irecv")
        works |= dict.fromkeys(batch, together)
    return [_home(members, message, works[i]) for i, message in enumerate(messages)]


def _begin(members: Membership, call: Call) -> Work:
    """Begin one message of a NumPy array, or one to this rank itself."""
    if call.peer != members.rank:
        return members.run(call)
    members.backend()  # raises if the group is closed
    own, tag = members.messages_to_self, call.tag
    if call.verb is SEND:
        return members.journal.run([call], "send", lambda: own.send(call.array, tag))
    work = members.journal.run([call], "recv", lambda: own.recv(call.array, tag, call.partial))
    return Then(work, lambda part: Matched(members.rank, len(part))) if call.is_open else work


def _home(members: Membership, message: _Message, work: Work) -> Any:
    """Return the user's own array once ``work`` is complete, or a Work for it."""
    op, array, call = message
    if op.sends:
        return work.wait() if call.blocking else Then(work, lambda _: op.x)
    if not call.is_open:
        return finish(members, call, work, Output(op.x, array, call.array))

    def complete(found: Matched) -> Any:
        then.source = found.source
        part = slice(found.rows) if op.partial else ...
        if call.array is not array:
            array[part] = call.array[part]
        return returned(op.x, array[part], in_place=not op.partial)

    then = members.keep(Then(work, complete))
    return then.wait() if call.blocking else then


def _prepare(members: Membership, verb: str, op: P2POp, blocking: bool) -> _Message:
    """Check everything that a message is given, and return it."""
    array = as_array(verb, op.x, writes=not op.sends, of_any_dtype=True, anew=True)
    if op.sends and op.peer is None:
        raise ValueError(
            f"{verb}: dst must be a rank of this group, 0 to {members.size - 1}; got None, which "
            "is nobody in sendrecv and in a P2POp of batch_isend_irecv only"
        )
    if op.peer is not None:
        check_rank(members.size, verb, "dst" if op.sends else "src", op.peer)
    elif members.size == 1:
        raise ValueError(f"{verb}: src=None is any other rank, and this group has one rank")
    partial = op.partial and not op.sends
    if (op.peer is None or partial) and is_cupy(array):
        raise TypeError(
            f"{verb}: src=None and partial=True are for NumPy arrays; name the rank, and receive "
            "as much as it sends, or receive into a NumPy array"
        )
    if partial and not array.ndim:
        raise ValueError(f"{verb}: partial=True needs a first dimension; got shape ()")
    if not isinstance(op.tag, int) or not 0 <= op.tag < 2**31:
        raise ValueError(f"{verb}: tag must be an integer from 0 to 2**31 - 1, got {op.tag!r}")
    peer, kind = ANY_RANK if op.peer is None else op.peer, SEND if op.sends else RECV
    call = Call(kind, pack(array), peer=peer, tag=op.tag, partial=partial, blocking=blocking)
    return _Message(op, array, call)
