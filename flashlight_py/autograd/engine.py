"""The backward pass: an iterative walk over recorded operations.

Every operation creates a ``Node``. A node has an edge to each input: to the node that computed the
input, or to a leaf ``Variable``. Each edge has the vector-Jacobian product ("vjp") of its input. A
vjp is a function that maps the gradient of the result to the gradient of the input.

A vjp returns a new array, its argument, or a view of its argument. The returned array has the shape
of the input. If it has another dtype than the input, the pass casts it. A vjp does not modify its
argument. The pass copies a gradient only if it would share memory with another gradient.

The results of a module under ``recompute`` are ``Part`` nodes (see ``graph``). With them, a pass
visits nodes and calls hooks in the same order as without ``recompute``.
"""

import functools
import sys
import weakref
from contextlib import ExitStack
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any

import numpy as np

from flashlight_py import _native, libraries
from flashlight_py.autograd.graph import EndCallback, Leaf, Node, Part, Target, Walk, this_thread
from flashlight_py.device import Array, array_module


class GradSink:
    """An object that stores a leaf's gradient. ``Leaf.buffer`` may be such an object."""

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def add(self, leaf: Any, contribution: Array, is_new: bool) -> None:
        """Add ``contribution``, which has the leaf's shape and dtype.

        If ``is_new``, nothing else refers to the array, and the sink may keep it without a copy.
        """
        raise NotImplementedError

    def product(self, leaf: Any, a: Array, b: Array) -> "Array | GradSink":
        """Add ``a @ b`` and return ``self``, or return ``a @ b``, which the pass adds later."""
        raise NotImplementedError


class InPasses:
    """Base class of objects whose methods a backward pass calls as hooks or vjps.

    The hook or vjp is a ``functools.partial`` of the method. If a pass raises before this call, it
    calls ``join_failed``. An outermost pass first calls ``on_begin`` of objects in ``watching``.
    """

    def on_begin(self) -> None:
        """Prepare for an outermost backward pass that begins now."""

    def join_failed(self) -> None:
        """Handle an exception that ended the pass before it called this object's hook or vjp."""


watching: list[weakref.ref[InPasses]] = []

_LAST = sys.maxsize  # callbacks of on_backward_end run after all others


def on_backward_end(callback: EndCallback) -> None:
    """Call ``callback(completed)`` once when the running pass ends. Gradient hooks call this.

    ``completed`` is False if the pass raised, so that gradients are missing or partial. Callbacks
    run on the thread of the pass in the order of registration, before ``backward()`` returns. If a
    callback raises, the other callbacks still run, and ``backward()`` raises its exception. A
    backward pass inside a hook has its own callbacks.

    Raises:
        RuntimeError: If no backward pass runs on this thread.
        TypeError: If ``callback`` is not callable.
    """
    if not callable(callback):
        raise TypeError(f"on_backward_end: expected a callable, got {type(callback).__name__}")
    if this_thread.walk is None:
        raise RuntimeError("on_backward_end: no backward pass is running. Call it in a hook")
    this_thread.walk.callbacks.append((_LAST, callback))


def at_end(callback: EndCallback, turn: int) -> None:
    """Call ``callback`` at the end of the running pass, before callbacks of ``on_backward_end``.

    Callbacks run in ascending order of ``turn``. All ranks pass equal numbers, so they run their
    callbacks in the same order, even if the pass of a rank stopped early.
    """
    assert this_thread.walk is not None
    this_thread.walk.callbacks.append((turn, callback))


def is_last_contribution(leaf: Leaf) -> bool:
    """Return whether ``leaf.grad`` lacks exactly one contribution in the running pass."""
    return this_thread.walk is not None and this_thread.walk.pending.get(leaf) == 1


def in_backward() -> bool:
    return this_thread.walk is not None


@functools.cache
def extension() -> Any | None:
    """Return the compiled module of csrc/nn, or None if it was not built."""
    if module := _native.optional("nn", "layers compute with NumPy alone, several times slower"):
        module.use_threads_of(*libraries.blas("openblas_get_num_threads")[1:])
    return module


def run_pass(start: Target, seed: Array, retain_graph: bool) -> None:
    """Propagate ``seed``, the gradient of ``start``, to the leaves. Then run ``Walk.callbacks``."""
    if module := extension():
        module.begin_pass()
    outer = this_thread.walk
    walk = this_thread.walk = Walk(start, seed, retain_graph)
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
        this_thread.walk = outer
        if walk.callbacks:
            walk.callbacks.sort(key=itemgetter(0))
            with ExitStack() as stack:  # calls all, last in first out, even if one raises
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


# This loop avoids function calls. In a small model it takes as long as the computations.
def _visit_all(walk: Walk, root: Node) -> None:
    """Visit each node after the nodes that use its result, and call the hooks of leaves.

    A hook is called when the gradient of its leaf is complete. Ordered nodes, such as message
    exchanges, wait until no other node is ready. Then the walk visits one of them: the ready node
    that was recorded last. Ordered nodes are therefore visited in the reverse order of recording.
    """
    pending, grads, replaced = walk.pending, walk.grads, walk.replaced
    walk.count([root], (), pending)
    ready = [root]
    ordered: list[tuple[Any, Node]] = []  # heap of ready ordered nodes
    while ready or ordered:
        node = ready.pop() if ready else heappop(ordered)[1]
        if type(node) is Part:
            ready += walk.replace(node)
            continue
        grad, edges = grads[node], node.edges
        if node.through is not None:
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
    if contribution.shape != node.shape or contribution.dtype != node.dtype:
        contribution = _fit(contribution, node.shape, node.dtype)
    previous = walk.grads.get(node)
    if previous is None:
        return contribution
    if node in walk.owned:
        previous += contribution
        return previous
    if node.shape:  # a sum without dimensions is an immutable NumPy scalar
        walk.owned.add(node)
    return previous + contribution


def _accumulate(leaf: Leaf, contribution: Array, incoming: Array) -> None:
    """Add ``contribution`` to ``leaf.grad``. A vjp computed it from the gradient ``incoming``."""
    buffer, previous = leaf.buffer, leaf.grad
    like = leaf.data if buffer is None else buffer
    shape = like.shape
    if contribution.shape != shape or contribution.dtype != like.dtype:
        contribution = _fit(contribution, shape, like.dtype)
    if buffer is None:
        if previous is not None:
            previous += contribution
            leaf.grad = previous  # += does not change a NumPy scalar in place
        elif contribution.base is None and contribution is not incoming and shape:
            leaf.grad = contribution  # a new array: nothing else refers to it
        else:
            leaf.grad = array_module(contribution).array(contribution)
    elif isinstance(buffer, GradSink):
        if not isinstance(contribution, GradSink):  # else sink.product() has added it
            is_new = contribution.base is None and contribution is not incoming and bool(shape)
            buffer.add(leaf, contribution, is_new)
    else:
        first = contribution if previous is None else previous
        if first is not buffer:  # a vjp may have written it into the buffer
            buffer[...] = first
        if previous is not None:
            buffer += contribution
        leaf.grad = buffer


def _fit(grad: Array, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    if grad.shape != shape:
        raise ValueError(
            f"backward: a vector-Jacobian product must return a gradient of the input's shape "
            f"{shape}, got {grad.shape}"
        )
    return grad.astype(dtype, copy=False)
