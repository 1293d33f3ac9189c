"""A stand-in for CuPy that runs on the CPU: its arrays, kernels, streams, graphs and memory pools.

It refuses what CuPy refuses: its arrays do not turn into NumPy arrays by themselves and do not mix
with them. So a test can see, without a GPU, whether a computation stays inside the library of its
data.

As on a GPU, what is called while a stream is captured computes nothing: results hold garbage until
the graph is launched, what the host would have to wait for raises, and so do CuPy's own products
and copies from the host. A graph needs the memory pool of its capture, as CuPy frees what lies in a
pool with it. Streams that use one memory have to be ``ordered`` by events in what they do.
``LOG`` has what was done to streams and events, and copies into and out of buffers of the host. It
shows what the host does; tests/gpu shows the rest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from flashlight_py import kernels
from flashlight_py.optim import cuda
from tests.autograd import compiled_kernels

LOG: list[tuple[Any, ...]] = []
# Methods and functions of NumPy that change their first argument.
CHANGING = ("fill", "sort", "put", "copyto", "put_along_axis", "at")


# Arrays -------------------------------------------------------------------------------------------


class StandInArray:
    """A NumPy array in disguise, with CuPy's manners."""

    __array_ufunc__ = None

    def __init__(self, hidden: np.ndarray) -> None:
        self.hidden = hidden

    @property
    def device(self) -> Any:
        """The device that is current now: one that was chosen stays chosen in these tests."""
        return SimpleNamespace(id=self.__dict__.get("elsewhere", Device.current))

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What MPI takes; of contiguous arrays, in version 2."""
        return {**self.hidden.__array_interface__, "version": 2}

    @property
    def data(self) -> Any:
        """Where the elements are, as CuPy says it."""
        whole = self.hidden
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        return SimpleNamespace(ptr=self.hidden.ctypes.data, mem=whole)

    def get(self, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            return read(self.hidden).copy()
        LOG.append(("to the host", type(out.base).__name__))
        out[...] = read(self.hidden)
        return out

    def set(self, array: np.ndarray) -> None:
        LOG.append(("to the device", type(array.base).__name__))
        self.hidden[...] = array

    def tobytes(self) -> bytes:
        return read(self.hidden).tobytes()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "hidden":
            raise AttributeError(name)
        value = getattr(self.hidden, name)
        if callable(value):
            return functools.partial(wrapped(getattr(np.ndarray, name)), self)
        return wrap(value)

    def __getitem__(self, where: Any) -> Any:
        return wrap(perform(operator.getitem, (self.hidden, unwrap_index(where))))

    def __setitem__(self, where: Any, value: Any) -> None:
        args = self.hidden, unwrap_index(where), unwrap(value)
        perform(operator.setitem, args, changed=self.hidden)

    def __len__(self) -> int:
        return len(self.hidden)

    def __bool__(self) -> bool:
        return bool(read(self.hidden))

    def __int__(self) -> int:
        return int(read(self.hidden))

    def __float__(self) -> float:
        return float(read(self.hidden))


def perform(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any] | None = None,
    changed: Any = None,
) -> Any:
    """Return what a function of NumPy returns, or note the call in the graph that is captured.

    ``changed``: the array that it changes in place, if any.
    """
    options, nodes = options or {}, Stream.current.nodes
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


def read(hidden: np.ndarray) -> np.ndarray:
    """Return what the host reads."""
    found: np.ndarray = perform(seen_by_host, (hidden,))
    return found


def seen_by_host(hidden: np.ndarray) -> np.ndarray:
    return hidden


def unwrap(value: Any) -> Any:
    if isinstance(value, StandInArray):
        return value.hidden
    if isinstance(value, (list, tuple)):
        return type(value)(unwrap(each) for each in value)
    if isinstance(value, np.ndarray):
        raise TypeError("unsupported type numpy.ndarray")
    return value


def unwrap_index(where: Any) -> Any:
    if isinstance(where, tuple):
        return tuple(unwrap_index(each) for each in where)
    return unwrap(where)


def wrap(value: Any) -> Any:
    """CuPy has no scalars: a result without dimensions is an array."""
    return StandInArray(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        out = options.get("out")
        plain = {name: unwrap(value) for name, value in options.items()}
        given = tuple(map(unwrap, args))
        name = getattr(function, "__name__", "")
        changed = given[0] if name in CHANGING else unwrap(out)
        if isinstance(function, compiled_kernels.RawKernel) or (
            isinstance(function, compiled_kernels.ElementwiseKernel)
            and len(args) == len(function.inputs) + len(function.outputs)
        ):
            changed = given[-1]
        if name in ("item", "tolist"):
            return function(*map(read, given), **plain)
        result = perform(function, given, plain, changed)
        return wrap(result) if out is None else out

    return call


def binary(function: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[..., Any]:
    def call(self: StandInArray, other: Any) -> Any:
        pair = (self.hidden, unwrap(other))
        return wrap(perform(function, pair[::-1] if swapped else pair))

    return call


def in_place(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(self: StandInArray, other: Any) -> StandInArray:
        self.hidden = perform(function, (self.hidden, unwrap(other)), changed=self.hidden)
        return self

    return call


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "and", "or"):
    _function = getattr(operator, f"__{_name}__")
    setattr(StandInArray, f"__{_name}__", binary(_function))
    setattr(StandInArray, f"__r{_name}__", binary(_function, swapped=True))
    setattr(StandInArray, f"__i{_name}__", in_place(getattr(operator, f"__i{_name}__")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(StandInArray, f"__{_name}__", binary(getattr(operator, f"__{_name}__")))
for _name in ("neg", "abs", "invert"):
    _unary = getattr(operator, f"__{_name}__")
    setattr(
        StandInArray,
        f"__{_name}__",
        lambda self, _unary=_unary: wrap(perform(_unary, (self.hidden,))),
    )


class StandInGenerator:
    """Draws as NumPy's, from a state that lies on the device."""

    def __init__(self, seed: int | None) -> None:
        self._numpy = np.random.default_rng(seed)
        self.bit_generator = SimpleNamespace(_state=StandInArray(self._packed()))

    def random(self, *args: Any, **options: Any) -> Any:
        return wrap(perform(self.draw, args, options))

    def draw(self, *args: Any, **options: Any) -> Any:
        bits, state = self._numpy.bit_generator, self.bit_generator._state
        words = state.hidden.tolist()
        numbers = {name: words[2 * k] + (words[2 * k + 1] << 64) for k, name in enumerate(_WORDS)}
        bits.state = {**bits.state, "state": numbers}
        drawn = self._numpy.random(*args, **options)
        state.hidden[...] = self._packed()
        return drawn

    def _packed(self) -> np.ndarray:
        numbers: Any = self._numpy.bit_generator.state["state"]
        words = [numbers[name] >> shift & (1 << 64) - 1 for name in _WORDS for shift in (0, 64)]
        return np.array(words, np.uint64)


_WORDS = ("state", "inc")  # of PCG64, 128 bits each


def copied_in(array: np.ndarray) -> np.ndarray:
    """Return what comes from the host."""
    return array.copy("K")


# Devices, streams, graphs and memory pools --------------------------------------------------------


class CUDARuntimeError(RuntimeError):
    """What CUDA says; CuPy's is one too."""


class Device(contextlib.nullcontext[None]):
    current = 0

    def __init__(self, index: int) -> None:
        super().__init__()
        self.id, self.pci_bus_id = index, f"0000:{index:02x}:00.0"

    def use(self) -> None:
        Device.current = self.id


class Event:
    """``done`` unless a test holds it back."""

    _numbers = itertools.count()
    seen: ClassVar[dict[int, int]] = {}  # of each stream, how much of what it had to do

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.number = next(self._numbers)
        self.done = True

    @property
    def ptr(self) -> int:
        return self.number

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.current
        assert stream.nodes is None, "an event of a captured stream, which no host can wait for"
        self.seen = {**stream.seen, stream.ptr: stream.queued}  # type: ignore[misc]
        LOG.append(("record", stream.name, self.number))


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
    ordered = False

    def __init__(self, non_blocking: bool = False, name: str = "communication") -> None:
        self.ptr, self.name = id(self), name
        self.nodes: list[Callable[[], object]] | None = None
        self.is_valid = True
        self._before: list[Stream] = []
        self.queued = 0
        self.seen: dict[int, int] = {}  # of other streams: how much of what they had to do
        Stream.all.add(self)

    def queue(self) -> None:
        """Have something to do, after all that other streams have to do."""
        self.queued += 1
        for other in Stream.all if Stream.ordered else ():
            is_seen = other is self or self.seen.get(other.ptr, 0) >= other.queued
            assert is_seen, "two streams are not ordered"

    def wait_event(self, event: Event) -> None:
        assert self.nodes is None
        for ptr, count in event.seen.items():
            self.seen[ptr] = max(count, self.seen.get(ptr, 0))
        LOG.append(("wait", self.name, event.number))

    def synchronize(self) -> None:
        assert self.nodes is None
        LOG.append(("synchronize", self.name))

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


Stream.current = Stream(name="default")


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


# The library --------------------------------------------------------------------------------------


class PinnedMemory(bytearray):
    """What CuPy returns as memory of the host that cannot be swapped out."""


class StandInCupy(ModuleType):
    """NumPy's functions on these arrays, under the name ``cupy``, with so many ``devices``.

    ``ordered``: what one stream does must wait for all that the others do, by events. A new one
    begins with a stream of its own.
    """

    ndarray = StandInArray
    random = SimpleNamespace(default_rng=StandInGenerator)

    def __init__(self, devices: int = 1, ordered: bool = False) -> None:
        super().__init__("cupy")
        self.kernels: list[Any] = []  # raw ones
        self.add: Any = wrapped(np.add)
        self.add.at = wrapped(np.add.at)
        Stream.all, Stream.ordered = weakref.WeakSet(), ordered
        Stream.current, Device.current = Stream(name="default"), 0
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=lambda: devices,
                getDevice=lambda: Device.current,
                eventQuery=lambda event: 600,  # of what is on its way: cudaErrorNotReady
                CUDARuntimeError=CUDARuntimeError,
            ),
            Device=Device,
            Stream=Stream,
            Event=Event,
            MemoryPool=MemoryPool,
            using_allocator=using_allocator,
            get_current_stream=lambda index=-1: Stream.current,
            alloc_pinned_memory=PinnedMemory,
            device=SimpleNamespace(get_cublas_handle=lambda: 7),
        )

    def ElementwiseKernel(self, *description: str) -> Callable[..., Any]:
        kernel = compiled_kernels.ElementwiseKernel(*description)
        launch: Any = wrapped(kernel)
        launch.launches = lambda: kernel.launches
        return launch  # type: ignore[no-any-return]

    def RawKernel(self, *description: Any, **options: Any) -> Callable[..., Any]:
        kernel = compiled_kernels.RawKernel(*description, **options)
        launch: Any = wrapped(kernel)
        launch.launches = lambda: kernel.launches
        self.kernels.append(launch)
        return launch  # type: ignore[no-any-return]

    def ReductionKernel(self, *description: str, **options: str) -> Callable[..., Any]:
        return wrapped(compiled_kernels.ReductionKernel(*description, **options))

    def asarray(self, value: Any, dtype: Any = None) -> StandInArray:
        """As in CuPy, the way in: takes NumPy arrays too; a number is filled in by a kernel."""
        if isinstance(value, StandInArray):
            return wrap(perform(np.asarray, (value.hidden, dtype)))
        if np.ndim(value) == 0:
            return wrap(perform(np.full, ((), value, dtype)))
        return StandInArray(perform(copied_in, (np.asarray(value, dtype),)))

    def array(self, value: Any, dtype: Any = None, order: str = "K") -> StandInArray:
        return self.asarray(value, dtype).copy(order)

    def shares_memory(self, a: StandInArray, b: StandInArray, max_work: Any = None) -> bool:
        """Compare where elements begin, as CuPy does, which takes no limit of work."""
        if max_work is not None:
            raise NotImplementedError("Not supported for integer `max_work`.")
        return bool(np.intersect1d(_addresses(a.hidden), _addresses(b.hidden)).size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(np, name)
        return wrapped(value) if callable(value) and not isinstance(value, type) else value


def _addresses(array: np.ndarray) -> np.ndarray:
    """Where the elements of ``array`` begin."""
    found = np.array(array.ctypes.data)
    for extent, stride in zip(array.shape, array.strides, strict=True):
        found = np.add.outer(found, np.arange(extent) * stride)
    return found


def forget_kernels() -> None:
    """Drop what the library of kernels has compiled: by the stand-in, of no use to CuPy."""
    for value in [*vars(kernels).values(), *vars(cuda).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()
