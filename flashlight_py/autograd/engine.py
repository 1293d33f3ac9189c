"""The backward pass: one walk over recorded operations, without recursion.

Every operation leaves a ``Node`` whose edges say where its gradient goes next: to the node of an
input that was itself computed, or to a leaf ``Variable``. Each edge carries the input's
vector-Jacobian product ("vjp"): a function from the gradient of the result to that of the input.

A vjp returns a new array, its argument, or a view of its argument, in the shape of its input, and
never changes its argument. So the engine copies only if two gradients would share memory. It also
casts, so that no vjp has to.

Results computed without recording stand in the graph as ``Part``s (see ``graph``). Visited, they
are computed again, recorded, and the walk goes on in that graph: everything is visited in the same
order, and every hook called when it would be.

All bookkeeping lives in local dictionaries: a pass that raises leaves nothing behind.
"""

import functools
import sys
import threading
import weakref
from contextlib import ExitStack
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any

import numpy as np

from flashlight_py import _native, libraries
from flashlight_py.autograd.graph import EndCallback, Leaf, Node, Part, Target, Walk
from flashlight_py.device import Array, array_module


class GradSink:
    """A receiver of a leaf's gradient in the place of an array; see ``Variable.grad_buffer``."""

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def add(self, leaf: Any, contribution: Array, is_new: bool) -> None:
        """Take a contribution of the leaf's shape and dtype; only a new array may be kept."""
        raise NotImplementedError

    def product(self, leaf: Any, a: Array, b: Array) -> "Array | GradSink":
        """Take ``a @ b``, and return this sink; or return the product, to be added."""
        raise NotImplementedError


class InPasses:
    """An owner of methods that a pass calls, notified of a pass that fails before it has.

    They are gradient hooks of leaves or vjps of operations, by ``functools.partial``. Those in
    ``watching`` are notified of every pass that is inside no other.
    """

    def on_begin(self) -> None:
        """Take note that a pass begins."""

    def join_failed(self) -> None:
        """Take note that the running pass, which would have called it, ends by an exception."""


watching: list[weakref.ref[InPasses]] = []

_LAST = sys.maxsize  # the turn of what users ask for


class _Pass(threading.local):
    """The backward pass of this thread, if one is running."""

    walk: Walk | None = None


_current = _Pass()


def on_backward_end(callback: EndCallback) -> None:
    """Ask the running backward pass to call ``callback(completed)`` once, when it ends.

    Meant for gradient hooks. ``completed`` is False if the pass raised and gradients are missing or
    partial. Callbacks run on the thread of the pass in the order in which they were given, before
    ``backward()`` returns; each is called even if another raised, and the exception reaches the
    caller of ``backward()``. A backward pass inside a hook is a pass of its own.

    Raises:
        RuntimeError: no backward pass is running on this thread.
        TypeError: ``callback`` is not callable.
    """
    if not callable(callback):
        raise TypeError(f"on_backward_end needs a callable, got {type(callback).__name__}")
    if _current.walk is None:
        raise RuntimeError("on_backward_end was called outside a backward pass; call it in a hook")
    _current.walk.callbacks.append((_LAST, callback))


def at_end(callback: EndCallback, turn: int) -> None:
    """Ask for a call of ``callback`` before those of ``on_backward_end``, in the order of turns.

    So ranks call their modules in one order, also if their passes have got to other places.
    """
    assert _current.walk is not None
    _current.walk.callbacks.append((turn, callback))


def is_last_contribution(leaf: Leaf) -> bool:
    """Return whether the running pass has one contribution to ``leaf`` left, which it computes."""
    return _current.walk is not None and _current.walk.pending.get(leaf) == 1


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread."""
    return _current.walk is not None


@functools.cache
def extension() -> Any | None:
    """Return the module of csrc/nn, or None if it was not built."""
    module = _native.optional("nn", "layers compute with NumPy alone, some times slower")
    if module is not None and (found := libraries.blas("sgemm", "dgemm")):
        module.use_blas(*found)
    return module


def run_pass(start: Target, seed: Array, retain_graph: bool) -> None:
    """Send ``seed``, the gradient of ``start``, to the leaves below; then call the callbacks."""
    if module := extension():
        module.begin_pass()
    outer = _current.walk
    walk = _current.walk = Walk(start, seed, retain_graph)
    completed = False
    try:
        for watcher in watching[:] if outer is None else ():
            if (owner := watcher()) is not None:
                owner.on_begin()
        if isinstance(start, Node):
            _visit_all(walk, start)
        else:
            _accumulate(start, seed, seed)
            if start.hook is not None:
                start.hook(start)
        completed = True
    except BaseException:
        _join_failed(walk)
        raise
    finally:
        _current.walk = outer
        if walk.callbacks:
            walk.callbacks.sort(key=itemgetter(0))
            with ExitStack() as stack:  # it calls the last first, and all even if one raises
                for _, callback in reversed(walk.callbacks):
                    stack.callback(callback, completed)


def _join_failed(walk: Walk) -> None:
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


# In a small model's step this takes as long as its computations, so there are few calls.
def _visit_all(walk: Walk, root: Node) -> None:
    """Visit nodes as soon as all their consumers are done; finish a leaf with its last one.

    Ordered nodes, such as exchanges of messages, wait until nothing else is ready. Then the latest
    of those below ``root`` is among them, and is visited: the reverse of the order of recording.
    """
    pending, grads, replaced = walk.pending, walk.grads, walk.replaced
    walk.count([root], (), pending)
    ready = [root]
    ordered: list[tuple[Any, Node]] = []  # a heap of those with turns
    while ready or ordered:
        node = ready.pop() if ready else heappop(ordered)[1]
        if type(node) is Part:
            ready += walk.replace(node)  # visited next: it was recorded last
            continue
        grad, edges = grads[node], node.edges
        if node.through is not None:  # the gradient before it is needed no more
            contribution = grads[node] = grad = node.through(grad)
            if not walk.retain_graph:
                node.edges = node.through = None
        for recorded, vjp in edges or ():
            contribution = vjp(grad)
            target = walk.now(recorded) if replaced else recorded
            left = pending[target] = pending[target] - 1
            if isinstance(target, Leaf):
                _accumulate(target, contribution, grad)
                if not left and target.hook is not None:
                    target.hook(target)
                continue
            fits = contribution.shape == target.shape and contribution.dtype == target.dtype
            if not fits or target in grads:
                contribution = _sum(walk, target, contribution)
            grads[target] = contribution
            if not left and target.turn is None:
                ready.append(target)
            elif not left:
                heappush(ordered, (target.turn, target))
        del grads[node]
        if not walk.retain_graph:
            node.edges = None


def _sum(walk: Walk, node: Node, contribution: Array) -> Array:
    """Return the sum of the node's contributions so far and another one, in its shape and dtype."""
    if contribution.shape != node.shape or contribution.dtype != node.dtype:
        contribution = _fit(contribution, node.shape, node.dtype)
    held = walk.grads.get(node)
    if held is None:
        return contribution
    if node in walk.owned:
        held += contribution
        return held
    if node.shape:  # a sum of zero dimensions is an immutable NumPy scalar
        walk.owned.add(node)
    return held + contribution


def _accumulate(leaf: Leaf, contribution: Array, incoming: Array) -> None:
    """Add a contribution to ``leaf.grad``, which shares memory with nothing but its buffer."""
    buffer, held = leaf.buffer, leaf.grad
    like = leaf.data if buffer is None else buffer
    shape = like.shape
    if contribution.shape != shape or contribution.dtype != like.dtype:
        contribution = _fit(contribution, shape, like.dtype)
    if buffer is None:
        if held is not None:
            held += contribution
            leaf.grad = held  # another one where a hook has left a NumPy scalar
        elif contribution.base is None and contribution is not incoming and shape:
            leaf.grad = contribution  # a new array, which nobody else has
        else:
            leaf.grad = array_module(contribution).array(contribution)
    elif isinstance(buffer, GradSink):
        if not isinstance(contribution, GradSink):  # else a vjp has passed it there already
            is_new = contribution.base is None and contribution is not incoming and bool(shape)
            buffer.add(leaf, contribution, is_new)
    else:
        first = contribution if held is None else held
        if first is not buffer:  # a vjp may have written there already
            buffer[...] = first
        if held is not None:
            buffer += contribution
        leaf.grad = buffer


def _fit(grad: Array, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Cast a gradient; raise a ValueError if its shape is not that of the input."""
    if grad.shape != shape:
        raise ValueError(
            f"backward: expected a gradient of shape {shape}, as its input has, got {grad.shape}; "
            "the vector-Jacobian product of an operation is wrong"
        )
    return grad.astype(dtype, copy=False)
