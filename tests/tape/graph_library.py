"""A stand-in for CuPy's streams, graphs and memory pools, and for cuBLAS, where there is no GPU.

As on a GPU, what is called while a stream is captured computes nothing: results hold garbage until
the graph is launched, what the host would have to wait for raises, and so do CuPy's own products
and copies from the host. A graph needs the memory pool of its capture, as CuPy frees what lies in a
pool with it. What streams do has to be ordered by events, as their memory is the same. It shows
what the host does; tests/gpu/test_capture.py shows the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from tests.autograd.strict_library import (
    StrictLibrary,
    copied_in,
    seen_by_host,
)

LETTERS = {2: "e", 0: "f", 1: "d"}  # of cudaDataType


class CUDARuntimeError(RuntimeError):
    """What CUDA says; CuPy's is one too."""


class Event:
    done = True

    def __init__(self, disable_timing: bool = False) -> None:
        self.ptr = id(self)
        self.seen: dict[int, int] = {}

    def record(self, stream: Any = None) -> None:
        stream = stream or Stream.current
        assert stream.nodes is None, "an event of a captured stream, which no host can wait for"
        self.seen = {**stream.seen, stream.ptr: stream.queued}


class Device(contextlib.nullcontext[None]):
    """The only device; each process has one of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.id, self.pci_bus_id = index, f"{os.getpid()}:{index}"

    def use(self) -> None:
        """It is the current one."""


class Graph:
    """The calls of a captured stream."""

    def __init__(self, nodes: list[Callable[[], object]]) -> None:
        self.nodes = nodes
        self.launches = 0
        self.pool = weakref.ref(MemoryPool.current)

    def launch(self, stream: Any = None) -> None:
        assert Stream.current.nodes is None, "a graph is launched into another one"
        assert self.pool() is not None, "its memory was freed with the pool"
        Stream.current.queue()
        self.launches += 1
        for node in self.nodes:
            node()


class Stream:
    """The current one is the last that was entered."""

    current: Stream
    all: ClassVar[weakref.WeakSet[Stream]] = weakref.WeakSet()

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = id(self)
        self.nodes: list[Callable[[], object]] | None = None
        self.is_valid = True
        self._before: list[Stream] = []
        self.queued = 0
        self.seen: dict[int, int] = {}  # of other streams: how much of what they had to do
        Stream.all.add(self)

    def queue(self) -> None:
        """Have something to do, after all that other streams have to do."""
        self.queued += 1
        for other in Stream.all:
            is_seen = other is self or self.seen.get(other.ptr, 0) >= other.queued
            assert is_seen, "two streams are not ordered"

    def wait_event(self, event: Event) -> None:
        assert self.nodes is None
        for ptr, count in event.seen.items():
            self.seen[ptr] = max(count, self.seen.get(ptr, 0))

    def synchronize(self) -> None:
        assert self.nodes is None

    def begin_capture(self) -> None:
        assert self.nodes is None
        self.nodes, self.is_valid = [], True

    def end_capture(self) -> Graph:
        nodes, self.nodes = self.nodes, None
        if nodes is None or not self.is_valid:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return Graph(nodes)

    def __enter__(self) -> Stream:
        self._before.append(Stream.current)
        Stream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._before.pop()


Stream.current = Stream()


class MemoryPool:
    current: MemoryPool

    def __init__(self, allocator: Any = None) -> None:
        pass

    def malloc(self, size: int) -> None:
        raise NotImplementedError("NumPy takes memory where it wants")


MemoryPool.current = MemoryPool()


@contextlib.contextmanager
def using_allocator(malloc: Any) -> Iterator[None]:
    before, MemoryPool.current = MemoryPool.current, malloc.__self__
    try:
        yield
    finally:
        MemoryPool.current = before


def refuse(words: str) -> Exception:
    Stream.current.is_valid = False
    return CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {words}")


def perform(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], changed: Any
) -> Any:
    """Call ``function``, or note the call in the graph that is captured."""
    nodes = Stream.current.nodes
    if nodes is None:
        Stream.current.queue()
        return function(*args, **options)
    if function is seen_by_host:
        raise refuse("the host would wait for the stream")
    if function is copied_in:
        raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")
    if getattr(function, "__name__", "") in ("dot", "matmul"):
        raise NotImplementedError("calling cuBLAS API during stream capture is unsupported")
    if changed is not None:
        nodes.append(lambda: function(*args, **options))
        return changed
    result = dry_run(function, args, options)
    if not isinstance(result, (np.ndarray, np.generic)):
        return result
    if any(np.shares_memory(result, each) for each in arrays_in((args, options))):
        return result  # a view
    made = np.full_like(result, garbage(result.dtype), subok=False)
    if function in (np.empty, np.empty_like):
        return made
    nodes.append(lambda: made.__setitem__(..., function(*args, **options)))
    return made


def dry_run(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return what is like the result; random numbers are not drawn."""
    generator = getattr(function, "__self__", None)
    bits = getattr(generator, "bit_generator", None)
    if not hasattr(bits, "_state"):
        with np.errstate(all="ignore"):
            return function(*args, **options)
    before = bits._state.hidden.copy()
    try:
        return function(*args, **options)
    finally:
        bits._state.hidden[...] = before


def garbage(dtype: np.dtype[Any]) -> Any:
    return np.nan if dtype.kind == "f" else 0


def arrays_in(values: Any) -> Iterator[np.ndarray]:
    if isinstance(values, np.ndarray):
        yield values
    elif isinstance(values, (tuple, list)):
        for each in values:
            yield from arrays_in(each)
    elif isinstance(values, dict):
        yield from arrays_in(list(values.values()))


class StandInCublas:
    """Two settings and a product of columns, where the addresses say that they are."""

    def __init__(self, ffi: Any) -> None:
        self.ffi, self.stream, self.workspace, self.products = ffi, 0, 0, 0

    def cublasSetStream_v2(self, handle: int, stream: int) -> int:
        self.stream, self.workspace = stream, 0  # cuBLAS goes back to a workspace of its own
        return 0

    def cublasSetWorkspace_v2(self, handle: int, workspace: int, size: int) -> int:
        assert size
        self.workspace = workspace
        return 0

    def cublasGemmStridedBatchedEx(self, *arguments: Any) -> int:
        assert self.workspace, "it would take memory of its own while a graph is captured"
        assert self.stream == Stream.current.ptr
        (_, trans_a, trans_b, m, n, k, alpha, *rest) = arguments
        (a, a_type, lda, step_a, b, b_type, ldb, step_b, beta, *rest) = rest
        (c, c_type, ldc, step_c, batch, compute, algorithm) = rest
        assert (alpha[0], beta[0], algorithm) == (1.0, 0.0, -1)
        assert compute == (70 if c_type == 1 else 68)
        assert a_type == b_type == c_type
        assert lda >= (k if trans_a else m)
        assert ldb >= (n if trans_b else k)
        assert ldc >= m
        assert min(step_a, step_b, step_c) >= 0
        dtype = np.dtype(LETTERS[c_type])
        one = columns(a, dtype, (k, m) if trans_a else (m, k), lda, step_a, batch)
        other = columns(b, dtype, (n, k) if trans_b else (k, n), ldb, step_b, batch)
        to = columns(c, dtype, (m, n), ldc, step_c, batch)

        def multiply() -> None:
            left = one.swapaxes(1, 2) if trans_a else one
            right = other.swapaxes(1, 2) if trans_b else other
            for number in range(batch):
                # As rows, so that the bits are those of NumPy's product of the same operands.
                to[number].T[...] = right[number].T.dot(left[number].T)

        self.products += 1
        nodes = Stream.current.nodes
        if nodes is None:
            multiply()
        else:
            nodes.append(multiply)
        return 0


def columns(
    address: int, dtype: np.dtype[Any], shape: tuple[int, int], leading: int, step: int, batch: int
) -> np.ndarray:
    """Return matrices of columns at ``address``."""
    rows, count = shape
    length = (batch - 1) * step + (count - 1) * leading + rows
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
    flat = np.frombuffer(memory, dtype)
    size = dtype.itemsize
    strides = step * size, size, leading * size
    return np.lib.stride_tricks.as_strided(flat, (batch, rows, count), strides)


class GraphLibrary(StrictLibrary):
    """The library of strict arrays, with streams that can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=lambda: 1,
                getDevice=lambda: 0,
                CUDARuntimeError=CUDARuntimeError,
                eventQuery=lambda event: 0,
            ),
            Device=Device,
            Stream=Stream,
            Event=Event,
            MemoryPool=MemoryPool,
            using_allocator=using_allocator,
            get_current_stream=lambda index=-1: Stream.current,
            device=SimpleNamespace(get_cublas_handle=lambda: 7),
        )
