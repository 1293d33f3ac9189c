"""``DataParallel``: processes of this machine compute shares of each batch."""

import atexit
import io
import math
import mmap
import os
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from itertools import accumulate, pairwise, zip_longest
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import blas, random
from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import on_backward_end
from flashlight_py.autograd.graph import Walk
from flashlight_py.autograd.variable import record, record_in_order
from flashlight_py.cores import check_processes, thread_variables, usable_cores
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed import get_local_size
from flashlight_py.distributed.internal import check_integer, memory_file
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.pickling import dumps, main_can_be_imported
from flashlight_py.launch.spawning import Worker
from flashlight_py.nn import Module

WHAT = "DataParallel"
_ALIGNMENT = 64  # bytes, of arrays in shared memory
_can_import_main = cache(main_can_be_imported)

Part: TypeAlias = "Variable | Array"
# A leaf: (True, number of a parameter of the module) or (False, number of an input).
Leaf: TypeAlias = tuple[bool, int]
# An array in shared memory: offset in bytes, shape and dtype.
ArrayLayout: TypeAlias = "tuple[int, tuple[int, ...], np.dtype[np.generic]]"
# Forward: results by index, and the leaves of each result. Backward: gradients by leaf, and [].
Answer: TypeAlias = tuple[dict[Any, Any], list[list[Leaf]]]


# The module is pickled without its parameters for each pass, which takes about 0.1 ms for a small
# module. The pickle contains modes, ratios and buffers, and is sent only if it has changed.
def split_parts(
    value: Any, is_part: Callable[[Any], bool], noun: str = ""
) -> tuple[bytes, list[Any]]:
    """Pickle ``value`` without the objects that ``is_part`` accepts; return these objects too."""
    parts: dict[int, tuple[int, Any]] = {}

    def stand_in(value: Any) -> int | None:
        return parts.setdefault(id(value), (len(parts), value))[0] if is_part(value) else None

    form = dumps(value, not noun or _can_import_main(WHAT), stand_in, f"{WHAT}: {noun} ")
    return form, [part for _, part in parts.values()]


def join_parts(form: bytes, parts: Sequence[Any]) -> Any:
    """Unpickle ``form`` of ``split_parts``, with ``parts`` instead of the removed objects."""
    unpickler = pickle.Unpickler(io.BytesIO(form))
    unpickler.persistent_load = parts.__getitem__  # type: ignore[method-assign]
    return unpickler.load()


def is_data(value: Any) -> bool:
    return isinstance(value, (Variable, np.ndarray)) or is_cupy(value)


def array_of(part: Part) -> Array:
    return part.data if isinstance(part, Variable) else part


class WorkerMemory:
    """Shared memory that grows as needed. Workers open the ``path`` of the parent's object."""

    def __init__(self, path: str = "") -> None:
        if path:
            with memory_file.open_memory(path) as fd:
                self.fd, self.path, self._end = os.dup(fd), path, None
        else:
            file = memory_file.MemoryFile(named=not memory_file.process_space())
            self.fd, self.path, self._end = file.fd, file.path, file.close
        self._map: mmap.mmap | None = None

    def put(self, arrays: Iterable[Array]) -> list[ArrayLayout]:
        """Write ``arrays`` over the previous arrays; return their layout, or raise MemoryError."""
        arrays, places, size = list(arrays), [], 0
        for array in arrays:
            if array.dtype.hasobject:
                raise TypeError(f"{WHAT}: expected numbers, got an array of dtype {array.dtype}")
            places.append((size, array.shape, array.dtype))
            size += (array.nbytes // _ALIGNMENT + 1) * _ALIGNMENT
        if size > os.fstat(self.fd).st_size:
            memory_file.reserve(self.fd, size, f"arrays for the workers of {WHAT}")
        for view, array in zip(self.views(places), arrays, strict=True):
            view[...] = array
        return places

    def views(self, places: Iterable[ArrayLayout]) -> list[Array]:
        """Return views of the arrays at ``places``. The views stay valid after ``close``."""
        arrays = []
        for offset, shape, dtype in places:
            end = offset + math.prod(shape) * dtype.itemsize
            if self._map is None or len(self._map) < end:
                self._map = mmap.mmap(self.fd, 0)  # arrays keep the old mapping alive
            arrays.append(np.ndarray(shape, dtype, self._map, offset))
        return arrays

    def close(self) -> None:
        self._map = None
        if self._end:
            self._end()
        else:
            os.close(self.fd)


class WorkerShare:
    """The module in worker ``number``: its parameters in shared memory, and its stored graphs."""

    def __init__(
        self, takes_output: bool, number: int, paths: Sequence[str], params: Any, grads: Any
    ) -> None:
        model, self._box = map(WorkerMemory, paths)
        self._params = [Variable(array) for array in model.views(params)]
        for param, grad in zip(self._params, model.views(grads), strict=True):
            param.buffer = grad
        model.close()
        self._takes_output, self._number, self._module = takes_output, number, b""
        self._graphs: dict[int, tuple[list[Part], list[Part]]] = {}  # by number: inputs, results

    def __call__(self, link: Connection) -> None:
        """Send (failure, answer, output) for each request until ``link`` is closed.

        ``failure`` is None, or a Failure if the request fails. Then ``answer`` is a pickle of the
        exception, or empty if it cannot be pickled.
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
                except Exception as error:  # noqa: BLE001 - the parent raises any error
                    failure, answer = Failure.of_exception(error), b""
                    with suppress(TypeError):
                        answer = dumps(error)
            link.send((failure, answer, printed.getvalue()))

    def _answer(
        self, module: bytes | None, kept: list[int], method: str, places: Any, *arguments: Any
    ) -> Answer:
        """Call ``method``, and return its answer with a layout in place of each array.

        Gradients of parameters are None, because the parent has mapped their memory. ``module`` is
        a pickle, or None if it has not changed. ``places`` is None if this worker has no rows.
        ``kept`` are the numbers of graphs that the parent still uses.
        """
        self._module = module or self._module
        self._graphs = {graph: self._graphs[graph] for graph in kept if graph in self._graphs}
        if places is None:
            return {}, []
        arrays, below = getattr(self, method)(self._box.views(places), *arguments)
        sent = [key for key, array in arrays.items() if array is not None]
        places = self._box.put(map(arrays.__getitem__, sent))
        return {**arrays, **dict(zip(sent, places, strict=True))}, below

    def forward(
        self, arrays: list[Array], graph: int, seed: int, form: bytes, calc_grads: list[bool | None]
    ) -> Answer:
        """Return results for ``arrays``. ``calc_grads`` has flags of parameters, then of inputs."""
        for param, flag in zip(self._params, calc_grads, strict=False):
            param.calc_grad = bool(flag)
        # Copy, because the graph needs the inputs, which the answer overwrites.
        flags = zip(map(np.array, arrays), calc_grads[len(self._params) :], strict=True)
        inputs = [x if flag is None else Variable(x, flag) for x, flag in flags]
        random.set_seed(seed + self._number)
        module = join_parts(self._module, self._params)
        arguments, options = join_parts(form, inputs)
        _, results = split_parts(module(*arguments, **options), is_data)
        self._graphs[graph] = inputs, results
        leaves = self._leaves(inputs)
        below = [[leaves[v] for v in _leaves_below(part) if v in leaves] for part in results]
        return dict(enumerate(map(array_of, results))), below

    def backward(self, seeds: list[Array], graph: int, numbers: list[int]) -> Answer:
        """Return the leaves' gradients. ``seeds`` are the gradients of the results ``numbers``."""
        inputs, results = self._graphs[graph]
        leaves = self._leaves(inputs)
        for variable in leaves:
            variable.grad = None
        # One pass from all results: the root depends on every result.
        roots = zip([results[number] for number in numbers], seeds, strict=True)
        edges = [(x, lambda _, seed=seed: seed) for x, seed in roots if isinstance(x, Variable)]
        root = record(np.zeros(()), *edges)
        if root.calc_grad:
            root.backward(retain_graph=True)  # the parent may repeat the pass
        grads = {leaf: v.grad for v, leaf in leaves.items() if v.grad is not None}
        return {leaf: None if leaf[0] else grad for leaf, grad in grads.items()}, []

    def _leaves(self, inputs: Sequence[Part]) -> dict[Variable, Leaf]:
        leaves = {part: (False, n) for n, part in enumerate(inputs) if isinstance(part, Variable)}
        return leaves | {param: (True, n) for n, param in enumerate(self._params)}


def _leaves_below(result: Part) -> list[Variable]:
    """Return the leaves that a backward pass from ``result`` would reach."""
    if not isinstance(result, Variable) or not result.calc_grad:
        return []
    if result.node is None:
        return [result]
    walk = Walk(result.node, result.array, False)
    with suppress(RuntimeError):  # freed graph or changed leaf: backward() raises this too
        walk.count([result.node], (), walk.pending)
    return [target for target in walk.pending if isinstance(target, Variable)]


class TeamResources(AbstractContextManager["TeamResources"]):
    """Processes and memory of a team in the parent. If a ``with`` block raises, workers end."""

    def __init__(self) -> None:
        self.pid, self.is_open = os.getpid(), True
        self.workers: list[Worker] = []
        self.memories: list[WorkerMemory] = []
        self.limited: list[Any] = []

    def end(self) -> None:
        """Kill the workers. Blocks. If interrupted, a second call ends the remaining workers."""
        self.is_open = False
        if os.getpid() == self.pid:  # not in a process that was forked from the parent
            for worker in self.workers:
                worker.end()
            blas.restore(self.limited)
        while self.memories:
            self.memories.pop().close()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.end()


# Python may collect a team at any line, and an exception that a signal handler raises during the
# collection is lost. So the collection only appends a reference, and the next use of any
# DataParallel ends the workers of the collected team.
_resources: "dict[weakref.ref[Team], TeamResources]" = {}
_dropped_teams: "deque[weakref.ref[Team]]" = deque()


def end_dropped() -> None:
    """End the workers of teams that Python has freed. Several threads may call this."""
    with suppress(IndexError):  # empty, or another thread took the last reference
        while True:
            team = _dropped_teams.popleft()
            _resources[team].end()
            del _resources[team]


@atexit.register
def _end_all() -> None:
    for resources in list(_resources.values()):
        resources.end()


# If sending or receiving is interrupted, the message cannot be completed, so all workers end. The
# next call starts new workers without loss: this process has parameters, modes and random numbers.
class Team:
    """``count`` worker processes with the arrays of ``params`` in shared memory.

    The workers and this process share ``cores``. ``ask`` sends a request and returns an empty list.
    ``fill`` waits for the answers and appends them to this list.
    """

    def __init__(self, count: int, params: Sequence[Variable], cores: int) -> None:
        self.numbers: dict[weakref.ref[Any], int] = {}  # by WorkersGraph: its number
        self._params = list(params)
        self._module: bytes | None = None  # pickle of the module that the workers have
        self._answers: list[Any] = []  # answers of the workers to the last request
        self._is_waiting = False
        end_dropped()
        self.resources = resources = TeamResources()
        _resources[weakref.ref(self, _dropped_teams.append)] = resources
        self._workers = resources.workers
        variables = thread_variables(os.environ, count + 1, cores)
        with resources:
            resources.memories.extend(WorkerMemory() for _ in range(count + 1))
            model, *self._boxes = resources.memories
            size = len(self._params)
            places = model.put([param.data for param in self._params] * (count + 1))
            # ``sets[0]`` is for the parameters, ``sets[k]`` for the gradients of worker k.
            sets = [places[size * k : size * (k + 1)] for k in range(count + 1)]
            self._views, *self._grads = map(model.views, sets)
            self.holds(self._params)
            for number, box in enumerate(self._boxes, 1):
                name, paths = (WHAT, number, count + 1), (model.path, box.path)
                # If stdout is replaced, as in a notebook, output of workers must be sent back.
                args = sys.stdout is not sys.__stdout__, number, paths, sets[0], sets[number]
                resources.workers.append(Worker(name, WorkerShare, args, variables))
            for worker in resources.workers:
                worker.wait_for_start()
            resources.limited += blas.limit_each(max(1, cores // (count + 1)))

    def holds(self, params: Sequence[Variable]) -> bool:
        """Return whether the workers can use ``params``. Copy replaced arrays to their memory."""
        if not self.resources.is_open or [*map(id, params)] != [*map(id, self._params)]:
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
        """Send each worker its share, or None if there are too few. Return a list for ``fill``.

        Raises RuntimeError if the workers have ended, or this process was forked from their parent.
        """
        end_dropped()
        self._require_open()
        with suppress(RankFailedError):  # answers that no caller waited for
            self._receive()
        self._require_open()
        for answer in self._answers:  # copy arrays that the request overwrites
            if isinstance(answer, tuple):
                answer[0].update({key: np.array(array) for key, array in answer[0].items()})
        self.numbers = {graph: n for graph, n in self.numbers.items() if graph() is not None}
        request = None if module == self._module else module, [*self.numbers.values()], method
        self._module = module or self._module
        self._answers = []
        with self.resources:
            for worker, box, share in zip_longest(self._workers, self._boxes, shares):
                places = None if share is None else box.put(share)
                worker.send((*request, places, *arguments))
            self._is_waiting = True  # an interrupt before this line ends the workers
        return self._answers

    def fill(self, answers: list[Any]) -> list[Any]:
        """Block until ``answers`` is full, and return it. Arrays are valid until the next request.

        Raises like ``ask``, and RankFailedError if a worker was killed or raised (see the cause).
        """
        self._receive()
        errors = [answer for answer in answers if isinstance(answer, RankFailedError)]
        if errors:
            answers.clear()  # the error's frames must not refer to the arrays
            raise errors.pop(0)
        if not answers:
            self._require_open()
        return answers

    def _receive(self) -> None:
        """Receive the answers to the last request, and print what the workers printed."""
        if not (self._is_waiting and self.resources.is_open):
            return
        received = []
        with self.resources:
            for worker in self._workers:
                received.append(worker.receive())
                for line in received[-1][2].splitlines():
                    print(f"[{worker.number}] {line}")
            self._is_waiting = False
        shares = zip(self._workers, received, self._boxes, self._grads, strict=True)
        for worker, (failure, answer, _), box, grads in shares:
            if failure is not None:
                error = worker.error(failure.description, failure.traceback)
                with suppress(Exception):  # unpickling runs user code, which may fail
                    error.__cause__ = pickle.loads(answer)
                self._answers.append(error)
                continue
            for key, layout in answer[0].items():
                answer[0][key] = grads[key[1]] if layout is None else box.views([layout])[0]
            self._answers.append(answer)

    def _require_open(self) -> None:
        if os.getpid() != self.resources.pid:
            raise RuntimeError(
                f"{WHAT}: expected process {self.resources.pid}, which started the workers, got "
                f"process {os.getpid()}, which was forked from it. Wrap the module again here"
            )
        if not self.resources.is_open:
            raise RuntimeError(
                f"{WHAT}: expected running workers, got workers that close() or an error has ended "
                "since the forward pass. Repeat the forward pass"
            )


_NOTHING = np.zeros(())  # value and gradient of the nodes of workers' leaves


class DataParallel(Module):
    """A module that divides each batch into shares, which processes of this machine compute.

    A training script needs only one change: ``model = fl.DataParallel(model)``. ``model(x)``
    returns one Variable with all rows. ``backward()`` gives every ``param.grad`` the value that one
    process would compute, except for rounding, and the same bits each time. Optimizers and
    checkpoints work with the wrapped module, whose parameters and names in ``state_dict()`` stay
    the same. No launcher and no ``distributed_init`` is needed. Each rank has its own workers.

    This process computes the first share, and workers compute the other shares. The first call
    starts the workers as new interpreters, like the ranks of :func:`flashlight_py.spawn`. So
    scripts must make the call under ``if __name__ == "__main__":``. All processes map the
    parameters and gradients. Other parts of the module (modes, ratios, buffers) are sent if they
    have changed. Each share has its own random numbers, derived from this process's seed. If the
    forward pass changes the module (running statistics), the changes of the first share are kept.

    Inputs are NumPy arrays and Variables of any dtype except object, with the batch as their first
    dimension. They may be nested in objects that can be pickled. Other values are sent to every
    share. Shares differ by at most one row, and a small batch leaves processes idle. Results are
    concatenated along their first dimension. Other result values are taken from the first share.

    If the workers have ended, a call starts new workers. If a DataParallel object is freed without
    ``close``, its workers end when another such object is used. When this process ends, also by
    ``kill -9``, no process and no memory remains. Only one thread at a time may use the object.

    Args:
        module: Module on the CPU that can be pickled (in a notebook by cloudpickle).
        nprocs: Number of processes, including this process. Default: the number of usable cores
            divided by the number of ranks on this host. If it is 1, there are no workers.

    Raises:
        TypeError: If ``module`` is not a Module, or ``nprocs`` is not an integer.
        ValueError: If ``nprocs`` is below 1 or too large for this host, or the module contains a
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
            raise TypeError(f"{WHAT}: expected a fl.nn.Module, got {type(module).__name__}")
        if any(isinstance(child, DataParallel) for _, child in module._walk()):
            raise ValueError(f"{WHAT}: the module contains a {WHAT}. Wrap only the outermost one")
        self._cores = max(1, usable_cores() // get_local_size())
        self.nprocs = self._cores if nprocs is None else check_integer(WHAT, "nprocs", nprocs, 1)
        check_processes(f"{WHAT}: nprocs", self.nprocs, 3)
        self.module = module
        self._team: Team | None = None
        self._number = 0

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the result of ``module``, computed in shares. Blocks.

        Raises:
            ValueError: If input arrays have different first dimensions, a result has no dimensions,
                the shares return different numbers of results, or a parameter is sharded.
            TypeError: If an array is a CuPy array or contains Python objects, or the module, the
                inputs or a worker's result cannot be pickled.
            RankFailedError: If a worker was killed or raised. The message contains the traceback,
                and the cause is the exception if it can be pickled. ``backward()`` raises this as
                well. An exception in this process's share is raised unchanged.
            RuntimeError: If a worker makes the call while it imports the script, because the call
                is not under ``if __name__ == "__main__":``. ``backward()`` raises it if they end.
            OSError: If the system cannot start processes or allocate memory.
        """
        if self.nprocs == 1:
            return self.module(*inputs, **options)
        form, parts = split_parts((inputs, options), is_data, "an input")
        rows = _rows(parts)
        count = min(rows, self.nprocs)
        if count < 2:
            return self.module(*inputs, **options)
        ends = [rows // count * k + min(k, rows % count) for k in range(count + 1)]
        own_rows, *others = (slice(begin, end) for begin, end in pairwise(ends))
        if self.module.before_forward is not None:  # may change attributes that the workers need
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
        inputs, options = join_parts(form, [part[own_rows] for part in parts])
        form, results = split_parts(compute(*inputs, **options), is_data, "a result")
        return join_parts(form, graph.join(results, team.fill(answers)[: count - 1], params, parts))

    def close(self) -> None:
        """End the workers now. Blocks until they have exited. A later call starts new workers."""
        if self._team is not None:
            self._team.resources.end()
            self._team = None

    def __reduce__(self) -> tuple[Any, ...]:
        return DataParallel, (self.module, self.nprocs), {"training": self.training}

    def __repr__(self) -> str:
        return f"{WHAT}({self.module!r}, nprocs={self.nprocs})"

    def _visit(self, prefix: str, seen: set[int], modules: Any, seen_params: Any) -> Any:
        """Append this module, and visit the inner module without adding a prefix to its names."""
        modules.append((prefix, self))
        return self.module._visit(prefix, seen, modules, seen_params)

    def _ready_team(self) -> tuple[Team, bytes, list[Variable]]:
        form, params = split_parts(
            self.module, lambda x: isinstance(x, Variable) and x.node is None, "the module"
        )
        for number, param in enumerate(params):
            if param.placement is not None:
                raise ValueError(
                    f"{WHAT}: expected unsharded parameters, got sharded parameter {number} (shape "
                    f"{param.shape}). Use either {WHAT}, or sharding with one rank per core"
                )
            if is_cupy(param.data):
                raise TypeError(
                    f"{WHAT}: expected NumPy arrays, got a CuPy array as parameter {number} "
                    f"(shape {param.shape}). Instead, start one rank per GPU: flrun or fl.spawn"
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
            kind = "with Python objects" if part.dtype.hasobject else "of CuPy"
            raise TypeError(f"{WHAT}: inputs must be NumPy arrays of numbers, got an array {kind}")
    rows = {shape[0] if shape else None for shape in shapes}
    if len(rows) > 1 or None in rows:
        raise ValueError(
            f"{WHAT}: all inputs must have the batch as their first dimension, got the shapes "
            f"{', '.join(map(str, shapes))}. Pass numbers as Python numbers"
        )
    return rows.pop() or 0 if rows else 0


# A backward pass visits, in this order:
#
# 1. the concatenated results, whose gradients are divided into the rows of each share;
# 2. the results of this process's share; the first one sends the other rows to the workers;
# 3. the remaining graph of this process's share, while the workers compute;
# 4. a node for each leaf of the workers' results, which waits for the workers' gradients.
#
# Steps 2 and 4 are ordered operations of the engine, which visits them in the reverse order of
# recording. The engine handles accumulation, hooks, buffers, retain_graph and a second pass.
class WorkersGraph:
    """The graphs that the workers store for forward pass ``number``, until this object is freed.

    ``shares`` are the workers' rows of the batch. This process's graph keeps the object alive.
    """

    def __init__(self, team: Team, number: int, shares: Sequence[slice]) -> None:
        self._team, self._number, self._shares = team, number, shares
        self._rows: dict[int, list[Array]] = {}  # by result: the gradient rows of each worker
        self._answers: list[Answer] = []
        team.numbers[weakref.ref(self)] = number

    def join(
        self, local: list[Part], answers: list[Answer], params: list[Variable], inputs: list[Part]
    ) -> list[Part]:
        """Return ``local`` with the workers' rows appended. Record the operations for backward."""
        others, leaves = zip(*answers, strict=True)
        counts = [len(local), *map(len, others)]
        if len(set(counts)) > 1:
            raise ValueError(
                f"{WHAT}: expected the same number of results from every share of the batch, got "
                f"{', '.join(map(str, counts))}. Return the same number of results for any batch"
            )
        below = [set[Leaf]().union(*sets) for sets in zip(*leaves, strict=True)]  # for each result
        nodes: dict[Leaf, Variable] = {}
        for leaf in sorted(set[Leaf]().union(*below)):
            source: Any = (params if leaf[0] else inputs)[leaf[1]]
            gradient = partial(self._gradient, leaf, source.data)
            nodes[leaf] = record_in_order(_NOTHING, (source, gradient))
        results: list[Part] = []
        for k, part in enumerate(local):
            arrays = [array_of(part), *(arrays[k] for arrays in others)]
            if not all(array.ndim for array in arrays):
                raise ValueError(
                    f"{WHAT}: expected results with one row per sample, got a result without "
                    "dimensions. Compute means outside of the module: loss(model(x), y)"
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
        """Store the workers' rows of ``grad``, a result's gradient. Return this process's rows."""
        if not self._rows:
            on_backward_end(self._forget)
        self._rows[result] = [grad[begin:end] for begin, end in pairwise(ends)]
        return grad[: ends[0]]

    def _send(self, grad: Array) -> Array:
        """Send the rows that ``_cut`` has stored. Do not wait. A second call sends nothing."""
        if self._rows:
            shares = zip(*self._rows.values(), strict=True)
            self._answers = self._team.ask(shares, None, "backward", self._number, [*self._rows])
            self._rows = {}
        return grad

    def _gradient(self, leaf: Leaf, like: Array, _: object) -> Array:
        """Return the workers' gradient of ``leaf``. For an input, the first share's rows are 0."""
        answers = enumerate(self._team.fill(self._answers))
        parts = [(worker, arrays.pop(leaf)) for worker, (arrays, _) in answers if leaf in arrays]
        if not leaf[0]:
            grad = np.zeros_like(like)
            for worker, part in parts:
                grad[self._shares[worker]] = part
            return grad
        total: Array = parts.pop(0)[1]
        for _, part in parts:
            total += part  # in place: nothing else reads the first worker's gradient
        return total

    def _forget(self, completed: bool) -> None:
        self._rows = {}
        self._answers.clear()
