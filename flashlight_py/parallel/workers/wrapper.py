"""``DataParallel``: a module whose batches are computed by several processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.cores import usable_cores
from flashlight_py.device import is_cupy
from flashlight_py.distributed import get_local_size
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.launch.pickling import main_can_be_imported
from flashlight_py.nn import Module
from flashlight_py.parallel.workers.graph import ShareResult, WorkersGraph, join
from flashlight_py.parallel.workers.parts import (
    Part,
    array_of,
    is_data,
    is_parameter,
    put_together,
    take_apart,
)
from flashlight_py.parallel.workers.serving import Forward
from flashlight_py.parallel.workers.team import WHAT, Team


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
    step of an optimizer, in place, is seen by the workers at once. Whatever else the module
    consists of (modes, ratios, buffers) is sent where it has changed. Each share has its own random
    numbers, from this process's seed. What a forward pass changes in the module, such as running
    statistics, stays as the first share has changed it.

    Inputs are NumPy arrays and Variables, also inside tuples, lists, dicts and objects that can be
    pickled; all with the batch as their first dimension, of any dtype but object. Other values
    reach every share as they are. A batch that does not divide has shares that differ by one row;
    one smaller than the number of processes leaves some idle. Results are joined along their first
    dimension, in order; what is neither array nor Variable is taken from the first share.

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
        ValueError: ``nprocs`` is below 1, or the module contains a DataParallel.

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
        self.module = module
        self._team: Team | None = None
        self._sent: bytes | None = None
        self._number = 0

    def forward(self, *inputs: Any) -> Any:
        """Return ``module(*inputs)``, computed in shares; blocks until all have been computed.

        Raises:
            ValueError: arrays of the inputs have different first dimensions, or a result has no
                dimension to join along, or other results in other shares; or a parameter is
                sharded.
            TypeError: an array is CuPy's or holds Python objects, or the module, the inputs or a
                worker's result cannot be pickled.
            RankFailedError: a worker raised, with its traceback and, as the cause, its exception
                where that can be sent, or was killed. What this process's own share raises is
                raised as it is. So in ``backward()``.
            RuntimeError: a worker calls it while it imports the script: the call is not under
                ``if __name__ == "__main__":``. In ``backward()``: the workers have ended since.
            OSError: the system starts no more processes, or has no more memory.
        """
        if self.nprocs == 1:
            return self.module(*inputs)
        form, parts = _apart("an input", inputs, is_data)
        counts = _shares(_rows(parts), self.nprocs)
        if len(counts) < 2:
            return self.module(*inputs)
        if self.module.before_forward is not None:  # it may change what the workers need
            self.module.before_forward(self.module)
        team, changed = self._ready_team()
        self._number += 1
        seed = int(random.generator().integers(1 << 62)) * self.nprocs
        starts = np.cumsum([0, *counts]).tolist()
        requests = []
        for share in range(1, len(counts)):
            own = [array_of(part)[starts[share] : starts[share + 1]] for part in parts]
            requests.append((Forward(self._number, seed + share, form, []), own))
        graph = WorkersGraph(team, self._number, starts)
        team.ask(requests, module=changed)
        self._sent = self._sent if changed is None else changed
        own_parts = [_first_rows(part, counts[0]) for part in parts]
        run = self.module._instead
        compute = self.module.forward if run is None else partial(run, self.module)
        result = compute(*put_together(form, lambda number, _: own_parts[number]))
        answers = team.answers()
        result_form, results = _apart("a result", result, is_data)
        shares = [
            ShareResult(answer, team.results(worker, answer.places))
            for worker, answer in enumerate(answers)
        ]
        joined = join(graph, results, shares, self._params, parts)
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

    def _walk(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module and those of the one inside, under the names that they have without."""
        yield prefix, self
        yield from self.module._walk(prefix)

    def _ready_team(self) -> tuple[Team, bytes | None]:
        """Return workers that have this module's parameters; and its form, if that is new to them.

        It takes all Variables of the module that it meets, also those that ``params()`` does not.
        """
        form, params = _apart("the module", self.module, is_parameter)
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
            self._team, self._sent = Team(self.nprocs - 1, params, self._cores), None
        return self._team, None if form == self._sent else form


@cache
def _can_import_main() -> bool:
    """Return whether the workers can import this process's script."""
    return main_can_be_imported(WHAT)


def _apart(what: str, value: Any, is_part: Callable[[Any], bool]) -> tuple[bytes, list[Any]]:
    try:
        return take_apart(value, is_part, _can_import_main())
    except TypeError as error:
        raise TypeError(f"{WHAT}: {what} {error}") from error


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


def _shares(rows: int, most: int) -> list[int]:
    """Return how many rows each share has, the longer ones first; none is empty."""
    count = min(rows, most)
    return [rows // count + (share < rows % count) for share in range(count)]


def _first_rows(part: Part, rows: int) -> Part:
    if isinstance(part, Variable) and not part.calc_grad:
        return Variable(part.data[:rows])
    return part[:rows]
