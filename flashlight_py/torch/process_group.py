"""A process group of torch.distributed that uses flashlight_py's collectives.

torch's functions, DDP and functional collectives call the methods of this class. Native code reads
contiguous tensors directly. The tensors of a list are sent as one array.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.autograd.graph import increment_version
from torch.distributed.distributed_c10d import _world
from torch.utils._pytree import tree_leaves, tree_map_only

from flashlight_py import distributed as fl
from flashlight_py.distributed import P2POp, ProcessGroup, Work, internal
from flashlight_py.distributed.internal import verbs as v
from flashlight_py.errors import DistributedError
from flashlight_py.torch.tensors import DeviceError, copy, fill, native_tensor, packed, room_for
from flashlight_py.torch.tracing import untraced
from flashlight_py.torch.work import Ended, Futures, TensorWork, as_torchs, ends_soon

NAME = "flashlight"  # backend name in torch
_T = dist.ReduceOp.RedOpType
_SUM = _T.SUM
# Keys are hashes, because comparing objects of pybind11 takes a microsecond.
_PREMUL = hash(_T.PREMUL_SUM)
_OPS = {
    **{hash(_SUM): "sum", hash(_T.AVG): "avg", hash(_T.PRODUCT): "prod", hash(_T.MIN): "min"},
    **{hash(_T.MAX): "max", hash(_T.BAND): "and", hash(_T.BOR): "or", hash(_T.BXOR): "xor"},
    _PREMUL: "sum",
}
# Sums and products of Booleans as in gloo: a byte is True unless it is 0.
_OF_BOOL = {"sum": "or", "prod": "and"}
_ALL_REDUCE = v.ALL_REDUCE.code
_VERBS = {verb.name.replace("_", ""): verb for verb in v.VERBS}
# Before torch 2.7 the options do not state whether the call is asynchronous.
_OPTIONS = dist.AllreduceOptions if hasattr(dist.AllreduceOptions, "asyncOp") else None
_MOST_COMPARED = 60  # maximum number of lengths, which are sent as the shape of an array
# torch's send and recv wait for the Work immediately, so a call from them may block.
_WAIT_AT_ONCE = {inspect.unwrap(function).__code__ for function in (dist.send, dist.recv)}
# DDP's C++ code, called from here, requests the future of a Work immediately.
_BACKWARD = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_BLOCKING = SimpleNamespace(asyncOp=False)
_NO_EVENT = nullcontext()
Tensors = Sequence[torch.Tensor]

# Method names before torch 2.12, which newer versions also have.
_OLD_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
    "gather_into_tensor": "gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}

# Keywords in torch -> here. A method with a parameter of the keyword's name keeps the keyword.
_KEYWORDS = {
    **{"tensor": "tensors", "root": "opts", "op": "opts", "dstRank": "dst", "srcRank": "src"},
    **{"input_split_sizes": "sent", "output_split_sizes": "received"},
    **{"inputTensor": "input", "outputTensor": "output", "timeout": "opts"},
    **dict.fromkeys(("input", "input_tensor", "input_tensors", "input_list"), "inputs"),
    **dict.fromkeys(("output", "output_tensor", "output_tensors", "output_lists"), "outputs"),
}

Method = Callable[..., Any]


def _in_torchs_terms(method: Method, name: str) -> Method:
    """Make ``method`` raise torch's errors, and accept torch's keywords.

    For tensors not on the CPU, call another backend. Tensors without data remain unchanged. If
    ``method`` rejects its arguments before it sends anything, the other ranks raise at once.
    """
    names = method.__code__.co_varnames[: method.__code__.co_argcount]
    verb = _VERBS.get(re.sub("_|single|coalesced|anysource", "", method.__name__))

    @functools.wraps(method)
    def called(self: FlashlightGroup, *args: Any, **options: Any) -> Any:
        renamed = {k if k in names else _KEYWORDS.get(k, k): options[k] for k in options}
        journal, calls = self.ours.journal, self.ours.journal.count[0]
        try:
            return method(self, *args, **renamed)
        except DistributedError as error:
            raise as_torchs(error) from None
        except Exception as error:
            if isinstance(error, DeviceError) and error.device is DeviceError.META:
                return self._done
            other = self._backend_of(error.device) if isinstance(error, DeviceError) else None
            if other is None:
                values = dict(zip(names[1:], args, strict=False)) | renamed
                is_new = journal.count[0] == calls and not str(error).startswith(f"[{verb}]")
                with self._rejection(verb, error, values.get) if verb and is_new else _NO_EVENT:
                    raise
        return getattr(other, name)(*args, **options)

    return called


def _of_torch(cls: type[Any]) -> type[Any]:
    """Apply ``_in_torchs_terms`` to the methods of ``cls``, also under their old names."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and not name.startswith("_") and name != "allreduce":
            setattr(cls, name, _in_torchs_terms(method, name))
    for old, name in _OLD_NAMES.items():
        setattr(cls, old, _in_torchs_terms(vars(cls)[name].__wrapped__, old))
    return untraced(cls)


def _only(tensors: Any) -> torch.Tensor:
    """Return the only tensor in ``tensors``. torch's functions pass a list of one tensor."""
    parts = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if [isinstance(x, torch.Tensor) for x in parts] != [True]:
        kinds = [type(x).__name__ for x in parts]
        raise ValueError(f"expected one tensor of each rank, got {kinds}. Pass one tensor per call")
    return parts[0]


def _list(tensors: Any) -> list[torch.Tensor]:
    """Return the only list in ``tensors``, which is a list of one list."""
    parts = list(tensors)
    return list(parts[0]) if parts and not isinstance(parts[0], torch.Tensor) else parts


def _root(opts: Any) -> int:
    return int(getattr(opts, "rootRank", opts))


def _split(tensor: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Return the number of elements for each rank. If ``rows`` is empty, ranks get equal parts."""
    length = len(tensor) if tensor.ndim else 1
    of_row = tensor.numel() // length if length else 0
    return [row * of_row for row in rows or [length // size] * size]


def _options_of_message() -> Any:
    """Return blocking options if torch's ``send`` or ``recv`` makes the current call, else None."""
    frame = sys._getframe(2).f_back  # the caller of the decorated method, or None if C++ called it
    callers = frame, frame and frame.f_back
    waits = any(caller and caller.f_code in _WAIT_AT_ONCE for caller in callers)
    return _BLOCKING if waits else None


def _then(work: Any, is_async: bool, finish: Callable[[], object]) -> Any:
    """Return ``finish()``. If ``is_async``, instead return a Work that calls it after ``work``."""
    if not is_async:
        return finish()

    def end(_: object) -> None:
        then.source = work.source
        finish()

    return (then := internal.Then(work, end))


def _reduction(op: Any, dtype: torch.dtype) -> tuple[str, float]:
    """Return this package's name of torch's reduction ``op``, and the factor of the result."""
    name = _OPS[number := hash(op)]
    scale = float(op.__getstate__()[1]) if number == _PREMUL else 1.0
    return (_OF_BOOL.get(name, name) if dtype is torch.bool else name), scale


def _event(verb: v.Verb, x: torch.Tensor | None) -> Any:
    """Return a context that torch's profiler shows as an event with the shape of ``x``."""
    if not profiler._is_profiler_enabled:
        return _NO_EVENT
    return _RecordFunctionFast(f"{NAME}:{verb}", [] if x is None else [x])


@_of_torch
class FlashlightGroup(dist.ProcessGroup):
    """The ranks of ``group`` as a process group of torch.

    ``seconds`` is the timeout. ``join`` creates subgroups. ``shutdown`` ends an owned ``group``.
    """

    supports_splitting, supports_coalescing, supports_time_estimate = True, False, False

    def __init__(
        self, group: ProcessGroup, store: Any, seconds: float, join: Method, is_owned: bool = True
    ) -> None:
        super().__init__(group.rank, group.size)
        self.ours, self._store, self._join, self._is_owned = group, store, join, is_owned
        self._limit = timedelta(seconds=seconds)
        self._futures = Futures()
        self._done = Ended(internal.Done(), (), self._futures)
        self._coalesced: list[Work] | None = None
        self._others: dict[str, Any] = {}  # backends by device type
        self._name = self._description = ""

    def allreduce(self, tensors: Any = None, opts: Any = None, *timeout: Any, **named: Any) -> Any:
        """Reduce with few steps in Python if possible, which takes half the time of ``_do``."""
        is_plain = type(opts) is _OPTIONS and len(tensors) == 1 and self._coalesced is None
        x = native_tensor(tensors[0]) if is_plain and not named else None
        if x is None:
            return self._allreduce(**{"tensors": tensors, "opts": opts, **named})
        is_async, (op, scale) = opts.asyncOp, _reduction(opts.reduceOp, x[3].dtype)
        try:
            with _event(v.ALL_REDUCE, x[3]):
                work = self.ours.fast.collective(_ALL_REDUCE, x, None, op, scale, 0, 0, is_async)
            if work is NotImplemented:
                return self._allreduce(tensors, opts)
            if not is_async:
                return self._done
            caller = sys._getframe().f_back
            is_of_ddp = caller is not None and caller.f_code is _BACKWARD
            # torch's FP16_COMPRESS hook, in C++, needs a future that TensorWork cannot create.
            is_half = x[3].dtype is torch.float16
            if not (is_of_ddp and (is_half or ends_soon(work, tensors))):
                return TensorWork(work, tensors, self._futures)
            work.wait()
        except DistributedError as error:
            raise as_torchs(error) from None
        # fork() returns an ended future of C++. A TensorWork takes 30 us more, a list in it 40 us.
        result = (list, tensors) if is_half else (tensors.__getitem__, 0)
        return _distributed_c10d._create_work_from_future(torch._C.fork(*result))

    @functools.partial(_in_torchs_terms, name="allreduce")
    def _allreduce(self, tensors: Any, opts: Any, timeout: Any = None) -> dist.Work:
        reduction, x = _SUM if opts is None else opts, _only(tensors)
        if x.layout is not torch.sparse_coo:
            return self._do(opts, v.ALL_REDUCE, x, reduction=reduction)
        with _event(v.ALL_REDUCE, x):
            return self._sum_sparse(opts, x, reduction)

    def _sum_sparse(self, opts: Any, x: torch.Tensor, reduction: Any) -> dist.Work:
        """Gather the indices and values of all ranks, and add values of equal indices."""
        is_async, ours = getattr(opts, "asyncOp", True), self.ours
        op, scale = _reduction(getattr(opts, "reduceOp", reduction), x.dtype)
        if (op, scale) != _reduction(_SUM, x.dtype):
            raise ValueError(
                f"expected op SUM of a sparse x, got {op}, factor {scale:g}. Pass x.to_dense()"
            )
        if not x.is_cpu:
            raise DeviceError(DeviceError.META if x.is_meta else x.device)
        summands = x.detach().coalesce()
        text = f"{v.ALL_REDUCE} of a sparse {x.dtype} tensor of shape {tuple(x.shape)}"
        compared = internal.check_calls(ours, v.ALL_REDUCE, text, internal.SPARSE, not is_async)
        if not is_async:
            compared.wait()
        parts: Any = summands.indices().t().contiguous(), summands.values()
        works: Any = [fl.all_gather(part, group=ours, async_op=is_async) for part in parts]

        def finish() -> None:
            indices, values = (work.wait() for work in works) if is_async else works
            options: Any = {"size": x.shape, "check_invariants": False}
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                x.copy_(torch.sparse_coo_tensor(indices.t(), values, **options).coalesce())

        work = _then(is_async and internal.AllOf([compared, *works]), is_async, finish)
        return TensorWork(work, [x], self._futures) if is_async else self._done

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Any = None) -> dist.Work:
        return self._do(opts, v.BROADCAST, _only(tensors), peer=_root(opts))

    def reduce(self, tensors: Any, opts: Any = 0, op: Any = _SUM, timeout: Any = None) -> dist.Work:
        return self._do(opts, v.REDUCE, _only(tensors), peer=_root(opts), reduction=op)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        rows = input.numel()
        self._require(output.numel() == rows * self.ours.size, input, output)
        return self._do(opts, v.ALL_GATHER, input, output, ((1, rows), (self.ours.size, rows)))

    def gather_single(self, output: Any, input: Any, opts: Any) -> dist.Work:
        root, rows = _root(opts), input.numel()
        fills = self.ours.rank == root
        self._require(not fills or output.numel() == rows * self.ours.size, input, output)
        shapes = (1, rows), (self.ours.size, rows)
        return self._do(opts, v.GATHER, input, output if fills else None, shapes, peer=root)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        rows = output.numel()
        self._require(input.numel() == rows * self.ours.size, input, output)
        return self._do(opts, v.REDUCE_SCATTER, input, output, ((self.ours.size, rows), (1, rows)))

    def all_to_all_single(
        self, output: Any, input: Any, received: Any, sent: Any, opts: Any = None
    ) -> dist.Work:
        size = self.ours.size
        if not received and not sent:
            self._require(input.numel() == output.numel() and len(input) % size == 0, input, output)
            shape = size, input.numel() // size
            return self._do(opts, v.ALL_TO_ALL, input, output, (shape, shape))
        counts = _split(input, sent, size), _split(output, received, size)
        fits = [sum(x) for x in counts] == [input.numel(), output.numel()]
        self._require(fits, input, output, (sent, received))
        room_for([input, output], [input])  # raises before the first call
        before = self._check_counts(opts, *counts)
        shapes = (input.numel(),), (output.numel(),)
        return self._do(opts, v.ALL_TO_ALL, input, output, shapes, rows=counts[0], before=before)

    def _check_counts(self, opts: Any, sent: Sequence[int], expected: Sequence[int]) -> Any:
        """Return a Work that raises unless each rank sends the ``expected`` number of elements."""
        counts = torch.tensor(sent, dtype=torch.int64, device="cpu")
        arriving = torch.empty_like(counts)
        work = self._do(opts, v.ALL_TO_ALL, counts, arriving).work

        def compare() -> None:
            if (received := arriving.tolist()) != list(expected):
                raise ValueError(
                    f"[all_to_all] rank {self.ours.rank} of {self.ours.size}: expected "
                    f"{list(expected)} elements from the ranks, got {received}"
                )

        if getattr(opts, "asyncOp", True):
            return _then(work, True, compare)
        with internal.reject_together(self.ours, v.ALL_TO_ALL):
            return compare()

    def send(self, tensors: Any, dst: int, tag: int) -> dist.Work:
        return self._message(v.SEND, tensors, dst, tag, _options_of_message())

    def recv(self, tensors: Any, src: int, tag: int) -> dist.Work:
        return self._message(v.RECV, tensors, src, tag, _options_of_message())

    def recv_anysource(self, tensors: Any, tag: int) -> dist.Work:
        return self._message(v.RECV, tensors, None, tag, None)

    def _message(self, verb: v.Verb, tensors: Any, peer: Any, tag: int, opts: Any) -> dist.Work:
        x = _only(tensors)
        return self._do(opts, verb, x, shapes=((x.numel(),), None), peer=peer, tag=tag)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._gather(v.ALL_GATHER, outputs, inputs, opts, 0)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        return self._gather(v.GATHER, outputs, inputs, opts, _root(opts))

    def _gather(self, verb: v.Verb, outputs: Any, inputs: Any, opts: Any, root: int) -> dist.Work:
        x, parts, joined, before = _only(inputs), _list(outputs), None, None
        rows, size = x.numel(), self.ours.size
        shapes: tuple[Any, Any] = ((1, rows), (size, rows))
        if verb.fills(self.ours.rank, root):
            counts = [part.numel() for part in parts]
            equal = counts == [rows] * size
            fits = len(parts) == size and counts[self.ours.rank] == rows
            self._require(fits and (equal or verb is v.ALL_GATHER), x, parts)
            joined = room_for([x, *parts], parts)
            if not equal:
                # Lengths may differ, so ranks first compare them, encoded as the shape of an array.
                compared = 0, *counts[:_MOST_COMPARED]
                expected = torch.empty(compared, dtype=torch.uint8, device="cpu")
                before = self._do(opts, v.BROADCAST, expected).work
                shapes = (rows,), None
        return self._do(opts, verb, x, joined, shapes, peer=root, parts=parts, before=before)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0, timeout: Any = None) -> dist.Work:
        out, root, joined = _only(outputs), _root(opts), None
        rows, parts = out.numel(), _list(inputs)
        if self.ours.rank == root:
            fits = [part.numel() == rows for part in parts] == [True] * self.ours.size
            self._require(fits, out, parts)
            joined = room_for([out, *parts], parts)
            copy(joined, parts, back=False)
        shapes = (self.ours.size, rows), (1, rows)
        return self._do(opts, v.SCATTER, joined, out, shapes, peer=root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = _SUM, timeout: Any = 0) -> Any:
        out, parts = _only(outputs), _list(inputs)
        fits = len(parts) == self.ours.size and parts[self.ours.rank].numel() == out.numel()
        self._require(fits, out, parts)
        joined = room_for([out, *parts], parts)
        copy(joined, parts, back=False)
        counts = [part.numel() for part in parts]
        equal = len(set(counts)) == 1
        shapes = ((self.ours.size, counts[0]), (1, counts[0])) if equal else (None, (out.numel(),))
        rows = None if equal else counts
        return self._do(opts, v.REDUCE_SCATTER, joined, out, shapes, reduction=opts, rows=rows)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        self._require(len(outputs) == len(inputs) == self.ours.size, inputs, outputs)
        joined = room_for([*inputs, *outputs], inputs)
        copy(joined, inputs, back=False)
        room = room_for(outputs, outputs)
        counts, expected = ([part.numel() for part in parts] for parts in (inputs, outputs))
        before = self._check_counts(opts, counts, expected)
        return self._do(opts, v.ALL_TO_ALL, joined, room, rows=counts, parts=outputs, before=before)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        joined = room_for(tensors, tensors)
        copy(joined, tensors, back=False)
        return self._do(opts, v.ALL_REDUCE, joined, parts=tensors)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._do_each(self.allgather, zip(*outputs, strict=True), inputs, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._do_each(self.all_gather_single, outputs, inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._do_each(self.reduce_scatter_single, outputs, inputs, opts)

    def _do(
        self, opts: Any, verb: v.Verb, x: torch.Tensor | None, out: torch.Tensor | None = None,
        shapes: tuple[Any, Any] = (None, None), *, reduction: Any = _SUM, peer: int | None = 0,
        tag: int = 0, rows: Sequence[int] | None = None,
        parts: Sequence[torch.Tensor] | None = None, before: Work | None = None,
    ) -> TensorWork:  # fmt: skip
        """Run ``verb`` with input ``x`` and output ``out``, and copy the result to ``parts``.

        The call uses ``x`` and ``out`` in the two ``shapes`` (None: unchanged). If ``opts`` has no
        ``reduceOp``, ``reduction`` is used. If ``before`` fails, the call fails too.
        """
        is_async, op, scale = getattr(opts, "asyncOp", True), "sum", 1.0
        if verb.reduces and x is not None:
            op, scale = _reduction(getattr(opts, "reduceOp", reduction), x.dtype)
        op_or_rows: Any = op if rows is None else rows
        source, room = native_tensor(x, shapes[0]), native_tensor(out, shapes[1])
        work: Any = NotImplemented
        with _event(verb, x):
            if (source is None) == (x is None) and (room is None) == (out is None):
                native = self.ours.fast.collective
                work = native(verb.code, source, room, op_or_rows, scale, peer, tag, is_async)
            if work is NotImplemented:
                call = {"op": op, "scale": scale, "root": peer, "rows": rows, "async_op": is_async}
                work = self._packed(verb, x, out, shapes, call, tag)
            elif rows is not None and not is_async and work is not room:
                numbers = len(work), self.ours.rank, self.ours.size
                internal.call_arrays.check_out_rows(verb.name, room, *numbers)
        if is_async and before is not None:
            work = internal.AllOf([before, work])
        result: Any = x if out is None else out
        if parts or (out is not None and verb is not v.SCATTER):  # like gloo
            increment_version(parts or [result])  # a backward pass must not use the old values
        if parts:
            work = _then(work, is_async, lambda: copy(result, parts, back=True))
        if not is_async:
            return self._done
        if self._coalesced is not None:
            self._coalesced.append(work)
        return TensorWork(work, parts or [result], self._futures)

    def _packed(
        self, verb: v.Verb, x: torch.Tensor | None, out: torch.Tensor | None,
        shapes: tuple[Any, Any], call: dict[str, Any], tag: int,
    ) -> Any:  # fmt: skip
        """Run ``verb`` with contiguous copies. If native code does not support it, use Python."""
        ours, peer, is_async = self.ours, call["root"], call["async_op"]
        source, room = packed((x, out), shapes, verb.reduces)
        work: Any = NotImplemented
        if call["rows"] is None or verb is v.ALL_TO_ALL:
            arrays = native_tensor(source), native_tensor(room)
            op = call["op"] if call["rows"] is None else call["rows"]
            work = ours.fast.collective(verb.code, *arrays, op, call["scale"], peer, tag, is_async)
        if work is NotImplemented:
            if verb.is_message:
                options = {"dst" if verb is v.SEND else "src": peer, "tag": tag}
            else:
                names = (*verb.takes, "async_op")
                options = {name: call[name] for name in names if call[name] is not None}
                options |= {} if verb.in_place else {"out": room}
            prefix = "i" * (is_async and verb.is_message)
            work = getattr(fl, f"{prefix}{verb}")(source, group=ours, **options)
        target, filled = (x, source) if verb.in_place else (out, room)
        if target is None or not verb.fills(ours.rank, peer):
            return work
        if filled.data_ptr() == target.data_ptr():
            return work
        seen = filled.view(target.dtype).view(target.shape)
        return _then(work, is_async, lambda: fill(target, seen))

    def _do_each(self, method: Method, outputs: Iterable[Any], inputs: Any, opts: Any) -> dist.Work:
        pairs = list(zip(outputs, inputs, strict=True))  # raises before the first call
        works = [method(*pair, opts) for pair in pairs]
        if not getattr(opts, "asyncOp", True):
            return self._done
        tensors = [tensor for work in works for tensor in work.tensors]
        return TensorWork(internal.AllOf([work.work for work in works]), tensors, self._futures)

    def _rejection(self, verb: v.Verb, error: Exception, get: Any) -> Any:
        """Add the rank to ``error``. Return a context in which all ranks of the call raise."""
        error.args = (f"[{verb}] rank {self.ours.rank} of {self.ours.size}: {error}",)
        # Asynchronous all_to_all with lists begins two calls, and an asynchronous sparse sum three.
        has_lists = get("outputs") is not None or get("received") or get("sent")
        is_sparse = any(getattr(x, "is_sparse", False) for x in tree_leaves(get("tensors")))
        count = 2 if verb is v.ALL_TO_ALL and has_lists else 3 if is_sparse else 1
        message: Any = verb.name, None, get("dst", get("src")), get("tag", 0)
        is_async = getattr(get("opts"), "asyncOp", True)
        begun = [P2POp(*message)] if verb.is_message else [None] * (count if is_async else 1)
        return internal.reject_together(self.ours, verb, begun)

    def _require(self, fits: bool, *tensors: Any) -> None:
        if not fits:
            shapes = tree_map_only(torch.Tensor, lambda x: tuple(x.shape), list(tensors))
            raise ValueError(f"expected shapes that fit {self.ours.size} ranks, got {shapes}")

    def _start_coalescing(self, device_type: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device_type: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return TensorWork(internal.AllOf(works), (), self._futures)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        is_async, native = getattr(opts, "asyncOp", True), self.ours.fast.collective
        limit = getattr(opts, "timeout", None) if timeout is None else timeout
        seconds = limit.total_seconds() if limit and limit > timedelta(0) else None
        arguments = v.BARRIER.code, None, None, None, None, 0, 0, is_async
        with _event(v.BARRIER, None):
            work: Any = NotImplemented if seconds else native(*arguments)
            if work is NotImplemented:
                call = internal.Call(v.BARRIER, seconds=seconds, blocking=not is_async)
                work = self.ours.run(call)
        return TensorWork(work, (), self._futures) if is_async else self._done

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        fl.barrier(seconds, group=self.ours)

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self._backend_of(device)

    def _backend_of(self, device: torch.device) -> Any:
        """Return the backend for ``device`` (not the CPU), which torch does not create, or None."""
        kind = device.type
        if kind not in self._others:
            config = _world.pg_backend_config.get(self, "")
            names = dict(part.split(":") for part in config.split(",") if ":" in part)
            self._others[kind] = self._begun(kind, names.get(kind, NAME))
        return self._others[kind]

    def _begun(self, kind: str, name: str) -> Any:
        if name == NAME:
            return None
        store, rank, size = dist.PrefixStore(f"{kind}/", self._store), self.rank(), self.size()
        if name == dist.Backend.NCCL:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
        elif name == dist.Backend.GLOO:
            backend = dist.ProcessGroupGloo(store, rank, size, timeout=self._limit)
        else:
            raise ValueError(f"{NAME}: backend of {kind} tensors must be nccl or gloo, got {name}")
        backend._set_sequence_number_for_group()
        return backend

    def split_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, opts: Any = None,
        group_name: str = "", group_desc: str = "", device_types: Any = None,
    ) -> FlashlightGroup | None:  # fmt: skip
        """Return the group of ``ranks``, or None on another rank. Collective over ``ranks``."""
        if self.rank() not in ranks:
            return None
        options = SimpleNamespace(group_rank=ranks.index(self.rank()), group_size=len(ranks))
        options.global_ranks_in_group = [self.ours.ranks[rank] for rank in ranks]
        options.store = dist.PrefixStore(f"{group_name}/", self._store)
        options.timeout = timeout or self._limit
        return self._child(options, group_name, group_desc)

    def merge_remote_group(
        self, store: Any, size: int, timeout: timedelta | None = None, group_name: str = "",
        group_desc: str = "",
    ) -> FlashlightGroup:  # fmt: skip
        """Return a group of all ``size`` ranks that call this with ``store``, also of other groups.

        The first rank that calls is rank 0, as with gloo.
        """
        options = SimpleNamespace(store=store, group_rank=store.add("mergeGroupRank", 1) - 1)
        options.group_size, options.timeout = size, timeout or self._limit
        return self._child(options, group_name, group_desc, is_independent=True)

    def _child(self, options: Any, *texts: str | None, **names: Any) -> FlashlightGroup:
        child: FlashlightGroup = self._join(options, None, **names)
        child._name, child._description = (text or "" for text in texts)
        return child

    @property
    def _device_types(self) -> list[torch.device]:
        if sys._getframe(1).f_code.co_name == "_maybe_attach_flight_recorder":
            return []  # torch 2.15 requires a backend of torch here
        return [torch.device(kind) for kind in ("cpu", *self._others)]

    @property
    def options(self) -> Any:
        return _distributed_c10d.Backend.Options(NAME, self._limit)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout
        self.ours.limit(timeout.total_seconds())

    set_timeout = _set_default_timeout

    def get_group_store(self) -> Any:
        return self._store

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing. Every call has a number already."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has called in the group."""
        return int(self.ours.journal.count[0])

    def shutdown(self) -> None:
        """End the group. Not collective."""
        for other in filter(None, self._others.values()):
            other.shutdown()
        if self._is_owned:
            internal.initialize.leave(self.ours)
        self._futures.close()

    abort = shutdown
