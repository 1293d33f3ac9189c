"""Stand-ins for arrays and numbers while a step is recorded. They record their operations.

A ``Recorded`` computes like the NumPy array that it represents, and adds a note of each operation
to the recording of the thread. It is no ndarray, but its ``__class__`` is ndarray for isinstance().
NumPy's protocols and its own methods read its elements, which ends the recording. Methods that
NumPy implements in Python, such as ``sum``, record the ufunc that they call.
"""

import functools
import operator
import weakref
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from flashlight_py.autograd import Variable
from flashlight_py.structure import thread_state

Array = np.ndarray[Any, Any]


class CannotCapture(Exception):
    """An error with the reason why the step cannot be captured."""


def compute(function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Return ``function(*args, **options)``. Record the call if this thread records a step."""
    recording = thread_state.recorder
    if recording is None:
        return function(*unwrap(args), **unwrap(options))
    if not _ARE_NO_NUMBERS.issuperset(map(type, args)):
        function = _of_numbers(function, args)
    return recording.compute(function, args, options)


CONSTANT = {int, float, complex, bool, str, type(None), np.ufunc, FunctionType}
_LEAVES = {*CONSTANT, np.ndarray}


def map_items(value: Any, change: Callable[[Any], Any], only_tuples: bool = False) -> Any:
    """Return nested tuples, lists and dicts with ``change(item)`` in place of each item."""
    kind: Any = type(value)
    if kind in CONSTANT:
        return value
    if issubclass(kind, tuple) or (kind is list and not only_tuples):
        changed = [
            item if type(item) in CONSTANT else map_items(item, change, only_tuples)
            for item in value
        ]
        # A tuple without changes is returned itself: some tuple types cannot be created from items.
        is_same = kind is not list and all(map(operator.is_, changed, value))
        return value if is_same else getattr(kind, "_make", kind)(changed)
    if kind is dict and not only_tuples:
        return {name: map_items(item, change) for name, item in value.items()}
    return change(value)


def items_in(value: Any) -> list[Any]:
    """Return the items of nested tuples, lists and dicts, or [value] if it is none of these."""
    kind: Any = type(value)
    if not (kind in (list, dict) or issubclass(kind, tuple)):
        return [value]
    items = value.values() if kind is dict else value
    return [x for item in items for x in ([item] if type(item) in _LEAVES else items_in(item))]


def arrays_in(value: Any) -> list[Array]:
    """Return the arrays in ``value``, an argument of a note."""
    items = [x for x in items_in(value) if type(x) not in CONSTANT]
    return [x for x in map(data_of, items) if type(x) is np.ndarray]


def data_of(value: Any) -> Any:
    """Return the array of a Variable. Return other values unchanged."""
    return value.data if isinstance(value, Variable) else value


def arrays_of(result: Any) -> list[Array]:
    """Return the arrays that the stand-ins and variables in ``result`` represent."""
    items = [x for x in map(data_of, items_in(result)) if type(x) in STAND_INS]
    return [x.array if type(x) is Number else x.plain for x in items]


def array_or_number(value: Any) -> Any:
    """Return what a stand-in represents: an array or a number. Return other values unchanged."""
    if type(value) is RecordedScalar:
        return value.plain[()]
    return value.plain if type(value) in STAND_INS else value


def unwrap(value: Any) -> Any:
    """Return ``value`` with arrays and numbers in place of their stand-ins."""
    return map_items(value, lambda x: x.plain if type(x) in STAND_INS else x)


def reject_read(operation: str, value: Any = None) -> Any:
    """Return ``value``, but give up the recording, because ``operation`` reads array elements."""
    if thread_state.recorder is not None:
        reason = f"{operation} reads a value that is computed in it"
        thread_state.recorder.leave(reason, "return it, and read it after that")
    return value


class Recorded(NDArrayOperatorsMixin):
    """A stand-in for the array ``plain``. In notes, ``noted`` (at first None) represents it."""

    __slots__ = ("__weakref__", "noted", "plain")
    plain: Array

    def __init__(self, array: Array, noted: Any = None) -> None:
        _set_plain(self, array)
        keep(self, noted)
        if (recorder := thread_state.recorder) is not None:
            recorder.stand_ins.append(weakref.ref(self))

    __class__ = property(lambda _: np.ndarray)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        are_plain = _ARE_NO_NUMBERS.issuperset(map(type, inputs))  # isinstance() takes longer
        if not are_plain and any(isinstance(value, Variable) for value in inputs):
            return NotImplemented  # Variable implements the operation
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return compute(function, *inputs, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if any(issubclass(kind, Variable) for kind in types):
            return NotImplemented
        if function in _SAY_NOTHING_OF_VALUES:
            return function(*map(unwrap, args), **options)
        if function in _HAVE_ANY_SHAPE or (function is np.where and len(args) == 1):
            reject_read(f"{function.__name__}(), whose result may have any shape,")
        if function in _CALL_METHODS:
            return function._implementation(*args, **options)
        return compute(function, *args, **options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        reject_read("numpy.asarray()")
        return np.array(self.plain, dtype) if copy or dtype is not None else self.plain

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # NumPy must not find __array_interface__, but call __array__
            raise AttributeError(name)
        value = getattr(self.plain, name)  # arrays may have no such attribute
        if name in _READS:
            reject_read(name)
        if callable(value):
            return functools.partial(compute, getattr(np.ndarray, name), self)
        return Recorded(value) if isinstance(value, np.ndarray) and name != "base" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if thread_state.recorder is not None:
            thread_state.recorder.leave(f"{name} of an array is set")
        setattr(self.plain, name, unwrap(value))

    def __getitem__(self, where: Any) -> Any:
        parts = where if type(where) is tuple else (where,)
        if _is_basic(parts):
            view = self.plain[where]
            if isinstance(view, np.ndarray):
                return Recorded(view)
            return _as_scalar(compute(np.copy, Recorded(self.plain[(*parts, ...)])))
        numbers = tuple([x.plain[()] if type(x) is RecordedScalar else x for x in parts])
        if _is_basic(numbers) and isinstance(self.plain[numbers], np.ndarray):
            return reject_read("an index", Recorded(self.plain[numbers]))  # the index was computed
        if any(getattr(part, "dtype", None) == np.bool_ for part in parts):
            reject_read("an index by truth values, whose result may have any shape,")
        return compute(operator.getitem, self, where)

    def __setitem__(self, where: Any, value: Any) -> None:
        parts = where if type(where) is tuple else (where,)
        dtype = self.plain.dtype
        if dtype.kind in "biufc" and _is_basic(parts) and _has_room_for(dtype, value):
            view = self.plain[parts if Ellipsis in parts else (*parts, ...)]
            if view.ndim or not (type(value) in (list, tuple) or getattr(value, "ndim", False)):
                compute(np.copyto, Recorded(view), value, casting="unsafe")
                return
        compute(operator.setitem, self, where, value)

    def __ipow__(self, other: Any) -> Any:
        is_power = self.plain.dtype.kind not in "fc" or type(other) not in (int, float)
        if is_power or other not in (-1, 0.5, 1, 2):  # for these, NumPy calls square(), sqrt() ...
            return compute(np.power, self, other, out=self)
        return compute(np.positive, self**other, out=self)

    def item(self, *where: Any) -> Any:
        if where or self.plain.size != 1 or thread_state.recorder is None:
            return reject_read("item()", self.plain.item(*where))
        return Number(compute(np.copy, self).plain)

    def mean(self, axis: Any = None, *more: Any, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if value is not None}
        if more or options.keys() - {"keepdims"} or self.plain.dtype.char not in "fdFD":
            return compute(np.ndarray.mean, self, axis, *more, **options)
        total = self.sum(axis, **options)
        mean = total / np.intp(self.plain.size // max(1, total.size))
        return mean.astype(total.dtype, copy=False)

    def __bool__(self) -> bool:
        value = bool(self.plain)
        if thread_state.recorder is not None:
            thread_state.recorder.truth(self, value)
        return value


_set_plain = Recorded.__dict__["plain"].__set__
keep = Recorded.__dict__["noted"].__set__


class RecordedScalar(Recorded):
    """A stand-in for an immutable NumPy number. ``x += 1`` creates a new number."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.plain[()])

    def __hash__(self) -> int:
        return hash(reject_read("hash()", self.plain[()]))

    def __getattr__(self, name: str) -> Any:
        if name in _READ_NUMBERS or not hasattr(self.plain, name):
            return reject_read(name, getattr(self.plain[()], name))
        value = super().__getattr__(name)
        if not callable(value):
            return _as_scalar(value)
        return lambda *args, **options: _as_scalar(value(*args, **options))

    def __getitem__(self, where: Any) -> Any:
        view = super().__getitem__(where)
        return view.copy() if type(view) is Recorded else view

    __setitem__ = None  # type: ignore[assignment]  # raises TypeError, like numbers


KINDS: set[type] = {Recorded, RecordedScalar}


class Number:
    """A stand-in for the Python number ``array.item()``. The step may return it, but not use it."""

    __slots__ = ("__weakref__", "array", "value")

    def __init__(self, array: Array) -> None:
        self.array, self.value = array, array.item()
        thread_state.recorder.stand_ins.append(weakref.ref(self))

    plain = property(lambda self: reject_read("item()", self.value))
    __class__ = property(lambda self: type(self.value))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.plain, dtype)

    def __getattr__(self, name: str) -> Any:
        return reject_read("item()", getattr(self.value, name))  # may raise AttributeError


STAND_INS = dict.fromkeys((Recorded, RecordedScalar, Number))  # in this order in program.py


# Python looks up special methods in the class, so __getattr__ does not implement them ------------


def _reading(method: str, words: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        is_number = type(self) is RecordedScalar and method != "__complex__"  # few have __complex__
        value = self.plain[()] if is_number else self.plain
        return getattr(reject_read(words, value), method)(*unwrap(args))

    return call


def _reducing(ufunc: np.ufunc, dtype: Any = None, takes_dtype: bool = True) -> Callable[..., Any]:
    def method(self: Any, axis: Any = None, *more: Any, **options: Any) -> Any:
        more = more if takes_dtype else (None, *more)
        wanted = (*more, None)[0] or options.pop("dtype", None) or dtype
        options.update(zip(("out", "keepdims", "initial", "where"), more[1:], strict=False))
        return compute(ufunc.reduce, self, axis=axis, dtype=wanted, **options)

    return method


_READERS = {"float": "float()", "int": "int()", "complex": "complex()", "index": "an index",
            "contains": "in", "repr": "repr()", "str": "str()", "format": "format()",
            "bytes": "bytes()", "reduce_ex": "a copy or pickle", "dlpack": "DLPack"}  # fmt: skip
_METHODS: dict[str, Any] = {
    "__len__": lambda self: len(self.plain),
    "__iter__": lambda self: (self[row] for row in range(len(self))),
    "__pow__": lambda self, other: compute(operator.pow, self, other),
    "__rpow__": lambda self, other: compute(operator.pow, other, self),
    "repeat": lambda self, repeats, axis=None: compute(
        np.ndarray.repeat, self, np.asarray(repeats).tolist(), axis
    ),
    "copy": lambda self, order="C": compute(np.copy, self, order),
    "dot": lambda self, *args, **options: compute(np.ndarray.dot, self, *args, **options),
    "T": property(lambda self: type(self)(self.plain.T)),
    **dict.fromkeys(("__copy__", "__deepcopy__"), lambda self, _=None: self.copy()),
    **{f"__{name}__": _reading(f"__{name}__", words) for name, words in _READERS.items()},
    "sum": _reducing(np.add),
    "prod": _reducing(np.multiply),
    "max": _reducing(np.maximum, takes_dtype=False),
    "min": _reducing(np.minimum, takes_dtype=False),
    "any": _reducing(np.logical_or, np.bool_),
    "all": _reducing(np.logical_and, np.bool_),
}
for _name, _method in _METHODS.items():
    setattr(Recorded, _name, _method)
for _name in ("shape", "dtype", "ndim", "size", "base", "flags"):  # faster than __getattr__
    setattr(Recorded, _name, property(operator.attrgetter(f"plain.{_name}")))
_IN_PLACE = "add sub mul truediv floordiv mod pow lshift rshift and or xor matmul"
for _name in _IN_PLACE.split():
    setattr(RecordedScalar, f"__i{_name}__", lambda self, other: NotImplemented)
for _name in {"__str__", "__reduce_ex__", *vars(int), *vars(float), *vars(complex)}:
    if _name.startswith("__") and _name not in ("__new__", "__getattribute__", "__doc__"):
        setattr(Number, _name, _reading(_name, "item()"))
RecordedScalar.copy = lambda self, _=None: self  # type: ignore[attr-defined]
RecordedScalar.__round__ = _reading("__round__", "round()")  # type: ignore[attr-defined]


def _is_basic(parts: tuple[Any, ...]) -> bool:
    basic = (type(None), type(Ellipsis), slice, int, np.integer)
    return all(type(part) is not bool and issubclass(type(part), basic) for part in parts)


def _has_room_for(dtype: np.dtype[Any], value: Any) -> bool:
    if type(value) is RecordedScalar or isinstance(value, np.generic):
        return dtype.kind not in "iu" or np.can_cast(value.dtype, dtype)
    if type(value) in (list, tuple):
        return all(_has_room_for(dtype, item) for item in value)
    if isinstance(value, (int, float, complex)):
        return np.can_cast(np.min_scalar_type(value), dtype, "same_kind")
    return True


def _as_scalar(value: Any) -> Any:
    """Return a number for a 0-d ``Recorded``, a copy for another ``Recorded``, else ``value``."""
    if type(value) is not Recorded:
        return value
    return value.copy() if value.ndim else RecordedScalar(value.plain)


def _of_numbers(function: Any, args: tuple[Any, ...]) -> Any:
    """Return a function that passes NumPy numbers to ``function`` in place of 0-d arrays.

    Some functions need numbers: Python code may check types, the power of a number differs from
    that of an array, and assignment of a number raises if it does not fit into an integer dtype.
    """
    is_python = type(getattr(function, "_implementation", None)) is FunctionType
    numbers = [n for n, arg in enumerate(args) if RecordedScalar in map(type, items_in(arg))]
    is_changed = function in _WRITE_TO_FIRST and 0 in numbers  # then NumPy raises
    if numbers and (is_python or function in _MIND_NUMBERS or is_changed):
        return functools.partial(_call_with_numbers, function, numbers)
    return function


def _call_with_numbers(function: Any, numbers: list[int], *args: Any, **options: Any) -> Any:
    def number(value: Any) -> Any:
        return value[()] if type(value) is np.ndarray else value

    arguments = [map_items(x, number) if n in numbers else x for n, x in enumerate(args)]
    return function(*arguments, **options)


_ARE_NO_NUMBERS = {Recorded, np.ndarray, int, float, bool, str, type(None), *np.sctypeDict.values()}
_WRITE_TO_FIRST = {np.copyto, np.place, np.putmask}
_MIND_NUMBERS = {operator.pow, operator.setitem, np.ndarray.fill}


# NumPy functions that call the method of the same name if the argument is not an array.
_CALL_METHODS = {np.sum, np.prod, np.mean, np.max, np.min, np.any, np.all, np.clip, np.repeat}
_SAY_NOTHING_OF_VALUES = {np.shape, np.ndim, np.size, np.result_type, np.can_cast, np.iscomplexobj,
                          np.isrealobj, np.may_share_memory, np.shares_memory}  # fmt: skip
_HAVE_ANY_SHAPE = {np.nonzero, np.flatnonzero, np.argwhere, np.unique, np.compress, np.extract,
                   np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d, np.trim_zeros,
                   np.bincount}  # fmt: skip

_READS = {"byteswap", "compress", "data", "flat", "tolist", "tobytes", "tofile", "dump", "dumps",
          "nonzero"}  # fmt: skip
_READ_NUMBERS = {*_READS, "sort", "partition", "put", "resize", "itemset", "setfield", "fill"}


def _asarray(value: Any, dtype: Any = None) -> Any:
    if type(value) in KINDS or type(value) is Number:
        value = value if dtype is None else value.astype(dtype, copy=False)
        return Recorded(value.plain) if type(value) is RecordedScalar else value
    return compute(np.asarray, value, dtype)


# A replacement of the module numpy for code that supports several array libraries. Its functions
# record the creation of arrays.
_library = ModuleType(np.__name__)
_library.__dict__.update(vars(np), asarray=_asarray)
for _name in ("array", "zeros", "ones", "full", "empty", "arange", "linspace", "eye", "identity"):
    setattr(_library, _name, functools.partial(compute, getattr(np, _name)))
setattr(Recorded, "__array_library__", _library)  # noqa: B010
