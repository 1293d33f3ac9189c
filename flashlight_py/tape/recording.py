"""The notes of one run of a step: what NumPy computed, from what, and where the results are.

Arrays are known by their memory: views need no notes, and all readers see writes in place. Memory
that existed before is state, or an argument. Memory that NumPy has allocated since has a number,
and notes have arrays that stand for it: so a recording keeps no memory of the step.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import operator
import signal
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from flashlight_py import _native, random
from flashlight_py.autograd import Variable
from flashlight_py.distributed.internal import leave_to_python
from flashlight_py.structure import thread_state
from flashlight_py.tape.arrays import (
    KINDS,
    Array,
    Number,
    Recorded,
    RecordedScalar,
    items_in,
    keep,
    map_items,
    unwrap,
)

_tape = _native.load("tape")
_HERE, _PACKAGE = map(str, Path(__file__).parents[:2])
_NUMPY = str(Path(np.__file__).parent)
_LIBRARIES = _PACKAGE, _NUMPY, contextlib.__file__
_NUMBERS = {*np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "?", "E"}  # E: bfloat16
are_numbers: Any = lambda x: x.dtype.char in _NUMBERS and x.dtype.isnative and x.flags.aligned  # noqa: E731


@dataclass(slots=True, eq=False)
class Note:
    """One call: ``function(*args, **options)`` of plain arrays.

    ``made``: new arrays that it returned; ``changed``: arrays that it wrote to. An ``effect`` does
    more than that, and is never left out. ``required``: a truth value; if it is
    false, the step runs eagerly. ``function`` is then ``numpy.all`` or ``structure.require_all``.
    ``operands``: of all its arrays, the written ones first; see ``operands.Memory``.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    made: list[Array] = field(default_factory=list)
    changed: list[Array] = field(default_factory=list)
    effect: bool = False
    required: Array | None = None
    operands: list[Any] = field(default_factory=list)

    @property
    def written(self) -> list[Any]:
        """The operands that the call returns anew or writes to."""
        return self.operands[: len(self.made) + len(self.changed)]


class Watcher:
    """A recorder of a step: it notes which gradients of ``variables`` are read and set."""

    # Held while a step of this process is recorded: something may stand for arrays of its state.
    only = threading.Lock()

    def __init__(self, variables: Iterable[Variable]) -> None:
        self.left = ""  # why the step cannot be captured, once something was found
        self.variables = set(variables)
        self.grads_read: set[Variable] = set()  # before they were set
        self.grads_set: set[Variable] = set()

    def leave(self, reason: str, instead: str = "") -> None:
        """Note why the step cannot be captured, and what to write ``instead``; it goes on."""
        if not self.left:
            self.left = f"{reason} at {line_of_user()}" + (instead and f"; {instead}")

    def drawing(self, generator: Any) -> Any:
        """Return what draws for this thread in the place of the package's ``generator``."""
        return generator

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Note what this thread does until ``stack`` ends."""
        leave_to_python(1)
        stack.callback(leave_to_python, -1)
        stack.callback(self._ignore)
        self._listen()

    def without(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with nothing noted."""
        self._ignore()
        try:
            return function()
        finally:
            self._listen()

    def _listen(self) -> None:
        note_gradients(self.variables, True)
        thread_state.recorder = self

    def _ignore(self) -> None:
        thread_state.recorder = None
        note_gradients(self.variables, False)


class Recording(Watcher):
    """The notes of a step on this thread, from ``begin`` to ``end``.

    ``known``: arrays that were there before. ``swap``: called with whether arrays of the state are
    to be ``Recorded`` ones. ``variables``: of the state. ``names``: of its arrays, by their ids.
    """

    def __init__(
        self, known: Iterable[Array], swap: Callable[[bool], None], variables: Iterable[Variable],
        names: dict[int, str],
    ) -> None:  # fmt: skip
        super().__init__(variables)
        self.notes: list[Note] = []
        self.made: list[Array] = []  # of each, what stands for all of its memory
        self._memory = _tape.new_memory()
        self._numbers: set[int] = set()  # of pieces of memory that are in ``made``
        self._constants: dict[Any, tuple[bytes, Array]] = {}
        self.constants: list[Any] = []  # what they hold: the same, if they are none
        self.lines: list[str] = []  # of each, where it is used
        self.stand_ins: list[weakref.ref[Any]] = []
        self._draws, self._swap, self._names = Draws(self), swap, names
        self._spans = merged(map(bounds, known))

    def begin(self, stack: contextlib.ExitStack) -> None:
        stack.callback(self.end)
        stack.callback(_tape.use_memory, _tape.use_memory(self._memory))
        super().begin(stack)

    def end(self) -> None:
        """Forget what stands for arrays, when nothing is noted any more."""
        self._draws.recording = None
        for each in [one for ref in self.stand_ins if type(one := ref()) in KINDS]:
            keep(each, None)  # no other recording knows it

    def leave_reading(self, how: str) -> None:
        self.leave(
            f"{how} reads a value that is computed in it", "return it, and read it after that"
        )

    def drawing(self, generator: Any) -> Draws:
        self._draws.generator = generator
        return self._draws

    def _listen(self) -> None:
        self._swap(True)
        super()._listen()

    def _ignore(self) -> None:
        super()._ignore()
        self._swap(False)

    def compute(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what ``function`` returns, noted."""
        plain_args, noted_args = self._both(args)
        plain_options, noted_options = options, options
        outs: tuple[Any, ...] = ()
        if options:
            out = options.get("out")
            outs = out if type(out) is tuple else () if out is None else (out,)
            options = options if len(outs) != 1 else {**options, "out": outs[0]}
            both = self._both(options.values())
            plain_options, noted_options = [dict(zip(options, x, strict=True)) for x in both]
            if RecordedScalar in map(type, outs):
                raise TypeError("out is a number of NumPy, and no array")
        if not _ARE_NO_NUMBERS.issuperset(map(type, args)):
            function = _of_numbers(function, args)
        result = function(*plain_args, **plain_options)
        if function is np.matmul and _is_dot(plain_args, result):
            function = np.dot
        made: list[Array] = []
        wrapped = outs[0] if len(outs) == 1 else self.wrap(result, made)
        if made and type(result) in (tuple, list) and len(made) != len([*arrays_in(result)]):
            self.leave("new arrays are returned with such as share their memory,")
        changed = [self._changed(each) for each in outs if each is not None]
        if result is None and plain_args and type(plain_args[0]) is np.ndarray:
            changed.append(self._changed(args[0]))  # as by copyto() and sort()
        elif type(function) is not np.ufunc and _has_other_outs(function, args, options, result):
            name = getattr(function, "__name__", "a function")
            self.leave(f"{name}() may write to more than what is passed as out=")
        if (made or changed) and not self.left:
            self.notes.append(Note(function, tuple(noted_args), noted_options, made, changed))
        return wrapped

    def _both(self, values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Return arguments as functions get them, and as they are noted."""
        owns, noted = [], []
        for value in values:
            kind = type(value)
            if kind in KINDS:
                own, seen = value.plain, value.noted
                if seen is None and (seen := self._noted(own)) is own:
                    keep(value, own)  # state, which stays where it is
            elif kind in _SIMPLE:
                own = seen = value
            else:
                own = unwrap(value)
                seen = self.noted(own)
            owns.append(own)
            noted.append(seen)
        return owns, noted

    def _changed(self, value: Any) -> Any:
        """Return what stands for an array that is written to."""
        noted = getattr(value, "noted", None)
        if noted is None:
            noted = self._noted(unwrap(value))
            if any(noted is constant for _, constant in self._constants.values()):
                self.leave(
                    "an array is written to that NumPy has made in it of nothing; make it like one "
                    "of the step's, such as by numpy.empty_like(x),"
                )
        return noted

    def truth(self, value: Any, found: bool, function: Any = np.all, args: Any = ()) -> None:
        """Note that the truth value is ``found`` wherever code of this package asks for it.

        If a replay finds another one, the step runs eagerly. If the replay has changed something
        before, it calls ``function``, which raises. Code of users gets no such test.
        """
        frame, _ = user_frame((_HERE, _NUMPY))
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            self.leave(
                "a truth value reads a value that is computed in it",
                "check arguments before the call, and what is computed after it: return that",
            )
            return
        is_as_found = value.astype(np.bool_) if found else np.logical_not(value)
        required = self.noted(is_as_found.plain)
        self.notes.append(Note(function, args, effect=True, required=required))

    def effect(
        self, function: Any, given: Any = ((), {}), result: Any = None, changed: Any = ()
    ) -> Any:
        """Note an operation that was done; return what stands for its ``result``."""
        made: list[Array] = []
        wrapped = self.wrap(result, made)
        if not self.left:
            self.notes.append(Note(function, given[0], given[1], made, list(changed), True))
        return wrapped

    def _frozen(self, value: Any) -> Any:
        """Return ``value`` as an operation gets it in every replay."""
        is_new = isinstance(value, Variable) and value not in self.variables
        if is_new and type(value.data) in KINDS:
            return Variable(unwrap(value.data))
        return value.array if type(value) is Number else unwrap(value)

    def noted(self, value: Any) -> Any:
        """Return ``value`` with what stands for arrays' memory in the place of arrays."""
        return map_items(value, self._noted)

    def _noted(self, value: Any) -> Any:
        if type(value) is not np.ndarray:
            if isinstance(value, Variable) and type(value.data) is np.ndarray:
                stand_in = self._noted(value.data)
                return value if stand_in is value.data else Variable(stand_in)
            if isinstance(value, np.ndarray) and type(value) not in KINDS:
                self.leave(f"an array of class {type(value).__name__} is used")
            return value
        self._check(value)
        found = _tape.find_memory(self._memory, value)
        if found is not None:
            return found[1] if found[0] in self._numbers else self._constant(value, *found)
        if value.size and not overlaps(self._spans, value):
            self.leave(
                f"an array of shape {value.shape} is used that is neither passed to it nor among "
                "the state that it names; pass it, or name what holds it, "
                "capture(step, state=[...]),"
            )
        return value

    def move(self, old: Array, new: Array) -> None:
        """Let notes have ``new``, of the same form, in the place of ``old``."""
        (low, high), shift = bounds(old), address_of(new) - address_of(old)

        def moved(value: Any) -> Any:
            if type(value) is not np.ndarray or not low <= address_of(value) < high:
                return value
            return array_at(new, address_of(value) + shift, value)

        for note in self.notes:
            for name in ("args", "options", "changed"):
                setattr(note, name, map_items(getattr(note, name), moved))

    def _constant(self, array: Array, number: int, stand_in: Array) -> Array:
        """Return what an array that was made of nothing, such as numpy.ones(3), holds now."""
        key = number, address_of(stand_in), array.shape, array.strides, array.dtype.str
        bits = array.tobytes()
        if key not in self._constants or self._constants[key][0] != bits:
            self._constants[key] = bits, array.copy(order="K")
            self.constants.append((array.dtype.str, array.shape, bits))
            self.lines.append(line_of_user())
        return self._constants[key][1]

    def is_made(self, array: Array) -> bool:
        """Return whether the memory was allocated by the step."""
        return _tape.find_memory(self._memory, array) is not None

    def wrap(self, result: Any, made: list[Array]) -> Any:
        """Return what stands for a result; new parts of it are added to ``made``."""
        kind = type(result)
        if kind is tuple or kind is list:
            return kind([self.wrap(each, made) for each in result])
        is_scalar = kind is not np.ndarray and isinstance(result, np.generic)
        if kind is not np.ndarray and not is_scalar:
            if result is not None:
                self.leave_reading("a function")
            return result
        array = np.asarray(result) if is_scalar else result
        self._check(array)
        found = _tape.find_memory(self._memory, array) if array.size else None
        if found is None and array.size and not overlaps(self._spans, array):
            array = array.copy(order="K")  # of what another thread or library has allocated
            found = _tape.find_memory(self._memory, array)
        if found is not None and found[0] not in self._numbers:
            self._numbers.add(found[0])
            whole = found if array.base is None else _tape.find_memory(self._memory, array.base)
            self.made.append(whole[1])
            made.append(found[1])
        noted = array if found is None else found[1]
        return RecordedScalar(array, noted) if is_scalar else Recorded(array, noted)

    def _check(self, array: Array) -> None:
        if not are_numbers(array):
            name = self._names.get(id(array), "an array")
            self.leave(f"{name} of {array.dtype} is no array of numbers, or not aligned,")


class Draws:
    """Draws as ``generator``, for which it stands; replays draw too what this thread draws."""

    generator: Any

    def __init__(self, recording: Recording) -> None:
        self.recording: Recording | None = recording  # until it has ended: users may keep this

    def __getattr__(self, name: str) -> Any:
        if name == "generator":  # of a copy that is being made
            raise AttributeError(name)
        recording = self.recording
        if name == "bit_generator" and recording is not None and thread_state.recorder is recording:
            recording.leave("the state of the random generator is read, as by recompute(),")
        found = getattr(self.generator, name)
        return functools.partial(self._draw, name) if callable(found) else found

    def _draw(self, name: str, *args: Any, **options: Any) -> Any:
        recording = self.recording
        result = getattr(self.generator, name)(*unwrap(args), **unwrap(options))
        if recording is None or thread_state.recorder is not recording:  # it is another thread
            return result
        if any(type(each) in KINDS for each in (*args, *options.values())):
            recording.leave("random numbers are drawn with an array of the step")
        again = lambda: getattr(random.generator(), name)(*args, **options)  # noqa: E731
        return recording.effect(again, result=result)


class CtrlC:
    """A block that handles Ctrl-C after its end, or at once within ``let_in``.

    So a KeyboardInterrupt leaves no recording half ended. On threads other than the main thread,
    which alone handles signals, the block does nothing.
    """

    def __init__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._handler: Any = signal.getsignal(signal.SIGINT) if is_main else None
        self._waits, self._was_pressed = True, False

    def __enter__(self) -> CtrlC:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._handler)
        if self._was_pressed:
            self._handler(signal.SIGINT, None)

    def let_in(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return ``function(*args, **options)``, during which Ctrl-C is handled at once."""
        self._waits = False
        try:
            return function(*args, **options)
        finally:
            self._waits = True

    def _handle(self, number: int, frame: Any) -> None:
        if self._waits:
            self._was_pressed = True
            return
        self._waits = True  # if the handler raises, another Ctrl-C waits for the end
        self._handler(number, frame)
        self._waits = False


class _Noted:
    """First base of a class of noted variables; ``type(variable)(array)`` is not noted."""

    __slots__ = ()
    __init_subclass__ = object.__init_subclass__  # classes of users see no subclass


def note_gradients(variables: Iterable[Variable], on: bool) -> None:
    """Let this thread's recorder note, or not, which gradients of ``variables`` are read and set.

    Meanwhile they have a class of their own, so that other variables are as fast as ever.
    """
    for variable in variables:
        kind: Any = type(variable)
        if on is not issubclass(kind, _Noted):
            variable.__class__ = _noted_kind(kind) if on else kind.__bases__[1]


@functools.cache
def _noted_kind(kind: Any) -> Any:
    def read(variable: Variable) -> Any:
        if thread_state.recorder is not None and variable not in thread_state.recorder.grads_set:
            thread_state.recorder.grads_read.add(variable)
        return own.__get__(variable)  # no super(): on another thread the class may change meanwhile

    def write(variable: Variable, grad: Any) -> None:
        if thread_state.recorder is not None:
            thread_state.recorder.grads_set.add(variable)
        own.__set__(variable, grad)

    own, make = kind.grad, lambda _, *args, **options: kind(*args, **options)
    members = {"__slots__": (), "__new__": make, "grad": property(read, write)}
    return type(kind.__name__, (_Noted, kind), members)


def user_frame(libraries: tuple[str, ...] = _LIBRARIES) -> tuple[Any, int]:
    """Return the frame outside of this package and NumPy that has led here, and its stacklevel."""
    frame: Any = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        frame, level = frame.f_back, level + 1
    return frame, level


def line_of_user() -> str:
    frame, _ = user_frame()
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f" ({text})" if text else "")


def _is_dot(args: Sequence[Any], result: Any) -> bool:
    """Return whether ``dot`` has the bits of ``matmul`` here: NumPy may choose other functions."""
    a, b = args[:2]
    if not (type(a) is type(b) is np.ndarray and a.ndim == b.ndim == 2 and a.shape[1] > 1):
        return False  # of one column they differ in the signs of zeros
    found = a.dot(b)
    return bool(found.dtype == result.dtype and found.tobytes() == result.tobytes())


def _has_other_outs(function: Any, args: Any, options: dict[str, Any], result: Any) -> bool:
    """Return whether a function may have written to what is not passed by the name of ``out``."""
    if function in _MAY_OVERWRITE:
        return bool in map(type, args) or not {"copy", "overwrite_input"}.isdisjoint(options)
    is_number = isinstance(result, np.generic)  # as where an array of one is written to
    others = [each.plain for each in args[2:] if type(each) is Recorded] if len(args) > 2 else ()
    return result is None or any(x is result or (is_number and not x.ndim) for x in others)


_WRITE_TO_FIRST = {np.copyto, np.place, np.putmask}
_MAY_OVERWRITE = {np.nan_to_num, np.median, np.nanmedian, np.percentile, np.nanpercentile,
                  np.quantile, np.nanquantile}  # fmt: skip


def _of_numbers(function: Any, args: tuple[Any, ...]) -> Any:
    """Return what gets numbers of NumPy in the place of arrays that stand for them.

    Functions that are written in Python may look at which kind of object they are given. Numbers
    have another way than arrays to powers, and raise where they do not fit into an integer.
    """
    is_python = type(getattr(function, "_implementation", None)) is FunctionType
    numbers = [number for number, each in enumerate(args) if _has_numbers(each)]
    is_changed = function in _WRITE_TO_FIRST and 0 in numbers  # which raises
    if numbers and (is_python or function in _MIND_NUMBERS or is_changed):
        return functools.partial(_call_with_numbers, function, numbers)
    return function


def _call_with_numbers(function: Any, numbers: list[int], *args: Any, **options: Any) -> Any:
    def number(value: Any) -> Any:
        return value[()] if type(value) is np.ndarray else value

    given = [map_items(x, number) if place in numbers else x for place, x in enumerate(args)]
    return function(*given, **options)


_SIMPLE: set[type] = {int, float, bool, str, type(None), *np.sctypeDict.values()}
_ARE_NO_NUMBERS = {Recorded, *_SIMPLE}
_MIND_NUMBERS = {operator.pow, operator.setitem, np.ndarray.fill}


def _has_numbers(value: Any) -> bool:
    is_list = type(value) in (list, tuple)
    return type(value) is RecordedScalar or (is_list and any(map(_has_numbers, value)))


# Where the first element lies; the addresses between which all lie, the second behind the last one.
address_of: Callable[[Array], int] = _tape.address
bounds: Callable[[Array], tuple[int, int]] = _tape.bounds
# An array of the form of the last one at an address in the memory of the first one, its owner.
array_at: Callable[[Array, int, Array], Array] = _tape.at


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same memory in order, in pieces that do not overlap."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(set(ranges)):
        if found and low < found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        elif low < high:
            found.append((low, high))
    return found


def overlaps(spans: Sequence[tuple[int, int]], array: Any, range_of: Any = bounds) -> bool:
    """Return whether elements of ``array`` lie in one of ``spans``, as of :func:`merged`."""
    low, high = range_of(array)
    place = bisect_right(spans, (high,)) - 1
    return place >= 0 and low < spans[place][1]


def arrays_in(value: Any) -> Iterable[Array]:
    """Return the arrays that an argument of a note consists of."""
    for each in items_in(value):
        if type(each) is np.ndarray:
            yield each
        elif isinstance(each, Variable):
            yield each.data
