"""Steps on a GPU, captured as CUDA graphs. Each replay is one launch.

The first call for a combination of arguments runs eagerly: it compiles kernels, and NCCL connects
the ranks. CUDA captures the second call. Later calls copy the arguments and launch the graph.

NCCL requires that either all ranks or no ranks launch a graph with collectives (NCCL, "Using NCCL
with CUDA Graphs"). The ranks of a step therefore compare their graphs before each call, in the
group of the step that has the most ranks. If this group lacks a rank of another group, the step
stays eager, because ranks that agree inside each group could disagree between groups.
"""

import ctypes
import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from zlib import crc32

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed import Work, internal
from flashlight_py.distributed.internal import ALL_REDUCE, SCATTER, Call, Membership, graph_launcher
from flashlight_py.errors import BackendUnavailableError, DistributedError, GroupClosedError
from flashlight_py.libraries import loaded_libraries
from flashlight_py.optim.cuda import CapturedStep
from flashlight_py.optim.optimizer import RuleOptimizer
from flashlight_py.random import generator
from flashlight_py.structure import count, thread_state
from flashlight_py.tape.arrays import CannotCapture, data_of, items_in, map_items
from flashlight_py.tape.recording import CtrlC, Watcher, line_of_user, merged, overlaps
from flashlight_py.tape.state import ITEMS, EveryCall, State, plain_arrays

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
        self.calls: dict[Membership, list[str]] = {}  # descriptions of captured calls
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
            return self.without(lambda: group.run_many(calls, name))  # type: ignore[no-any-return]
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
            self.calls.setdefault(group, []).extend(map(_described, calls))
        if len(calls) == 1:
            return group.journal.run(calls, name, lambda: backend.start(call))
        return group.journal.run(calls, name, lambda: backend.start_many(calls))

    # The next methods override ``Comparisons``, so that ranks compare nothing during a capture: a
    # rank that cannot capture the step does not reach the call. After the capture, all ranks
    # compare digests.

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
        self._memory = _spans_in(state, [grad for _, grad in self._reads])
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
        if key != self.key or self._graph is None or any(overlaps(self._memory, x) for x in arrays):
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
        self._groups: list[Membership] | None = None  # of the step; None before its first run
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
            spans = _spans_in(state()) if is_warm else []
            has_shared = any(overlaps(spans, array) for array in arrays)
            vote = _CAPTURE if is_warm and not has_shared else _EAGER
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
                finally:  # the caller may catch an error, and later votes need the groups
                    self._groups = list(recorder.groups) or None
            self._groups = self._groups or []
        if len(self._warm) >= _MOST_FORMS:
            self._warm.clear()
        self._warm[key] = int(count[0])
        return result

    def _agreed(self, vote: int) -> int:
        """Return ``vote`` if all ranks of the step have this vote, else _EAGER. Blocking."""
        groups = _spanning(self._groups or ())
        vote = vote if len(groups) < 2 else _NEVER
        votes = {number for group in groups for number in _extremes(group, vote)} or {vote}
        if _NEVER in votes:
            self.reason = "a rank uses several groups in it, and no group contains all ranks"
        return vote if len(votes) == 1 and _NEVER not in votes else _EAGER

    def _capture(self, key: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Capture and replay the step once, or run it eagerly if a rank cannot capture it."""
        values = (*args, *options.values())
        arrays, state = _arrays(values), self._state(values)
        self._captures += 1
        recorder = Recorder(state.variables, self._groups)
        held = plain_arrays(*[value for _, value in state.held])
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
        reason = reason or _moved(state)
        if not reason and any(array.tobytes() != copy.tobytes() for array, copy in host):
            reason = "an array of the CPU changes; keep it on the GPU"
        if not reason and state.numbers != after.numbers:
            reason = "a number of a module, an optimizer or a meter changes; keep it in an array"
        if not self._all_without(reason) or not self._all_have_captured(recorder) or graph is None:
            _restore(state, host)
            draws.state = drawn
            self._stay_eager(graph, reason)
            return self._step(*args, **options)
        graph.number = self._captures
        graph.signature, graph.stamp = after.signature, int(count[0])
        result = graph.replay(arrays)
        pairs = [*zip(arrays, graph.inputs, strict=True)]
        if any(array.tobytes() != changed.tobytes() for array, changed in pairs):
            reason = "an argument is changed in place; make a copy of it"
            for array, changed in pairs:
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
        differ = False
        for group in self._groups or ():
            digest = crc32("; ".join(recorder.calls.get(group, [])).encode())
            differ |= len({*_extremes(group, digest)}) > 1
        return self._all_without("ranks have captured different calls" if differ else "")

    def _stay_eager(self, graph: Graph | None, reason: str) -> None:
        if graph is not None:
            graph.release()
        self.reason = reason or self.reason or "another rank cannot capture it, or not these calls"

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
            if not is_cupy(data := data_of(value)):
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
                _capture_products(stack, recorder)
                _refuse_copies(stack, recorder)
                stream.begin_capture()
                try:
                    result = ctrl_c.let_in(self._step, *placed[0], **placed[1])
                except BaseException:
                    with suppress(RuntimeError):  # an error invalidates the capture
                        stream.end_capture()
                    raise
                captured = stream.end_capture()
        except CannotCapture as error:
            return None, recorder.left or str(error)
        except DistributedError:
            raise
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            return None, recorder.left or f"{type(error).__name__}: {error}"
        recorder.keep(pool)
        for value in map(data_of, items_in(result)):
            if not (value is None or isinstance(value, str) or is_cupy(value)):
                recorder.leave(f"it returns an object of {type(value).__name__}; return GPU arrays")
        return Graph(captured, recorder, key, pairs, result, state), recorder.left


def _refuse_copies(stack: ExitStack, recorder: Recorder) -> None:
    """Reject copies from the CPU, because replays would read host memory that was freed."""
    import cupy

    def allocate(size: int) -> Any:
        if thread_state.recorder is recorder:
            problem = f"an array is copied to the GPU at {line_of_user()}"
            raise CannotCapture(f"{problem}; copy it before the step")
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
            return f"{field.text} gets another value; write into its array instead"
    return ""


def _spans_in(state: State, grads: Sequence[Any] = ()) -> list[tuple[int, int]]:
    """Return address ranges of GPU arrays: ``grads``, and arrays of ``state`` except gradients."""
    held = [value for field, value in state.held if field.slot != "grad"]
    return merged(map(internal.bounds, filter(is_cupy, plain_arrays(*held, *grads))))


def _form(value: Any) -> Any:
    """Return a key of an argument. A graph accepts arguments with the keys of its capture."""
    data = data_of(value)
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


def _arrays(values: Sequence[Any]) -> list[Any]:
    return [data for data in map(data_of, values) if is_cupy(data)]


# CuPy's own products fail while a CUDA graph is captured. These functions call cuBLAS with the
# operands, types and algorithm that CuPy uses, so a captured product has the bits of an eager one.

# For each dtype: cudaDataType, cublasComputeType_t, and the C type of the factors 1 and 0.
_TYPES: dict[str, tuple[int, int, Any]] = {
    "e": (2, 68, ctypes.c_float),
    "f": (0, 77 if os.environ.get("CUPY_TF32", "0") > "0" else 68, ctypes.c_float),
    "d": (1, 70, ctypes.c_double),
}
_TENSOR_CORES, _DEFAULT = 99, -1  # CUBLAS_GEMM_DEFAULT_TENSOR_OP, used by CuPy since Ampere
_PLAIN, _TRANSPOSED = 0, 1
# Workspace in bytes that NVIDIA recommends for Hopper. Without one, cuBLAS allocates memory.
_WORKSPACE = 32 << 20


def _capture_products(stack: ExitStack, recorder: Any) -> None:
    """Replace products of CuPy arrays by cuBLAS calls while ``recorder`` records this thread.

    When ``stack`` ends, it restores CuPy's functions. Products that cuBLAS does not support, such
    as products of integers, remain calls of CuPy.
    """
    import cupy

    workspace, stream = cupy.empty(_WORKSPACE, np.uint8), cupy.cuda.get_current_stream()
    recorder.keep(workspace)
    owners = (cupy.ndarray, "dot"), (cupy.ndarray, "__matmul__"), (cupy, "matmul"), (cupy, "dot")
    for owner, name in owners:
        usual = getattr(owner, name)
        restore = (setattr, owner, name, usual) if name in vars(owner) else (delattr, owner, name)

        def product(
            a: Any, b: Any, out: Any = None, usual: Any = usual, name: str = name, **options: Any
        ) -> Any:
            is_known = thread_state.recorder is recorder and not options and _is_for_blas(a, b)
            if is_known and (name != "dot" or b.ndim == 2):
                # All products use one workspace, so they must not overlap in time.
                if cupy.cuda.get_current_stream().ptr != stream.ptr:
                    raise CannotCapture(f"a product on another stream at {line_of_user()}")
                return _product(a, b, out, workspace)
            return usual(a, b, **options) if out is None else usual(a, b, out=out, **options)

        setattr(owner, name, product)
        stack.callback(*restore)


def _is_for_blas(a: Any, b: Any) -> bool:
    """Return whether CuPy uses cuBLAS for ``a @ b``, and ``_product`` supports the arrays."""
    dtypes = {x.dtype.char if is_cupy(x) else "" for x in (a, b)}
    if len(dtypes) > 1 or not dtypes <= _TYPES.keys():
        return False
    is_matrix = a.ndim > 1 and b.ndim > 1 and bool(a.size and b.size)
    return is_matrix and a.shape[-2] * b.shape[-1] > 1 and a.shape[-1] == b.shape[-2]


def _product(a: Any, b: Any, out: Any, workspace: Any) -> Array:
    import cupy

    (n, k), m = a.shape[-2:], b.shape[-1]
    outer = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    result = cupy.empty((*outer, n, m), a.dtype)
    a, a_form, a_lead, a_step = _operand(a, outer, is_first=True)
    b, b_form, b_lead, b_step = _operand(b, outer, is_first=False)
    code, compute, real = _TYPES[a.dtype.char]
    is_new = int(cupy.cuda.Device().compute_capability) >= 80
    algorithm = _TENSOR_CORES if is_new or a.dtype.char == "e" else _DEFAULT
    one, zero = ctypes.byref(real(1)), ctypes.byref(real(0))
    library, handle = _cublas(), ctypes.c_void_p(cupy.cuda.device.get_cublas_handle())
    stream, pointer = cupy.cuda.get_current_stream().ptr, ctypes.c_void_p
    _require(library.cublasSetStream_v2(handle, pointer(stream)))
    room = pointer(workspace.data.ptr), ctypes.c_size_t(workspace.nbytes)
    _require(library.cublasSetWorkspace_v2(handle, *room))
    # cuBLAS stores matrices by columns, so swapped operands give the result by rows.
    leading = handle, b_form, a_form, m, n, k, one
    first, second, third = [
        (pointer(array.data.ptr), code, lead, *([ctypes.c_longlong(step)] if outer else []))
        for array, lead, step in ((b, b_lead, b_step), (a, a_lead, a_step), (result, m, n * m))
    ]
    rest = (*([math.prod(outer)] if outer else []), compute, algorithm)
    multiply = library.cublasGemmStridedBatchedEx if outer else library.cublasGemmEx
    _require(multiply(*leading, *first, *second, zero, *third, *rest))
    if out is None:
        return result  # type: ignore[no-any-return]
    out[...] = result
    return out  # type: ignore[no-any-return]


def _operand(x: Any, outer: tuple[int, ...], is_first: bool) -> tuple[Any, int, int, int]:
    """Return ``x`` for cuBLAS, whether it is transposed, its leading dimension and batch stride.

    ``outer`` is the shape of the batch. A matrix may be contiguous by rows and by columns. Then the
    first operand is stored by rows and the second by columns, as in CuPy's call.
    """
    import cupy

    rows, columns = x.shape[-2:]
    if x.ndim == 2:
        if x.flags.f_contiguous and not (is_first and x.flags.c_contiguous):
            return x, _TRANSPOSED, rows, 0
        return cupy.ascontiguousarray(x), _PLAIN, columns, 0
    if x.ndim - 2 < len(outer) or x.shape[:-2] != outer:
        x = cupy.broadcast_to(x, (*outer, rows, columns))
    return cupy.ascontiguousarray(x), _PLAIN, columns, rows * columns


@functools.cache
def _cublas() -> Any:
    for library in loaded_libraries("libcublas"):
        if hasattr(library, "cublasGemmEx"):
            return library
    raise BackendUnavailableError("capture: matrix products need cuBLAS. Install it for CuPy")


def _require(status: int) -> None:
    if status:
        raise RuntimeError(f"a captured matrix product: expected status 0 of cuBLAS, got {status}")
