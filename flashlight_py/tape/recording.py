"""The notes of one run of a step: what NumPy computed, from what, and where the results are.

Arrays are known by their memory. An operand that lies in the memory of another one is part of it,
however it was made; so views need no notes, and what is written in place is seen by all readers.
"""

from __future__ import annotations

import functools
import linecache
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from flashlight_py import _native, random
from flashlight_py.autograd import Variable
from flashlight_py.device import is_cupy, operations_made
from flashlight_py.tape.arrays import Number, Recorded, RecordedScalar
from flashlight_py.tape.methods import current
from flashlight_py.tape.operations import Later, RecordedGenerator, keeping, returning

_tape = _native.load("tape")
PACKAGE = str(Path(__file__).parent.parent)
_NUMPY = str(Path(np.__file__).parent)


class Note:
    """One call: ``function(*args, **options)`` of plain arrays.

    ``made``: new arrays that it returned; ``changed``: arrays that it wrote to. An ``effect`` does
    more than that, and is never left out. ``required``: a truth value that has to be true.
    """

    __slots__ = ("args", "changed", "effect", "function", "made", "options", "required")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        made: list[np.ndarray[Any, Any]],
        changed: list[np.ndarray[Any, Any]],
        effect: bool = False,
        required: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self.function, self.args, self.options = function, args, options
        self.made, self.changed, self.effect = made, changed, effect
        self.required = required


class Recording:
    """The notes of a step, from ``begin`` to ``end`` on this thread.

    ``known``: arrays that were there before.
    """

    def __init__(self, known: Iterable[np.ndarray[Any, Any]]) -> None:
        self.notes: list[Note] = []
        self.left = ""  # why it cannot be captured, once something was found
        self.made: list[np.ndarray[Any, Any]] = []
        # Arrays that nobody knew, such as numpy.ones(3): they count as constants, if they are the
        # same whenever the step is recorded.
        self.constants: list[np.ndarray[Any, Any]] = []
        self._later: list[Later] = []
        self._made_before = _operations_made()
        random.generator()  # so that there is one, whose state can be compared
        self._drawn = random.state_dict()
        self._starts: list[int] = []
        self._ends: list[int] = []
        for low, high in merged(map(bounds, known)):
            self._starts.append(low)
            self._ends.append(high)

    def knows(self, array: np.ndarray[Any, Any]) -> bool:
        """Return whether the memory is that of an array which was there, or was made and noted."""
        address = address_of(array)
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._ends[place]

    def is_here(self) -> bool:
        """Return whether this is the recording of the thread that asks."""
        return current.recording is self

    def leave(self, reason: str) -> None:
        """Give up; the step goes on, and computes what it would compute without a recording."""
        if not self.left:
            self.left = f"{reason} at {_line_of_user()}"

    # What arrays report -------------------------------------------------------------------------

    def compute(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        changed: tuple[Any, ...],
    ) -> Any:
        """Return what ``function`` returns, noted."""
        plain_args = tuple([self._plain(each) for each in args])
        plain_options = {name: self._plain(each) for name, each in options.items()}
        if "raise" in np.geterr().values():
            self.leave("numpy.errstate lets errors of numbers raise, which no replay does,")
        numbers = tuple(i for i, each in enumerate(args) if type(each) is RecordedScalar)
        if numbers and _is_written_in_python(function):
            function = _of_numbers(function, numbers)
        result = function(*plain_args, **plain_options)
        if numbers and function is not np.ndarray.astype and _is_view_of_number(result, args):
            result = result.copy()  # numbers are no memory
        out = options.get("out")
        given = out if isinstance(out, tuple) else () if out is None else (out,)
        written = [self._plain(each) for each in (*changed, *given) if each is not None]
        written += _outs_by_position(result, args, plain_args)
        made: list[np.ndarray[Any, Any]] = []
        wrapped = given[0] if len(given) == 1 else self.wrap(result, made)
        if made and len(made) != _count_of(result):
            self.leave("new arrays are returned with such as share their memory,")
        if (made or written) and not self.left:
            self.notes.append(Note(function, plain_args, plain_options, made, written))
        return wrapped

    def number(self, array: np.ndarray[Any, Any]) -> Any:
        """Return the only element of ``array``, to be returned by the step."""
        kept = self.compute(np.copy, (Recorded(array),), {}, ())
        return Number(kept.array)

    def require(self, condition: Any) -> None:
        """Note that all of ``condition`` are true; where they are not, the step is left."""
        all_true = condition.all()
        note = Note(_nothing, (), {}, [], [], effect=True, required=all_true.array)
        self.notes.append(note)

    def operation(
        self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Do an operation that does more than compute; it is done again by every replay."""
        handler = handlers.get(function)
        if handler is not None:
            return handler(self, function, args, options)
        plain_args = tuple([self._frozen(each) for each in args])
        plain_options = {name: self._frozen(each) for name, each in options.items()}
        arrays = [*_arrays_in(plain_args), *_arrays_in(tuple(plain_options.values()))]
        made: list[np.ndarray[Any, Any]] = []
        self.read_by_replays(*args)
        result = self.without(lambda: function(*plain_args, **plain_options))
        if isinstance(result, (np.ndarray, np.generic)):
            given = (*args, *options.values())
            plain = (*plain_args, *plain_options.values())
            same = [old for old, new in zip(given, plain, strict=True) if new is result]
            if same:  # what was changed in place
                self.effect(function, plain_args, plain_options, [], [np.asarray(result)])
                return same[0]
            wrapped = self.wrap(result, made)
            self.effect(function, plain_args, plain_options, made, [])
            return wrapped
        if isinstance(result, float):  # that is computed from the arrays, such as a norm
            self.wrap(np.float64(result), made)
            self.effect(function, plain_args, plain_options, made, arrays)
            return Number(made[0])
        if result is None or isinstance(result, (bool, int, str, list)):
            again = function if result is None else returning(function, result)
            self.effect(again, plain_args, plain_options, [], [])
            return result
        cell: list[Any] = []
        self.effect(keeping(function, cell), plain_args, plain_options, [], arrays)
        self._later.append(Later(self, result, cell, arrays))
        return self._later[-1]

    @staticmethod
    def read_by_replays(*objects: object) -> None:
        """Note whose numbers operations read and change by themselves, in every replay."""
        for each in objects:
            if type(each).__weakrefoffset__ and not isinstance(each, (np.ndarray, Variable)):
                live[id(each)] = each

    def effect(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        made: list[np.ndarray[Any, Any]],
        changed: list[np.ndarray[Any, Any]],
    ) -> None:
        """Note an operation that was done."""
        if not self.left:
            self.notes.append(Note(function, args, options, made, changed, effect=True))

    def without(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with nothing noted."""
        self._check_draws()
        current.recording = None
        before = _operations_made()
        try:
            return function()
        finally:
            current.recording = self
            self._made_before += _operations_made() - before
            self._drawn = random.state_dict()

    def check_operations(self) -> None:
        """Leave unless all operations that were made have been noted."""
        if any(each.is_pending for each in self._later):
            self.leave("an operation is begun that the step does not wait for,")
        if _operations_made() != self._made_before:
            self.leave("something is sent that is no array of the step,")
        self._check_draws()

    def _check_draws(self) -> None:
        if random.state_dict() != self._drawn:
            self.leave("random numbers are drawn that are no array of the step,")

    def generator(self, found: Any) -> Any:
        """Return what draws as ``found`` does, and draws again in every replay."""
        return RecordedGenerator(self, found)

    def wrap_drawn(self, draw: Callable[[], Any]) -> Any:
        """Return what ``draw`` returns: every replay draws again."""
        self._check_draws()
        result = draw()
        self._drawn = random.state_dict()
        if not isinstance(result, np.ndarray):
            self.leave("a random number that is drawn as a number of Python")
            return result
        made: list[np.ndarray[Any, Any]] = []
        wrapped = self.wrap(result, made)
        self.effect(draw, (), {}, made, [])
        return wrapped

    # Between arrays and what stands for them ----------------------------------------------------

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        if kind is Recorded or kind is RecordedScalar:
            self._check(value.array)
            return value.array
        if kind is np.ndarray:
            self._check(value)
            if value.size and not self.knows(value):
                self.constants.append(value)
                self._know(value)
            return value
        if kind is Number:
            self.leave("item() reads a value that is computed in it")
            return value.value
        if kind is tuple or kind is list:
            return kind([self._plain(each) for each in value])
        return value

    def _frozen(self, value: Any) -> Any:
        """Return ``value`` as an operation gets it in every replay."""
        held: Any = value.data if isinstance(value, Variable) else None
        if type(held) in (Recorded, RecordedScalar):
            return Variable(held.array)
        return value.array if type(value) is Number else self._plain(value)

    def wrap(self, result: Any, made: list[np.ndarray[Any, Any]]) -> Any:
        kind = type(result)
        if kind is np.ndarray:
            if not result.size or self.knows(result):
                return Recorded(result)
            self._add(result)
            made.append(result)
            return Recorded(result)
        if isinstance(result, np.generic):
            array = np.asarray(result)
            self._add(array)
            made.append(array)
            return RecordedScalar(array)
        if kind is tuple or kind is list:
            return kind([self.wrap(each, made) for each in result])
        if result is not None:
            self.leave("a value is read that is computed in it")
        return result

    def _check(self, array: np.ndarray[Any, Any]) -> None:
        if not is_number(array.dtype):
            self.leave(f"an array of {array.dtype} is no array of numbers,")
        elif not array.flags.aligned:
            self.leave("an array is not aligned,")

    def _add(self, array: np.ndarray[Any, Any]) -> None:
        self._check(array)
        self.made.append(array)
        if array.size:
            self._know(array)

    def _know(self, array: np.ndarray[Any, Any]) -> None:
        low, high = bounds(array)
        place = bisect_right(self._starts, low)
        self._starts.insert(place, low)
        self._ends.insert(place, high)


_NUMBERS = (int, float, complex, str, type(None))

# Objects whose numbers are none of what a replay must find as they were.
live: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()

# Of some functions: what does them and notes them, instead of Recording.operation.
handlers: dict[Any, Callable[[Recording, Any, Any, Any], Any]] = {}


def numbers_of(objects: Iterable[object]) -> set[Any]:
    """Return which private state of ``objects`` is numbers or lists of them, for ``Reach``."""
    found: set[Any] = set()
    for each in objects:
        for name, value in getattr(each, "__dict__", {}).items():
            if name[0] != "_":  # a step may read it for itself: it is compared
                continue
            if isinstance(value, _NUMBERS):
                found.add((id(each), name))
            elif type(value) is list and all(isinstance(item, _NUMBERS) for item in value):
                found.add(id(value))
    return found


def _outs_by_position(result: Any, args: tuple[Any, ...], plain_args: tuple[Any, ...]) -> list[Any]:
    """Return what a function has written to; where that is an array of one, it returns a number."""
    found = [each for each in plain_args[1:] if each is result]
    if isinstance(result, np.generic):
        both = zip(args[2:], plain_args[2:], strict=True)
        found += [p for a, p in both if type(a) is Recorded and not p.ndim]
    return found


def _is_view_of_number(result: Any, args: tuple[Any, ...]) -> bool:
    numbers = (each.array for each in args if type(each) is RecordedScalar)
    return type(result) is np.ndarray and any(np.shares_memory(result, each) for each in numbers)


def _count_of(result: Any) -> int:
    return sum(map(_count_of, result)) if isinstance(result, (tuple, list)) else 1


def _operations_made() -> int:
    return sum(made() for made in operations_made)


def gpu_array_of(value: Any) -> Any:
    """Return the CuPy array of an argument, or None."""
    held = value.data if isinstance(value, Variable) else value
    return held if is_cupy(held) else None


def is_number(dtype: np.dtype[Any]) -> bool:
    """Return whether the tape can hold elements of ``dtype``: numbers as the machine has them."""
    return dtype.kind in "biufc" and dtype.isnative


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return where the first element lies."""
    return _tape.address(array)  # type: ignore[no-any-return]


def bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return the addresses between which all elements lie; the second is behind the last one."""
    return _tape.bounds(array)  # type: ignore[no-any-return]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same memory in order, in pieces that do not overlap."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(set(ranges)):
        if found and low < found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        elif low < high:
            found.append((low, high))
    return found


def _arrays_in(values: tuple[Any, ...]) -> list[np.ndarray[Any, Any]]:
    found = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += _arrays_in(tuple(value))
        elif isinstance(value, Variable):
            found.append(value.data)
        elif type(value) is np.ndarray:
            found.append(value)
    return found


def user_frame() -> tuple[Any, int]:
    """Return the frame outside of this package and NumPy that has led here, and its stacklevel."""
    frame: Any = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((PACKAGE, _NUMPY)):
        frame, level = frame.f_back, level + 1
    return frame, level


def _line_of_user() -> str:
    """Return the line, outside of this package and NumPy, that has led here."""
    frame, _ = user_frame()
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f" ({text})" if text else "")


def _nothing() -> None:
    """Do nothing."""


def _is_written_in_python(function: Any) -> bool:
    """Return whether a function of NumPy may look at which kind of object it is given."""
    return type(getattr(function, "_implementation", None)) is FunctionType and (
        function is not np.clip
    )


@functools.lru_cache(maxsize=256)
def _of_numbers(function: Any, places: tuple[int, ...]) -> Callable[..., Any]:
    """Return ``function``, which gets numbers of NumPy in the place of arrays of one."""

    def call(*args: Any, **options: Any) -> Any:
        given = [each[()] if place in places else each for place, each in enumerate(args)]
        return function(*given, **options)

    call.__qualname__ = f"{function.__name__} of numbers"
    return call
