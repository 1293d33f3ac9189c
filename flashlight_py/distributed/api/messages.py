"""Messages between two ranks: argument checks, start and completion."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from flashlight_py.device import Array, as_packed, is_cupy
from flashlight_py.distributed.api import verb_call
from flashlight_py.distributed.api.verb_call import Group, native_entry, reject_together
from flashlight_py.distributed.calls.arrays import as_array, may_overlap
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched, P2POp
from flashlight_py.distributed.calls.checks import OverlapCheck, check_rank
from flashlight_py.distributed.calls.journal import SENDRECV
from flashlight_py.distributed.groups.membership import Membership, members_of, world_fast
from flashlight_py.distributed.verbs import RECV, SEND
from flashlight_py.distributed.work import AllOf, Done, Then, Work
from flashlight_py.kinds import user_result

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send", "sendrecv"]

X = TypeVar("X")


@native_entry(SEND, op=None)
def send(x: Any, dst: int, tag: int = 0, *, group: Group = None) -> None:
    """Send array ``x`` of any shape and dtype to rank ``dst``. Blocks until ``x`` may be changed.

    The call returns when ``dst`` has received ``x``. If all ranks of the world are on one host, the
    call copies an array of at most 16 KB and returns without waiting for ``dst``. To wait even
    then, set the environment variable ``FLASHLIGHT_CHECKS=sync``.

    Args:
        x: Array to send.
        dst: Another rank of the group.
        tag: An integer from 0 to 2**31 - 1. The receiver must pass the same tag. Messages with one
            tag from one rank to another rank arrive in the order of sending.
        group: The process group. Default: the world.

    Raises:
        ValueError: If ``dst`` is no other rank of the group, or ``tag`` is out of range.
        CollectiveTimeoutError: If ``dst`` does not receive within the timeout. If ``dst`` waits for
            another tag, the error names this tag.
        MismatchError: If ``dst`` receives another shape or dtype. Both ranks raise. If ``send`` has
            already returned, this rank raises in its next call of the group.
        TypeError, DistributedError: As for :func:`all_reduce`.
    """
    _message(send, x, dst, tag, group)


@native_entry(RECV)
def recv(x: X, src: int | None, tag: int = 0, *, partial: bool = False, group: Group = None) -> X:
    """Receive a message of rank ``src`` with ``tag`` into array ``x``, in place. Blocks.

    Args:
        x: Array to fill, with the shape and dtype of the sent array.
        src: Rank in the group. None: any other rank, for NumPy arrays only. If messages of several
            ranks are waiting, successive receives prefer different ranks. To learn the sender, use
            :func:`irecv` and read ``source`` of its ``Work``. With None, no rank may leave the
            group until the receive has ended.
        tag: An integer from 0 to 2**31 - 1. If several receives match a message, the receive that
            was called first takes it.
        partial: True if the message may have fewer rows than the NumPy array ``x``.
        group: The process group. Default: the world.

    Returns:
        ``x``. If ``x`` is a JAX array, a new array. If ``partial``, a view of the filled rows.

    Raises:
        ValueError: If ``src`` is no other rank of the group, or ``tag`` is out of range, or with
            ``partial`` the array has no dimension.
        PeerLostError: If ``src`` exits or dies. With ``src=None``: if any rank exits or dies and no
            message is waiting.
        CollectiveTimeoutError: If ``src`` sends no message with ``tag`` within the timeout. The
            error names the tags of other messages from ``src``.
        MismatchError: If ``src`` sends another shape or dtype. Both ranks raise.
        TypeError, DistributedError: As for :func:`all_reduce`.
    """
    return _message(recv, x, src, tag, group, partial)


@native_entry(SEND, op=None, async_op=True)
def isend(x: X, dst: int, tag: int = 0, *, group: Group = None) -> Work[X]:
    """Start to send array ``x`` to rank ``dst``. Return a ``Work`` without waiting for ``dst``.

    Like :func:`send`, but ``dst`` may be this rank, and this rank may start other operations
    meanwhile. Do not change ``x`` until ``wait()`` of the ``Work`` has returned. ``wait()`` returns
    ``x``. With CuPy arrays, ``isend`` blocks until ``dst`` receives, so two ranks that send to each
    other must use :func:`sendrecv` or :func:`batch_isend_irecv`.

    Raises:
        TypeError, ValueError, DistributedError: As for :func:`send`.
    """
    return _message(isend, x, dst, tag, group)


@native_entry(RECV, async_op=True)
def irecv(
    x: X, src: int | None, tag: int = 0, *, partial: bool = False, group: Group = None
) -> Work[X]:
    """Start to receive a message of rank ``src`` into array ``x``. Return a ``Work``; do not wait.

    Like :func:`recv`, but ``src`` may be this rank, and this rank may start other operations
    meanwhile. Do not use ``x`` until ``wait()`` of the ``Work`` has returned. ``wait()`` returns
    the same value as :func:`recv`. Then the attribute ``source`` of the ``Work`` is the rank of the
    sender.

    Raises:
        TypeError, ValueError, DistributedError: As for :func:`send`.
    """
    return _message(irecv, x, src, tag, group, partial)


@native_entry(SENDRECV)
def sendrecv(
    x: Any, dst: int | None, *, src: int | None, out: X, tag: int = 0, recv_tag: int | None = None,
    group: Group = None,
) -> X:  # fmt: skip
    """Send ``x`` to rank ``dst``, and receive a message of rank ``src`` into ``out``, in place.

    The two messages run at the same time, so no deadlock occurs if every rank sends to its
    neighbour in a ring. Blocks until both messages have ended. ``dst`` and ``src`` may be this
    rank, and ``out`` may share memory with ``x``.

    Args:
        x: Array to send.
        dst: Rank in the group that receives ``x``. None: nothing is sent (MPI's PROC_NULL).
        src: Rank in the group that sends to this rank. None: nothing is received, and ``out`` stays
            unchanged. So neighbours that a :func:`grid` returns can be passed even at an edge.
        out: Array to fill, with the shape and dtype that ``src`` sends.
        tag: Tag of the sent message.
        recv_tag: Tag of the received message. Default: ``tag``.
        group: The process group. Default: the world.

    Returns:
        ``out``, or a new array if ``out`` is a JAX array.

    Raises:
        TypeError, ValueError, DistributedError: As for :func:`send` and :func:`recv`.

    Example:
        >>> x, out = np.arange(3), np.zeros(3, int)
        >>> size, rank = fl.get_world_size(), fl.get_world_rank()
        >>> fl.sendrecv(x, (rank + 1) % size, src=(rank - 1) % size, out=out)  # one rank: to itself
        array([0, 1, 2])
    """
    other = tag if recv_tag is None else recv_tag
    members, pair = members_of(group), (P2POp("send", x, dst, tag), P2POp("recv", out, src, other))
    ops = [op for op in pair if op.peer is not None]
    with reject_together(members, "sendrecv", ops, [x, out]):
        members.backend()  # raises GroupClosedError if the group is closed
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
        return _complete(members, both[1], work)


@native_entry(SENDRECV, recv_tag=...)
def batch_isend_irecv(ops: Sequence[P2POp], *, group: Group = None) -> Work[list[Any]]:
    """Start several messages that run at the same time. Return one ``Work`` for all messages.

    ``wait()`` of the ``Work`` returns the list of the arrays of ``ops``.

    Args:
        ops: Sends and receives. All entries are checked before the first message starts. Receives
            start in list order. An entry whose ``peer`` is None has no effect.
        group: The process group. Default: the world.

    Raises:
        ValueError: If an array to fill shares memory with another array, or as for :func:`recv`.
        TypeError: If an entry of ``ops`` is no ``P2POp``, or as for :func:`send`.
        DistributedError: As for :func:`send` and :func:`recv`.
    """
    work: Work = (world_fast if group is None else members_of(group).fast).sendrecv(ops)
    if work is not NotImplemented:
        return work
    members, ops = members_of(group), list(ops)
    arrays = [getattr(op, "x", None) for op in ops]
    invalid = [type(op).__name__ for op in ops if not isinstance(op, P2POp)]
    begun = [] if invalid else [op for op in ops if op.peer is not None]
    with reject_together(members, "batch_isend_irecv", begun, arrays):
        if invalid:
            raise TypeError(
                "batch_isend_irecv: entries of ops must be P2POp('send' or 'recv', x, peer), got "
                f"{invalid[0]}"
            )
        members.backend()
        messages = [_prepare(members, f"i{op.kind}", op, blocking=False) for op in begun]
        overlap = OverlapCheck("batch_isend_irecv")
        for message in messages:
            overlap.add(message.array, writes=not message.op.sends)
        works = iter(_begin_all(members, messages))
        return AllOf([Done(op.x) if op.peer is None else next(works) for op in ops])


class _Message(NamedTuple):
    """A checked message. ``call.array`` may be a packed copy of the user's ``array``."""

    op: P2POp
    array: Array
    call: Call


def _message(
    function: Callable[..., Any], x: Any, peer: Any, tag: int, group: Group, partial: bool = False
) -> Any:
    verb, members = function.__name__, members_of(group)
    op = P2POp("recv" if verb.endswith("recv") else "send", x, peer, tag, partial)
    if verb == op.kind and not partial:
        row = SEND if op.sends else RECV
        y = verb_call.call_fast_path(members, row, x, None, None, None, op.peer, op.tag, False)
        if y is not NotImplemented:
            return y
    with reject_together(members, verb, [op], [x]):
        message = _prepare(members, verb, op, blocking=verb == op.kind)
        if not message.call.blocking:
            work = _begin_all(members, [message])[0]
            work.source = None if op.sends else op.peer
            return work
        if op.peer == members.rank:
            name = "dst" if op.sends else "src"
            raise ValueError(
                f"{verb}: {name} must be another rank, got {op.peer}, the rank of this process. "
                "To send to itself, a rank must use isend and irecv, or sendrecv."
            )
        return _complete(members, message, members.run(message.call))


def _begin_all(members: Membership, messages: Sequence[_Message]) -> list[Work]:
    """Start messages to this rank, then messages of NumPy arrays, then messages of CuPy arrays."""
    calls = [message.call for message in messages]

    def phase(i: int) -> int:
        return 0 if calls[i].peer == members.rank else 1 + is_cupy(calls[i].array)

    works: dict[int, Work] = {}
    ordered = sorted(range(len(calls)), key=phase)
    for (when, is_open), indices in groupby(ordered, lambda i: (phase(i), calls[i].is_open)):
        batch = list(indices)
        if when == 0 or is_open or (when == 1 and len(batch) == 1):
            works |= {i: _begin(members, calls[i]) for i in batch}
            continue
        pairs = [(messages[i].op.kind, calls[i]) for i in batch]
        ops = [P2POp(kind, call.array, call.peer, call.tag) for kind, call in pairs]
        together = members.fast.sendrecv(ops)
        if together is NotImplemented:
            together = members.run_many([calls[i] for i in batch], "batch_isend_irecv")
        works |= dict.fromkeys(batch, together)
    return [_complete(members, message, works[i]) for i, message in enumerate(messages)]


def _begin(members: Membership, call: Call) -> Work:
    if call.peer != members.rank:
        return members.run(call)
    members.backend()  # raises GroupClosedError if the group is closed
    queue, tag = members.messages_to_self, call.tag
    if call.verb is SEND:
        return members.journal.run([call], "send", lambda: queue.send(call.array, tag))
    work = members.journal.run([call], "recv", lambda: queue.recv(call.array, tag, call.partial))
    return Then(work, lambda part: Matched(members.rank, len(part))) if call.is_open else work


def _complete(members: Membership, message: _Message, work: Work) -> Any:
    op, array, call = message
    if op.sends:
        return work.wait() if call.blocking else Then(work, lambda _: op.x)
    if not call.is_open:
        return verb_call.finish(members, call, work, verb_call.Output(op.x, array, call.array))

    def complete(matched: Matched) -> Any:
        then.source = matched.source
        part = slice(matched.rows) if op.partial else ...
        if call.array is not array:
            array[part] = call.array[part]
        return user_result(op.x, array[part], in_place=not op.partial)

    then = members.keep(Then(work, complete))
    return then.wait() if call.blocking else then


def _prepare(members: Membership, verb: str, op: P2POp, blocking: bool) -> _Message:
    array = as_array(verb, op.x, writes=not op.sends, of_any_dtype=True, mutable=True)
    if op.sends and op.peer is None:
        raise ValueError(
            f"{verb}: dst must be a rank of this group, 0 to {members.size - 1}, got None. Only "
            "sendrecv and P2POp accept None for no rank."
        )
    if op.peer is not None:
        check_rank(members.size, verb, "dst" if op.sends else "src", op.peer)
    elif members.size == 1:
        raise ValueError(f"{verb}: src=None needs a group of several ranks, got one rank")
    partial = op.partial and not op.sends
    if (op.peer is None or partial) and is_cupy(array):
        raise TypeError(
            f"{verb}: src=None and partial=True expected a NumPy array, got a CuPy array. Pass "
            "src and an array of the sent length, or receive into a NumPy array."
        )
    if partial and not array.ndim:
        raise ValueError(f"{verb}: with partial=True, x must have a dimension, got shape ()")
    if not isinstance(op.tag, int) or not 0 <= op.tag < 2**31:
        raise ValueError(f"{verb}: tag must be an integer from 0 to 2**31 - 1, got {op.tag!r}")
    peer, kind = ANY_RANK if op.peer is None else op.peer, SEND if op.sends else RECV
    call = Call(kind, as_packed(array), peer=peer, tag=op.tag, partial=partial, blocking=blocking)
    return _Message(op, array, call)
