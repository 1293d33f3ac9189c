"""A stand-in for CuPy that runs on the CPU: its arrays, kernels, streams and events.

Like CuPy arrays, its arrays are not converted to NumPy arrays implicitly, and operations do not mix
both. So tests without a GPU detect computations that leave the library of their data. ``LOG``
records operations of streams and events, and copies to and from host buffers. tests/gpu tests real
devices.
"""

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from flashlight_py import kernels
from flashlight_py.optim import cuda
from tests.autograd import compiled_kernels

LOG: list[tuple[Any, ...]] = []


class StandInArray:
    """A NumPy array with the interface of a CuPy array."""

    __array_ufunc__ = None

    def __init__(self, hidden: np.ndarray) -> None:
        self.hidden = hidden

    @property
    def device(self) -> Any:
        """Return the current device. These tests do not switch back to an earlier device."""
        return SimpleNamespace(id=self.__dict__.get("elsewhere", Device.current))

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Return the interface that MPI reads, in version 2, of contiguous arrays."""
        return {**self.hidden.__array_interface__, "version": 2}

    @property
    def data(self) -> Any:
        """Return the memory pointer, like CuPy."""
        return SimpleNamespace(ptr=self.hidden.ctypes.data)

    def get(self, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            return self.hidden.copy()
        LOG.append(("to the host", type(out.base).__name__))
        out[...] = self.hidden
        return out

    def set(self, array: np.ndarray) -> None:
        LOG.append(("to the device", type(array.base).__name__))
        self.hidden[...] = array

    def dot(self, other: Any, out: Any = None) -> Any:
        """A method of the class, as in CuPy."""
        return wrapped(self.hidden.dot)(other, **({} if out is None else {"out": out}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "hidden":
            raise AttributeError(name)
        value = getattr(self.hidden, name)
        return wrapped(value) if callable(value) else wrap(value)

    def __getitem__(self, where: Any) -> Any:
        return wrap(self.hidden[unwrap_index(where)])

    def __setitem__(self, where: Any, value: Any) -> None:
        self.hidden[unwrap_index(where)] = unwrap(value)

    def __len__(self) -> int:
        return len(self.hidden)

    def __bool__(self) -> bool:
        return bool(self.hidden)

    def __int__(self) -> int:
        return int(self.hidden)

    def __float__(self) -> float:
        return float(self.hidden)


def unwrap(value: Any) -> Any:
    if isinstance(value, StandInArray):
        return value.hidden
    if isinstance(value, (list, tuple)):
        return type(value)(unwrap(item) for item in value)
    if isinstance(value, np.ndarray) and not (value.size == 1 and value.dtype.names):
        raise TypeError("unsupported type numpy.ndarray")  # except by-value arguments
    return value


def unwrap_index(where: Any) -> Any:
    if isinstance(where, tuple):
        return tuple(unwrap_index(item) for item in where)
    return unwrap(where)


def wrap(value: Any) -> Any:
    """Return ``value`` as arrays. CuPy has no scalars but arrays without dimensions."""
    return StandInArray(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        out = options.get("out")
        plain = {name: unwrap(value) for name, value in options.items()}
        result = function(*map(unwrap, args), **plain)
        if getattr(function, "__name__", "") == "item":
            return result
        return wrap(result) if out is None else out

    return call


def launching(kernel: Any) -> Any:
    """Return a function that launches a compiled kernel and counts the launches."""
    launch = wrapped(kernel)
    launch.launches = lambda: kernel.launches  # type: ignore[attr-defined]
    return launch


def binary(function: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[..., Any]:
    def call(self: StandInArray, other: Any) -> Any:
        pair = (self.hidden, unwrap(other))
        return wrap(function(*(pair[::-1] if swapped else pair)))

    return call


def in_place(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(self: StandInArray, other: Any) -> StandInArray:
        self.hidden = function(self.hidden, unwrap(other))
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
    setattr(StandInArray, f"__{_name}__", lambda self, _unary=_unary: wrap(_unary(self.hidden)))


class StandInGenerator:
    """A generator with NumPy's draws and its state on the device."""

    def __init__(self, seed: int | None) -> None:
        self._numpy = np.random.default_rng(seed)
        self.bit_generator = SimpleNamespace(_state=StandInArray(self._packed()))

    def random(self, *args: Any, **options: Any) -> Any:
        bits, state = self._numpy.bit_generator, self.bit_generator._state
        words = state.hidden.tolist()
        numbers = {name: words[2 * k] + (words[2 * k + 1] << 64) for k, name in enumerate(_WORDS)}
        bits.state = {**bits.state, "state": numbers}
        drawn = wrap(self._numpy.random(*args, **options))
        state.hidden[...] = self._packed()
        return drawn

    def _packed(self) -> np.ndarray:
        numbers: Any = self._numpy.bit_generator.state["state"]
        words = [numbers[name] >> shift & (1 << 64) - 1 for name in _WORDS for shift in (0, 64)]
        return np.array(words, np.uint64)


_WORDS = ("state", "inc")  # of PCG64, 128 bits each


class Device(contextlib.nullcontext[None]):
    current = 0

    def __init__(self, index: int) -> None:
        super().__init__()
        self.id, self.pci_bus_id = index, f"0000:{index:02x}:00.0"

    def use(self) -> None:
        Device.current = self.id


class Event:
    """An event that is done once recorded, unless a test sets ``ends_at_once`` to False."""

    ends_at_once = True
    _numbers = itertools.count()
    by_ptr: ClassVar["weakref.WeakValueDictionary[int, Event]"] = weakref.WeakValueDictionary()

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.number = next(self._numbers)
        self.by_ptr[self.number] = self
        self.done = True

    @property
    def ptr(self) -> int:
        return self.number

    def record(self, stream: "Stream") -> None:
        self.done = self.ends_at_once
        LOG.append(("record", stream.name, self.number))


class Stream:
    """A stream. The current stream is the last one that was entered."""

    current: "Stream"
    by_ptr: ClassVar["weakref.WeakValueDictionary[int, Stream]"] = weakref.WeakValueDictionary()

    def __init__(self, non_blocking: bool = False, name: str = "communication") -> None:
        self.ptr, self.name = id(self), name
        self.by_ptr[self.ptr] = self
        self._before: list[Stream] = []

    def wait_event(self, event: Event) -> None:
        LOG.append(("wait", self.name, event.number))

    def synchronize(self) -> None:
        LOG.append(("synchronize", self.name))

    def begin_capture(self) -> None:
        raise RuntimeError("the stand-in captures nothing")

    def __enter__(self) -> "Stream":
        self._before.append(Stream.current)
        Stream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._before.pop()


Stream.current = Stream(name="default")


class PinnedMemory(bytearray):
    """Memory of the host that is not swapped out."""


class StandInCupy(ModuleType):
    """NumPy's functions on these arrays, as module ``cupy``, with a number of ``devices``."""

    ndarray = StandInArray
    random = SimpleNamespace(default_rng=StandInGenerator)

    def __init__(self, devices: int = 1) -> None:
        super().__init__("cupy")
        self.kernels: list[Any] = []  # raw kernels
        self.add: Any = wrapped(np.add)
        self.add.at = wrapped(np.add.at)
        Device.current = 0
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDeviceCount=lambda: devices,
                getDevice=lambda: Device.current,
                eventQuery=lambda event: 600,  # cudaErrorNotReady, for work in progress
                eventRecord=lambda event, stream: LOG.append(("record", stream, event)),
                CUDARuntimeError=RuntimeError,
            ),
            Device=Device,
            Stream=Stream,
            Event=Event,
            get_current_stream=lambda index=-1: Stream.current,
            alloc_pinned_memory=PinnedMemory,
            MemoryPool=lambda: SimpleNamespace(malloc=None),
            using_allocator=contextlib.nullcontext,
            set_pinned_memory_allocator=lambda allocator: None,
        )
        self.get_default_pinned_memory_pool = lambda: SimpleNamespace(malloc=PinnedMemory)

    def ElementwiseKernel(self, *description: str) -> Callable[..., Any]:
        return launching(compiled_kernels.ElementwiseKernel(*description))

    def RawKernel(self, *description: Any, **options: Any) -> Callable[..., Any]:
        self.kernels.append(launching(compiled_kernels.RawKernel(*description, **options)))
        return self.kernels[-1]  # type: ignore[no-any-return]

    def ReductionKernel(self, *description: str, **options: str) -> Callable[..., Any]:
        return wrapped(compiled_kernels.ReductionKernel(*description, **options))

    def asarray(self, value: Any, dtype: Any = None) -> StandInArray:
        """Return an array of this library. As in CuPy, this function also accepts NumPy arrays."""
        if isinstance(value, StandInArray):
            return StandInArray(np.asarray(value.hidden, dtype))
        if hasattr(value, "__cuda_array_interface__"):
            assert value.__cuda_array_interface__["stream"] is None, "CuPy would block"
            held = SimpleNamespace(__array_interface__=value.__cuda_array_interface__, owner=value)
            return StandInArray(np.asarray(held, dtype))
        return StandInArray(np.array(value, dtype))

    def array(self, value: Any, dtype: Any = None, order: str = "K") -> StandInArray:
        return self.asarray(value, dtype).copy(order)

    def shares_memory(self, a: StandInArray, b: StandInArray, max_work: Any = None) -> bool:
        """Compare the first addresses, like CuPy, which has no limit of work."""
        if max_work is not None:
            raise NotImplementedError("Not supported for integer `max_work`.")
        return bool(np.intersect1d(_addresses(a.hidden), _addresses(b.hidden)).size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(np, name)
        return wrapped(value) if callable(value) and not isinstance(value, type) else value


def _addresses(array: np.ndarray) -> np.ndarray:
    result = np.array(array.ctypes.data)
    for extent, stride in zip(array.shape, array.strides, strict=True):
        result = np.add.outer(result, np.arange(extent) * stride)
    return result


def forget_kernels() -> None:
    """Delete the kernels that the stand-in compiled, which CuPy cannot use."""
    for value in [*vars(kernels).values(), *vars(cuda).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()
