"""The graph of a backward pass: nodes, left by operations, and their edges.

An operation that is not recorded leaves an ``Outline``: what it was computed from, without the
arrays. A computation that is to be done again leaves a ``Part`` for each result, with edges to what
its outlines lead to; the graph of the second time then takes its place.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, Union

import numpy as np

from flashlight_py.device import Array

Vjp: TypeAlias = Callable[[Array], Array]
Target: TypeAlias = Union["Node", "Leaf"]
Edges: TypeAlias = Sequence[tuple[Target, Vjp]]
EndCallback: TypeAlias = Callable[[bool], None]
Repeat: TypeAlias = Callable[[], Sequence["Leaf"]]


class Leaf:
    """An end of a graph, with all that a pass knows of a variable: ``Variable`` is made of it."""

    # For the library's own use, but grad.
    __slots__ = ("__weakref__", "_calc_grad", "buffer", "changed", "data", "grad", "hook", "node",
                 "placement")  # fmt: skip

    data: Array  # Variable.array is this with checks
    grad: Array | None
    node: "Node | None"
    hook: Callable[[Any], None] | None
    buffer: Any  # None, an array, or a GradSink
    placement: Any  # of a sharded module's parameter (optim.optimizer)
    changed: int  # Changes.count of a leaf's last change that was noted


class Changes:
    """How often values of variables were changed, as far as this package has done it."""

    count = 0


def note_changes(leaves: Iterable[Leaf]) -> None:
    """Have backward passes refuse graphs in which these leaves were used before."""
    Changes.count += 1
    now = Changes.count
    for leaf in leaves:
        leaf.changed = now


class Node:
    """One recorded operation; ``edges`` is None once a backward pass has freed it.

    ``made``: the number of changes of variables before it. ``through``: a function of the gradient
    before the vjps of the edges, if any, such as the slope of a ReLU.
    """

    __slots__ = ("dtype", "edges", "made", "shape", "through")

    edges: Edges | None
    turn: int | None = None
    repeat: Repeat | None = None

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], edges: Edges, through: Vjp | None = None
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.edges, self.through = edges, through
        self.made = Changes.count


_recorded = itertools.count()


class OrderedNode(Node):
    """An operation that a pass visits before all ordered ones that were recorded earlier."""

    __slots__ = ("turn",)

    def __init__(self, node: Node) -> None:
        super().__init__(node.shape, node.dtype, node.edges or (), node.through)
        self.turn = -next(_recorded)


class Outline(Node):
    """The sources of an operation, all that a block without results keeps of it."""

    __slots__ = ("ordered", "sources")

    edges = None

    def __init__(self, sources: tuple[Target, ...]) -> None:
        self.sources = sources
        self.ordered = False

    def targets(self) -> tuple[list[Target], bool]:
        """Return what it was computed from outside of the block, and if by ordered operations."""
        seen: dict[Target, None] = {self: None}
        unseen: list[Outline] = [self]
        ordered = False
        while unseen:
            outline = unseen.pop()
            ordered |= outline.ordered
            for source in outline.sources:
                if source not in seen:
                    seen[source] = None
                    if isinstance(source, Outline):
                        unseen.append(source)
        return [target for target in seen if not isinstance(target, Outline)], ordered


class Outlining(threading.local):
    """Whether operations on this thread are recorded as outlines alone."""

    is_outline = False


recording = Outlining()


class Part(Node):
    """Result ``place`` of a computation that was not recorded; ``edges``: what the result leads to.

    ``repeat``: the function that does it again and returns all results, as variables; all parts of
    a computation have the same one. ``ordered``: there are ordered operations in the computation.
    """

    __slots__ = ("place", "repeat", "turn")

    def __init__(
        self, like: Array, repeat: Repeat, place: int, targets: Iterable[Target], ordered: bool
    ) -> None:
        super().__init__(like.shape, like.dtype, tuple([(each, _no_vjp) for each in targets]))
        self.repeat: Repeat | None = repeat
        self.place = place
        self.turn = -next(_recorded) if ordered else None


def _no_vjp(grad: Array) -> Array:
    raise AssertionError("a part is computed again, and not differentiated itself")


class Walk:
    """The state of a backward pass on its way through a graph.

    ``pending``: how many contributions each target still waits for. ``grads``: their sums so far;
    ``owned``: those whose sum was made by the pass, hence its own to add into. ``callbacks``: calls
    at the end of the pass, with turns. A pass that begins at a leaf has callbacks alone.
    """

    def __init__(self, root: Target, seed: Array, retain_graph: bool) -> None:
        self._parts: dict[Repeat, list[Part]] = {}  # those that the pass reaches
        self.retain_graph = retain_graph
        self.pending: dict[Target, int] = {}
        self.grads = {root: seed} if isinstance(root, Node) else {}
        self.owned: set[Node] = set()
        self.callbacks: list[tuple[int, EndCallback]] = []
        self.replaced: dict[Target, Node] = {}  # parts of computations that were done again
        self._inside: set[Node] = set()  # those whose node is also used in its computation

    def count(
        self, roots: Sequence[Node], ends: Iterable[Target], counts: dict[Target, int]
    ) -> None:
        """Put into ``counts``, which is empty, how many edges lead to each target below ``roots``.

        Not below ``ends``; roots and ends that no edge leads to have 0. ``counts`` is complete even
        if this raises: it shows which nodes wait. The walk takes note of the parts on the way.
        """
        wrong, now = "", Changes.count
        for root in roots:
            counts[root] = 0
        unseen: list[Any] = list(counts)
        for end in ends:
            counts.setdefault(end, 0)
        while unseen:
            node = unseen.pop()
            edges = node.edges
            if edges is None:
                wrong = _why_without_edges(node)
                continue
            if node.made < now:
                wrong = wrong or _changed_since(node)
            if node.repeat is not None:
                self._parts.setdefault(node.repeat, []).append(node)
            for target, _ in edges:
                if target in counts:
                    counts[target] += 1
                else:
                    counts[target] = 1
                    if not isinstance(target, Leaf):
                        unseen.append(target)
        if wrong:
            raise RuntimeError(wrong)

    def replace(self, part: Part) -> list[Node]:
        """Return the node that is to be visited in the place of ``part``, or none for the time.

        The computation is done again, unless it was. Then the nodes of its graph take the place of
        all its parts, so that all sums are made in the order in which they are made without parts.
        """
        if part not in self.replaced:
            assert part.repeat is not None
            parts = self._parts[part.repeat]
            nodes = self._done_again(part.repeat(), parts)
            for each, node in zip(parts, nodes, strict=True):
                if each in self.grads:
                    self.grads[node] = self.grads.pop(each)
                if each in self.owned:
                    self.owned.add(node)
                if self.pending.get(node, 0) > self.pending.get(each, 0):
                    self._inside.add(each)  # so that what uses it last brings it to its turn
                self.replaced[each] = node
                if not self.retain_graph:
                    each.edges = each.repeat = None
        return [] if part in self._inside else [self.replaced[part]]

    def _done_again(self, results: Sequence[Leaf], parts: Sequence[Part]) -> list[Node]:
        """Return what stands for ``parts`` in a new graph, which ``pending`` counts from now on."""
        announced = [target for part in parts for target, _ in part.edges or ()]
        found = [results[part.place].node for part in parts if part.place < len(results)]
        nodes = [node for node in found if node is not None]
        counts: dict[Target, int] = {}
        self.count(nodes, announced, counts)
        counts = {target: count for target, count in counts.items() if count}
        reached = {target for target in counts if not isinstance(target, Node)}
        left, new = set(announced) - counts.keys(), reached - set(announced)
        # A leaf that is made on the way is another one each time.
        same = len(left) == len(new) and all(
            not isinstance(x, Node) and x.hook is None for x in left
        )
        if [(x.shape, x.dtype) for x in nodes] != [(x.shape, x.dtype) for x in parts] or not same:
            raise RuntimeError(
                "backward: a module that is computed again (see recompute) did something else than "
                "the first time; it must do the same with the same inputs, random numbers of "
                "flashlight_py.random and buffers, and use nothing else that changes in between"
            )
        for part, node in zip(parts, nodes, strict=True):
            counts[node] = counts.get(node, 0) + self.pending.get(part, 0)
        for target, count in counts.items():
            now = self.now(target)
            self.pending[now] = self.pending.get(now, 0) + count
        for target in announced:
            self.pending[self.now(target)] -= 1
        return nodes

    def now(self, target: Target) -> Target:
        """Return what contributions to ``target`` go to: parts may have been replaced."""
        while target in self.replaced:
            target = self.replaced[target]
        return target


def _changed_since(node: Node) -> str:
    """Return what is wrong if a leaf was changed after the operation has used it, else nothing."""
    edges: Any = node.edges
    changed = [each for each, _ in edges if isinstance(each, Leaf) and each.changed > node.made]
    if not changed:
        return ""
    vjp = getattr(edges[0][1], "func", edges[0][1])  # of a partial
    name: str = getattr(vjp, "__qualname__", type(vjp).__qualname__)
    function = "recompute" if vjp is _no_vjp else name.partition(".")[0].lstrip("_")
    return (
        f"backward: {function}() has used a variable of shape {changed[0].data.shape} that was "
        "changed since by an optimizer's step, load_state_dict or an assignment to its array; call "
        "backward() before that, or compute the loss again"
    )


def _why_without_edges(node: Node) -> str:
    if isinstance(node, Outline):
        return (
            "backward: the loss depends on a variable that a module made whose intermediate "
            "results are not kept (see recompute), and that it did not return; return it, also "
            "within a tuple, list or dict, or call recompute on another module"
        )
    return (
        "backward: this graph was freed by an earlier backward pass, or by the function that "
        "returned the variable; compute the loss again, pass retain_graph=True to the earlier "
        "backward(), or call it inside of that function"
    )
