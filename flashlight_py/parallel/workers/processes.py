"""The worker processes of ``DataParallel``: their program, and the requests of their parent."""

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
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd.graph import Walk
from flashlight_py.autograd.variable import record
from flashlight_py.cores import thread_variables
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.memory.memory_room import reserve
from flashlight_py.distributed.start import blas
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.pickling import dumps, main_can_be_imported
from flashlight_py.launch.spawning import Worker
from flashlight_py.random import set_seed

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
            reserve(self.fd, size, f"arrays for the workers of {WHAT}")
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


# In the worker ------------------------------------------------------------------------------------


class WorkerShare:
    """The share of worker ``number``: parameters in shared memory, and graphs."""

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

        ``module`` is None if it has not changed, ``places`` is None if this worker has no rows.
        The parent still has the graphs whose numbers are ``kept``.
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
        set_seed(seed + self._number)
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


# In the parent ------------------------------------------------------------------------------------


def _answer_of(worker: Worker) -> Any:
    """Return the next answer of ``worker``, and print the text of the share; blocks.

    If the share raised, it is a RankFailedError, with the cause if that can be pickled.
    """
    failure, result, printed = worker.receive()
    for line in printed.splitlines():
        print(f"[{worker.number}] {line}")
    if failure is None:
        return result
    error = worker.error(failure.what, failure.traceback)
    with suppress(Exception):  # runs code of the exception; its traceback is in the message
        error.__cause__ = pickle.loads(result)
    return error


@dataclass
class TeamResources:
    """The processes and the memory of a team. An exception within ``with`` ends them."""

    pid: int = field(default_factory=os.getpid)
    is_open: bool = True
    workers: list[Worker] = field(default_factory=list)
    memories: list[WorkerMemory] = field(default_factory=list)
    limited: list[Any] = field(default_factory=list)

    def end(self) -> None:
        """Kill the workers; blocks. After an interrupt, a second call ends the rest."""
        self.is_open = False
        if os.getpid() == self.pid:  # not in a process that was forked from it
            for worker in self.workers:
                worker.end()
            blas.restore(self.limited)
        while self.memories:
            self.memories.pop().close()

    def __enter__(self) -> None:
        pass

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
        self.held = _held[weakref.ref(self, _dropped.append)] = TeamResources()
        self._workers = self.held.workers
        with self.held:
            self._start(count, cores)

    def _start(self, count: int, cores: int) -> None:
        self.held.memories.extend(WorkerMemory() for _ in range(count + 1))
        model, *self._boxes = self.held.memories
        size = len(self._params)
        places = model.put([param.data for param in self._params] * (count + 1))
        # The parameters, and for each worker the gradients.
        sets = [places[size * k : size * (k + 1)] for k in range(count + 1)]
        self._views, *self._grads = map(model.views, sets)
        self.holds(self._params)
        variables = thread_variables(os.environ, count + 1, cores)
        for number, box in enumerate(self._boxes, 1):
            name, fds = (WHAT, number, count + 1), (model.fd, box.fd)
            # A notebook's own object is in the place of stdout: a process would not print to it.
            args = sys.stdout is not sys.__stdout__, number, fds, sets[0], sets[number]
            self._workers.append(Worker(name, WorkerShare, args, fds, variables))
        for worker in self._workers:
            worker.wait_for_start()
        self.held.limited += blas.limit_each(max(1, cores // (count + 1)))

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
            RuntimeError: the workers have ended since.
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
        """Receive the answers to the last request, unless this was done."""
        if not (self._is_waiting and self.held.is_open):
            return
        with self.held:
            received = [_answer_of(worker) for worker in self._workers]
            self._is_waiting = False
        for answer, box, grads in zip(received, self._boxes, self._grads, strict=True):
            self._answers.append(answer)
            if isinstance(answer, tuple):  # no error
                for key, place in answer[0].items():
                    answer[0][key] = grads[key[1]] if place is None else box.views([place])[0]

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
