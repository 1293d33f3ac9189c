"""Results of all shares as one, and the backward pass from there through every share.

A result is recorded with the one of this process's share as an input, and others that stand for the
workers. A pass visits, in this order,

1. the results, where the workers' rows of each gradient are noted;
2. ``send``: the noted rows go to the workers;
3. this process's own share, meanwhile;
4. ``collect``: the workers' gradients are awaited, and added in the order of the shares.

2, 3 and 4 are ordered operations of the engine, recorded last to first.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import on_backward_end
from flashlight_py.autograd.graph import Vjp
from flashlight_py.autograd.variable import record, record_in_order
from flashlight_py.device import Array
from flashlight_py.parallel.workers.parts import Part, array_of
from flashlight_py.parallel.workers.serving import Backward, Computed, Differentiated, Leaf
from flashlight_py.parallel.workers.team import WHAT, Team

# What stands for the workers in a graph has a value, which nobody needs.
_NOTHING = np.zeros(())


class ShareResult(NamedTuple):
    """The result of a worker; its ``arrays`` are valid until the next request."""

    computed: Computed
    arrays: list[Array]


def join(
    graph: WorkersGraph,
    own: Sequence[Part],
    shares: Sequence[ShareResult],
    params: Sequence[Variable],
    inputs: Sequence[Part],
) -> list[Part]:
    """Return the results of a forward pass, joined, with a graph through all shares.

    Args:
        graph: of the workers that compute the others.
        own: the results of this process's share.
        shares: those of the workers, in order.
        params: the module's parameters, by number.
        inputs: the whole inputs, by number.

    Raises:
        ValueError: a result has no dimensions, or the shares have results of different shapes.
    """
    arrays = [
        _joined([array_of(part), *(share.arrays[k] for share in shares)])
        for k, part in enumerate(_as_many(own, shares))
    ]
    collect = graph.collect(shares, params, inputs)
    ordered = [_in_order(part) for part in own]
    send = record_in_order(_NOTHING, (Variable(_NOTHING, True), graph.send))
    results: list[Part] = []
    for k, (array, part) in enumerate(zip(arrays, ordered, strict=True)):
        if not isinstance(part, Variable):
            results.append(array)
            continue
        ends = np.cumsum([part.shape[0], *(share.arrays[k].shape[0] for share in shares)]).tolist()
        edges: list[tuple[Variable, Vjp]] = [(part, partial(_first_rows, ends[0]))]
        below = [node for group, node in collect.items() if k in group]
        if below:
            edges.insert(0, (send, partial(graph.note, k, ends)))
            edges += [(node, _nothing) for node in below]
        results.append(record(array, *edges))
    return results


class WorkersGraph:
    """The workers' graphs of forward pass ``number``; they forget them when this object is gone.

    Share s is the rows from ``starts[s]`` on. In the end only the operations here refer to it.
    """

    def __init__(self, team: Team, number: int, starts: Sequence[int]) -> None:
        self._team, self._number, self._starts = team, number, starts
        self._arrays: dict[Leaf, Array] = {}  # what may have a gradient
        self._noted: dict[int, list[Array]] = {}  # by result: the gradient of each worker's rows
        # Of the pass that is running:
        self._left = set[Leaf]()  # whose gradients have not been taken
        self._answers: list[Differentiated] | None = None
        self._saved: dict[Leaf, Array] = {}
        team.numbers[weakref.ref(self, team.dropped.append)] = number

    def collect(
        self, shares: Sequence[ShareResult], params: Sequence[Variable], inputs: Sequence[Part]
    ) -> dict[tuple[int, ...], Variable]:
        """Return what stands for the end of the workers' backward passes, by groups of results.

        One for the leaves that all results of a group depend on, and no other result: so a leaf
        that a pass does not reach has no gradient.
        """
        self._count = len(shares)
        edges: dict[tuple[int, ...], list[tuple[Variable, Vjp]]] = {}
        of_shares = zip(*(share.computed.leaves for share in shares), strict=True)
        of_results = [set[Leaf]().union(*leaves) for leaves in of_shares]
        for leaf in sorted(set[Leaf]().union(*of_results)):
            is_param, number = leaf
            part = (params if is_param else inputs)[number]
            assert isinstance(part, Variable), "an array has no gradient"
            self._arrays[leaf] = part.data
            group = tuple(k for k, leaves in enumerate(of_results) if leaf in leaves)
            edges.setdefault(group, []).append((part, partial(self._gradient, leaf)))
        return {group: record_in_order(_NOTHING, *some) for group, some in edges.items()}

    def note(self, result: int, ends: Sequence[int], grad: Array) -> Array:
        """Note the workers' rows of the gradient of ``result``; they end at ``ends[1:]``."""
        if not self._noted:
            on_backward_end(self._forget)
        self._noted[result] = np.split(grad, ends[:-1])[1:]
        return _NOTHING

    def send(self, grad: Array) -> Array:
        """Send the workers what was noted; does not wait for them."""
        results = list(self._noted)
        requests = [
            (Backward(self._number, results, []), [self._noted[k][worker] for k in results])
            for worker in range(self._count)
        ]
        self._team.ask(requests, self)
        self._left = set(self._arrays)
        return grad

    def _gradient(self, leaf: Leaf, _: object = None) -> Array:
        """Return the sum over the workers for a parameter, or the gradient of an input."""
        if leaf in self._saved:
            return self._saved[leaf]
        self._left.discard(leaf)
        is_param, number = leaf
        return self._of_param(number) if is_param else self._of_input(number)

    def _of_param(self, number: int) -> Array:
        grads = [
            self._team.gradient(worker, number)
            for worker, answer in enumerate(self._received())
            if (True, number) in answer.leaves
        ]
        if len(grads) == 1:
            return grads[0]
        total = np.asarray(grads[0] + grads[1])  # NumPy makes a scalar where there is no dimension
        for grad in grads[2:]:
            total += grad
        return total

    def _of_input(self, number: int) -> Array:
        """Return the gradient of all rows; those of this process's share are zeros here."""
        whole = np.zeros_like(self._arrays[False, number])
        for worker, answer in enumerate(self._received()):
            if number in answer.places:
                begin, end = self._starts[worker + 1 : worker + 3]
                whole[begin:end] = self._team.results(worker, [answer.places[number]])[0]
        return whole

    def _received(self) -> list[Differentiated]:
        """Return the workers' answers; blocks until they are there."""
        if self._answers is None:
            self._answers = self._team.answers()
        return self._answers

    def save(self) -> None:
        """Copy what the running pass has not taken yet; see ``Asker``."""
        if self._left:
            answered = {leaf for answer in self._received() for leaf in answer.leaves}
            for leaf in sorted(answered & self._left):
                self._saved[leaf] = np.array(self._gradient(leaf))

    def _forget(self, completed: bool) -> None:
        self._noted.clear()
        self._saved.clear()
        self._left.clear()
        self._answers = None


def _as_many(own: Sequence[Part], shares: Sequence[ShareResult]) -> Sequence[Part]:
    counts = [len(own), *(len(share.arrays) for share in shares)]
    if len(set(counts)) > 1:
        raise ValueError(
            f"{WHAT}: the shares of the batch have different numbers of results: "
            f"{', '.join(map(str, counts))}; the module must return as many for any rows"
        )
    return own


def _joined(arrays: Sequence[Array]) -> Array:
    if not all(array.ndim for array in arrays):
        raise ValueError(
            f"{WHAT}: a result has no dimensions, so the shares cannot be joined; return one row "
            "for each sample, and take the mean of the whole outside: loss(model(x), y)"
        )
    return np.concatenate(arrays)


def _in_order(part: Part) -> Part:
    """Return ``part`` behind an ordered operation that does nothing."""
    if not isinstance(part, Variable):
        return part
    return record_in_order(part.data, (part, lambda grad: grad))


def _nothing(_: Array) -> Array:
    return _NOTHING


def _first_rows(count: int, grad: Array) -> Array:
    return grad[:count]
