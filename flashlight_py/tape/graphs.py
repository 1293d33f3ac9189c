"""Steps on a GPU, captured as CUDA graphs. Each replay is one launch.

The first call for a combination of arguments runs eagerly: it compiles kernels, and NCCL connects
the ranks. CUDA captures the second call. Later calls copy the arguments and launch the graph.

NCCL requires that either all ranks or no ranks launch a graph with collectives (NCCL, "Using NCCL
with CUDA Graphs"). The ranks of a step therefore compare their graphs before each call, in the
group of the step that has the most ranks. If this group lacks a rank of another group, the step
stays eager, because ranks that agree inside each group could disagree between groups.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from zlib import crc32

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import is_cupy
from flashlight_py.distributed import Work
from flashlight_py.distributed.internal import ALL_REDUCE, SCATTER, Call, Membership, graph_launcher
from flashlight_py.errors import DistributedError, GroupClosedError
from flashlight_py.optim.cuda import CapturedStep
from flashlight_py.optim.optimizer import RuleOptimizer
from flashlight_py.random import generator
from flashlight_py.structure import count, thread_state
from flashlight_py.tape.arrays import items_in, map_items
from flashlight_py.tape.operands import CannotCapture
from flashlight_py.tape.products import capture_products
from flashlight_py.tape.recording import CtrlC, Watcher, line_of_user, merged, overlaps
from flashlight_py.tape.state import ITEMS, EveryCall, State, format_path, plain_arrays

_MOST_GRAPHS = 8  # maximum number of graphs; each keeps the memory of a step
_MOST_FORMS = 64  # maximum number of argument forms in Graphs._warm
_LEAST_CAPTURES = 16  # beyond this number, a step with more captures than replays stays eager
_EAGER, _CAPTURE, _NEVER = 0, -1, -2  # votes of a rank; a vote above 0 is the number of a graph


class _CannotSend(CannotCapture, DistributedError):
    """An error: this rank cannot capture a communication call, so no rank captures the step."""


class Recorder(Watcher):
    """The recorder of one run of a step on this thread. It collects communication and optimizers.

    ``groups``: groups whose ranks agreed to capture this run, or None if the run is eager.
    """

    def __init__(self, variables: Iterable[Variable] = (), groups: Any = None) -> None:
        super().__init__(variables)
        self.is_capturing = groups is not None
        self.groups: dict[Membership, None] = dict.fromkeys(groups or ())
        self.backends: dict[Any, None] = {}
        self.steps: list[CapturedStep] = []
        self._kept: list[Any] = []  # objects whose GPU memory the graph uses
        self._tables: Any = None  # memory pool for tables of optimizer kernels
        self._calls: dict[Membership, list[str]] = {}
        self._size = 1  # number of ranks in the group of the latest call

    def keep(self, *values: Any) -> None:
        self._kept += values

    def as_one(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function``. For an optimizer's step, add a ``CapturedStep`` to ``steps``."""
        if function is not RuleOptimizer.step.__wrapped__:  # type: ignore[attr-defined]
            return function(*args, **options)
        step = CapturedStep(args[0])
        self.steps.append(step)
        function(*args, **options)
        if self.is_capturing and (reason := step.end()):
            self.leave(reason)
        return None

    def table(self, packed: bytes, numbers: int, params: Sequence[Any]) -> Any:
        """Return the table of the kernel that updates ``params``. See ``CapturedStep.table``."""
        import cupy

        if not self.steps:
            raise CannotCapture(f"parameters are updated without an optimizer at {line_of_user()}")
        self._tables = self._tables or cupy.cuda.MemoryPool()
        # Kernels of the graph may still use memory that was freed to the usual pool.
        with cupy.cuda.using_allocator(self._tables.malloc):
            table = self.steps[-1].table(packed, numbers, params)
        if not self.is_capturing:
            table.set(np.frombuffer(packed, np.int64))
        return table

    def verb(self, group: Membership, calls: Sequence[Call], name: str) -> Work:
        """Start ``calls`` of operation ``name``. Their launches become part of the graph."""
        call = calls[0]
        array = call.out if call.array is None else call.array
        if not self.is_capturing:
            if group.size > 1 and not call.verb.is_message:
                self.groups[group] = None
            run: Any = (group.run, call) if len(calls) == 1 else (group.run_many, calls, name)
            return self.without(functools.partial(*run))  # type: ignore[no-any-return]
        if not is_cupy(array):
            raise _CannotSend(f"{name} sends no GPU array at {line_of_user()}")
        backend: Any = group.backend(array)
        if call.verb.is_message:
            self.run(calls)
        if group.size > 1:
            if group not in self.groups:
                raise _CannotSend(f"{name} uses a group that the step has not used before")
            if reason := backend.capture_problem():
                raise _CannotSend(reason)
            self.backends[backend], self._size = None, group.size
            self._calls.setdefault(group, []).extend(map(_described, calls))
        if len(calls) == 1:
            return group.journal.run(calls, name, lambda: backend.start(call))
        return group.journal.run(calls, name, lambda: backend.start_many(calls))

    def digest(self, group: Membership) -> int:
        """Return a number that is equal on all ranks of ``group`` if they captured equal calls."""
        return crc32("; ".join(self._calls.get(group, [])).encode())

    # These methods replace those of ``Comparisons``. During a capture ranks compare nothing,
    # because a rank that cannot capture the step does not reach the call. All ranks compare digests
    # after the capture.

    def post(self, call: Call) -> None:
        """Compare nothing."""

    refuse = post

    def compare(self, call: Call) -> list[int]:
        """Return this rank's number of rows for each rank. Ranks compare the numbers later."""
        return [len(call.like)] * self._size

    def run(self, calls: Any) -> Any:
        """Raise ``_CannotSend``, because this call needs data of other ranks during the capture."""
        call = calls if isinstance(calls, Call) else calls[0]
        raise _CannotSend(f"{call.name} needs data of other ranks at {line_of_user()}")

    rows_for_this_rank = run


class Graph:
    """A captured step: a CUDA graph, memory for its arguments, its gradients and its result.

    ``recorder`` has recorded the step. ``state`` is the state before the capture. ``pairs`` has,
    for each argument, the passed array and the array that the graph reads. After all ranks have
    captured the step, ``number`` identifies the graph in votes. ``signature``: ``State.signature``
    after the capture. ``stamp``: ``structure.count`` at the latest check of the signature.
    """

    number: int
    signature: Any
    stamp: int

    def __init__(
        self, graph: Any, recorder: Recorder, key: Any, pairs: Sequence[Any], result: Any,
        state: State,
    ) -> None:  # fmt: skip
        self.recorder, self.key, self._result = recorder, key, result
        self._stream: Any = None  # stream of the latest launch
        self.inputs = inputs = [array for _, array in pairs]
        flags = [array.flags.c_contiguous or array.flags.f_contiguous for array, _ in pairs]
        self._plain = [number for number, is_plain in enumerate(flags) if is_plain]
        self._strided = [number for number, is_plain in enumerate(flags) if not is_plain]
        self._graph: Any = graph_launcher(graph, [inputs[number] for number in self._plain])
        self._names = state.names
        self._kept = {id(value) for _, value in state.held}
        before = {field.holder: grad for field, grad in state.held if field.slot == "grad"}
        self._reads = [(v, before[v]) for v in recorder.grads_read if v in before]
        self._memory = _spans_of(state, [grad for _, grad in self._reads])
        changed = [v for v in before if v in recorder.grads_set or v.grad is not before[v]]
        self._grads = [(v, v.grad) for v in changed]
        for backend in recorder.backends:
            backend.add_captured(self)

    def release(self) -> None:
        """Destroy the CUDA graph. NCCL frees a communicator only after all its graphs."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.release()

    def fits(self, key: Any, arrays: Sequence[Any], state: Callable[[], State]) -> bool:
        """Return whether the graph can replay a call with ``arrays`` and argument forms ``key``."""
        if key != self.key or self._graph is None or _have_any(self._memory, arrays):
            return False
        stamp = int(count[0])
        if self.stamp != stamp:
            if state().signature != self.signature:
                return False
            self.stamp = stamp
        names = all(field.has(value) for field, value in self._names)
        return names and all(variable.grad is before for variable, before in self._reads)

    def replay(self, arrays: Sequence[Any]) -> Any:
        """Launch the graph on the current stream with ``arrays``, and return the step's result.

        Raises:
            DistributedError: If a group of the step has failed.
        """
        import cupy

        stream, graph = cupy.cuda.get_current_stream(), self._graph
        if self._stream is not None and self._stream.ptr != stream.ptr:
            stream.wait_event(self._stream.record())
        self._stream = stream
        if graph is None:
            raise GroupClosedError("a captured step: its group was closed. Capture it again")
        for number in self._strided:
            self.inputs[number][...] = arrays[number]
        for step in self.recorder.steps:
            step.advance(stream.ptr)
        sources = [arrays[number].data.ptr for number in self._plain]
        launch = functools.partial(graph.launch, sources, stream.ptr)
        first, *others = self.recorder.backends or (None,)
        if first is None:
            launch()
        else:
            first.launch_captured("a captured step", launch)
        for backend in others:
            record = functools.partial(cupy.cuda.runtime.eventRecord, stream=stream.ptr)
            backend.launch_captured("a captured step", record)
        for variable, grad in self._grads:
            variable.grad = grad
        return map_items(self._result, self._copied)

    def changes(self, arrays: Sequence[Any]) -> bool:
        """Return whether the latest replay changed a copy of an argument. Waits for the replay."""
        pairs = zip(arrays, self.inputs, strict=True)
        return any(before.tobytes() != array.tobytes() for before, array in pairs)

    def _copied(self, value: Any) -> Any:
        """Return ``value``, or a copy if it is an array that the next replay overwrites."""
        if isinstance(value, Variable):
            is_state = value in self.recorder.variables
            return value if is_state else Variable(self._copied(value.data))
        return value.copy() if is_cupy(value) and id(value) not in self._kept else value


class Graphs:
    """The CUDA graphs of ``step``. ``roots`` are objects with state that ``step`` does not name."""

    def __init__(self, step: Callable[..., Any], roots: Sequence[Any]) -> None:
        self._step, self._roots = step, roots
        self._graphs: list[Graph] = []
        self._warm: dict[Any, int] = {}  # by argument form: structure.count after the eager run
        # Groups of the step. None before its first run.
        self._groups: list[Membership] | None = None
        self._numbers = itertools.count(1)
        self._captures = 0
        self._changes = EveryCall(_LEAST_CAPTURES)
        self._lock = threading.RLock()
        self.replays = 0
        self.reason = ""  # why the step stays eager, or ""

    def __call__(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Replay a graph, capture the step or run it eagerly. All ranks choose the same action."""
        with self._lock:
            if self._groups is not None and not all(group.is_open for group in self._groups):
                self._graphs, self._warm, self._groups = [], {}, None
            values = (*args, *options.values())
            key = (*map(_form, values), *options)
            state, arrays = functools.partial(self._state, values), _arrays(values)
            graph = next((g for g in self._graphs if g.fits(key, arrays, state)), None)
            is_warm = graph is None and self._warm.get(key) == int(count[0])
            vote = _CAPTURE if is_warm and not _have_any(_spans_of(state()), arrays) else _EAGER
            agreed = self._agreed(vote if graph is None else graph.number)
            if graph is not None and agreed == graph.number:
                self.replays += 1
                return graph.replay(arrays)
            if agreed == _CAPTURE:
                return self._capture(key, args, options)
            return self._run(key, args, options)

    def _state(self, values: Iterable[Any]) -> State:
        """Return the state of the step and of all arguments without arrays, such as a model."""
        others = [value for value in values if not _arrays([value])]
        return State(self._step, (*self._roots, *others))

    def _run(self, key: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.reason or self._groups is not None:
            result = self._step(*args, **options)
        else:
            recorder = Recorder()
            with recorder.only, CtrlC() as ctrl_c, ExitStack() as stack:
                recorder.begin(stack)
                try:
                    result = ctrl_c.let_in(self._step, *args, **options)
                except BaseException:
                    # The caller may catch the error. Later votes need the groups.
                    self._groups = list(recorder.groups) or None
                    raise
            self._groups = list(recorder.groups)
        if len(self._warm) >= _MOST_FORMS:
            self._warm.clear()
        self._warm[key] = int(count[0])
        return result

    def _agreed(self, vote: int) -> int:
        """Return ``vote`` if all ranks of the step have this vote, else _EAGER. Blocking."""
        groups = _spanning(self._groups or ())
        if len(groups) > 1:
            vote = _NEVER
        agreed = vote
        for group in groups:
            least, most = _extremes(group, vote)
            if least == _NEVER:
                self.reason = "a rank uses several groups in it, and no group contains all ranks"
            if least != most or least == _NEVER:
                agreed = _EAGER
        return agreed

    def _capture(self, key: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Capture and replay the step once, or run it eagerly if a rank cannot capture it."""
        values = (*args, *options.values())
        arrays, state = _arrays(values), self._state(values)
        self._captures += 1
        recorder = Recorder(state.variables, self._groups)
        held = plain_arrays(tuple([value for _, value in state.held]))
        host = [(array, array.copy()) for array in held if not is_cupy(array)]
        draws, drawn = generator().bit_generator, generator().bit_generator.state
        try:
            graph, reason = self._record(recorder, key, args, options, state)
            after = self._state(values)
        except BaseException:
            _restore(state, host)
            draws.state = drawn
            raise
        if self._captures > max(_LEAST_CAPTURES, self.replays):
            reason = f"{self._captures} calls had to be captured, and {self.replays} were replayed"
        reason = self._changes.reason(state, self.replays - self._captures) or reason
        if not reason and draws.state != drawn:
            reason = "random numbers are drawn on the CPU; draw them on the GPU, or before"
        if not reason:
            reason = _moved(state)
        if not reason and any(array.tobytes() != copy.tobytes() for array, copy in host):
            reason = "an array of the CPU changes; keep it on the GPU"
        if not reason and state.numbers != after.numbers:
            reason = "a number of a module, an optimizer or a meter changes; keep it in an array"
        if not self._all_without(reason) or not self._all_have_captured(recorder) or graph is None:
            _restore(state, host)
            draws.state = drawn
            self._stay_eager(graph, reason)
            return self._step(*args, **options)
        graph.number = next(self._numbers)
        graph.signature, graph.stamp = after.signature, int(count[0])
        result = graph.replay(arrays)
        if graph.changes(arrays):
            reason = "an argument is changed in place; make a copy of it"
            for array, changed in zip(arrays, graph.inputs, strict=True):
                array[...] = changed
        if not self._all_without(reason):
            self._stay_eager(graph, reason)
            return result
        self._graphs = [graph, *self._graphs][:_MOST_GRAPHS]
        self.replays += 1
        return result

    def _all_without(self, reason: str) -> bool:
        return self._agreed(_EAGER if reason else 1) == 1

    def _all_have_captured(self, recorder: Recorder) -> bool:
        digests = [_extremes(group, recorder.digest(group)) for group in self._groups or ()]
        differ = any(least != most for least, most in digests)
        return self._all_without("ranks have captured different calls" if differ else "")

    def _stay_eager(self, graph: Graph | None, reason: str) -> None:
        if graph is not None:
            graph.release()
        self.reason = (
            reason or self.reason or "another rank cannot capture it, or has captured other calls"
        )

    def _record(
        self, recorder: Recorder, key: Any, args: tuple[Any, ...], options: dict[str, Any],
        state: State,
    ) -> tuple[Graph | None, str]:  # fmt: skip
        """Capture the step as a CUDA graph. Return (graph, ""), or (None, reason) if this fails."""
        import cupy

        # The graph uses this memory after the capture, so no other code may get it.
        pool = cupy.cuda.MemoryPool()
        stream = cupy.cuda.Stream(non_blocking=True)
        pairs: list[Any] = []

        def stage(value: Any) -> Any:
            if not is_cupy(data := _data_of(value)):
                return value
            array = data.copy(order="K")
            pairs.append((data, array))
            return Variable(array) if isinstance(value, Variable) else array

        try:
            with recorder.only, CtrlC() as ctrl_c, ExitStack() as stack:
                for group in self._groups or ():  # other threads must not launch during the capture
                    if group.gpus is not None:
                        stack.enter_context(group.gpus.communicator.lock)  # type: ignore[attr-defined]
                stack.enter_context(cupy.cuda.using_allocator(pool.malloc))
                placed = [*map(stage, args)], {name: stage(x) for name, x in options.items()}
                stack.enter_context(stream)
                recorder.begin(stack)
                capture_products(stack, recorder)
                _refuse_copies(stack, recorder)
                captured = stack.enter_context(_capturing(stream))
                result = ctrl_c.let_in(self._step, *placed[0], **placed[1])
        except CannotCapture as error:
            return None, recorder.left or str(error)
        except DistributedError:
            raise
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            return None, recorder.left or f"{type(error).__name__}: {error}"
        recorder.keep(pool)
        for value in map(_data_of, items_in(result)):
            if not (value is None or isinstance(value, str) or is_cupy(value)):
                recorder.leave(f"it returns an object of {type(value).__name__}; return GPU arrays")
        return Graph(captured[0], recorder, key, pairs, result, state), recorder.left


@contextmanager
def _capturing(stream: Any) -> Iterator[list[Any]]:
    """Capture the launches on ``stream``. After the block, the yielded list has the graph."""
    captured: list[Any] = []
    stream.begin_capture()
    try:
        yield captured
    except BaseException:
        with suppress(RuntimeError):  # an error invalidates the capture
            stream.end_capture()
        raise
    captured.append(stream.end_capture())


def _refuse_copies(stack: ExitStack, recorder: Recorder) -> None:
    """Reject copies from the CPU, because replays would read host memory that was freed."""
    import cupy

    def allocate(size: int) -> Any:
        if thread_state.recorder is recorder:
            raise CannotCapture(
                f"an array is copied to the GPU at {line_of_user()}; copy it before the step"
            )
        return usual(size)

    usual = cupy.get_default_pinned_memory_pool().malloc
    cupy.cuda.set_pinned_memory_allocator(allocate)
    stack.callback(cupy.cuda.set_pinned_memory_allocator, usual)


def _described(call: Call) -> str:
    """Return a description of a captured call. It must be equal on all ranks."""
    like = None if call.verb is SCATTER else call.like
    kind = "" if like is None else f"{like.dtype} {like.shape}"
    return f"{call.name} {kind} {call.op} {call.scale} {call.root} {call.rows}"


def _spanning(groups: Sequence[Membership]) -> list[Membership]:
    """Return the groups that no other group of ``groups`` contains.

    Of groups with equal ranks, the first is returned. The result is the same on all ranks.
    """
    first: dict[frozenset[int], Membership] = {}  # for each set of ranks, the first group
    for group in groups:
        first.setdefault(frozenset(group.ranks), group)
    return [group for ranks, group in first.items() if not any(ranks < other for other in first)]


def _extremes(group: Membership, number: int) -> tuple[int, int]:
    both = np.array([number, -number], np.int64)
    if group.fast.collective(ALL_REDUCE.code, both, None, "max", 1.0, 0, 0, False) is not both:
        group.all_reduce(both, op="max")  # type: ignore[attr-defined]
    return -int(both[1]), int(both[0])


def _moved(state: State) -> str:
    """Return why a replay would read an old array or value that the step has replaced, or "".

    Gradients may be replaced, because a replay sets them.
    """
    arrays = [item for item in state.held if item[0].slot]
    for field, value in (*arrays, *state.names):
        if field.slot != "grad" and not field.has(value):
            return f"{format_path(field.path)} gets another value; write into its array instead"
    return ""


def _spans_of(state: State, grads: Sequence[Any] = ()) -> list[tuple[int, int]]:
    """Return address ranges of GPU arrays: ``grads``, and arrays of ``state`` except gradients."""
    held = [value for field, value in state.held if field.slot != "grad"]
    arrays = plain_arrays((*held, *grads))
    return merged(_range(array) for array in arrays if is_cupy(array) and array.size)


def _have_any(spans: Sequence[tuple[int, int]], arrays: Iterable[Any]) -> bool:
    return any(overlaps(spans, array, _range) for array in arrays)


def _range(array: Any) -> tuple[int, int]:
    """Return the address range of the elements of ``array``. The end is exclusive."""
    start = int(array.data.ptr)
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return start, start + array.nbytes
    spans = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True) if n]
    first, last = (sum(bound(x, 0) for x in spans) for bound in (min, max))
    return start + first, start + last + array.itemsize


def _form(value: Any) -> Any:
    """Return a key of an argument. A graph accepts arguments with the keys of its capture."""
    data = _data_of(value)
    if is_cupy(data):
        return type(value), data.shape, data.strides, data.dtype.char
    return value


def _restore(state: State, host: Iterable[tuple[Any, Any]]) -> None:
    """Undo changes that Python made during a capture. The GPU has run none of the kernels."""
    moved = [item for item in state.names if item[0].key is not ITEMS and not item[0].has(item[1])]
    for field, value in (*moved, *state.held):
        is_short = isinstance(field.holder, (list, deque)) and len(field.holder) <= field.key
        field.holder.append(value) if is_short else field.set(value)
    for array, copy in host:
        np.copyto(array, copy)


def _data_of(value: Any) -> Any:
    return value.data if isinstance(value, Variable) else value


def _arrays(values: Sequence[Any]) -> list[Any]:
    return [data for data in map(_data_of, values) if is_cupy(data)]
