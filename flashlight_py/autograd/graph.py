"""The graph of a backward pass. Each operation creates a node with edges to its inputs.

A module under ``recompute`` does not record its operations. Each operation of the module creates an
``Outline``, which refers to the outlines, nodes and leaves of its inputs, but not to arrays. Then
each result of the module gets a ``Part``: a node with edges to the nodes and leaves that its
outline leads to. The backward pass runs the module again, and the new graph replaces the parts.
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
    """A variable in the graph that no recorded operation computed. Base class of ``Variable``."""

    # All slots except grad are internal.
    __slots__ = ("__weakref__", "_calc_grad", "buffer", "changed", "data", "grad", "hook", "node",
                 "placement")  # fmt: skip

    data: Array  # the value; assignment skips the checks of Variable.array
    grad: Array | None
    node: "Node | None"
    hook: Callable[[Any], None] | None
    buffer: Any  # memory for grad: None, an array, or a GradSink
    placement: Any  # a Placement if the parameter is sharded, else None
    changed: int  # Changes.count at the latest change of the leaf


class Changes:
    """Number of calls of :func:`note_changes` in this process."""

    count = 0


def note_changes(leaves: Iterable[Leaf]) -> None:
    """Note a change of ``leaves``. ``backward`` then rejects graphs that used the old arrays."""
    Changes.count += 1
    now = Changes.count
    for leaf in leaves:
        leaf.changed = now


class Node:
    """One recorded operation. ``edges`` is None after a backward pass has freed the graph.

    ``made``: ``Changes.count`` at the recording. ``through``: function, or None, that the pass
    applies to the gradient of the result before it calls the vjps. For a ReLU, ``through``
    multiplies by the slope.
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
    """An operation that a pass visits before all ordered nodes that were recorded earlier."""

    __slots__ = ("turn",)

    def __init__(self, node: Node) -> None:
        super().__init__(node.shape, node.dtype, node.edges or (), node.through)
        self.turn = -next(_recorded)


class Outline(Node):
    """The inputs (``sources``) of an operation that is not recorded, without arrays and vjps."""

    __slots__ = ("ordered", "sources")

    edges = None

    def __init__(self, sources: tuple[Target, ...]) -> None:
        self.sources = sources
        self.ordered = False

    def targets(self) -> tuple[list[Target], bool]:
        """Follow outlines to nodes and leaves. Return these, and whether an outline is ordered."""
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


class _ThreadState(threading.local):
    walk: "Walk | None" = None  # the running backward pass
    is_outline = False  # whether operations create outlines


this_thread = _ThreadState()


class Part(Node):
    """The node of a result that was computed without recording, such as by a recomputed module.

    ``edges`` lead to the sources of the result. ``repeat`` repeats the computation with recording
    and returns all results, with this result at ``position``. All parts of one computation have the
    same ``repeat``. ``ordered`` states whether the computation has ordered operations.
    """

    __slots__ = ("position", "repeat", "turn")

    def __init__(
        self, like: Array, repeat: Repeat, position: int, targets: Iterable[Target], ordered: bool
    ) -> None:
        super().__init__(like.shape, like.dtype, tuple([(target, _no_vjp) for target in targets]))
        self.repeat: Repeat | None = repeat
        self.position = position
        self.turn = -next(_recorded) if ordered else None


def _no_vjp(grad: Array) -> Array:
    raise AssertionError("the walk replaces a Part before it calls vjps")


class Walk:
    """The state of a backward pass.

    ``pending``: for each target, the number of missing contributions. ``grads``: for each node, the
    sum of contributions so far. ``owned``: nodes whose sum is a new array, which the pass may
    modify. ``callbacks``: (turn, function) pairs to call at the end of the pass. A pass that starts
    at a leaf uses only ``callbacks``.
    """

    def __init__(self, root: Target, seed: Array, retain_graph: bool) -> None:
        self._parts: dict[Repeat, list[Part]] = {}
        self.retain_graph = retain_graph
        self.pending: dict[Target, int] = {}
        self.grads = {root: seed} if isinstance(root, Node) else {}
        self.owned: set[Node] = set()
        self.callbacks: list[tuple[int, EndCallback]] = []
        self.replaced: dict[Target, Node] = {}  # for a part: its new node
        self._inside: set[Node] = set()  # parts whose new node is an input of other new nodes

    def count(
        self, roots: Sequence[Node], ends: Iterable[Target], counts: dict[Target, int]
    ) -> None:
        """Count the edges to each target that ``roots`` reach, and store the numbers in ``counts``.

        A root or an item of ``ends`` gets 0 if no edge leads to it. Edges of ``ends`` are not
        followed. If the graph was freed or a leaf was changed, this raises RuntimeError, but only
        after it has completed ``counts``.
        """
        problem, now = "", Changes.count
        for root in roots:
            counts[root] = 0
        unseen: list[Any] = list(counts)
        for end in ends:
            counts.setdefault(end, 0)
        while unseen:
            node = unseen.pop()
            edges = node.edges
            if edges is None:
                problem = _why_without_edges(node)
                continue
            if node.made < now:
                problem = problem or _changed_since(node)
            if node.repeat is not None:
                self._parts.setdefault(node.repeat, []).append(node)
            for target, _ in edges:
                if target in counts:
                    counts[target] += 1
                else:
                    counts[target] = 1
                    if not isinstance(target, Leaf):
                        unseen.append(target)
        if problem:
            raise RuntimeError(problem)

    def replace(self, part: Part) -> list[Node]:
        """Return ``[node]``, the new node in place of ``part``, or [] if it is not ready.

        The first call for a computation repeats it and replaces all its parts. A new node is not
        ready if other new nodes use its result. This keeps the order of sums of gradients.
        """
        if part not in self.replaced:
            assert part.repeat is not None
            parts = self._parts[part.repeat]
            nodes = self._done_again(part.repeat(), parts)
            for replaced_part, node in zip(parts, nodes, strict=True):
                if replaced_part in self.grads:
                    self.grads[node] = self.grads.pop(replaced_part)
                if replaced_part in self.owned:
                    self.owned.add(node)
                if self.pending.get(node, 0) > self.pending.get(replaced_part, 0):
                    self._inside.add(replaced_part)  # its node waits for other new nodes
                self.replaced[replaced_part] = node
                if not self.retain_graph:
                    replaced_part.edges = replaced_part.repeat = None
        return [] if part in self._inside else [self.replaced[part]]

    def _done_again(self, results: Sequence[Leaf], parts: Sequence[Part]) -> list[Node]:
        """Return the new node of each part, from ``results``, and update ``pending``."""
        announced = [target for part in parts for target, _ in part.edges or ()]
        candidates = [results[part.position].node for part in parts if part.position < len(results)]
        nodes = [node for node in candidates if node is not None]
        counts: dict[Target, int] = {}
        self.count(nodes, announced, counts)
        counts = {target: count for target, count in counts.items() if count}
        reached = {target for target in counts if not isinstance(target, Node)}
        missing, added = set(announced) - counts.keys(), reached - set(announced)
        # The computation may create leaves, which are other objects in each repetition.
        is_same = all(not isinstance(x, Node) and x.hook is None for x in missing)
        kinds, expected = ([(x.shape, x.dtype) for x in items] for items in (nodes, parts))
        if len(missing) != len(added) or not is_same or kinds != expected:
            raise RuntimeError(
                "backward: expected a module under recompute to repeat its operations, got other "
                "operations. Let them depend only on its inputs, buffers and random numbers of "
                "flashlight_py.random"
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
        """Return the node that has replaced ``target``, or ``target`` itself."""
        while target in self.replaced:
            target = self.replaced[target]
        return target


def _changed_since(node: Node) -> str:
    edges: Any = node.edges
    changed = [leaf for leaf, _ in edges if isinstance(leaf, Leaf) and leaf.changed > node.made]
    if not changed:
        return ""
    vjp = getattr(edges[0][1], "func", edges[0][1])  # the function of a functools.partial
    name: str = getattr(vjp, "__qualname__", type(vjp).__qualname__)
    function = "recompute" if vjp is _no_vjp else name.partition(".")[0].lstrip("_")
    return (
        f"backward: a variable of shape {changed[0].data.shape} was changed after {function}() had "
        "used it, by an optimizer step, load_state_dict or an assignment to its array. Call "
        "backward() before the change, or compute the loss again"
    )


def _why_without_edges(node: Node) -> str:
    if isinstance(node, Outline):
        return (
            "backward: the loss depends on an intermediate variable of a module under recompute, "
            "which is not kept. Return the variable from the module, also inside a tuple, list or "
            "dict, or call recompute on another module"
        )
    return (
        "backward: this graph was freed by an earlier backward pass, or by the function that "
        "returned the variable. Compute the loss again, pass retain_graph=True to the earlier "
        "backward(), or call backward() inside that function"
    )
