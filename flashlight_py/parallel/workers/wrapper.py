"""``DataParallel``: a module that computes its batches with several processes of this machine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import on_backward_end
from flashlight_py.autograd.variable import record, record_in_order
from flashlight_py.cores import check_processes, usable_cores
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed import get_local_size
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.nn import Module
from flashlight_py.parallel.workers.processes import (
    WHAT,
    Answer,
    Leaf,
    Part,
    Team,
    array_of,
    is_data,
    put_together,
    take_apart,
)

_NOTHING = np.zeros(())  # value and gradient of nodes that stand for the workers


class DataParallel(Module):
    """A module that cuts each batch into shares, computed by as many processes of this machine.

    ``model = fl.DataParallel(model)`` is the only change: ``model(x)`` returns one Variable of all
    rows, and ``backward()`` computes in every ``param.grad`` what one process would have computed,
    to rounding, and the same bits each time. Optimizers, clipping, schedules and checkpoints work
    with the wrapped module, whose parameters and names in ``state_dict()`` stay the same. Neither
    a launcher nor ``distributed_init`` is needed; in a world each rank has its own workers.

    This process computes the first share, and workers compute the others. Workers are fresh
    interpreters that the first call starts, like the ranks of :func:`flashlight_py.spawn`. So a
    script makes that call under ``if __name__ == "__main__":``. Parameters and gradients are in
    memory that all processes map, so the workers use the result of an optimizer's step at once.
    The other parts of the module (modes, ratios, buffers) are sent if they have changed. Each share
    has its own random numbers, from this process's seed. Changes of the module by a forward pass,
    such as running statistics, are those of the first share.

    Inputs are NumPy arrays and Variables, also inside tuples, lists, dicts and objects that can be
    pickled. All have the batch as their first dimension and any dtype but object. Other values
    are sent to every share. The sizes of the shares differ by one row at most; a batch smaller than
    the number of processes leaves some idle. Results are joined along their first dimension, in
    order; values that are neither arrays nor Variables are taken from the first share.

    It can be used after an exception: a call starts new workers if they have ended. If it is
    dropped and not closed, the next use of another one ends its workers. No process and no memory
    remains when this process ends, also by ``kill -9``. Use it from one thread at a time.

    Args:
        module: computed on the CPU, can be pickled (in a notebook by cloudpickle).
        nprocs: number of processes, this one included; default the cores that this process may
            use, divided by the ranks of this host. 1: calls the module, and starts nothing.

    Raises:
        TypeError: ``module`` is no module, or ``nprocs`` is no integer.
        ValueError: ``nprocs`` is below 1 or too large for this host, or the module contains a
            DataParallel.

    Example:
        >>> model = fl.DataParallel(fl.nn.Linear(3, 2), nprocs=1)
        >>> model(fl.input(np.ones((4, 3), np.float32))).shape
        (4, 2)
        >>> sorted(model.state_dict())
        ['bias', 'weight']
    """

    def __init__(self, module: Module, nprocs: int | None = None) -> None:
        if not isinstance(module, Module):
            raise TypeError(f"{WHAT} takes a flashlight_py.nn.Module, got {type(module).__name__}")
        if any(isinstance(each, DataParallel) for _, each in module._walk()):
            raise ValueError(f"{WHAT}: the module contains a {WHAT} already; wrap the outermost")
        self._cores = max(1, usable_cores() // get_local_size())
        self.nprocs = self._cores if nprocs is None else whole_number(WHAT, "nprocs", nprocs, 1)
        check_processes(f"{WHAT}: nprocs", self.nprocs, 3)
        self.module = module
        self._team: Team | None = None
        self._number = 0

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what ``module`` does, computed in shares; blocks until all have been computed.

        Raises:
            ValueError: arrays of the inputs have different first dimensions, a result has no
                dimensions, the shares have different numbers of results, or a parameter is sharded.
            TypeError: an array is CuPy's or holds Python objects, or the module, the inputs or a
                worker's result cannot be pickled.
            RankFailedError: a worker was killed, or it raised: the message has the traceback, and
                the cause is the exception, if it can be pickled. ``backward()`` raises this, too.
                An exception of this process's share is raised unchanged.
            RuntimeError: a worker calls it while it imports the script: the call is not under
                ``if __name__ == "__main__":``. In ``backward()``: the workers have ended since.
            OSError: the system starts no more processes, or has no more memory.
        """
        if self.nprocs == 1:
            return self.module(*inputs, **options)
        form, parts = take_apart((inputs, options), is_data, "an input")
        rows = _rows(parts)
        count = min(rows, self.nprocs)
        if count < 2:
            return self.module(*inputs, **options)
        ends = [rows // count * k + min(k, rows % count) for k in range(count + 1)]
        own, *others = (slice(begin, end) for begin, end in pairwise(ends))
        if self.module.before_forward is not None:  # it may change what the workers need
            self.module.before_forward(self.module)
        team, module, params = self._ready_team()
        self._number += 1
        seed = int(random.generator().integers(1 << 62)) * self.nprocs
        calc_grads = [getattr(part, "calc_grad", None) for part in (*params, *parts)]
        graph = WorkersGraph(team, self._number, others)
        shares = [[array_of(part)[rows] for part in parts] for rows in others]
        answers = team.ask(shares, module, "forward", self._number, seed, form, calc_grads)
        instead = self.module._instead
        compute = partial(instead, self.module) if instead else self.module.forward
        inputs, options = put_together(form, [part[own] for part in parts])
        form, results = take_apart(compute(*inputs, **options), is_data, "a result")
        joined = graph.join(results, team.fill(answers)[: count - 1], params, parts)
        return put_together(form, joined)

    def close(self) -> None:
        """End the workers now; a later call starts new ones. Blocks until they are gone."""
        if self._team is not None:
            self._team.held.end()
            self._team = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the module and the number of processes."""
        return DataParallel, (self.module, self.nprocs), {"training": self.training}

    def __repr__(self) -> str:
        return f"{WHAT}({self.module!r}, nprocs={self.nprocs})"

    def _visit(self, prefix: str, met: set[int], found: Any, held: Any) -> Any:
        """Add this module, and the inner modules under the names that they have without it."""
        found.append((prefix, self))
        return self.module._visit(prefix, met, found, held)

    def _ready_team(self) -> tuple[Team, bytes, list[Variable]]:
        """Return workers that map the module's leaves, the module's pickle, and the leaves."""
        form, params = take_apart(
            self.module, lambda x: isinstance(x, Variable) and x.node is None, "the module"
        )
        for number, param in enumerate(params):
            if param.placement is not None:
                raise ValueError(
                    f"{WHAT}: parameter {number} (shape {param.shape}) is sharded, so its array "
                    "is in memory of the ranks; use one of both, with a rank for each core"
                )
            if is_cupy(param.data):
                raise TypeError(
                    f"{WHAT}: parameter {number} (shape {param.shape}) is on a GPU; this is for "
                    "NumPy arrays: start one process for each GPU with flrun or fl.spawn"
                )
        if self._team is None or not self._team.holds(params):
            self.close()
            self._team = Team(self.nprocs - 1, params, self._cores)
        return self._team, form, params


def _rows(parts: Sequence[Part]) -> int:
    """Return the first dimension of all inputs; 0 if there is no input."""
    shapes = [part.shape for part in parts]
    for part in parts:
        if is_cupy(array_of(part)) or part.dtype.hasobject:
            kind = "holds Python objects" if part.dtype.hasobject else "is a CuPy array"
            raise TypeError(f"{WHAT}: an input {kind}; this is for NumPy arrays of numbers")
    rows = {shape[0] if shape else None for shape in shapes}
    if len(rows) > 1 or None in rows:
        raise ValueError(
            f"{WHAT}: all inputs need the batch as their first dimension, got the shapes "
            f"{', '.join(map(str, shapes))}; pass numbers as Python numbers"
        )
    return rows.pop() or 0 if rows else 0


# The graph through all shares ---------------------------------------------------------------------


# A backward pass visits, in this order,
#
# 1. the joined results, whose gradients are cut into the rows of each share;
# 2. the results of this process's share; the first one sends the other rows to the workers;
# 3. the rest of this process's share, while the workers compute;
# 4. a node for each leaf below the workers' results, which waits for the workers' gradients.
#
# 2 and 4 are ordered operations of the engine, which visits them in the reverse of the order of
# recording. The engine does the rest: accumulation, hooks, buffers, retain_graph, a second pass.
class WorkersGraph:
    """The graphs of workers for forward pass ``number``, which they drop after this object.

    ``shares`` are the workers' rows of the batch. Only operations of the graph refer to it.
    """

    def __init__(self, team: Team, number: int, shares: Sequence[slice]) -> None:
        self._team, self._number, self._shares = team, number, shares
        self._rows: dict[int, list[Array]] = {}  # of the gradients of results, for each worker
        self._answers: list[Answer] = []
        team.numbers[weakref.ref(self)] = number

    def join(
        self, own: list[Part], answers: list[Answer], params: list[Variable], inputs: list[Part]
    ) -> list[Part]:
        """Return this process's ``own`` results joined with the workers', recorded."""
        others, leaves = zip(*answers, strict=True)
        counts = [len(own), *map(len, others)]
        if len(set(counts)) > 1:
            raise ValueError(
                f"{WHAT}: the shares of the batch have different numbers of results: "
                f"{', '.join(map(str, counts))}; the module must return as many for any rows"
            )
        below = [set[Leaf]().union(*each) for each in zip(*leaves, strict=True)]  # each result
        nodes: dict[Leaf, Variable] = {}
        for leaf in sorted(set[Leaf]().union(*below)):
            source: Any = (params if leaf[0] else inputs)[leaf[1]]
            gradient = partial(self._gradient, leaf, source.data)
            nodes[leaf] = record_in_order(_NOTHING, (source, gradient))
        results: list[Part] = []
        for k, part in enumerate(own):
            arrays = [array_of(part), *(arrays[k] for arrays in others)]
            if not all(array.ndim for array in arrays):
                raise ValueError(
                    f"{WHAT}: a result has no dimensions, so the shares cannot be joined: return a "
                    "row for each sample, and take the mean of the whole outside: loss(model(x), y)"
                )
            result: Any = np.concatenate(arrays)
            if isinstance(part, Variable):
                source = part if part.calc_grad else Variable(part.data, bool(below[k]))
                first = record_in_order(part.data, (source, self._send))
                cut = partial(self._cut, k, [*accumulate(map(len, arrays))])
                edges = [(nodes[leaf], _return_nothing) for leaf in sorted(below[k])]
                result = record(result, (first, cut), *edges)
            results.append(result)
        return results

    def _cut(self, result: int, ends: Sequence[int], grad: Array) -> Array:
        """Return the first share's rows of the gradient of ``result``; keep the workers' rows."""
        if not self._rows:
            on_backward_end(self._forget)
        self._rows[result] = [grad[begin:end] for begin, end in pairwise(ends)]
        return grad[: ends[0]]

    def _send(self, grad: Array) -> Array:
        """Send the workers their rows, unless this was done; do not wait for them."""
        if self._rows:
            shares = zip(*self._rows.values(), strict=True)
            self._answers = self._team.ask(shares, None, "backward", self._number, [*self._rows])
            self._rows = {}
        return grad

    def _gradient(self, leaf: Leaf, like: Array, _: object) -> Array:
        """Return a parameter's gradient from the workers, or an input's, with 0 in other rows."""
        answers = enumerate(self._team.fill(self._answers))
        parts = [(worker, arrays.pop(leaf)) for worker, (arrays, _) in answers if leaf in arrays]
        if not leaf[0]:
            grad = np.zeros_like(like)
            for worker, part in parts:
                grad[self._shares[worker]] = part
            return grad
        total: Array = parts.pop(0)[1]
        for _, part in parts:
            total += part  # in the memory of the first worker, which the pass does not need again
        return total

    def _forget(self, completed: bool) -> None:
        self._rows = {}
        self._answers.clear()


def _return_nothing(grad: Array) -> Array:
    return _NOTHING
