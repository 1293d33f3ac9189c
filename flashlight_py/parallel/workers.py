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
from collections import deque
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
from flashlight_py.autograd.graph import Walk
from flashlight_py.autograd.variable import record, record_in_order
from flashlight_py.cores import check_processes, thread_variables, usable_cores
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed import get_local_size
from flashlight_py.distributed.internal import blas, check_integer, reserve_memory
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.pickling import dumps, main_can_be_imported
from flashlight_py.launch.spawning import Worker
from flashlight_py.nn import Module

WHAT = "DataParallel"
_ALIGNMENT = 64  # bytes
_can_import_main = cache(main_can_be_imported)

Part: TypeAlias = "Variable | Array"
# A parameter of the module (True) or an input (False), and its number.
Leaf: TypeAlias = tuple[bool, int]
# The first byte, shape and dtype of an array in shared memory.
ArrayPlace: TypeAlias = "tuple[int, tuple[int, ...], np.dtype[np.generic]]"
# Arrays by leaf, or by the number of a result, and the leaves below each result.
Answer: TypeAlias = tuple[dict[Any, Any], list[list[Leaf]]]


# A module is pickled without its parameters for each pass, which takes some 0.1 ms for a small one,
# and sent if the pickle has changed. So modes, ratios and buffers need no list of possible changes.
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


def put_together(form: bytes, parts: Sequence[Any]) -> Any:
    """Return the value of a pickle from ``take_apart``, with ``parts`` in place of the numbers."""
    unpickler = pickle.Unpickler(io.BytesIO(form))
    unpickler.persistent_load = parts.__getitem__  # type: ignore[method-assign]
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

    def put(self, arrays: Iterable[Array]) -> list[ArrayPlace]:
        """Write ``arrays`` over the previous ones; return their places. Raises a MemoryError."""
        arrays, places, size = list(arrays), [], 0
        for array in arrays:
            if array.dtype.hasobject:
                raise TypeError("an array of Python objects cannot be in memory of two processes")
            places.append((size, array.shape, array.dtype))
            size += (array.nbytes // _ALIGNMENT + 1) * _ALIGNMENT
        if size > os.fstat(self.fd).st_size:
            reserve_memory(self.fd, size, f"arrays for the workers of {WHAT}")
        for view, array in zip(self.views(places), arrays, strict=True):
            view[...] = array
        return places

    def views(self, places: Iterable[ArrayPlace]) -> list[Array]:
        """Return the arrays at ``places``, without a copy; they stay valid after ``close``."""
        arrays = []
        for offset, shape, dtype in places:
            end = offset + math.prod(shape) * dtype.itemsize
            if self._map is None or len(self._map) < end:
                self._map = mmap.mmap(self.fd, 0)  # the last array frees the previous mapping
            arrays.append(np.ndarray(shape, dtype, self._map, offset))
        return arrays

    def close(self) -> None:
        """Close the descriptor and drop the mapping."""
        os.close(self.fd)
        self._map = None


class WorkerShare:
    """In worker ``number``: its share, with parameters in shared memory, and graphs."""

    def __init__(
        self, takes_output: bool, number: int, fds: Sequence[int], params: Any, grads: Any
    ) -> None:
        model, self._box = map(WorkerMemory, fds)
        self._params = [Variable(array) for array in model.views(params)]
        for param, grad in zip(self._params, model.views(grads), strict=True):
            param.buffer = grad
        model.close()
        self._takes_output, self._number, self._module = takes_output, number, b""
        self._graphs: dict[int, tuple[list[Part], list[Part]]] = {}  # inputs and results

    def __call__(self, link: Connection) -> None:
        """Answer requests until ``link`` ends, by a failure or None, the answer, and printed text.

        The answer of a failure is a pickle of the exception, empty if there can be none.
        """
        while True:
            try:
                request = link.recv()
            except (EOFError, ConnectionResetError):
                return
            failure, printed = None, io.StringIO()
            out, err = (printed, printed) if self._takes_output else (sys.stdout, sys.stderr)
            with redirect_stdout(out), redirect_stderr(err):
                try:
                    answer: Any = self._answer(*request)
                except Exception as error:  # noqa: BLE001 - whatever it is, the parent raises it
                    failure, answer = Failure.of_exception(error, time.monotonic()), b""
                    with suppress(TypeError):
                        answer = dumps(error)
            link.send((failure, answer, printed.getvalue()))

    def _answer(
        self, module: bytes | None, kept: list[int], method: str, places: Any, *arguments: Any
    ) -> Answer:
        """Return an answer with the arrays' places, None for the gradient of a parameter.

        ``module`` is None if it has not changed, ``places`` if this worker has no rows. The parent
        still has the graphs ``kept``.
        """
        self._module = module or self._module
        self._graphs = {each: self._graphs[each] for each in kept if each in self._graphs}
        if places is None:
            return {}, []
        arrays, below = getattr(self, method)(self._box.views(places), *arguments)
        sent = [key for key, array in arrays.items() if array is not None]
        places = self._box.put(map(arrays.__getitem__, sent))
        return {**arrays, **dict(zip(sent, places, strict=True))}, below

    def forward(
        self, arrays: list[Array], graph: int, seed: int, form: bytes, calc_grads: list[bool | None]
    ) -> Answer:
        """Return the results; ``calc_grads`` are of parameters and inputs, None for an array."""
        for param, flag in zip(self._params, calc_grads, strict=False):
            param.calc_grad = bool(flag)
        # Copies: the graph needs the inputs, and the answer overwrites them.
        flags = zip(map(np.array, arrays), calc_grads[len(self._params) :], strict=True)
        inputs = [x if flag is None else Variable(x, flag) for x, flag in flags]
        random.set_seed(seed + self._number)
        module = put_together(self._module, self._params)
        given, options = put_together(form, inputs)
        _, results = take_apart(module(*given, **options), is_data)
        self._graphs[graph] = inputs, results
        leaves = self._leaves(inputs)
        below = [[leaves[v] for v in _leaves_below(part) if v in leaves] for part in results]
        return dict(enumerate(map(array_of, results))), below

    def backward(self, seeds: list[Array], graph: int, numbers: list[int]) -> Answer:
        """Return the gradients of leaves, for the gradients ``seeds`` of results ``numbers``."""
        inputs, results = self._graphs[graph]
        leaves = self._leaves(inputs)
        for variable in leaves:
            variable.grad = None
        # One pass from all results: the root is a number that depends on each of them.
        roots = zip([results[each] for each in numbers], seeds, strict=True)
        edges = [(x, lambda _, seed=seed: seed) for x, seed in roots if isinstance(x, Variable)]
        root = record(np.zeros(()), *edges)
        if root.calc_grad:
            root.backward(retain_graph=True)  # until the parent's graph is gone
        grads = {leaf: v.grad for v, leaf in leaves.items() if v.grad is not None}
        return {leaf: None if leaf[0] else grad for leaf, grad in grads.items()}, []

    def _leaves(self, inputs: Sequence[Part]) -> dict[Variable, Leaf]:
        """Return the variables whose gradients the parent may need."""
        leaves = {part: (False, n) for n, part in enumerate(inputs) if isinstance(part, Variable)}
        return leaves | {param: (True, n) for n, param in enumerate(self._params)}


def _leaves_below(result: Part) -> list[Variable]:
    """Return the leaves that a backward pass from ``result`` would reach."""
    if not isinstance(result, Variable) or not result.calc_grad:
        return []
    if result.node is None:
        return [result]
    walk = Walk(result.node, result.array, False)
    with suppress(RuntimeError):  # it was differentiated already: a second pass raises this, too
        walk.count([result.node], (), walk.pending)
    return [target for target in walk.pending if isinstance(target, Variable)]


class TeamResources(AbstractContextManager["TeamResources"]):
    """In the parent: processes and memory of a team. An exception within ``with`` ends them."""

    def __init__(self) -> None:
        self.pid, self.is_open = os.getpid(), True
        self.workers: list[Worker] = []
        self.memories: list[WorkerMemory] = []
        self.limited: list[Any] = []

    def end(self) -> None:
        """Kill the workers; blocks. After an interrupt, a second call ends the rest."""
        self.is_open = False
        if os.getpid() == self.pid:  # not in a process that was forked from it
            for worker in self.workers:
                worker.end()
            blas.restore(self.limited)
        while self.memories:
            self.memories.pop().close()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.end()


# Python may collect a team at any line, and an exception that a signal handler raises in code of
# the collection is lost. So the collection appends a reference, and the next use of a team ends
# the workers.
_held: dict[weakref.ref[Team], TeamResources] = {}
_dropped: deque[weakref.ref[Team]] = deque()


def end_dropped() -> None:
    """End the workers of teams that were collected, each on one thread."""
    with suppress(IndexError):  # there is none, or another thread has the last one
        while True:
            team = _dropped.popleft()
            _held[team].end()
            del _held[team]


@atexit.register
def _end_all() -> None:
    for held in list(_held.values()):
        held.end()


# A message that was interrupted cannot be completed, so an error in one ends all workers. The next
# call starts new ones without a loss: this process has the parameters, modes and random numbers.
class Team:
    """``count`` workers, which share ``cores`` with this process, and map the arrays of ``params``.

    One request at a time: ``ask``, then ``fill``. The workers end with this process.
    """

    def __init__(self, count: int, params: Sequence[Variable], cores: int) -> None:
        self.numbers: dict[weakref.ref[Any], int] = {}  # of graphs, until the workers drop them
        self._params = list(params)
        self._module: bytes | None = None  # the pickle that the workers have
        self._answers: list[Any] = []  # to the last request
        self._is_waiting = False
        end_dropped()
        self.held = held = _held[weakref.ref(self, _dropped.append)] = TeamResources()
        self._workers = held.workers
        variables = thread_variables(os.environ, count + 1, cores)
        with held:
            held.memories.extend(WorkerMemory() for _ in range(count + 1))
            model, *self._boxes = held.memories
            size = len(self._params)
            places = model.put([param.data for param in self._params] * (count + 1))
            # The parameters, and for each worker the gradients.
            sets = [places[size * k : size * (k + 1)] for k in range(count + 1)]
            self._views, *self._grads = map(model.views, sets)
            self.holds(self._params)
            for number, box in enumerate(self._boxes, 1):
                name, fds = (WHAT, number, count + 1), (model.fd, box.fd)
                # A notebook's own object is in the place of stdout: processes print past it.
                args = sys.stdout is not sys.__stdout__, number, fds, sets[0], sets[number]
                held.workers.append(Worker(name, WorkerShare, args, fds, variables))
            for worker in held.workers:
                worker.wait_for_start()
            held.limited += blas.limit_each(max(1, cores // (count + 1)))

    def holds(self, params: Sequence[Variable]) -> bool:
        """Return whether workers map these parameters; a new array of the same kind is copied."""
        if not self.held.is_open or [*map(id, params)] != [*map(id, self._params)]:
            return False
        for param, view in zip(self._params, self._views, strict=True):
            if param.data is not view:
                if (param.data.shape, param.data.dtype) != (view.shape, view.dtype):
                    return False
                view[...] = param.data
                param.data = view
        return True

    def ask(
        self, shares: Iterable[Sequence[Array]], module: bytes | None, method: str, *arguments: Any
    ) -> list[Any]:
        """Send a request with one share for each of the first workers; return a list for ``fill``.

        Raises:
            RuntimeError: the workers have ended, or this process was forked from their parent.
        """
        end_dropped()
        self._require_open()
        with suppress(RankFailedError):  # nobody has waited for the last request
            self._receive()
        self._require_open()
        for answer in self._answers:  # the request overwrites arrays that the asker still needs
            if isinstance(answer, tuple):
                answer[0].update({key: np.array(array) for key, array in answer[0].items()})
        self.numbers = {graph: n for graph, n in self.numbers.items() if graph() is not None}
        request = None if module == self._module else module, [*self.numbers.values()], method
        self._module = module or self._module
        self._answers = []
        with self.held:
            for worker, box, share in zip_longest(self._workers, self._boxes, shares):
                places = None if share is None else box.put(share)
                worker.send((*request, places, *arguments))
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
        if not answers:
            self._require_open()
        return answers

    def _receive(self) -> None:
        """Receive the answers to the last request, unless this was done, and print their text.

        A share that raised answers a RankFailedError, with the cause if that can be pickled.
        """
        if not (self._is_waiting and self.held.is_open):
            return
        received = []
        with self.held:
            for worker in self._workers:
                received.append(worker.receive())
                for line in received[-1][2].splitlines():
                    print(f"[{worker.number}] {line}")
            self._is_waiting = False
        shares = zip(self._workers, received, self._boxes, self._grads, strict=True)
        for worker, (failure, answer, _), box, grads in shares:
            if failure is not None:
                error = worker.error(failure.description, failure.traceback)
                with suppress(Exception):  # runs its code; the message has its traceback
                    error.__cause__ = pickle.loads(answer)
                self._answers.append(error)
                continue
            for key, place in answer[0].items():
                answer[0][key] = grads[key[1]] if place is None else box.views([place])[0]
            self._answers.append(answer)

    def _require_open(self) -> None:
        if os.getpid() != self.held.pid:
            raise RuntimeError(
                f"{WHAT}: this process ({os.getpid()}) was forked from the one whose workers these "
                f"are ({self.held.pid}); wrap the module again here"
            )
        if not self.held.is_open:
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
    of the module (modes, ratios, buffers) is sent if it has changed. Each share has its own random
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
        self.nprocs = self._cores if nprocs is None else check_integer(WHAT, "nprocs", nprocs, 1)
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
                edges = [(nodes[leaf], lambda _: _NOTHING) for leaf in sorted(below[k])]
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
