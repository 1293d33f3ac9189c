"""``DataParallel``: the processes of one machine compute shares of each batch for this one."""

from __future__ import annotations

import atexit
import io
import math
import mmap
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from itertools import accumulate, pairwise, zip_longest
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import random
from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import on_backward_end
from flashlight_py.autograd.variable import record, record_in_order
from flashlight_py.cores import check_processes, thread_variables, usable_cores
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed import get_local_size
from flashlight_py.distributed.internal import blas, reserve_memory, whole_number
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.pickling import dumps, main_can_be_imported
from flashlight_py.launch.spawning import Worker
from flashlight_py.nn import Module

WHAT = "DataParallel"
_ALIGNMENT = 64  # bytes
_can_import_main = cache(main_can_be_imported)

Part: TypeAlias = "Variable | Array"
# The first byte, shape and dtype of an array in shared memory.
ArrayPlace: TypeAlias = "tuple[int, tuple[int, ...], np.dtype[np.generic]]"
# Results or gradients of leaves, by number, and the numbers of the leaves below each result.
Answer: TypeAlias = tuple[dict[int, Any], list[set[int]]]


# A module is pickled without its parameters for each pass, which takes some 0.1 ms for a small one,
# so modes, ratios and buffers need no list of possible changes.
def take_apart(
    value: Any, is_part: Callable[[Any], bool], what: str = ""
) -> tuple[bytes, list[Any]]:
    """Return a pickle of ``value`` with numbers in place of its parts, and the distinct parts.

    ``what`` names a value of the parent, for errors.
    """
    parts: dict[int, tuple[int, Any]] = {}

    def stand_in(value: Any) -> int | None:
        return parts.setdefault(id(value), (len(parts), value))[0] if is_part(value) else None

    form = dumps(value, not what or _can_import_main(WHAT), stand_in, f"{WHAT}: {what} ")
    return form, [part for _, part in parts.values()]


def put_together(form: bytes, part_of: Callable[[Any], Any]) -> Any:
    """Return the value of a pickle from ``take_apart``, with parts in place of the numbers."""
    unpickler = pickle.Unpickler(io.BytesIO(form))
    unpickler.persistent_load = part_of  # type: ignore[method-assign]
    return unpickler.load()


def is_data(value: Any) -> bool:
    """Return whether ``value`` is a Variable or an array, as inputs and results contain them."""
    return isinstance(value, (Variable, np.ndarray)) or is_cupy(value)


def array_of(part: Part) -> Array:
    """Return the array of an input or a result."""
    return part.data if isinstance(part, Variable) else part


class WorkerMemory:
    """Shared memory that grows as needed and has no name; ``fd`` is its inherited descriptor."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("flashlight workers") if fd is None else fd
        os.set_inheritable(self.fd, False)
        self._map: mmap.mmap | None = None
        self._end = 0  # of what was written

    def put(self, value: Any) -> Any:
        """Write an array behind the previous one, return its place; None for anything else.

        Raises a MemoryError.
        """
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            return None
        place = self._end, value.shape, value.dtype
        self._end += (value.nbytes // _ALIGNMENT + 1) * _ALIGNMENT
        if self._end > os.fstat(self.fd).st_size:
            reserve_memory(self.fd, self._end, f"arrays for the workers of {WHAT}")
        self.view(place)[...] = value
        return place

    def view(self, place: ArrayPlace) -> Array:
        """Return the array at ``place``, without a copy; it stays valid after ``close``."""
        start, shape, dtype = place
        if self._map is None or len(self._map) < start + math.prod(shape) * dtype.itemsize:
            self._map = mmap.mmap(self.fd, 0)  # the last array frees the previous mapping
        return np.ndarray(shape, dtype, self._map, start)

    def dumps(self, message: Any) -> bytes:
        """Pickle ``message``, whose arrays are written here in the place of the previous ones."""
        self._end, file = 0, io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self.put  # type: ignore[method-assign]
        pickler.dump(message)
        return file.getvalue()

    def close(self) -> None:
        """Close the descriptor and drop the mapping."""
        os.close(self.fd)
        self._map = None


class WorkerShare:
    """In worker ``number``: its share, with parameters and gradients in shared memory."""

    def __init__(
        self, takes_output: bool, number: int, fds: Sequence[int], params: Any, grads: Any
    ) -> None:
        model, self._box = map(WorkerMemory, fds)
        self._params = [Variable(model.view(place)) for place in params]
        for param, place in zip(self._params, grads, strict=True):
            param.buffer = model.view(place)
        model.close()
        self._takes_output, self._number = takes_output, number
        self._graphs: dict[int, tuple[dict[Variable, int], list[Part]]] = {}  # leaves, results

    def __call__(self, link: Connection) -> None:
        """Answer requests until ``link`` ends, by a failure or None, a pickle, and printed text.

        The pickle is of the answer, or of the exception that failed, empty if there can be none.
        """
        while True:
            try:
                kept, method, arguments = link.recv()
            except (EOFError, ConnectionResetError):
                return
            # The parent still has the graphs ``kept``.
            self._graphs = {graph: self._graphs[graph] for graph in kept if graph in self._graphs}
            failure, printed = None, io.StringIO()
            out, err = (printed, printed) if self._takes_output else (sys.stdout, sys.stderr)
            with redirect_stdout(out), redirect_stderr(err):
                try:
                    result: Answer = {}, []
                    if method:
                        result = getattr(self, method)(*put_together(arguments, self._box.view))
                    answer = self._box.dumps(result)
                except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
                    failure, answer = Failure.of_exception(error, time.monotonic()), b""
                    with suppress(TypeError):
                        answer = dumps(error)
            link.send((failure, answer, printed.getvalue()))

    def forward(
        self, arrays: list[Array], graph: int, seed: int, module: bytes, form: bytes, learns: Any
    ) -> Answer:
        """Return the results, and the numbers of the leaves below each: parameters, then inputs.

        ``learns`` has their ``calc_grad``, None for an array.
        """
        for param, flag in zip(self._params, learns, strict=False):
            param.calc_grad = flag
        # Copies: the graph needs the inputs, and the answer overwrites them.
        flags = zip(map(np.array, arrays), learns[len(self._params) :], strict=True)
        inputs = [x if flag is None else Variable(x, flag) for x, flag in flags]
        random.set_seed(seed + self._number)
        given, options = put_together(form, inputs.__getitem__)
        result = put_together(module, self._params.__getitem__)(*given, **options)
        _, results = take_apart(result, is_data)
        parts = enumerate([*self._params, *inputs])
        leaves = {part: number for number, part in parts if isinstance(part, Variable)}
        self._graphs[graph] = leaves, results
        below = [{leaves[x] for x in _reached_from(part) if x in leaves} for part in results]
        return dict(enumerate(map(array_of, results))), below

    def backward(self, seeds: dict[int, Array], graph: int) -> Answer:
        """Return the gradients of leaves, for ``seeds``, gradients of results by number.

        Those of parameters are None: they lie in the shared memory.
        """
        leaves, results = self._graphs[graph]
        for variable in leaves:
            variable.grad = None
        # One pass from all results: the root is a number that depends on each of them.
        roots = [(results[number], seed) for number, seed in seeds.items()]
        edges = [(x, lambda _, seed=seed: seed) for x, seed in roots if isinstance(x, Variable)]
        root = record(np.zeros(()), *edges)
        if root.calc_grad:
            root.backward(retain_graph=True)  # until the parent's graph is gone
        grads = {leaf: variable.grad for variable, leaf in leaves.items()}
        count = len(self._params)
        return {n: None if n < count else x for n, x in grads.items() if x is not None}, []


def _reached_from(result: Part) -> set[Any]:
    """Return the nodes and leaves that a backward pass from ``result`` would reach."""
    unseen = [result.node or result] if isinstance(result, Variable) and result.calc_grad else []
    seen: set[Any] = set(unseen)
    while unseen:
        for target, _ in getattr(unseen.pop(), "edges", None) or ():
            if target not in seen:
                seen.add(target)
                unseen.append(target)
    return seen


# How to end the workers of each team. Python may collect a team at any line, and an exception that
# a signal handler raises in code of the collection is lost. So none runs then: the next use of a
# team ends the workers of those that are gone.
_ends: dict[weakref.ref[Team], Callable[[], None]] = {}


def _end(pid: int, workers: list[Worker], memories: list[WorkerMemory], limited: list[Any]) -> None:
    """Kill the workers of process ``pid``; blocks. After an interrupt, a second call does."""
    if os.getpid() == pid:  # not in a process that was forked from it
        while workers:
            workers[-1].end()
            workers.pop()
        blas.restore(limited)
    while memories:
        memories.pop().close()


def end_dropped() -> None:
    """End the workers of teams that were collected, each on one thread."""
    for team in list(_ends):
        if team() is None and (end := _ends.pop(team, None)):
            end()


@atexit.register
def _end_all() -> None:
    for end in list(_ends.values()):
        end()


# A message that was interrupted cannot be completed, so an error in one ends all workers. The next
# call starts new ones without a loss: this process has the parameters, modes and random numbers.
class Team(AbstractContextManager["Team"]):
    """``count`` workers, which share ``cores`` with this process, and map the arrays of ``params``.

    One request at a time: ``ask``, then ``fill``. An exception within ``with`` ends the workers.
    """

    def __init__(self, count: int, params: Sequence[Variable], cores: int) -> None:
        end_dropped()
        self.numbers: dict[weakref.ref[Any], int] = {}  # of graphs, until the workers drop them
        self.workers: list[Worker] = []  # empty when they have been ended
        self.params = list(params)
        self._answers: list[Any] = []  # to the last request
        self._is_waiting, self._pid = False, os.getpid()
        limited: list[Any] = []
        memories: list[WorkerMemory] = []
        self.end = _ends[weakref.ref(self)] = partial(
            _end, self._pid, self.workers, memories, limited
        )
        variables = thread_variables(os.environ, count + 1, cores)
        with self:
            memories.extend(WorkerMemory() for _ in range(count + 1))
            model, *self._boxes = memories
            # The parameters, and for each worker the gradients.
            sets = [[model.put(param.data) for param in self.params] for _ in range(count + 1)]
            self._views, *self._grads = [[*map(model.view, places)] for places in sets]
            for number, box in enumerate(self._boxes, 1):
                name, fds = (WHAT, number, count + 1), (model.fd, box.fd)
                # A notebook's own object is in the place of stdout: processes print past it.
                args = sys.stdout is not sys.__stdout__, number, fds, sets[0], sets[number]
                self.workers.append(Worker(name, WorkerShare, args, fds, variables))
            self.holds(self.params)
            for worker in self.workers:
                worker.wait_for_start()
            limited += blas.limit_each(max(1, cores // (count + 1)))

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.end()

    def holds(self, params: Sequence[Variable]) -> bool:
        """Return whether workers map these parameters; a new array of the same kind is copied."""
        if not self.workers or [*map(id, params)] != [*map(id, self.params)]:
            return False
        for param, view in zip(self.params, self._views, strict=True):
            if param.data is not view:
                if (param.data.shape, param.data.dtype) != (view.shape, view.dtype):
                    return False
                view[...] = param.data
                param.data = view
        return True

    def ask(self, shares: Iterable[Any], method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` of the first workers, with a share each; return a list for ``fill``.

        Raises:
            RuntimeError: the workers have ended, or this process was forked from their parent.
        """
        end_dropped()
        with suppress(RankFailedError):  # nobody has waited for the last request
            self._receive()
        self._require_open()
        for answer in self._answers:  # the request overwrites arrays that the asker still needs
            if isinstance(answer, tuple):
                answer[0].update({key: array.copy() for key, array in answer[0].items()})
        self.numbers = {graph: n for graph, n in self.numbers.items() if graph() is not None}
        self._answers = []
        with self:
            for worker, box, share in zip_longest(self.workers, self._boxes, shares):
                call = ("", b"") if share is None else (method, box.dumps((share, *arguments)))
                worker.send(([*self.numbers.values()], *call))
            self._is_waiting = True  # within: no interrupt may come between
        return self._answers

    def fill(self, answers: list[Any]) -> list[Any]:
        """Return the list with the answers; blocks. Arrays are valid until the next request.

        Raises:
            RankFailedError: a worker raised, which is the error's cause, or was killed.
            RuntimeError: as ``ask``.
        """
        self._receive()
        errors = [answer for answer in answers if isinstance(answer, RankFailedError)]
        if errors:
            answers.clear()  # so that the frames of the error do not refer to it
            raise errors.pop(0)
        return answers

    def _receive(self) -> None:
        """Receive the answers to the last request, unless this was done, and print their text.

        A share that raised answers a RankFailedError, with the cause if that can be pickled.
        """
        if not self._is_waiting:
            return
        self._require_open()
        received: list[Any] = []
        with self:
            for worker, box, grads in zip(self.workers, self._boxes, self._grads, strict=True):
                failure, pickled, printed = worker.receive()
                for line in printed.splitlines():
                    print(f"[{worker.number}] {line}")
                if failure is not None:
                    answer: Any = worker.error(failure.what, failure.traceback)
                    with suppress(Exception):  # runs its code; the message has its traceback
                        answer.__cause__ = pickle.loads(pickled)
                else:
                    answer = put_together(pickled, box.view)
                    arrays = answer[0]
                    arrays.update({n: grads[n] for n, grad in arrays.items() if grad is None})
                received.append(answer)
            self._is_waiting = False
        self._answers += received

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{WHAT}: this process ({os.getpid()}) was forked from the one whose workers these "
                f"are ({self._pid}); wrap the module again here"
            )
        if not self.workers:
            raise RuntimeError(
                f"{WHAT}: the workers that computed this have been ended since, by close() or "
                "after an error; compute it again"
            )


_NOTHING = np.zeros(())  # value and gradient of nodes that stand for the workers


class DataParallel(Module):
    """A module that cuts each batch into shares, computed by as many processes of this machine.

    ``model = fl.DataParallel(model)`` is the only change: ``model(x)`` returns one Variable of all
    rows, and ``backward()`` computes in every ``param.grad`` what one process would have computed,
    to rounding, and the same bits each time. Optimizers and checkpoints work with the wrapped
    module, whose parameters and names in ``state_dict()`` stay the same. Neither a launcher nor
    ``distributed_init`` is needed; in a world each rank has its own workers.

    This process computes the first share, and workers compute the others. The first call starts
    them, as fresh interpreters like the ranks of :func:`flashlight_py.spawn`, so a script makes it
    under ``if __name__ == "__main__":``. All processes map the parameters and gradients; the rest
    of the module (modes, ratios, buffers) is sent with each call. Each share has its own random
    numbers, from this process's seed. Changes of the module by a forward pass, such as running
    statistics, are those of the first share.

    Inputs are NumPy arrays and Variables of any dtype but object, also inside of objects that can
    be pickled, with the batch as their first dimension; other values are sent to every share.
    Shares differ by one row at most, and a small batch leaves processes idle. Results are joined
    along their first dimension; other values are those of the first share.

    A call starts new workers if they have ended. The workers of a wrapper that is dropped and not
    closed end at the next use of another one. No process and no memory remains when this process
    ends, also by ``kill -9``. Use it from one thread at a time.

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
        learns = [getattr(part, "calc_grad", None) for part in (*params, *parts)]
        graph = WorkersGraph(team, self._number, others, [*params, *parts])
        shares = [[array_of(part)[rows] for part in parts] for rows in others]
        answers = team.ask(shares, "forward", self._number, seed, module, form, learns)
        instead = self.module._instead
        compute = partial(instead, self.module) if instead else self.module.forward
        inputs, options = put_together(form, [part[own] for part in parts].__getitem__)
        form, results = take_apart(compute(*inputs, **options), is_data, "a result")
        joined = graph.join(results, team.fill(answers)[: count - 1])
        return put_together(form, joined.__getitem__)

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

    ``shares`` are the workers' rows of the batch, ``leaves`` the parameters, and then the inputs.
    Only operations of the graph refer to it.
    """

    def __init__(
        self, team: Team, number: int, shares: Sequence[slice], leaves: Sequence[Any]
    ) -> None:
        self._team, self._number, self._shares, self._leaves = team, number, shares, leaves
        self._seeds: list[dict[int, Array]] = []  # of each worker: its gradients of results
        self._answers: list[Answer] = []
        team.numbers[weakref.ref(self)] = number

    def join(self, own: list[Part], answers: list[Any]) -> list[Part]:
        """Return this process's ``own`` results joined with the workers', recorded."""
        others, leaves_below = zip(*answers, strict=True)
        counts = [len(own), *map(len, others)]
        if len(set(counts)) > 1:
            raise ValueError(
                f"{WHAT}: the shares of the batch have different numbers of results: "
                f"{', '.join(map(str, counts))}; the module must return as many for any rows"
            )
        below = [set[int]().union(*each) for each in zip(*leaves_below, strict=True)]  # a result
        nodes = {
            leaf: record_in_order(_NOTHING, (self._leaves[leaf], partial(self._gradient, leaf)))
            for leaf in sorted(set[int]().union(*below))
        }
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
                edges = [(nodes[leaf], lambda _: _NOTHING) for leaf in sorted(below[k])]
                result = record(result, (first, cut), *edges)
            results.append(result)
        return results

    def _cut(self, result: int, ends: Sequence[int], grad: Array) -> Array:
        """Return the first share's rows of the gradient of ``result``; keep the workers' rows."""
        if not self._seeds:
            on_backward_end(self._forget)
            self._seeds = [{} for _ in self._shares]
        for seeds, (begin, end) in zip(self._seeds, pairwise(ends), strict=True):
            seeds[result] = grad[begin:end]
        return grad[: ends[0]]

    def _send(self, grad: Array) -> Array:
        """Send the workers their rows, unless this was done; do not wait for them."""
        if self._seeds:
            self._answers = self._team.ask(self._seeds, "backward", self._number)
            self._seeds = []
        return grad

    def _gradient(self, leaf: int, _: object) -> Array:
        """Return a parameter's gradient from the workers, or an input's, with 0 in other rows."""
        answers = zip(self._shares, self._team.fill(self._answers), strict=False)
        parts = [(rows, grads.pop(leaf)) for rows, (grads, _) in answers if leaf in grads]
        if leaf >= len(self._team.params):
            grad: Array = np.zeros_like(self._leaves[leaf].data)
            for rows, part in parts:
                grad[rows] = part
            return grad
        total: Array = parts.pop(0)[1]
        for _, part in parts:
            total += part  # in the memory of the first worker, which the pass does not need again
        return total

    def _forget(self, completed: bool) -> None:
        self._seeds = []
        self._answers.clear()
