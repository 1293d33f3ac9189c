"""Arrays and numbers that a step is recorded with: they stand for NumPy's, and all uses are noted.

A ``Recorded`` computes what NumPy computes, on the array that it stands for, and leaves a note of
it in the recording of the thread. It is no ndarray, so that nothing can read its elements by
another way than NumPy's protocols and its own methods; it only says that it is one
(``__class__``), for checks of the kind ``isinstance(x, numpy.ndarray)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from flashlight_py.tape.methods import (
    CHANGE_THEMSELVES,
    HAVE_ANY_SHAPE,
    METHODS,
    OWN_WORDS,
    READS,
    SAY_NOTHING_OF_VALUES,
    Methods,
    changes_the_first,
    compute,
    current,
    library,
    plain,
    read,
)


# No ndarray, so that nothing reads its elements unseen: readers have to ask, by
# ``__array_ufunc__``, ``__array_function__``, ``__array__`` or a method. Views need no notes,
# since operands are known by their memory.
class Recorded(NDArrayOperatorsMixin):
    """Stands for ``array``."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    @property
    def plain(self) -> Any:
        """The array."""
        return self.array

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return np.ndarray

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return compute(function, inputs, options, inputs[:1] if method == "at" else ())

    def __array_function__(self, function: Any, _: Any, args: Any, options: Any) -> Any:
        if function in SAY_NOTHING_OF_VALUES:
            return function(*map(plain, args), **options)
        if function in HAVE_ANY_SHAPE or (function is np.where and len(args) == 1):
            read(f"{function.__name__}(), whose result may have any shape,")
        if function is np.repeat and any(map(_is_recorded, (*args[1:2], options.get("repeats")))):
            read("repeat(), whose result may have any shape,")
        own = OWN_WORDS.get(function)
        if own is not None:
            return own(*args, **options)
        changed = args[:1] if changes_the_first(function, args, options) else ()
        return compute(function, args, options, changed)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        read("numpy.asarray()")
        return np.array(self.array, dtype) if copy or dtype is not None else self.array

    @classmethod
    def __operation__(cls, function: Any, args: Any, options: Any) -> Any:
        """Do what does more than compute: see ``flashlight_py.device.operation``."""
        recording = current.recording
        if recording is None:
            return function(*plain(args), **plain(options))
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
        if not self.array.flags.c_contiguous:
            read("flat of an array that is not contiguous")
            return self.array.flat
        return self.reshape(-1)

    def __len__(self) -> int:
        return len(self.array)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # else NumPy would read the memory before it asks for __array__
            raise AttributeError(name)
        value = getattr(self.array, name)  # which raises AttributeError as an array does
        if name in READS:
            return _reader(name, value) if callable(value) else _read(name, value)
        if name in METHODS:
            return getattr(Methods, name).__get__(self)
        if callable(value):
            changes = (self,) if name in CHANGE_THEMSELVES else ()
            function = getattr(np.ndarray, name)
            return lambda *args, **options: compute(function, (self, *args), options, changes)
        return Recorded(value) if isinstance(value, np.ndarray) and name != "base" else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "array":
            object.__setattr__(self, name, value)
        else:
            if current.recording is not None:
                current.recording.leave(f"{name} of an array is set")
            setattr(self.array, name, plain(value))

    # Elements -----------------------------------------------------------------------------------

    def __getitem__(self, where: Any) -> Any:
        if _is_basic(where):
            found = self.array[where]
            if isinstance(found, np.ndarray):
                return Recorded(found)
            view = self.array[_to_a_view(where)]
            if view.dtype.kind == "b":
                return compute(np.logical_or, (Recorded(view), False), {})
            return compute(
                np.positive if view.dtype.kind in "iufc" else np.copy, (Recorded(view),), {}
            )
        numbers = _of_numbers(where)
        if _is_basic(numbers) and isinstance(self.array[numbers], np.ndarray):
            read("an index")  # which says where the view lies
            return Recorded(self.array[numbers])
        if _has_truth_values(where):
            read("an index by truth values, whose result may have any shape,")
        return compute(operator.getitem, (self, where), {})

    def __setitem__(self, where: Any, value: Any) -> None:
        if self.array.dtype.kind not in "biufc":
            read("an array that is not of numbers")
            self.array[where] = plain(value)
        elif _is_basic(where):
            view = Recorded(self.array[_to_a_view(where)])
            if _has_room_for(self.array.dtype, value):
                compute(np.copyto, (view, value), {"casting": "unsafe"}, (view,))
            else:
                compute(_set_number, (view, value), {}, (view,))
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
        read("a truth value")
        return bool(self.array)

    def __float__(self) -> float:
        read("float()")
        return float(self.array)

    def __int__(self) -> int:
        read("int()")
        return int(self.array)

    def __complex__(self) -> complex:
        read("complex()")
        return complex(self.array)

    def __index__(self) -> int:
        read("an index")
        return operator.index(self.array)

    def __contains__(self, value: Any) -> bool:
        read("in")
        return value in self.array

    def __repr__(self) -> str:
        read("repr()")
        return repr(self.array)

    def __str__(self) -> str:
        read("str()")
        return str(self.array)

    def __format__(self, how: str) -> str:
        read("format()")
        return format(self.array, how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        read("a copy or pickle")
        return self.array.__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return compute(np.copy, (self,), {})

    def __deepcopy__(self, _: Any) -> Any:
        return compute(np.copy, (self,), {})

    def __hash__(self) -> NoReturn:
        raise TypeError("unhashable type: 'numpy.ndarray'")

    def __bytes__(self) -> bytes:
        read("bytes()")
        return bytes(self.array)

    def __dlpack__(self, **options: Any) -> Any:
        read("DLPack")
        return self.array.__dlpack__(**options)


class RecordedScalar(Recorded):
    """Stands for a number of NumPy, which nothing changes in place: ``x += 1`` makes another."""

    __slots__ = ()

    @property
    def T(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and not hasattr(self.array, name):
            return _read(name, getattr(self.array[()], name))
        if name in CHANGE_THEMSELVES or name == "fill":  # a number does not change
            return lambda *args: getattr(self.array.copy(), name)(*plain(args))
        value = super().__getattr__(name)
        if not callable(value):
            return _as_scalar(value)
        return lambda *args, **options: _as_scalar(value(*args, **options))

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        return found.copy() if type(found) is Recorded else found

    def __setitem__(self, where: Any, value: Any) -> None:
        self.array[()][where] = value  # which raises

    def __round__(self, digits: int | None = None) -> Any:
        if digits is None:
            return _read("round()", round(self.array.item()))
        return compute(np.round, (self, digits), {})

    def __pow__(self, other: Any) -> Any:
        return compute(_power_of_numbers, (self, other), {})

    def __rpow__(self, other: Any) -> Any:
        return compute(_power_of_numbers, (other, self), {})

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _: Any) -> Any:
        return self


def _set_number(target: Any, number: Any) -> None:
    """Set all elements, or raise what whole numbers raise of NaN and of larger ones."""
    target[...] = _as_numbers(number)


def _as_numbers(value: Any) -> Any:
    if type(value) in (list, tuple):
        return [_as_numbers(each) for each in value]
    return value[()] if type(value) is np.ndarray else value


def _has_room_for(dtype: np.dtype[Any], value: Any) -> bool:
    """Return whether elements of ``dtype`` can be set to ``value``, whatever it may be."""
    if type(value) is RecordedScalar or isinstance(value, np.generic):
        return dtype.kind not in "iu" or np.can_cast(value.dtype, dtype)
    if type(value) in (list, tuple):
        return all(_has_room_for(dtype, each) for each in value)
    if isinstance(value, (int, float, complex)):
        return np.can_cast(np.min_scalar_type(value), dtype, "same_kind")
    return True


def _power_of_numbers(one: Any, other: Any) -> Any:
    """Return a power as NumPy's numbers have it, in another way than its arrays."""
    return operator.pow(*(x[()] if type(x) is np.ndarray else x for x in (one, other)))


def _as_scalar(value: Any) -> Any:
    """Return what a method of a number returns: numbers, in the place of arrays of one."""
    is_one = type(value) is Recorded and value.array.ndim == 0
    return RecordedScalar(value.array) if is_one else value


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

KINDS = (Recorded, RecordedScalar)


def _reader(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **options: Any) -> Any:
        read(f"{name}()")
        return value(*args, **options)

    return method


def _read(name: str, value: Any) -> Any:
    read(name)
    return value


def _of_numbers(where: Any) -> Any:
    """Return the index with NumPy's numbers in the place of what stands for them."""
    parts = where if type(where) is tuple else (where,)
    return tuple(part.array[()] if type(part) is RecordedScalar else part for part in parts)


def _is_recorded(value: Any) -> bool:
    return issubclass(type(value), Recorded)


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


class Number:
    """A Python number read from an array, which the step may return, and not use before that."""

    __slots__ = ("array", "value")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.value = array.item()

    @property
    def plain(self) -> Any:
        """The number."""
        return self.value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    @classmethod
    def __operation__(cls, function: Any, args: Any, options: Any) -> Any:
        """Do what does more than compute, as of arrays."""
        return Recorded.__operation__(function, args, options)

    def __getattr__(self, name: str) -> Any:
        read("item()")
        return getattr(self.value, name)


def _reading(name: str) -> Callable[..., Any]:
    def method(self: Number, *args: Any) -> Any:
        read("item()")
        others = [each.value if type(each) is Number else each for each in args]
        return getattr(self.value, name)(*others)

    return method


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
