"""A stand-in for CuPy that runs on the CPU and refuses what CuPy refuses.

Its arrays do not turn into NumPy arrays by themselves and do not mix with them. So a test can
see, without a GPU, whether a computation stays inside the library of its data.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from flashlight_py import kernels
from flashlight_py.optim import cuda
from tests.autograd import compiled_kernels

# The last calls each function of NumPy, with plain arrays, and the one that it changes in place, if
# any; a stand-in for more than arrays puts its own there.
PERFORM: list[Callable[..., Any]] = [
    lambda function, args, options, changed: function(*args, **options)
]
# Methods and functions of NumPy that change their first argument.
CHANGING = ("fill", "sort", "put", "copyto", "put_along_axis", "at")


class StrictArray:
    """A NumPy array in disguise, with CuPy's manners."""

    __array_ufunc__ = None

    def __init__(self, hidden: np.ndarray) -> None:
        self.hidden = hidden
        self.device = SimpleNamespace(id=0)

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    @property
    def data(self) -> Any:
        """Where the elements are, as CuPy says it."""
        whole = self.hidden
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        return SimpleNamespace(ptr=self.hidden.ctypes.data, mem=whole)

    def get(self) -> np.ndarray:
        return read(self.hidden).copy()

    def set(self, array: np.ndarray) -> None:
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
    """Return what a function of NumPy returns; ``changed``: the array that it changes, if any."""
    return PERFORM[-1](function, args, options or {}, changed)


def read(hidden: np.ndarray) -> np.ndarray:
    """Return what the host reads."""
    found: np.ndarray = perform(seen_by_host, (hidden,))
    return found


def seen_by_host(hidden: np.ndarray) -> np.ndarray:
    return hidden


def unwrap(value: Any) -> Any:
    if isinstance(value, StrictArray):
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
    return StrictArray(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


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
    def call(self: StrictArray, other: Any) -> Any:
        pair = (self.hidden, unwrap(other))
        return wrap(perform(function, pair[::-1] if swapped else pair))

    return call


def in_place(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(self: StrictArray, other: Any) -> StrictArray:
        self.hidden = perform(function, (self.hidden, unwrap(other)), changed=self.hidden)
        return self

    return call


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "and", "or"):
    _function = getattr(operator, f"__{_name}__")
    setattr(StrictArray, f"__{_name}__", binary(_function))
    setattr(StrictArray, f"__r{_name}__", binary(_function, swapped=True))
    setattr(StrictArray, f"__i{_name}__", in_place(getattr(operator, f"__i{_name}__")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(StrictArray, f"__{_name}__", binary(getattr(operator, f"__{_name}__")))
for _name in ("neg", "abs", "invert"):
    _unary = getattr(operator, f"__{_name}__")
    setattr(
        StrictArray,
        f"__{_name}__",
        lambda self, _unary=_unary: wrap(perform(_unary, (self.hidden,))),
    )


class StrictGenerator:
    """Draws as NumPy's, from a state that lies on the device."""

    def __init__(self, seed: int | None) -> None:
        self._numpy = np.random.default_rng(seed)
        self.bit_generator = SimpleNamespace(_state=StrictArray(self._packed()))

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
    return array


class StrictLibrary(ModuleType):
    """NumPy's functions on strict arrays, under the name ``cupy``."""

    ndarray = StrictArray
    random = SimpleNamespace(default_rng=StrictGenerator)
    add = SimpleNamespace(at=wrapped(np.add.at))
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError),
        Device=contextlib.nullcontext,
    )

    def __init__(self) -> None:
        super().__init__("cupy")
        self.kernels: list[Any] = []  # raw ones

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

    def asarray(self, value: Any, dtype: Any = None) -> StrictArray:
        """As in CuPy, the way in: takes NumPy arrays too; a number is filled in by a kernel."""
        if isinstance(value, StrictArray):
            return wrap(perform(np.asarray, (value.hidden, dtype)))
        if np.ndim(value) == 0:
            return wrap(perform(np.full, ((), value, dtype)))
        return StrictArray(perform(copied_in, (np.asarray(value, dtype),)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return wrapped(getattr(np, name))


def forget_kernels() -> None:
    """Drop what the library of kernels has compiled: by the stand-in, of no use to CuPy."""
    for value in [*vars(kernels).values(), *vars(cuda).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()
