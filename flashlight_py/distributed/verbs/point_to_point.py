"""Messages: one rank gives, another takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.apart import Apart
from flashlight_py.distributed.arrays import as_array, may_overlap, pack
from flashlight_py.distributed.backend import Matched, Message
from flashlight_py.distributed.recorder.journal import Journal
from flashlight_py.distributed.verbs.base import Verbs, unpack_into, whole
from flashlight_py.distributed.verbs.refusing import End, refusable
from flashlight_py.distributed.verbs.self_mail import SelfMail
from flashlight_py.distributed.work import AllOf, Then, Work

__all__ = ["P2POp", "PointToPoint"]

X = TypeVar("X")


class P2POp:
    """One message of :func:`flashlight_py.batch_isend_irecv`.

    Args:
        kind: ``"send"`` or ``"recv"``.
        x: the array that is sent, or filled in place.
        peer: the other rank; None, for ``"recv"``: any other rank.
        tag: a number from 0 to 2**31 - 1.
        partial: for ``"recv"``: fewer rows may come than ``x`` has.

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

    def __repr__(self) -> str:
        return f"P2POp({self.kind!r}, peer={self.peer}, tag={self.tag})"


def _sent_to(dst: Any, tag: Any) -> End:
    return End(True, _plain(dst), _plain(tag))


def _received_from(src: Any, tag: Any) -> End:
    return End(False, _plain(src), _plain(tag))


def _ends_of(group: Verbs, ops: Any) -> list[End]:
    known = isinstance(ops, Sequence) and all(isinstance(op, P2POp) for op in ops)
    if not known:
        return []
    # Nobody waits for a receive from any rank in particular.
    return [End(op.sends, op.peer, op.tag) for op in ops if op.sends or op.peer is not None]


class PointToPoint(Verbs):
    """``send``, ``recv`` and their relatives."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self._mail = SelfMail()

    @refusable(lambda _, x, dst, tag=0: [_sent_to(dst, tag)])
    def send(self, x: Any, dst: int, tag: int = 0) -> None:
        """Give ``x`` to rank ``dst``, blocking; see :func:`flashlight_py.send`."""
        dst, tag = _plain(dst), _plain(tag)
        array = self._sent("send", x, dst, tag)
        self._refuse_self("send", "dst", dst)
        packed, call = pack(array), self.backend(array).send
        self._journal.run("send", packed, call, *(packed, dst, tag, True), peer=dst, tag=tag)

    @refusable(lambda _, x, src, tag=0, partial=False: [_received_from(src, tag)])
    def recv(self, x: X, src: int | None, tag: int = 0, partial: bool = False) -> X:
        """Fill ``x`` with what ``src`` sends, blocking; see :func:`flashlight_py.recv`."""
        src, tag = _plain(src), _plain(tag)
        array = self._filled("recv", x, src, tag, partial)
        self._refuse_self("recv", "src", src)
        if src is None or partial:
            op, room = P2POp("recv", x, src, tag, partial), pack(array)
            part: X = self._home_open(op, array, room, self._begin_open(op, room, False)).wait()
            return part
        packed, call = pack(array), self.backend(array).recv
        arguments = (packed, src, tag, True)
        work = self._journal.run("recv", packed, call, *arguments, peer=src, tag=tag)
        filled: X = self._finish(work, x, unpack_into(array, packed), async_op=False)
        return filled

    @refusable(lambda _, x, dst, tag=0: [_sent_to(dst, tag)])
    def isend(self, x: X, dst: int, tag: int = 0) -> Work[X]:
        """Begin to give ``x`` to rank ``dst``; see :func:`flashlight_py.isend`."""
        return self._begin_all([P2POp("send", x, dst, tag)])[0]

    @refusable(lambda _, x, src, tag=0, partial=False: [_received_from(src, tag)])
    def irecv(self, x: X, src: int | None, tag: int = 0, partial: bool = False) -> Work[X]:
        """Begin to fill ``x`` with what ``src`` sends; see :func:`flashlight_py.irecv`."""
        op = P2POp("recv", x, src, tag, partial)
        work = self._begin_all([op])[0]
        work.source = op.peer
        return work

    @refusable(_ends_of)
    def batch_isend_irecv(self, ops: Sequence[P2POp]) -> Work[list[Any]]:
        """Begin several messages; see :func:`flashlight_py.batch_isend_irecv`."""
        return AllOf(self._begin_all(ops))

    def _begin_all(self, ops: Sequence[P2POp]) -> list[Work]:
        """Check all messages, then begin them: several of one device together, GPUs' last."""
        checked = [(op, self._array_of(op)) for op in ops]
        if len(checked) > 1:
            apart = Apart("batch_isend_irecv")
            for op, array in checked:
                apart.add(array, writes=not op.sends)
        packed = [pack(array) for _, array in checked]
        alone, on_cpu, on_gpu = list[int](), list[int](), list[int]()
        for index, (op, array) in enumerate(checked):
            own = op.peer == self.rank or op.is_open
            (alone if own else on_gpu if is_cupy(array) else on_cpu).append(index)
        if len(on_cpu) == 1:
            alone, on_cpu = sorted(alone + on_cpu), []
        works = {index: self._begin(ops[index], packed[index]) for index in alone}
        for batch in filter(None, (on_cpu, on_gpu)):
            together = self._begin_together(
                [_message_of(ops[index], packed[index]) for index in batch]
            )
            works |= dict.fromkeys(batch, together)
        return [
            self._home(op, array, packed[index], works[index])
            for index, (op, array) in enumerate(checked)
        ]

    def _begin_together(self, messages: list[Message]) -> Work:
        return self._journal.run(
            "batch_isend_irecv",
            None,
            self.backend(messages[0].array).exchange,
            messages,
            peer=messages[0].peer,
            size=sum(message.array.nbytes for message in messages),
            async_op=True,
        )

    @refusable(
        lambda _, x, dst, out, src, tag=0, recv_tag=None: [
            _sent_to(dst, tag),
            _received_from(src, tag if recv_tag is None else recv_tag),
        ]
    )
    def sendrecv(
        self, x: Any, dst: int, out: X, src: int, tag: int = 0, recv_tag: int | None = None
    ) -> X:
        """Send and receive at once, blocking; see :func:`flashlight_py.sendrecv`."""
        self._check_rank("sendrecv", "src", src)
        receiving = P2POp("recv", out, src, tag if recv_tag is None else recv_tag)
        sending = P2POp("send", x, dst, tag)
        outgoing = self._sent("sendrecv", x, sending.peer, sending.tag)
        incoming = self._filled("sendrecv", out, receiving.peer, receiving.tag)
        if may_overlap(outgoing, incoming):
            sending.x = outgoing = outgoing.copy()
        if self.rank in (sending.peer, receiving.peer) or is_cupy(outgoing) or is_cupy(incoming):
            AllOf(self._begin_all([receiving, sending])).wait()
            return out
        # On this thread alone: no other has to wake up for it.
        packed, call = pack(incoming), self.backend().exchange
        messages = [_message_of(receiving, packed), _message_of(sending, pack(outgoing))]
        work = self._journal.run(
            "sendrecv", outgoing, call, messages, True, peer=sending.peer, tag=sending.tag
        )
        filled: X = self._finish(work, out, unpack_into(incoming, packed), async_op=False)
        return filled

    def _begin(self, op: P2POp, packed: Array) -> Work:
        """Begin one message of a NumPy array, or one to this rank itself."""
        if op.is_open:
            return self._begin_open(op, packed, True)
        assert op.peer is not None  # it sends, or is not open
        begin: Callable[..., Work]
        arguments: tuple[Any, ...]
        if op.peer == self.rank:
            self.backend()  # a closed group takes no mail
            begin, arguments = self._mail.send if op.sends else self._mail.recv, (packed,)
        else:
            backend, arguments = self.backend(packed), (packed, op.peer)
            begin = backend.send if op.sends else backend.recv
        return self._journal.run(
            op.kind, packed, begin, *arguments, op.tag, peer=op.peer, tag=op.tag, async_op=True
        )

    def _begin_open(self, op: P2POp, packed: Array, async_op: bool) -> Work:
        """Begin a receive that finds out who sends and how much: its result is a ``Matched``."""
        peer = -1 if op.peer is None else op.peer
        run = functools.partial(
            self._journal.run, "recv", packed, peer=peer, tag=op.tag, async_op=async_op
        )
        if op.peer == self.rank:
            self.backend()  # a closed group takes no mail
            work = run(self._mail.recv, packed, op.tag, op.partial)
            return Then(work, lambda part: Matched(self.rank, part.shape[0]))
        call = self.backend(packed).recv_matched
        return run(call, packed, op.peer, op.tag, op.partial, not async_op)

    def _home_open(self, op: P2POp, array: Array, packed: Array, work: Work) -> Work:
        """Return what brings home a message of which ``work`` says whose it is and how long."""

        def finish(found: Matched) -> Any:
            then.source = found.source
            if not op.partial:
                if packed is not array:
                    array[...] = packed
                return op.x
            if packed is not array:
                array[: found.rows] = packed[: found.rows]
            return array[: found.rows]

        then = self._keep(Then(work, finish))
        return then

    def _home(self, op: P2POp, array: Array, packed: Array, work: Work) -> Work:
        """Return ``work`` with the user's own array as its result, brought home if received."""
        if op.is_open:
            return self._home_open(op, array, packed, work)
        unpack = None if op.sends else unpack_into(array, packed)
        finished: Work = self._finish(work, op.x, unpack, async_op=True)
        return finished

    def _array_of(self, op: P2POp) -> Array:
        if not isinstance(op, P2POp):
            raise TypeError(
                "batch_isend_irecv takes flashlight_py.P2POp('send' or 'recv', x, peer), got "
                f"{type(op).__name__}"
            )
        if op.sends:
            return self._sent("isend", op.x, op.peer, op.tag)
        return self._filled("irecv", op.x, op.peer, op.tag, op.partial)

    def _sent(self, verb: str, x: Any, dst: Any, tag: int) -> Array:
        """Check everything that an outgoing message is given, and return its array."""
        array = as_array(verb, x, writes=False)
        self._check_rank(verb, "dst", dst)
        _check_tag(verb, tag)
        return array

    def _filled(self, verb: str, x: Any, src: int | None, tag: int, partial: bool = False) -> Array:
        """Check everything that an incoming message is given, and return its array."""
        array = as_array(verb, x)
        if src is not None:
            self._check_rank(verb, "src", src)
        elif self.size == 1:
            raise ValueError(f"{verb}: src=None is any other rank, and this group has one rank")
        if partial and not array.ndim:
            raise ValueError(f"{verb}: partial=True needs a first dimension; got shape ()")
        _check_tag(verb, tag)
        return array

    def _refuse_self(self, verb: str, name: str, peer: int | None) -> None:
        if peer == self.rank:
            raise ValueError(
                f"{verb}: {name}={peer} is this rank itself, and would wait for itself; use isend "
                "and irecv, or sendrecv"
            )


def _message_of(op: P2POp, array: Array) -> Message:
    assert op.peer is not None  # an open receive goes alone
    return Message(op.sends, array, op.peer, op.tag)


def _plain(number: Any) -> Any:
    """Return an integer of any kind as an int; anything else as it is, to be refused by name."""
    found = whole(number)
    return number if found is None else found


def _check_tag(verb: str, tag: int) -> None:
    if not isinstance(tag, int) or not 0 <= tag < 2**31:
        raise ValueError(f"{verb}: tag must be an integer from 0 to 2**31 - 1, got {tag!r}")
