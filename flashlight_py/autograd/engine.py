"""The backward pass: one walk over recorded operations, without recursion.

Every operation leaves a ``Node`` whose edges say where its gradient goes next: to the node of an
input that was itself computed, or to a leaf ``Variable``. Each edge carries the input's
vector-Jacobian product ("vjp"): a function from the gradient of the result to that of the input.

A vjp returns a new array, its argument, or a view of its argument, and never changes its
argument. So the engine knows who owns what, and copies only where two gradients would share
memory. It also sums broadcast dimensions away and casts, so that no vjp has to.

Operations that do more than compute, such as exchanging messages, can be recorded as ordered: a
pass visits those in the reverse of the order of recording, whatever the graph looks like.

What was computed without recording stands in the graph as ``Part``s (see ``graph``). Visited, they
are computed again, recorded, and the walk goes on in that graph, which ends where the parts said
that it would: everything is visited in the same order, and every hook called when it would be.

All bookkeeping lives in local dictionaries: a pass that raises leaves nothing behind.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.autograd.graph import Leaf, Node, Part, Target, Walk
from flashlight_py.device import Array, array_module, total

EndCallback: TypeAlias = Callable[[bool], None]


class GradSink:
    """A receiver of a leaf's gradient in the place of an array; see ``Variable.grad_buffer``."""

    __slots__ = ()

    is_stepped = False  # whether the leaf may change as soon as it has its last contribution
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def add(self, leaf: Any, contribution: Array, is_new: bool) -> None:
        """Take a contribution of the leaf's shape and dtype; only a new array may be kept."""
        raise NotImplementedError

    def product(self, leaf: Any, a: Array, b: Array) -> Array | GradSink:
        """Take ``a @ b``, and return this sink; or return the product, to be added."""
        raise NotImplementedError


# A backward pass visits operations that exchange messages in the reverse of the order in which
# they were recorded: ranks whose graphs differ meet all the same, and where the forward pass gets
# through the backward pass does.
class InPasses:
    """An owner of methods that a pass calls, notified of a pass that fails before it has.

    They are gradient hooks of leaves or vjps of operations, by ``functools.partial``.
    """

    def join_failed(self) -> None:
        """Take note that the running pass, which would have called it, ends by an exception."""


_LAST = sys.maxsize  # the turn of what users ask for


class _Pass(threading.local):
    """The backward pass of this thread: whom it calls when it ends, and its walk over nodes."""

    callbacks: list[tuple[int, EndCallback]] | None = None
    walk: Walk | None = None


_current = _Pass()


def on_backward_end(callback: EndCallback) -> None:
    """Ask the running backward pass to call ``callback(completed)`` once, when it ends.

    Meant for gradient hooks. ``completed`` is True when every gradient is in place, False when
    the pass raised and gradients are missing or partial. Callbacks run on the thread of the pass
    in the order in which they were given, before ``backward()`` returns; each is called even if
    another raised, and the exception reaches the caller of ``backward()``. A backward pass inside
    a hook is a pass of its own.

    Raises:
        RuntimeError: no backward pass is running on this thread.
        TypeError: ``callback`` is not callable.
    """
    if not callable(callback):
        raise TypeError(f"on_backward_end needs a callable, got {type(callback).__name__}")
    if _current.callbacks is None:
        raise RuntimeError("on_backward_end was called outside a backward pass; call it in a hook")
    _current.callbacks.append((_LAST, callback))


def at_end(callback: EndCallback, turn: int) -> None:
    """Ask for what ``on_backward_end`` does, before all of its callbacks, in the order of turns.

    So that ranks call their modules in one order, also where their passes have got to other places.
    """
    assert _current.callbacks is not None
    _current.callbacks.append((turn, callback))


def is_last_contribution(leaf: Leaf) -> bool:
    """Return whether the running pass has one contribution to ``leaf`` left, which it computes."""
    return _current.walk is not None and _current.walk.pending.get(leaf) == 1


def after_node(callback: Callable[[], None]) -> None:
    """Call ``callback`` once the node that the pass visits needs no inputs any more.

    Outside of a pass over nodes it is called at once.
    """
    if _current.walk is None:
        callback()
    else:
        _current.walk.after.append(callback)


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread."""
    return _current.callbacks is not None


def run_pass(start: Target, seed: Array, retain_graph: bool) -> None:
    """Send ``seed``, the gradient of ``start``, to every leaf below, then call the end callbacks.

    A leaf is itself all that is below.
    """
    callbacks: list[tuple[int, EndCallback]] = []
    outer = _current.callbacks, _current.walk
    _current.callbacks, _current.walk = callbacks, None
    completed = False
    try:
        if isinstance(start, Node):
            _walk(start, seed, retain_graph)
        else:
            _accumulate(start, seed, seed)
            if start.hook is not None:
                start.hook(start)
        completed = True
    except BaseException:
        _join_failed()
        raise
    finally:
        _current.callbacks, _current.walk = outer
        if callbacks:
            callbacks.sort(key=itemgetter(0))
            with ExitStack() as stack:  # it calls the last first, and all even if one raises
                for _, callback in reversed(callbacks):
                    stack.callback(callback, completed)


def _join_failed() -> None:
    walk = _current.walk
    if walk is None:
        return
    for target in (*walk.pending, *(walk.grads.keys() - walk.pending.keys())):
        called: list[object] = []
        if not isinstance(target, Node):
            called = [target.hook]
        elif walk.pending.get(target) or target in walk.grads:
            called = [vjp for _, vjp in target.edges or ()]
        for function in called:
            owner = getattr(getattr(function, "func", None), "__self__", None)
            if isinstance(owner, InPasses):
                owner.join_failed()


def _walk(root: Node, seed: Array, retain_graph: bool) -> None:
    """Visit nodes as soon as all their consumers are done; finish a leaf with its last one.

    Ordered nodes wait until nothing else is ready. Then the latest of those below ``root`` is among
    them, for whatever consumes it was recorded later, and has been visited.
    """
    _current.walk = found = Walk(root, seed, retain_graph)
    found.count([root], (), found.pending)
    pending, grads, owned = found.pending, found.grads, found.owned
    replaced, after = found.replaced, found.after
    ready = [root]
    ordered: list[tuple[int, Node]] = []  # a heap

    def is_ready(node: Node) -> None:
        if node.turn is not None:
            heappush(ordered, (node.turn, node))
        else:
            ready.append(node)

    while ready or ordered:
        node = ready.pop() if ready else heappop(ordered)[1]
        if isinstance(node, Part):
            instead = found.replace(node)
            if instead is not None:
                is_ready(instead)
            continue
        grad = grads[node]
        for recorded, vjp in node.edges or ():
            contribution, target = vjp(grad), recorded
            while target in replaced:
                target = replaced[target]
            pending[target] -= 1
            if isinstance(target, Node):
                _add_to_node(target, contribution, grads, owned)
                if not pending[target]:
                    is_ready(target)
            else:
                _accumulate(target, contribution, grad)
                if target.hook is not None and not pending[target]:
                    target.hook(target)
        del grads[node]
        if not retain_graph:
            node.edges = None
        while after:
            after.pop(0)()


def _add_to_node(
    node: Node, contribution: Array, grads: dict[Node, Array], owned: set[Node]
) -> None:
    if contribution.shape != node.shape or contribution.dtype != node.dtype:
        contribution = _fit(contribution, node.shape, node.dtype)
    held = grads.get(node)
    if held is None:
        grads[node] = contribution
    elif node in owned:
        held += contribution
    else:
        grads[node] = held + contribution
        if node.shape:  # a sum of zero dimensions is an immutable NumPy scalar
            owned.add(node)


def _accumulate(leaf: Leaf, contribution: Array, incoming: Array) -> None:
    """Add a contribution to ``leaf.grad``, which shares memory with nothing but its buffer."""
    buffer, held = leaf.buffer, leaf.grad
    like = leaf.data if buffer is None else buffer
    if contribution.shape != like.shape or contribution.dtype != like.dtype:
        contribution = _fit(contribution, like.shape, like.dtype)
    if isinstance(buffer, GradSink):
        if not isinstance(contribution, GradSink):  # else a vjp has passed it there already
            buffer.add(leaf, contribution, _is_new(contribution, incoming))
    elif buffer is not None:
        first = contribution if held is None else held
        if first is not buffer:  # a vjp may have written there already
            buffer[...] = first
        if held is not None:
            buffer += contribution
        leaf.grad = buffer
    elif held is not None:
        held += contribution
        leaf.grad = held  # another one where a hook has left a NumPy scalar
    elif _is_new(contribution, incoming):
        leaf.grad = contribution
    else:
        leaf.grad = array_module(contribution).array(contribution)


def _is_new(contribution: Array, incoming: Array) -> bool:
    """Return whether nobody else has the array, or a view of it."""
    return contribution is not incoming and contribution.base is None and bool(contribution.shape)


def _fit(grad: Array, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Sum a gradient over the dimensions that broadcasting added or stretched, and cast it."""
    if grad.shape != shape:
        added = grad.ndim - len(shape)
        stretched = [i + added for i, n in enumerate(shape) if n == 1 != grad.shape[i + added]]
        grad = total(grad, (*range(added), *stretched)).reshape(shape)
    return grad.astype(dtype, copy=False)
