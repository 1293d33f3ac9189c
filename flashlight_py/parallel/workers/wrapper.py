"""``DataParallel``: a module whose batches are computed by several processes of this machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise, zip_longest
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import on_backward_end
from flashlight_py.autograd.graph import Vjp
from flashlight_py.autograd.variable import record, record_in_order
from flashlight_py.cores import check_processes, usable_cores
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed import get_local_size
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.launch.pickling import main_can_be_imported
from flashlight_py.nn import Module
from flashlight_py.parallel.workers.serving import Leaf, ShareResult
from flashlight_py.parallel.workers.shared_values import (
    Part,
    array_of,
    is_data,
    put_together,
    take_apart,
)
from flashlight_py.parallel.workers.team import WHAT, Team

# What stands for the workers in a graph has a value, which nobody needs.
_NOTHING = np.zeros(())
# Of one leaf: which worker has which gradient.
Parts: TypeAlias = list[tuple[int, Array]]


class DataParallel(Module):
    """A module that cuts each batch into shares, computed by as many processes of this machine.

    ``model = fl.DataParallel(model)`` is the only change: ``model(x)`` returns one Variable of all
    rows, and ``backward()`` leaves in every ``param.grad`` what one process would have computed, to
    rounding, and the same bits each time. Optimizers, clipping, schedules and checkpoints go on
    with the wrapped module, whose parameters and names in ``state_dict()`` stay the same. No
    launcher and no ``distributed_init`` are needed; in a world each rank has workers of its own.

    This process computes the first share. The others are computed by workers: fresh interpreters,
    started by the first call, as by :func:`flashlight_py.spawn`, so a script makes that call under
    ``if __name__ == "__main__":``. Parameters and gradients lie in memory that all of them map: a
    step of an optimizer, in place, is seen by the workers at once. The other parts of the module
    (modes, ratios, buffers) are sent where they have changed. Each share has its own random
    numbers, from this process's seed. Changes of the module by a forward pass, such as running
    statistics, stay as the first share has made them.

    Inputs are NumPy arrays and Variables, also inside tuples, lists, dicts and objects that can be
    pickled; all with the batch as their first dimension, of any dtype but object. Other values
    reach every share as they are. A batch that does not divide has shares that differ by one row;
    one smaller than the number of processes leaves some idle. Results are joined along their first
    dimension, in order; anything but arrays and Variables is taken from the first share.

    An exception leaves it usable: a call that finds its workers ended starts new ones. Where it is
    dropped and not closed, the next use of another one ends its workers. Nothing stays behind when
    this process ends, however it ends: the memory has no name, and the workers end with this
    process. Use it from one thread at a time.

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
            ValueError: arrays of the inputs have different first dimensions, or a result has no
                dimension to join along, or other results in other shares; or a parameter is
                sharded.
            TypeError: an array is CuPy's or holds Python objects, or the module, the inputs or a
                worker's result cannot be pickled.
            RankFailedError: a worker raised, with its traceback and, as the cause, its exception
                where that can be sent, or was killed. An exception of this process's own share is
                raised as it is. So in ``backward()``.
            RuntimeError: a worker calls it while it imports the script: the call is not under
                ``if __name__ == "__main__":``. In ``backward()``: the workers have ended since.
            OSError: the system starts no more processes, or has no more memory.
        """
        if self.nprocs == 1:
            return self.module(*inputs, **options)
        form, parts = _apart("an input", (inputs, options), is_data)
        rows = _rows(parts)
        count = min(rows, self.nprocs)
        if count < 2:
            return self.module(*inputs, **options)
        ends = [rows // count * k + min(k, rows % count) for k in range(count + 1)]
        shares = [slice(begin, end) for begin, end in pairwise(ends)]
        if self.module.before_forward is not None:  # it may change what the workers need
            self.module.before_forward(self.module)
        team, form_of_module = self._ready_team()
        self._number += 1
        seed = int(random.generator().integers(1 << 62)) * self.nprocs
        requests = []
        for number, share in enumerate(shares[1:], 1):
            request = "forward", self._number, (seed + number, form)
            requests.append((request, [array_of(part)[share] for part in parts]))
        graph = WorkersGraph(team, self._number, shares[1:])
        team.ask(requests, module=form_of_module)
        own_parts = [part[shares[0]] for part in parts]
        instead = self.module._instead
        compute = partial(instead, self.module) if instead else self.module.forward
        inputs, options = put_together(form, lambda number, _: own_parts[number])
        result = compute(*inputs, **options)
        others = team.answers()
        result_form, results = _apart("a result", result, is_data)
        joined = graph.join(results, others, self._params, parts)
        return put_together(result_form, lambda number, _: joined[number])

    def close(self) -> None:
        """End the workers now; a later call starts new ones. Blocks until they are gone."""
        if self._team is not None:
            self._team.end()
            self._team = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the module and the number of processes."""
        return DataParallel, (self.module, self.nprocs), {"training": self.training}

    def __repr__(self) -> str:
        return f"{WHAT}({self.module!r}, nprocs={self.nprocs})"

    def _visit(self, prefix: str, met: set[int], found: Any, held: Any) -> Any:
        """Add this module and those in the one inside, under the names that they have without."""
        found.append((prefix, self))
        return self.module._visit(prefix, met, found, held)

    def _ready_team(self) -> tuple[Team, bytes]:
        """Return workers that map whatever Variables the module has, and the form of the module."""
        form, params = _apart(
            "the module", self.module, lambda x: isinstance(x, Variable) and x.node is None
        )
        self._params: list[Variable] = params
        for number, param in enumerate(params):
            if param.placement is not None:
                raise ValueError(
                    f"{WHAT}: parameter {number} (shape {param.shape}) is sharded, so its array "
                    "lies where ranks have it; use one of both, with a rank for each core"
                )
            if is_cupy(param.data):
                raise TypeError(
                    f"{WHAT}: parameter {number} (shape {param.shape}) is on a GPU; this is for "
                    "NumPy arrays: start one process for each GPU with flrun or fl.spawn"
                )
        if self._team is None or not self._team.holds(params):
            self.close()
            self._team = Team(self.nprocs - 1, params, self._cores)
        return self._team, form


_can_import_main = cache(main_can_be_imported)


def _apart(what: str, value: Any, is_part: Callable[[Any], bool]) -> tuple[bytes, list[Any]]:
    return take_apart(value, is_part, _can_import_main(WHAT), f"{WHAT}: {what} ")


def _rows(parts: Sequence[Part]) -> int:
    """Return the first dimension of all inputs; 0 where there are none, or none has one."""
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


# A result is recorded with the one of this process's share as an input, and others that stand for
# the workers. A pass visits, in this order,
#
# 1. the results, where the workers' rows of each gradient are noted;
# 2. ``_send``: the noted rows go to the workers;
# 3. this process's own share, meanwhile;
# 4. ``_gradient``: the workers' gradients are awaited, and added in the order of the shares.
#
# 2, 3 and 4 are ordered operations of the engine, recorded last to first. So accumulation, hooks,
# buffers, retain_graph and a second pass are the engine's, and passes at once follow each other:
# the answers of one are taken before the next is sent.
class WorkersGraph:
    """The workers' graphs of forward pass ``number``; they forget them when this object is gone.

    ``shares`` are their rows of the batch. In the end only the operations here refer to it.
    """

    def __init__(self, team: Team, number: int, shares: Sequence[slice]) -> None:
        self._team, self._number, self._shares = team, number, shares
        self._arrays: dict[Leaf, Array] = {}  # what may have a gradient
        # Of the pass that is running:
        self._noted: dict[int, list[Array]] = {}  # by result: the gradient of each worker's rows
        self._parts: dict[Leaf, Parts] | None = {}  # not taken yet; None: the workers will answer
        team.numbers[weakref.ref(self)] = number

    def join(
        self,
        own: Sequence[Part],
        others: Sequence[ShareResult],
        params: Sequence[Variable],
        inputs: Sequence[Part],
    ) -> list[Part]:
        """Return this process's ``own`` results joined with the workers', recorded."""
        counts = [len(own), *(len(arrays) for _, arrays in others)]
        if len(set(counts)) > 1:
            raise ValueError(
                f"{WHAT}: the shares of the batch have different numbers of results: "
                f"{', '.join(map(str, counts))}; the module must return as many for any rows"
            )
        shares = zip(*(leaves for leaves, _ in others), strict=True)
        of_results = [set[Leaf]().union(*each) for each in shares]
        # By groups of results: one node for the leaves that all results of a group depend on, and
        # no other result. So a leaf that a pass does not reach has no gradient.
        leaves: dict[tuple[int, ...], list[tuple[Variable, Vjp]]] = {}
        for leaf in sorted(set[Leaf]().union(*of_results)):
            is_param, number = leaf
            source = (params if is_param else inputs)[number]
            assert isinstance(source, Variable), "an array has no gradient"
            self._arrays[leaf] = source.data
            group = tuple(k for k, below in enumerate(of_results) if leaf in below)
            leaves.setdefault(group, []).append((source, partial(self._gradient, leaf)))
        collect = {group: record_in_order(_NOTHING, *some) for group, some in leaves.items()}
        ordered = list(own)
        for k, part in enumerate(own):
            if isinstance(part, Variable):
                ordered[k] = record_in_order(part.data, (part, lambda grad: grad))
        send = record_in_order(_NOTHING, (Variable(_NOTHING, True), self._send))
        results: list[Part] = []
        for k, part in enumerate(ordered):
            arrays = [array_of(part), *(arrays[k] for _, arrays in others)]
            if not all(array.ndim for array in arrays):
                raise ValueError(
                    f"{WHAT}: a result has no dimensions, so the shares cannot be joined: return a "
                    "row for each sample, and take the mean of the whole outside: loss(model(x), y)"
                )
            joined = np.concatenate(arrays)
            if not isinstance(part, Variable):
                results.append(joined)
                continue
            ends = np.cumsum([len(array) for array in arrays]).tolist()
            edges: list[tuple[Variable, Vjp]] = [(part, itemgetter(slice(ends[0])))]
            below = [node for group, node in collect.items() if k in group]
            if below:
                edges.insert(0, (send, partial(self._note, k, ends)))
                edges += [(node, lambda _: _NOTHING) for node in below]
            results.append(record(joined, *edges))
        return results

    def _note(self, result: int, ends: Sequence[int], grad: Array) -> Array:
        """Note the workers' rows of the gradient of ``result``; they end at ``ends[1:]``."""
        if not self._noted:
            on_backward_end(self._forget)
        self._noted[result] = np.split(grad, ends[:-1])[1:]
        return _NOTHING

    def _send(self, grad: Array) -> Array:
        """Send the workers what was noted; does not wait for them."""
        request = "backward", self._number, (list(self._noted),)
        seeds = zip(*self._noted.values(), strict=True)  # of each worker
        self._team.ask([(request, each) for each in seeds], self)
        self._parts = None
        return grad

    def _gradient(self, leaf: Leaf, _: object) -> Array:
        """Return the sum over the workers for a parameter, the gradient of all rows of an input.

        The rows of this process's share are zeros there. One at a time, as the pass takes them.
        """
        parts = self._received().pop(leaf)
        if not leaf[0]:
            whole = np.zeros_like(self._arrays[leaf])
            for worker, part in parts:
                whole[self._shares[worker]] = part
            return whole
        (_, first), *others = parts
        if not others:
            return first
        total = np.asarray(first + others[0][1])  # NumPy makes a scalar where there is no dimension
        for _, part in others[1:]:
            total += part
        return total

    def _received(self) -> dict[Leaf, Parts]:
        """Return what the workers have for each leaf; blocks until they have answered."""
        if self._parts is None:
            parts: dict[Leaf, Parts] = {}
            for worker, (leaves, arrays) in enumerate(self._team.answers()):
                for leaf, array in zip_longest(leaves, arrays):  # of inputs, which come first
                    grad = self._team.grads[worker][leaf[1]] if leaf[0] else array
                    parts.setdefault(leaf, []).append((worker, grad))
            self._parts = parts
        return self._parts

    def save(self) -> None:
        """Copy what the running pass has not taken yet; see ``Team.ask``."""
        for parts in self._received().values():
            parts[:] = [(worker, np.array(part)) for worker, part in parts]

    def _forget(self, completed: bool) -> None:
        self._noted.clear()
        self._parts = {}
