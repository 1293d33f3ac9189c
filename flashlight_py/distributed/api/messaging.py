"""Messages: one rank sends an array and another receives it; the checks, the start, the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.api.running import End, finish, unpack_into
from flashlight_py.distributed.calls.arrays import as_array, may_overlap, pack
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched
from flashlight_py.distributed.calls.checks import Apart, check_rank, whole
from flashlight_py.distributed.groups.membership import Membership
from flashlight_py.distributed.verbs import RECV, SEND
from flashlight_py.distributed.work import AllOf, Then, Work


class P2POp:
    """One message of :func:`flashlight_py.batch_isend_irecv`.

    Args:
        kind: ``"send"`` or ``"recv"``.
        x: the array that is sent, or filled in place.
        peer: the other rank; None, for ``"recv"``: any other rank.
        tag: a number from 0 to 2**31 - 1.
        partial: for ``"recv"``: fewer rows may arrive than ``x`` has.

    Raises:
        ValueError: ``kind`` is something else.
    """

    def __init__(
        self,
        kind: Literal["send", "recv"],
        x: Any,
        peer: int | None,
        tag: int = 0,
        partial: bool = False,
    ) -> None:
        if kind not in ("send", "recv"):
            raise ValueError(f"P2POp: kind must be 'send' or 'recv', got {kind!r}")
        self.kind, self.x, self.peer, self.tag = kind, x, _plain(peer), _plain(tag)
        self.partial = partial

    @property
    def sends(self) -> bool:
        """Whether this rank is the one that sends."""
        return self.kind == "send"

    @property
    def is_open(self) -> bool:
        """Whether it is a receive that does not know who sends, or how much."""
        return not self.sends and (self.peer is None or self.partial)

    @property
    def end(self) -> End:
        """This rank's end of the message."""
        return End(self.sends, self.peer, self.tag)

    def __repr__(self) -> str:
        return f"P2POp({self.kind!r}, peer={self.peer}, tag={self.tag})"


def _plain(number: Any) -> Any:
    """Return an integer of any kind as an int; anything else as it is, to be refused by name."""
    found = whole(number)
    return number if found is None else found


def ends_of(ops: Any) -> list[End]:
    """Return the ends that other ranks wait for: nobody in particular for one of any rank."""
    known = isinstance(ops, Sequence) and all(isinstance(op, P2POp) for op in ops)
    return [op.end for op in ops if op.sends or op.peer is not None] if known else []


def run(members: Membership, op: P2POp) -> Any:
    """Do one message, blocking; returns what the public function returns."""
    array = _checked(members, op.kind, op)
    if op.peer == members.rank:
        name = "dst" if op.sends else "src"
        raise ValueError(
            f"{op.kind}: {name}={op.peer} is this rank itself, and would wait for itself; use "
            "isend and irecv, or sendrecv"
        )
    call = _call(op, array, blocking=True)
    return _home(members, op, array, call, members.run(call))


def begin_all(members: Membership, ops: Sequence[P2POp]) -> list[Work]:
    """Check all messages, then begin them: several of one device together, GPUs' last."""
    arrays = [_checked_in_batch(members, op) for op in ops]
    if len(ops) > 1:
        apart = Apart("batch_isend_irecv")
        for op, array in zip(ops, arrays, strict=True):
            apart.add(array, writes=not op.sends)
    calls = [_call(op, array, blocking=False) for op, array in zip(ops, arrays, strict=True)]
    alone, on_cpu, on_gpu = list[int](), list[int](), list[int]()
    for index, op in enumerate(ops):
        own = op.peer == members.rank or op.is_open
        (alone if own else on_gpu if is_cupy(arrays[index]) else on_cpu).append(index)
    if len(on_cpu) == 1:
        alone, on_cpu = sorted(alone + on_cpu), []
    works = {index: _begin(members, calls[index]) for index in alone}
    for batch in filter(None, (on_cpu, on_gpu)):
        together = members.run_many([calls[index] for index in batch], "batch_isend_irecv")
        works |= dict.fromkeys(batch, together)
    return [
        _home(members, op, array, call, works[index])
        for index, (op, array, call) in enumerate(zip(ops, arrays, calls, strict=True))
    ]


def exchange(members: Membership, sending: P2POp, receiving: P2POp) -> Any:
    """Do both messages at once, blocking; returns what ``receiving`` fills."""
    sent = _checked(members, "sendrecv", sending)
    filled = _checked(members, "sendrecv", receiving)
    if may_overlap(sent, filled):
        sending.x = sent = sent.copy()
    if members.rank in (sending.peer, receiving.peer) or is_cupy(sent) or is_cupy(filled):
        AllOf(begin_all(members, [receiving, sending])).wait()
        return receiving.x
    # On this thread alone: no other has to wake up for it.
    calls = [_call(sending, sent, blocking=True), _call(receiving, filled, blocking=True)]
    work = members.run_many(calls, "sendrecv")
    return finish(members, calls[1], work, receiving.x, unpack_into(filled, calls[1].array))


def _call(op: P2POp, array: Array, blocking: bool) -> Call:
    peer = ANY_RANK if op.peer is None else op.peer
    verb, partial = SEND if op.sends else RECV, op.partial and not op.sends
    return Call(verb, pack(array), peer=peer, tag=op.tag, partial=partial, blocking=blocking)


def _begin(members: Membership, call: Call) -> Work:
    """Begin one message of a NumPy array, or one to this rank itself."""
    if call.peer != members.rank:
        return members.run(call)
    members.backend()  # a closed group takes no messages
    own, tag = members.messages_to_self, call.tag
    if call.verb is SEND:
        return members.journal.run([call], "send", lambda: own.send(call.array, tag))
    work = members.journal.run([call], "recv", lambda: own.recv(call.array, tag, call.partial))
    if not call.is_open:
        return work
    return Then(work, lambda part: Matched(members.rank, part.shape[0]))


def _home(members: Membership, op: P2POp, array: Array, call: Call, work: Work) -> Any:
    """Return the user's own array once ``work`` is complete, or a Work for it."""
    if not op.is_open:
        unpack = None if op.sends else unpack_into(array, call.array)
        return finish(members, call, work, op.x, unpack)

    def complete(found: Matched) -> Any:
        then.source = found.source
        if not op.partial:
            if call.array is not array:
                array[...] = call.array
            return op.x
        if call.array is not array:
            array[: found.rows] = call.array[: found.rows]
        return array[: found.rows]

    then = members.keep(Then(work, complete))
    return then.wait() if call.blocking else then


def _checked_in_batch(members: Membership, op: P2POp) -> Array:
    if not isinstance(op, P2POp):
        raise TypeError(
            "batch_isend_irecv takes flashlight_py.P2POp('send' or 'recv', x, peer), got "
            f"{type(op).__name__}"
        )
    return _checked(members, f"i{op.kind}", op)


def _checked(members: Membership, verb: str, op: P2POp) -> Array:
    """Check everything that a message is given, and return its array."""
    array = as_array(verb, op.x, writes=not op.sends, of_any_dtype=True)
    if op.peer is not None or op.sends:
        check_rank(members.size, verb, "dst" if op.sends else "src", op.peer)
    elif members.size == 1:
        raise ValueError(f"{verb}: src=None is any other rank, and this group has one rank")
    if op.is_open and is_cupy(array):
        raise TypeError(
            f"{verb}: src=None and partial=True are for NumPy arrays; name the rank, and receive "
            "as much as it sends, or receive into a NumPy array"
        )
    if op.is_open and op.partial and not array.ndim:
        raise ValueError(f"{verb}: partial=True needs a first dimension; got shape ()")
    if not isinstance(op.tag, int) or not 0 <= op.tag < 2**31:
        raise ValueError(f"{verb}: tag must be an integer from 0 to 2**31 - 1, got {op.tag!r}")
    return array
