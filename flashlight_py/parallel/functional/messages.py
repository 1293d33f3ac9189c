"""Differentiable messages: the gradient of what was sent is sent back by its receiver."""

from __future__ import annotations

import functools
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
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.api.verb_call import refusing
from flashlight_py.distributed.calls.call import P2POp
from flashlight_py.distributed.calls.checks import whole
from flashlight_py.distributed.start.world import group_or_world
from flashlight_py.distributed.verbs import RECV, SEND, Verb
from flashlight_py.parallel.failing import refuse_message
from flashlight_py.parallel.functional.collectives import require_variable
from flashlight_py.structure import as_one

Like: TypeAlias = "Variable | Array | tuple[int | Sequence[int], DTypeLike]"

# Tags of gradients: this bit, the tag of the message, and its number among those of its tag. So a
# gradient finds its message in whatever order the backward passes are run.
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
        group: the process group, default the world.

    Returns:
        A token: a variable of no dimensions with the value 0. Its backward pass blocks until the
        gradient arrives, so ``backward()`` must reach it: call ``token.backward()``, or add it to
        this rank's loss where there is one. The gradient is what ``dst`` sends, whatever the
        token is multiplied by. If ``v`` needs no gradient, the token has none either, and ``dst``
        must run no backward pass, or use :func:`flashlight_py.recv`.

    Raises:
        TypeError: ``v`` is no Variable, or as :func:`flashlight_py.send`.
        ValueError: ``dst`` is no other rank of the group, or ``tag`` is out of range.
        DistributedError: as :func:`flashlight_py.send`.
    """
    group = group_or_world(group)
    tag = _checked_tag("send", tag)
    with refusing(group, "functional.send", [P2POp("send", v, dst, tag)], [v]):
        require_variable("send", v)
    array = v.data
    group.send(array, dst, tag)
    answer = _Answer(group, RECV, dst, tag)
    shape, dtype, xp = array.shape, array.dtype, array_module(array)

    run = functools.partial(answer.run, lambda _: answer.travel(xp.empty(shape, dtype)))
    floating = dtype if is_floating(dtype) else np.dtype(np.float32)
    return record_in_order(xp.zeros((), floating), (v, run))


def recv(like: Like, src: int, tag: int = 0, *, group: ProcessGroup | None = None) -> Variable:
    """Return what rank ``src`` sends under ``tag`` by :func:`send`. Blocks.

    Gradient: y = x of rank src, hence dJ/dx = g: the gradient is sent back to ``src``, blocking
    until that runs the backward pass of its token.

    Args:
        like: a variable or an array of the shape and dtype that is sent, also on a GPU; or the
            shape and the dtype, as a tuple.
        src: another rank of the group.
        tag: from 0 to 32767.
        group: the process group, default the world.

    Returns:
        A new variable; with a gradient where its dtype is a real floating one.

    Raises:
        TypeError: ``like`` is none of these, or as :func:`flashlight_py.recv`.
        ValueError: ``src`` is no other rank of the group, or ``tag`` is out of range.
        MismatchError: ``src`` sends another shape or dtype; raised on both.
        DistributedError: as :func:`flashlight_py.recv`.
    """
    group = group_or_world(group)
    tag = _checked_tag("recv", tag)
    with refusing(group, "functional.recv", [P2POp("recv", like, src, tag)], [like]):
        array = _receive(group, like, src, tag)
    answer = _Answer(group, SEND, src, tag)
    if not is_floating(array.dtype):
        return Variable(array)
    source = Variable(array_module(array).zeros((), array.dtype), calc_grad=True)

    def give(grad: Array) -> Array:
        answer.travel(grad)
        return source.data  # this rank has nothing below

    return record_in_order(array, (source, functools.partial(answer.run, give)))


def _checked_tag(verb: str, tag: int) -> int:
    number = whole(tag)
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

    def run(self, message: Callable[[Array], Array], grad: Array) -> Array:
        """Return the gradient that ``message`` brings, or leaves here."""
        self._is_begun = True
        result = message(grad)
        self._is_begun = False
        return result

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
    def travel(self, grad: Array) -> Array:
        """Send ``grad``, or fill it with what arrives; return it. Blocks."""
        travel = self._group.recv if self._verb is RECV else self._group.send
        travel(grad, self._peer, self._tag)
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
