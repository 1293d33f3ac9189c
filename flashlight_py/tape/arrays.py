"""Arrays that a step is recorded with: each stands for a NumPy array, and every use of it is noted.

A ``Recorded`` computes what NumPy computes, on the array that it stands for, and leaves a note of
it in the recording of the thread. It is no ndarray, so that nothing can read its elements by
another way than NumPy's protocols and its own methods; it only says that it is one
(``__class__``), for checks of the kind ``isinstance(x, numpy.ndarray)``.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

if TYPE_CHECKING:
    from flashlight_py.tape.recording import Recording


class _Current(threading.local):
    recording: Recording | None = None


current = _Current()


class Recorded(NDArrayOperatorsMixin):
    """Stands for ``array``."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return np.ndarray

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return compute(function, inputs, options, inputs[:1] if method == "at" else ())

    def __array_function__(self, function: Any, _: Any, args: Any, options: Any) -> Any:
        if function in _SAY_NOTHING_OF_VALUES:
            plain = [each.array if type(each) in _KINDS else each for each in args]
            return function(*plain, **options)
        own = _OWN_WORDS.get(function)
        if own is not None:
            return own(*args, **options)
        return compute(function, args, options, args[:1] if function in _CHANGE_THE_FIRST else ())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        _read("numpy.asarray()")
        return np.array(self.array, dtype) if copy or dtype is not None else self.array

    @classmethod
    def __operation__(cls, function: Any, args: Any, options: Any) -> Any:
        """Do what does more than compute: see ``flashlight_py.device.operation``."""
        recording = current.recording
        if recording is None:
            return function(*_plain(args), **_plain(options))
        return recording.operation(function, args, options)

    def __require__(self, error: Callable[[], Exception]) -> None:
        """Check that all elements are true: see ``flashlight_py.device.require``."""
        if not self.array.all():
            raise error()
        if current.recording is not None:
            current.recording.require(self)

    @property
    def __array_library__(self) -> Any:
        return library

    # What is known of an array without its elements ---------------------------------------------

    @property
    def T(self) -> Any:
        return Recorded(self.array.T)

    @property
    def flat(self) -> Any:
        return self.reshape(-1)

    def __len__(self) -> int:
        return len(self.array)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # else NumPy would read the memory before it asks for __array__
            raise AttributeError(name)
        value = getattr(self.array, name)  # which raises AttributeError as an array does
        if name in _READS:
            return _reader(name, value)
        if name in _METHODS:
            return getattr(_Methods, name).__get__(self)
        if callable(value):
            changes = (self,) if name in _CHANGE_THEMSELVES else ()
            function = getattr(np.ndarray, name)
            return lambda *args, **options: compute(function, (self, *args), options, changes)
        return Recorded(value) if isinstance(value, np.ndarray) and name != "base" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "array":
            object.__setattr__(self, name, value)
        else:
            setattr(self.array, name, value)

    # Elements -----------------------------------------------------------------------------------

    def __getitem__(self, where: Any) -> Any:
        if _is_basic(where):
            found = self.array[where]
            if isinstance(found, np.ndarray):
                return Recorded(found)
            view = self.array[_to_a_view(where)]
            return compute(np.positive if _has_positive(view) else np.copy, (Recorded(view),), {})
        if _has_truth_values(where):
            _read("an index by truth values, whose result may have any shape,")
        return compute(operator.getitem, (self, where), {})

    def __setitem__(self, where: Any, value: Any) -> None:
        if _is_basic(where):
            view = Recorded(self.array[_to_a_view(where)])
            compute(np.copyto, (view, value), {"casting": "unsafe"}, (view,))
        else:
            compute(operator.setitem, (self, where, value), {}, (self,))

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __pow__(self, other: Any) -> Any:  # NumPy has own ways for some exponents
        return compute(operator.pow, (self, other), {})

    def __rpow__(self, other: Any) -> Any:
        return compute(operator.pow, (other, self), {})

    def __ipow__(self, other: Any) -> Any:
        self[...] = self**other
        return self

    # What reads elements ------------------------------------------------------------------------

    def __bool__(self) -> bool:
        _read("a truth value")
        return bool(self.array)

    def __float__(self) -> float:
        _read("float()")
        return float(self.array)

    def __int__(self) -> int:
        _read("int()")
        return int(self.array)

    def __complex__(self) -> complex:
        _read("complex()")
        return complex(self.array)

    def __index__(self) -> int:
        _read("an index")
        return operator.index(self.array)

    def __contains__(self, value: Any) -> bool:
        _read("in")
        return value in self.array

    def __repr__(self) -> str:
        _read("repr()")
        return repr(self.array)

    def __str__(self) -> str:
        _read("str()")
        return str(self.array)

    def __format__(self, how: str) -> str:
        _read("format()")
        return format(self.array, how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _read("a copy or pickle")
        return self.array.__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return compute(np.copy, (self,), {})

    def __deepcopy__(self, _: Any) -> Any:
        return compute(np.copy, (self,), {})

    def __hash__(self) -> NoReturn:
        raise TypeError("unhashable type: 'numpy.ndarray'")

    def __dlpack__(self, **options: Any) -> Any:
        _read("DLPack")
        return self.array.__dlpack__(**options)


class RecordedScalar(Recorded):
    """Stands for a number of NumPy, which nothing changes in place: ``x += 1`` makes another."""

    __slots__ = ()


def _not_in_place(self: Any, other: Any) -> Any:
    return NotImplemented


for _name in [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
    "matmul",
]:
    setattr(RecordedScalar, f"__i{_name}__", _not_in_place)

_KINDS = (Recorded, RecordedScalar)


class Number:
    """A Python number read from an array, which the step may return, and not use before that."""

    __slots__ = ("array", "value")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.value = array.item()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    @classmethod
    def __operation__(cls, function: Any, args: Any, options: Any) -> Any:
        """Do what does more than compute, as of arrays."""
        return Recorded.__operation__(function, args, options)

    def __getattr__(self, name: str) -> Any:
        _read("item()")
        return getattr(self.value, name)


def _reading(name: str) -> Callable[..., Any]:
    def read(self: Number, *args: Any) -> Any:
        _read("item()")
        others = [each.value if type(each) is Number else each for each in args]
        return getattr(self.value, name)(*others)

    return read


for _name in (
    *[
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "truediv",
        "rtruediv",
        "floordiv",
        "rfloordiv",
        "mod",
        "rmod",
        "divmod",
        "rdivmod",
    ],
    *[
        "pow",
        "rpow",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "neg",
        "pos",
        "abs",
        "bool",
        "int",
        "float",
        "complex",
        "index",
        "trunc",
        "floor",
        "ceil",
    ],
    *["round", "hash", "repr", "str", "format"],
):
    setattr(Number, f"__{_name}__", _reading(f"__{_name}__"))


def compute(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    changed: tuple[Any, ...] = (),
) -> Any:
    """Return what NumPy's ``function`` returns, and note it; ``changed``: what it changes."""
    recording = current.recording
    if recording is None:
        return function(*_plain(args), **_plain(options))
    return recording.compute(function, args, options, changed)


def _plain(value: Any) -> Any:
    """Return ``value`` with arrays in the place of what stands for them."""
    kind = type(value)
    if kind in _KINDS:
        return value.array
    if kind is Number:
        return value.value
    if kind is tuple or kind is list:
        return kind(map(_plain, value))
    if kind is dict:
        return {name: _plain(each) for name, each in value.items()}
    return value


def _read(how: str) -> None:
    if current.recording is not None:
        current.recording.leave(f"{how} reads a value that is computed in it")


def _reader(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **options: Any) -> Any:
        _read(f"{name}()")
        return value(*args, **options)

    return read


def _is_basic(where: Any) -> bool:
    parts = where if type(where) is tuple else (where,)
    return all(part is None or part is Ellipsis or type(part) is slice or _is_whole(part)
               for part in parts)  # fmt: skip


def _is_whole(value: Any) -> bool:
    kind = type(value)
    return kind is not bool and issubclass(kind, (int, np.integer))


def _to_a_view(where: Any) -> tuple[Any, ...]:
    """Return the index that leads to an array also where ``where`` leads to a number."""
    parts = where if type(where) is tuple else (where,)
    return parts if Ellipsis in parts else (*parts, ...)


def _has_truth_values(where: Any) -> bool:
    parts = where if type(where) is tuple else (where,)
    return any(getattr(part, "dtype", None) == np.bool_ for part in parts)


def _has_positive(view: np.ndarray[Any, Any]) -> bool:
    return view.dtype.kind in "iufc"


# As methods of numpy.ndarray, in terms of others -------------------------------------------------


class _Methods:
    """What arrays compute by functions of NumPy that are written in Python."""

    def item(self: Any, *where: Any) -> Any:
        if where or self.array.size != 1 or current.recording is None:
            _read("item()")
            return self.array.item(*where)
        return current.recording.number(self.array)

    def sum(self: Any, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        return np.add.reduce(self, axis, dtype, out, **options)

    def prod(
        self: Any, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any
    ) -> Any:
        return np.multiply.reduce(self, axis, dtype, out, **options)

    def max(self: Any, axis: Any = None, out: Any = None, **options: Any) -> Any:
        return np.maximum.reduce(self, axis, None, out, **options)

    def min(self: Any, axis: Any = None, out: Any = None, **options: Any) -> Any:
        return np.minimum.reduce(self, axis, None, out, **options)

    def any(self: Any, axis: Any = None, out: Any = None, **options: Any) -> Any:
        return np.logical_or.reduce(self, axis, np.bool_, out, **options)

    def all(self: Any, axis: Any = None, out: Any = None, **options: Any) -> Any:
        return np.logical_and.reduce(self, axis, np.bool_, out, **options)

    def mean(
        self: Any, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any
    ) -> Any:
        if dtype is not None or out is not None or options.keys() - {"keepdims"}:
            options |= {"axis": axis, "dtype": dtype, "out": out}
            return compute(np.ndarray.mean, (self,), options)
        given = self.array.dtype
        wide = {"e": np.float32}.get(given.char, np.float64 if given.kind in "biu" else None)
        total = np.add.reduce(self, axis, wide, None, **options)
        mean = total / np.intp(self.array.size // max(1, total.size))
        mean = mean.astype(total.dtype, copy=False)
        return mean.astype(given) if given.char == "e" else mean

    def clip(self: Any, min: Any = None, max: Any = None, out: Any = None, **options: Any) -> Any:
        return _clip(self, min, max, out, **options)

    def copy(self: Any, order: str = "C") -> Any:
        return compute(np.copy, (self, order), {})

    def fill(self: Any, value: Any) -> None:
        self[...] = value

    def get(self: Any) -> Any:
        raise AttributeError("'numpy.ndarray' object has no attribute 'get'")


_METHODS = {name for name in vars(_Methods) if not name.startswith("_")}


def _clip(x: Any, a_min: Any = None, a_max: Any = None, out: Any = None, **options: Any) -> Any:
    if a_min is None:
        return np.minimum(x, a_max, out=out, **options)
    if a_max is None:
        return np.maximum(x, a_min, out=out, **options)
    return compute(np.clip, (x, a_min, a_max), {**options, **({} if out is None else {"out": out})})


def _method(name: str) -> Callable[..., Any]:
    return lambda x, *args, **options: getattr(x, name)(*args, **options)


_OWN_WORDS: dict[Any, Callable[..., Any]] = {
    np.clip: _clip,
    np.max: _method("max"),
    np.min: _method("min"),
    **{getattr(np, name): _method(name) for name in ("sum", "prod", "any", "all", "mean")},
}
_SAY_NOTHING_OF_VALUES = {np.shape, np.ndim, np.size, np.result_type, np.can_cast, np.iscomplexobj,
                          np.isrealobj, np.may_share_memory, np.shares_memory}  # fmt: skip
_CHANGE_THE_FIRST = {np.copyto, np.put, np.place, np.putmask, np.fill_diagonal, np.put_along_axis}
_CHANGE_THEMSELVES = {"sort", "partition", "put", "resize", "itemset", "setfield"}
_READS = {"tolist", "tobytes", "tofile", "dump", "dumps", "nonzero"}


class _Library:
    """NumPy, whose arrays of its own making are noted as well."""

    __name__ = "numpy"

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        if name not in _MAKE_ARRAYS:
            return value
        return lambda *args, **options: compute(value, args, options)

    @staticmethod
    def asarray(value: Any, dtype: Any = None) -> Any:
        if type(value) in _KINDS:
            return value if dtype is None else value.astype(dtype, copy=False)
        return compute(np.asarray, (value, dtype), {})

    @staticmethod
    def recorded_generator(found: Any) -> Any:
        return found if current.recording is None else current.recording.generator(found)


_MAKE_ARRAYS = {"array", "zeros", "ones", "full", "empty", "arange", "linspace", "eye", "identity"}

library = _Library()
