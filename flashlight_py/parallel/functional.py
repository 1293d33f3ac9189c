"""Collectives between the forward and the backward pass: differentiable, out of place, blocking.

**The convention.** Every rank computes a loss of its own and calls ``backward()`` on it; all of
them differentiate J, the sum of the ranks' losses. So the gradient that a rank's variable x gets is
dJ/dx: it counts what x does to the losses of all ranks. Where g_r stands below, it is the gradient
of J with respect to rank r's result. A loss that every rank computes alike is in J once for each
rank; divide it by their number where that is not meant.

**The gradient of a collective is a collective.** So ``backward()`` must reach a result on every
rank if it does on one. A rank whose loss does not depend on its result adds ``0 * sum(result)``.
Backward passes run their collectives in the reverse of the order of the forward pass, so that
ranks whose graphs differ still meet; before each, as in the forward pass, they make sure by one
small ``all_reduce`` that all are at the same one. A rank that is elsewhere raises ``MismatchError``
on every rank, one that does nothing ``CollectiveTimeoutError``, which names it. A gradient is never
added to another's.

Everything here blocks. ``group`` is the process group, default the world. The result is a new
variable, of the dtype of ``v``, with a gradient on every rank if ``v`` has one on any. Errors are
those of the verb of the same name, and a TypeError if ``v`` is no Variable.
"""

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import InPasses
from flashlight_py.autograd.variable import record_in_order
from flashlight_py.device import Array, array_module, is_cupy, is_floating
from flashlight_py.distributed import P2POp, ProcessGroup
from flashlight_py.distributed.internal import (
    RECV,
    SEND,
    LinearOp,
    ReduceOp,
    Verb,
    as_integer,
    check_rank,
    group_or_world,
    parse_op,
    reject_together,
    scale_in_place,
)
from flashlight_py.errors import MismatchError
from flashlight_py.parallel.failing import fail, refuse_message
from flashlight_py.structure import as_one

__all__ = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv"]


def all_reduce(
    v: Variable, scale: float = 1.0, *, op: LinearOp = "sum", group: ProcessGroup | None = None
) -> Variable:
    """Return ``scale`` times the sum (or average) of all ranks' ``v``, the same on every rank.

    Gradient: y_r = scale * sum_q x_q on every rank r, hence dJ/dx_q = scale * sum_r g_r: the same
    all_reduce of the gradients.

    Args:
        v: any shape, the same shape and dtype on every rank.
        scale: real number that the result is multiplied by.
        op: ``"sum"`` or ``"avg"``; another is a ValueError.

    Returns:
        A new variable of the shape of ``v``.

    Example:
        >>> x = fl.param(np.ones(3))
        >>> y = fl.functional.all_reduce(x, scale=2.0)  # one process: only the scale shows
        >>> y.backward(np.ones(3))
        >>> x.grad
        array([2., 2., 2.])
    """
    call = DifferentiableCall("all_reduce", v, group, op)

    def combine(array: Array) -> Array:
        return call.group.all_reduce(copy_of(array), scale, op=op)

    return call.record(v, combine(v.data), vjp=combine)


def reduce_scatter(
    v: Variable, *, op: LinearOp = "sum", scale: float = 1.0, group: ProcessGroup | None = None
) -> Variable:
    """Return this rank's part of ``scale`` times the sum (or average) of all ranks' ``v``.

    Gradient: y_r = scale * sum_q (part r of x_q), hence part r of dJ/dx_q = scale * g_r: the
    scaled all_gather of the gradients.

    Args:
        v: its first dimension is a multiple of the number of ranks; the same shape and dtype on
            every rank.
        scale: real number that the result is multiplied by.
        op: ``"sum"`` or ``"avg"``; another is a ValueError.

    Returns:
        A new variable of shape ``(v.shape[0] // size, *v.shape[1:])``.
    """
    call = DifferentiableCall("reduce_scatter", v, group, op)
    factor = scale / call.group.size if call.op is ReduceOp.AVG else scale

    def gather(grad: Array) -> Array:
        gathered: Array = call.group.all_gather(grad)
        scale_in_place(gathered, factor)
        return gathered

    part = call.group.reduce_scatter(v.data, scale=scale, op=op)
    return call.record(v, part, vjp=gather)


def all_gather(v: Variable, *, group: ProcessGroup | None = None) -> Variable:
    """Return the ``v`` of all ranks, joined along the first dimension in rank order.

    Gradient: y_r holds x_q as its rows q on every rank r, hence dJ/dx_q = sum_r (rows q of g_r):
    the reduce_scatter of the gradients. Where the ranks' numbers of rows differ it is an
    all_reduce, of which each rank keeps its rows: twice the bytes.

    Args:
        v: the first dimension may differ between ranks, the others and the dtype must not. One
            without dimensions counts as one row.

    Returns:
        A new variable of shape ``(sum of first dimensions, *v.shape[1:])``.
    """
    call = DifferentiableCall("all_gather", v, group)
    shape, rank = v.shape, call.group.rank

    def own_rows(grad: Array) -> Array:
        rows = call.rows[:, 0].tolist()
        if min(rows) == max(rows):
            return call.group.reduce_scatter(grad).reshape(shape)
        start = sum(rows[:rank])
        summed: Array = call.group.all_reduce(copy_of(grad))
        return summed[start : start + rows[rank]].reshape(shape)

    gathered = call.group.all_gather(v.data)
    return call.record(v, gathered, vjp=own_rows, rows=[shape[0] if shape else 1])


def all_to_all(
    v: Variable, *, rows: Sequence[int] | None = None, group: ProcessGroup | None = None
) -> Variable:
    """Return what the ranks have for this one: part r of every ``v``, in rank order, on rank r.

    Gradient: y_r holds part r of x_q as its part q, hence part r of dJ/dx_q = part q of g_r: the
    all_to_all that takes the gradients back.

    Args:
        v: the dimensions but the first, and the dtype, are the same on every rank.
        rows: how many rows of ``v`` each rank gets; None: equal parts, of a first dimension that is
            a multiple of the number of ranks and the same on every rank. All ranks pass it or none.

    Returns:
        A new variable of shape ``(number of rows received, *v.shape[1:])``.

    Raises:
        ValueError: the first dimension cannot be cut so.
    """
    call = DifferentiableCall("all_to_all", v, group)

    def take_back(grad: Array) -> Array:
        received = None if rows is None else call.rows[:, call.group.rank].tolist()
        return call.group.all_to_all(grad, rows=received)

    sent = () if rows is None else rows
    return call.record(v, call.group.all_to_all(v.data, rows=rows), vjp=take_back, rows=sent)


def broadcast(v: Variable, root: int = 0, *, group: ProcessGroup | None = None) -> Variable:
    """Return the ``v`` of rank ``root`` on every rank.

    Gradient: y_r = x_root on every rank r, hence dJ/dx_root = sum_r g_r, and 0 for the others:
    the gradients are reduced to the root.

    Args:
        v: the same shape and dtype on every rank; the values of the root count alone.
        root: rank in the group.

    Returns:
        A new variable of the shape of ``v``.

    Raises:
        ValueError: ``root`` is no rank of the group.
    """
    call = DifferentiableCall("broadcast", v, group)

    def sum_for_root(grad: Array) -> Array:
        summed: Array = call.group.reduce(copy_of(grad), root)
        return summed if call.group.rank == root else array_module(grad).zeros_like(grad)

    with reject_together(call.group, "functional.broadcast", arrays=[v]):
        root = check_rank(call.group.size, "functional.broadcast", "root", root)
    # The ranks meet first: from a broadcast the root may return before another rank has raised.
    result = copy_of(v.data)
    variable = call.record(v, result, vjp=sum_for_root)
    call.group.broadcast(result, root)
    return variable


# How many differentiable collectives each group has had: the same number on all of its ranks.
_calls: dict[weakref.ref[ProcessGroup], int] = {}


# The small message ensures that gradients of different results are never added.
class DifferentiableCall(InPasses):
    """A differentiable collective of ``group`` and of ``v``, numbered as all its ranks number it.

    ``rows`` are numbers that the ranks have exchanged, those of a rank in a row.
    """

    def __init__(
        self, verb: str, v: Variable, group: ProcessGroup | None, op: LinearOp = "sum"
    ) -> None:
        self.group, self._verb = group_or_world(group), verb
        with reject_together(self.group, f"functional.{verb}", arrays=[v]):
            require_variable(verb, v)
            self.op = parse_op(f"functional.{verb}", op)
            if self.op not in (ReduceOp.SUM, ReduceOp.AVG):
                raise ValueError(
                    f"functional.{verb}: op must be 'sum' or 'avg', got {op!r}; if no gradient is "
                    f"needed, flashlight_py.{verb} takes the others"
                )

    def record(
        self, v: Variable, result: Array, vjp: Callable[[Array], Array], rows: Sequence[int] = ()
    ) -> Variable:
        """Return ``result`` as a variable whose backward pass calls ``vjp`` on every rank.

        It has a gradient on all ranks if ``v`` has one on any. Collective, blocking.
        """
        table = self._meet(False, v.calc_grad, *rows)
        self.rows = np.array([row[1:] for row in table])
        if not any(row[0] for row in table):
            return Variable(result)
        # A rank that needs no gradient takes part in the backward pass for the others' sake.
        source = v if v.calc_grad else Variable(v.data, calc_grad=True)
        return record_in_order(result, (source, functools.partial(self._answer, vjp)))

    def _answer(self, vjp: Callable[[Array], Array], grad: Array) -> Array:
        self._meet(True)
        return vjp(grad)

    def join_failed(self) -> None:
        """Autograd: a pass fails that has yet to come here, where the other ranks wait."""
        fail(self.group, sys.exc_info()[1])

    @as_one
    def _meet(self, backward: bool, *facts: int) -> list[list[int]]:
        """Return every rank's ``facts``, one rank a row, if all are where this rank is."""
        group = self.group
        if not backward:
            self._number = _calls.get(weakref.ref(group), 0) + 1
        mine = np.array([self._number, backward, *facts], np.int64)
        table = np.zeros((group.size, mine.size), np.int64)
        table[group.rank] = mine
        group.all_reduce(table)  # only this rank's row is not zero: the sum is a gathering
        if (table[:, :2] != mine[:2]).any():
            where = [
                f"rank {rank}: the {'backward' if backward else 'forward'} pass of number {number}"
                for rank, (number, backward) in enumerate(table[:, :2].tolist())
            ]
            raise MismatchError(
                f"[functional.{self._verb}] rank {group.rank} of {group.size}: the ranks are at "
                f"different differentiable collectives of this group: {', '.join(where)}. Let "
                "backward() reach the results of the same calls on every rank, and in the same "
                "passes; a rank that has no use for a result adds 0 times its sum to the loss"
            )
        if not backward:
            _calls[weakref.ref(group, _calls.pop)] = self._number
        return table[:, 2:].tolist()  # type: ignore[no-any-return]


def require_variable(verb: str, v: object) -> None:
    """Raise a TypeError for what is no Variable."""
    if not isinstance(v, Variable):
        raise TypeError(
            f"functional.{verb} takes a flashlight_py.Variable, got {type(v).__name__}; wrap data "
            f"in flashlight_py.input, or use flashlight_py.{verb}, which works on arrays"
        )


def copy_of(array: Array) -> Array:
    """Return a new array of the same values for a verb to work on in place."""
    return array_module(array).array(array, order="C")  # type: ignore[no-any-return]


Like: TypeAlias = "Variable | Array | tuple[int | Sequence[int], DTypeLike]"

# The receiver of a message sends the gradient back. Its tag: this bit, the message's tag, and the
# message's number among those of its tag. So backward passes may run in any order.
_GRADIENT = 1 << 30
_TAGS = _NUMBERS = 1 << 15

# How many messages each group has had, by the verb of their gradients, peer and tag.
_messages: dict[weakref.ref[ProcessGroup], Counter[tuple[str, int, int]]] = {}


def send(v: Variable, dst: int, tag: int = 0, *, group: ProcessGroup | None = None) -> Variable:
    """Send ``v`` to rank ``dst``, which must call :func:`recv`. Blocks as ``fl.send`` does.

    Gradient: rank dst's y = x, hence dJ/dx = g_dst, which ``dst`` sends back in its backward pass.

    Args:
        v: any shape and dtype.
        dst: another rank of the group.
        tag: from 0 to 32767; ``dst`` must ask for it.

    Returns:
        A token: a variable of no dimensions with the value 0. Its backward pass blocks until the
        gradient arrives, so ``backward()`` must reach it: call ``token.backward()``, or add it to
        this rank's loss where there is one. The gradient is what ``dst`` sends, whatever the
        token is multiplied by. If ``v`` needs no gradient, the token has none either, and ``dst``
        must run no backward pass, or use :func:`flashlight_py.recv`.

    Raises:
        ValueError: ``dst`` is no other rank of the group, or ``tag`` is out of range.
    """
    group = group_or_world(group)
    tag = _checked_tag("send", tag)
    with reject_together(group, "functional.send", [P2POp("send", v, dst, tag)], [v]):
        require_variable("send", v)
    array = v.data
    group.send(array, dst, tag)
    xp, dtype = array_module(array), array.dtype
    room = functools.partial(xp.empty, array.shape, dtype)  # made when the gradient arrives
    answer = _Answer(group, RECV, dst, tag)
    token = xp.zeros((), dtype if is_floating(dtype) else np.float32)
    return record_in_order(token, (v, functools.partial(answer.receive, room)))


def recv(like: Like, src: int, tag: int = 0, *, group: ProcessGroup | None = None) -> Variable:
    """Return what rank ``src`` sends under ``tag`` by :func:`send`. Blocks.

    Gradient: y = x of rank src, hence dJ/dx = g: the gradient is sent back to ``src``, blocking
    until that runs the backward pass of its token.

    Args:
        like: a variable or an array of the shape and dtype that is sent, also on a GPU; or the
            shape and the dtype, as a tuple.
        src: another rank of the group.
        tag: from 0 to 32767.

    Returns:
        A new variable; with a gradient where its dtype is a real floating one.

    Raises:
        TypeError: ``like`` is none of these, or as :func:`flashlight_py.recv`.
        ValueError: ``src`` is no other rank of the group, or ``tag`` is out of range.
        MismatchError: ``src`` sends another shape or dtype; raised on both.
    """
    group = group_or_world(group)
    tag = _checked_tag("recv", tag)
    with reject_together(group, "functional.recv", [P2POp("recv", like, src, tag)], [like]):
        array = _receive(group, like, src, tag)
    answer = _Answer(group, SEND, src, tag)
    if not is_floating(array.dtype):
        return Variable(array)
    source = Variable(array_module(array).zeros((), array.dtype), calc_grad=True)
    return record_in_order(array, (source, functools.partial(answer.send, source.data)))


def _checked_tag(verb: str, tag: int) -> int:
    number = as_integer(tag)
    if number is None or not 0 <= number < _TAGS:
        raise ValueError(
            f"functional.{verb}: tag must be an integer from 0 to {_TAGS - 1} (the others belong "
            f"to gradients), got {tag!r}"
        )
    return number


class _Answer(InPasses):
    """The gradient of the message that was just sent or received, and its tag."""

    def __init__(self, group: ProcessGroup, verb: Verb, peer: int, tag: int) -> None:
        self._group, self._verb, self._peer = group, verb, peer
        self._tag = 0
        self._is_begun = False  # in this pass
        self._count(tag)

    def receive(self, room: Callable[[], Array], _: Array) -> Array:
        """Return the gradient that the peer sends. Blocks."""
        return self._travel(room())

    def send(self, below: Array, grad: Array) -> Array:
        """Send ``grad`` to the peer, blocking; return ``below``: this rank has nothing there."""
        self._travel(grad)
        return below

    def join_failed(self) -> None:
        """Autograd: a pass fails that has yet to come here, where the other rank waits."""
        if not self._is_begun:
            refuse_message(self._group, self._verb, self._peer, self._tag)

    @as_one
    def _count(self, tag: int) -> None:
        counts = _messages.setdefault(weakref.ref(self._group, _messages.pop), Counter())
        key = self._verb.name, self._peer, tag
        self._tag = _GRADIENT + tag * _NUMBERS + counts[key] % _NUMBERS
        counts[key] += 1

    @as_one
    def _travel(self, grad: Array) -> Array:
        self._is_begun = True
        travel = self._group.recv if self._verb is RECV else self._group.send
        travel(grad, self._peer, self._tag)
        self._is_begun = False
        return grad


@as_one
def _receive(group: ProcessGroup, like: Any, src: int, tag: int) -> Array:
    """Receive into a new array."""
    if isinstance(like, tuple) and len(like) == 2:
        return group.recv(np.empty(*like), src, tag)
    array = like.data if isinstance(like, Variable) else like
    if not isinstance(array, np.ndarray) and not is_cupy(array):
        raise TypeError(
            "functional.recv needs a variable or an array like what arrives, or a tuple "
            f"(shape, dtype); got {type(like).__name__}"
        )
    return group.recv(array_module(array).empty(array.shape, array.dtype), src, tag)
