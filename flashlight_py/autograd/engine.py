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

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

from flashlight_py.autograd.graph import Node, Part, Repeated, count_consumers, start_of
from flashlight_py.autograd.narrow import total
from flashlight_py.device import Array, array_module

if TYPE_CHECKING:
    import numpy as np

    from flashlight_py.autograd.variable import Variable

EndCallback: TypeAlias = Callable[[bool], None]


class _Pass(threading.local):
    """What the backward pass that runs on this thread has been asked to call when it ends."""

    callbacks: list[EndCallback] | None = None


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
    _current.callbacks.append(callback)


def backward_from_node(root: Node, seed: Array, retain_graph: bool) -> None:
    """Send ``seed``, the gradient of ``root``'s result, to every leaf below ``root``."""
    _run(_walk, root, seed, retain_graph)


def backward_from_leaf(leaf: Variable, seed: Array) -> None:
    """Add ``seed`` to ``leaf.grad`` and call its hook: the pass of a graph without operations."""
    _run(_contribute, leaf, seed)


def _run(walk: Callable[..., None], *args: object) -> None:
    """Run one pass, then its end callbacks, whether it raised or not."""
    callbacks: list[EndCallback] = []
    outer, _current.callbacks = _current.callbacks, callbacks
    completed = False
    try:
        walk(*args)
        completed = True
    finally:
        _current.callbacks = outer
        if callbacks:
            _call_all(callbacks, completed)


def _call_all(callbacks: list[EndCallback], completed: bool) -> None:
    with ExitStack() as stack:  # it calls the last first, and all of them even if one raises
        for callback in reversed(callbacks):
            stack.callback(callback, completed)


def _contribute(leaf: Variable, seed: Array) -> None:
    _accumulate(leaf, seed, seed)
    if leaf.hook is not None:
        leaf.hook(leaf)


def _walk(root: Node, seed: Array, retain_graph: bool) -> None:
    """Visit nodes as soon as all their consumers are done; finish a leaf with its last one.

    Ordered nodes wait until nothing else is ready. Then the latest of those below ``root`` is among
    them, for whatever consumes it was recorded later, and has been visited.
    """
    parts: dict[Repeated, list[Part]] = {}  # those that this pass visits
    pending = count_consumers([root], (), parts)
    repeated: dict[Repeated, Sequence[Node | None]] = {}
    grads = {root: seed}
    owned: set[Node] = set()  # nodes whose gradient is a sum made here, hence ours to add into
    ready = [root]
    ordered: list[tuple[int, Node]] = []  # a heap
    while ready or ordered:
        node = ready.pop() if ready else heappop(ordered)[1]
        grad = grads.pop(node)
        if type(node) is Part:
            start = start_of(node, pending, parts, repeated)
            _add_to_node(start, grad, grads, owned)
            pending[start] -= 1
            if not pending[start]:
                ready.append(start)
            if not retain_graph:
                node.edges = None
            continue
        for target, vjp in node.edges or ():
            contribution = vjp(grad)
            pending[target] -= 1
            if isinstance(target, Node):
                _add_to_node(target, contribution, grads, owned)
                if not pending[target]:
                    if target.turn is not None:
                        heappush(ordered, (target.turn, target))
                    else:
                        ready.append(target)
            else:
                _accumulate(target, contribution, grad)
                if target.hook is not None and not pending[target]:
                    target.hook(target)
        if not retain_graph:
            node.edges = None


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


def _accumulate(leaf: Variable, contribution: Array, incoming: Array) -> None:
    """Add a contribution to ``leaf.grad``, which shares memory with nothing but its buffer."""
    array, held, buffer = leaf.data, leaf.grad, leaf.buffer
    if contribution.shape != array.shape or contribution.dtype != array.dtype:
        contribution = _fit(contribution, array.shape, array.dtype)
    if buffer is not None:
        leaf.grad = _accumulate_in_buffer(buffer, held, contribution)
    elif held is not None:
        held += contribution
    elif contribution is incoming or contribution.base is not None or not contribution.shape:
        leaf.grad = array_module(contribution).array(contribution)
    else:
        leaf.grad = contribution


def _accumulate_in_buffer(buffer: Array, held: Array | None, contribution: Array) -> Array:
    if held is None:
        if contribution is not buffer:  # a vjp may have written there already
            buffer[...] = contribution
        return buffer
    if held is not buffer:
        buffer[...] = held
    buffer += contribution
    return buffer


def _fit(grad: Array, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Sum a gradient over the dimensions that broadcasting added or stretched, and cast it."""
    if grad.shape != shape:
        added = grad.ndim - len(shape)
        stretched = [i + added for i, n in enumerate(shape) if n == 1 != grad.shape[i + added]]
        grad = total(grad, (*range(added), *stretched)).reshape(shape)
    return grad.astype(dtype, copy=False)
