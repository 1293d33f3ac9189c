"""Notes of one run of a step: NumPy's calls, their operands, and the memory of results.

Notes identify arrays by their memory. Views therefore need no notes, and every reader of an array
sees writes in place. Memory that existed before the step is state or an argument. Memory that NumPy
allocates during the step gets a number. Notes refer to it by stand-ins, so that it can be freed
while the recording continues.
"""

import contextlib
import functools
import linecache
import signal
import sys
import threading
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flashlight_py import _native, random
from flashlight_py.autograd import Variable
from flashlight_py.distributed import Work, internal
from flashlight_py.distributed.internal import Call, bounds
from flashlight_py.optim.optimizer import RuleOptimizer
from flashlight_py.structure import require_all, thread_state
from flashlight_py.tape import arrays as tape_arrays
from flashlight_py.tape.arrays import KINDS, Array, Number, Recorded, arrays_in, map_items, unwrap

_tape = _native.load_extension("tape")
_FOLDER, _PACKAGE = map(str, Path(__file__).parents[:2])
_NUMPY = str(Path(np.__file__).parent)
_LIBRARIES = _PACKAGE, _NUMPY, contextlib.__file__
_NUMBERS = {*np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "?", "E"}  # E: bfloat16
are_numbers: Any = lambda x: x.dtype.char in _NUMBERS and x.dtype.isnative and x.flags.aligned  # noqa: E731


@dataclass(slots=True, eq=False)
class Note:
    """One call ``function(*args, **options)`` of plain arrays.

    ``made``: new arrays that the call returned. ``changed``: arrays that the call modified. A note
    with ``effect`` has side effects and is never dropped. ``operands``: one ``Operand`` per array,
    written arrays first. A note with ``required`` is a condition, by ``numpy.all`` or
    ``structure.require_all``: if ``required`` is False in a replay, the step runs eagerly.
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
        return self.operands[: len(self.made) + len(self.changed)]


class Watcher:
    """A recorder of a step, which also notes reads and writes of gradients of ``variables``."""

    # A process records one step at a time: meanwhile, stand-ins replace arrays of the state, which
    # another recording would use.
    only = threading.Lock()

    def __init__(self, variables: Iterable[Variable]) -> None:
        self.left = ""  # why the step cannot be captured, or ""
        self.variables = set(variables)
        self.grads_read: set[Variable] = set()  # read before the step sets them
        self.grads_set: set[Variable] = set()

    def leave(self, reason: str, remedy: str = "") -> None:
        """Set the first reason why the step cannot be captured. Ignore later reasons."""
        if not self.left:
            self.left = f"{reason} at {line_of_user()}" + (remedy and f"; {remedy}")

    def drawing(self, generator: Any) -> Any:
        """Return the object that this thread uses in place of the random ``generator``."""
        return generator

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Record this thread until ``stack`` ends."""
        internal.journal.leave_to_python(1)
        stack.callback(internal.journal.leave_to_python, -1)
        stack.callback(self._switch, False)
        self._switch(True)

    def without(self, function: Callable[[], Any]) -> Any:
        self._switch(False)
        try:
            return function()
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        """Start (``on``) or stop the recording of this thread.

        Each observed variable gets another class, so that access to other variables stays fast.
        """
        thread_state.recorder = None
        for variable in self.variables:
            kind: Any = type(variable)
            if on is not issubclass(kind, _Noted):
                variable.__class__ = _noted_kind(kind) if on else kind.__bases__[1]
        thread_state.recorder = self if on else None


class Recording(Watcher):
    """The notes of a step on this thread, from ``begin`` to ``end``.

    ``before``: arrays that exist before the step. ``swap(on)`` replaces arrays of the state by
    ``Recorded`` stand-ins, or restores the arrays. ``variables`` of the state. ``fields``: the
    fields of arrays, by id.
    """

    def __init__(
        self, before: Iterable[Array], swap: Callable[[bool], None], variables: Iterable[Variable],
        fields: dict[int, Any],
    ) -> None:  # fmt: skip
        super().__init__(variables)
        self.notes: list[Note] = []
        self.made: list[Array] = []  # stand-ins of memory that NumPy allocated
        self._memory = _tape.new_memory()
        self._numbers: set[int] = set()  # numbers of the memory in ``made``
        self._constants: dict[Any, tuple[bytes, Array]] = {}
        self.constants: list[Any] = []  # of each: the line that uses it, dtype, shape and bytes
        self.stand_ins: list[weakref.ref[Any]] = []
        self.pending: set[Later] = set()  # started operations that the step has not waited for
        self._draws, self._swap, self._fields = Draws(), swap, fields
        self._spans = merged(map(bounds, before))

    def begin(self, stack: contextlib.ExitStack) -> None:
        stack.callback(self.end)
        stack.callback(_tape.use_memory, _tape.use_memory(self._memory))
        super().begin(stack)

    def end(self) -> None:
        self._draws.recording = "has ended"
        for stand_in in [stand_in for ref in self.stand_ins if type(stand_in := ref()) in KINDS]:
            tape_arrays.keep(stand_in, None)  # the next recording numbers memory anew
        if self.pending:
            self.leave("the step does not wait for an operation that it starts,")

    def drawing(self, generator: Any) -> "Draws":
        self._draws.generator, self._draws.recording = generator, self
        return self._draws

    def _switch(self, on: bool) -> None:
        switches = self._swap, super()._switch
        for switch in switches if on else reversed(switches):
            switch(on)

    def compute(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return the result of ``function``, and add a note of the call."""
        plain_args, noted_args = self._both(args)
        plain_options, noted_options = options, options
        outs: tuple[Any, ...] = ()
        if not tape_arrays.CONSTANT.issuperset(map(type, options.values())):
            out = options.get("out")
            outs = out if type(out) is tuple else () if out is None else (out,)
            options = options if len(outs) != 1 else {**options, "out": outs[0]}
            both = self._both(options.values())
            plain_options, noted_options = [dict(zip(options, x, strict=True)) for x in both]
            if tape_arrays.RecordedScalar in map(type, outs):
                raise TypeError("out must be an array, got a NumPy number")
        result = function(*plain_args, **plain_options)
        if function is np.matmul and _is_dot(plain_args, result):
            function = np.dot
        made: list[Array] = []
        wrapped = outs[0] if len(outs) == 1 else self.wrap(result, made)
        if made and type(result) in (tuple, list) and len(made) != len(arrays_in(result)):
            self.leave("a function returns new arrays and arrays that share memory,")
        changed = [self._changed(out) for out in outs if out is not None] if outs else []
        if result is None and plain_args and type(plain_args[0]) is np.ndarray:
            changed.append(self._changed(args[0]))  # for example copyto() and sort()
        elif type(function) is not np.ufunc and _has_other_outs(function, args, options, result):
            name = getattr(function, "__name__", "a function")
            self.leave(f"{name}() may write to more than what is passed as out=")
        if (made or changed) and not self.left:
            self.notes.append(Note(function, tuple(noted_args), noted_options, made, changed))
        return wrapped

    def _both(self, values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Return ``values`` twice: with plain arrays for the call, with stand-ins for the note."""
        owns, noted = [], []
        for value in values:
            kind = type(value)
            if kind in KINDS:
                plain, seen = value.plain, value.noted
                if seen is None and (seen := self._noted(plain)) is plain:
                    tape_arrays.keep(value, plain)  # memory of the state does not move
            elif kind in tape_arrays.CONSTANT:
                plain = seen = value
            else:
                plain = unwrap(value)
                seen = self.noted(plain)
            owns.append(plain)
            noted.append(seen)
        return owns, noted

    def _changed(self, value: Any) -> Any:
        """Return the array that represents ``value``, which the call modifies, in notes."""
        noted = getattr(value, "noted", None)
        if noted is None:
            noted = self._noted(unwrap(value))
            if any(noted is constant for _, constant in self._constants.values()):
                problem = "it writes to an array that NumPy created without inputs"
                self.leave(f"{problem}; create it by numpy.empty_like(x),")
        return noted

    def truth(self, value: Any, is_true: bool, function: Any = np.all, args: Any = ()) -> None:
        """Note that this package has read ``value`` as a truth value, which was ``is_true``.

        If a replay reads another truth value before it modifies arrays, the step runs eagerly.
        After that, ``function`` raises. If user code reads a truth value, the recording ends.
        """
        frame, _ = user_frame((_FOLDER, _NUMPY))
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            remedy = "check arguments before the call, and what is computed after it: return that"
            self.leave("a truth value reads a value that is computed in it", remedy)
            return
        condition = value.astype(np.bool_) if is_true else np.logical_not(value)
        self.notes.append(Note(function, args, effect=True, required=self.noted(condition.plain)))

    def effect(
        self, function: Any, inputs: Any = ((), {}), result: Any = None, changed: Any = ()
    ) -> Any:
        """Add a note of ``function``, which had side effects. Return ``result`` with stand-ins."""
        made: list[Array] = []
        wrapped = self.wrap(result, made)
        if not self.left:
            self.notes.append(Note(function, inputs[0], inputs[1], made, list(changed), True))
        return wrapped

    def _frozen(self, value: Any) -> Any:
        """Return ``value`` without stand-ins, as an argument that all replays pass."""
        is_new = isinstance(value, Variable) and value not in self.variables
        if is_new and type(value.data) in KINDS:
            return Variable(unwrap(value.data))
        return value.array if type(value) is Number else unwrap(value)

    def noted(self, value: Any) -> Any:
        """Return ``value`` for a note, with stand-ins for arrays that the step created."""
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
        memory = _tape.find_memory(self._memory, value)
        if memory is not None:
            return memory[1] if memory[0] in self._numbers else self._constant(value, *memory)
        if value.size and not overlaps(self._spans, value):
            self.leave(
                f"it uses an array of shape {value.shape} that is neither an argument nor named "
                "state; pass it, or pass its owner by capture(step, state=[...]),"
            )
        return value

    def move(self, old: Array, new: Array) -> None:
        """Replace ``old`` and views of it in all notes by ``new``, which has the same layout."""
        (low, high), shift = bounds(old), address_of(new) - address_of(old)

        def moved(value: Any) -> Any:
            if type(value) is not np.ndarray or not low <= address_of(value) < high:
                return value
            return array_at(new, address_of(value) + shift, value)

        for note in self.notes:
            for name in ("args", "options", "changed"):
                setattr(note, name, map_items(getattr(note, name), moved))

    def _constant(self, array: Array, number: int, stand_in: Array) -> Array:
        """Return a copy of ``array``, which a call without arrays such as ``np.ones(3)`` made."""
        key = number, address_of(stand_in), array.shape, array.strides, array.dtype.str
        bits = array.tobytes()
        if key not in self._constants or self._constants[key][0] != bits:
            self._constants[key] = bits, array.copy(order="K")
            self.constants.append((line_of_user(), array.dtype.str, array.shape, bits))
        return self._constants[key][1]

    def is_made(self, array: Array) -> bool:
        return _tape.find_memory(self._memory, array) is not None

    def wrap(self, result: Any, made: list[Array]) -> Any:
        """Return stand-ins for arrays in ``result``. Add stand-ins of new memory to ``made``."""
        kind = type(result)
        if kind is tuple or kind is list:
            return kind([self.wrap(item, made) for item in result])
        is_scalar = kind is not np.ndarray and isinstance(result, np.generic)
        if kind is not np.ndarray and not is_scalar:
            return result if result is None else tape_arrays.reject_read("a function", result)
        array = np.asarray(result) if is_scalar else result
        self._check(array)
        memory = _tape.find_memory(self._memory, array) if array.size else None
        if memory is None and array.size and not overlaps(self._spans, array):
            array = array.copy(order="K")  # another thread or library has allocated it
            memory = _tape.find_memory(self._memory, array)
        if memory is not None and memory[0] not in self._numbers:
            self._numbers.add(memory[0])
            base = memory if array.base is None else _tape.find_memory(self._memory, array.base)
            self.made.append(base[1])
            made.append(memory[1])
        noted = array if memory is None else memory[1]
        return tape_arrays.RecordedScalar(array, noted) if is_scalar else Recorded(array, noted)

    def _check(self, array: Array) -> None:
        if not are_numbers(array):
            name = at.text if (at := self._fields.get(id(array))) else "an array"
            self.leave(f"{name} of {array.dtype} is not an aligned array of numbers,")

    def as_one(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run ``function``, which has side effects. Every replay calls it again."""
        if function in self._ones:
            return self._ones[function](self, function, args, options)
        plain_args, plain_options = map_items((args, options), self._frozen)
        noted = self.noted(plain_args), self.noted(plain_options)
        result = self.without(lambda: function(*plain_args, **plain_options))
        both = zip((*args, *options.values()), (*plain_args, *plain_options.values()), strict=True)
        same = [old for old, new in both if new is result and isinstance(new, np.ndarray)]
        if same:  # the result is an argument, changed in place
            self.effect(function, noted, changed=[self.noted(result)])
            return same[0]
        if isinstance(result, float):  # for example a norm of the arrays
            return Number(self.effect(function, noted, np.float64(result), arrays_in(noted)).plain)
        if isinstance(result, (np.ndarray, np.generic)):
            return self.effect(function, noted, result)
        self.effect(function if result is None else _returning(function, result), noted)
        return result

    def check(self, function: Any, args: tuple[Any, ...], _: Any) -> None:
        """Run ``structure.require_all``. Every replay repeats the check."""
        condition, plain = args[0].all(), unwrap(args)
        if type(condition) in KINDS:
            is_met = bool(condition.plain)
            self.truth(condition, is_met, *((function, self.noted(plain)) if is_met else ()))
        function(*plain)

    def step(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Run the step of an optimizer. Every replay repeats the step."""
        optimizer, scale = args[0], unwrap((*args[1:], *options.values(), 1.0)[0])
        if optimizer._shards:  # _step_placed() is recorded instead
            function(*args, **options)
            return
        if any(type(variable.data) not in KINDS for variable in optimizer.params):
            self.leave("an optimizer updates parameters outside of the step's state,")
        grads = [unwrap(variable.grad) for variable in optimizer.params]
        noted: Any = (self.noted(tuple(grads)), {})
        self.without(lambda: function(*args, **options))
        data = [unwrap(variable.data) for variable in optimizer.params]
        step: Any = functools.partial(optimizer.prepared, scale)
        step.prepared = step  # Builder calls prepared() to get the function for replays
        self.effect(step, noted, changed=data)

    # as_one() runs and records these functions by a method of this class.
    _ones: ClassVar[dict[Any, Callable[..., Any]]] = {
        require_all.__wrapped__: check,  # type: ignore[attr-defined]
        RuleOptimizer.step.__wrapped__: step,  # type: ignore[attr-defined]
    }

    def verb(self, group: internal.Membership, calls: Sequence[Call], name: str) -> Work:
        """Run ``calls`` of operation ``name``, and return a stand-in of their ``Work``.

        Every replay repeats the calls.
        """
        first, again = calls[0], RepeatedCalls(group, calls, name)
        stand_ins = [array for call in calls for array in (call.array, call.out)]
        are_recorded = all(array is None or type(array) in KINDS for array in stand_ins)
        if first.refusal or first.received or not are_recorded:
            self.leave("it sends data that is not an array of the step,")
        arrays = unwrap(stand_ins)
        noted: Any = (tuple(self.noted(arrays)), {})
        changed = [array for array in noted[0] if array is not None]
        work: Work = self.without(lambda: again.begin(arrays))
        if not first.blocking:
            return Later(self, work, again, noted, changed)
        result = work.wait()
        if isinstance(result, internal.Matched):
            self.leave("it receives a message of unspecified length or rank,")
        same = [one for one, array in zip(stand_ins, arrays, strict=True) if array is result]
        if isinstance(result, np.ndarray) and not same:
            return internal.Done(self.effect(again, noted, result, changed))
        if not (same or result is None or len(calls) > 1):
            self.leave(f"{name} returns a {type(result).__name__}, which may vary,")
        self.effect(again, noted, changed=changed)
        return internal.Done(same[0] if same else result)


class RepeatedCalls:
    """Calls that each replay repeats with its own arrays, in the same group.

    In place of the recorded world (the group of all ranks), a replay uses the current world.
    """

    work: Work  # the latest work that ``start`` began

    def __init__(self, group: internal.Membership, calls: Sequence[Call], name: str) -> None:
        is_world = group is internal.members_of(None)
        self._group, self.__name__ = None if is_world else group, name
        self._fast = internal.world_fast if is_world else group.fast
        self._calls = [replace(call, array=None, out=None) for call in calls]
        call = calls[0]  # op is interned, because native code compares it by identity
        op = sys.intern(call.op.name.lower()) if call.rows is None else call.rows
        self._rest = op, call.scale, call.root, 0, not call.blocking

    def __call__(self, *arrays: Any) -> Any:
        call = self._calls[0]
        if len(self._calls) == 1 and not call.verb.is_message:
            y = self._fast.collective(call.verb.code, *arrays, *self._rest)
            if y is not NotImplemented:
                return y
        work = self.begin(arrays)
        return work.wait() if call.blocking else work

    def start(self, *arrays: Any) -> None:
        self.work = self(*arrays)

    def begin(self, arrays: Sequence[Any]) -> Work:
        """Start the calls. ``arrays`` has ``array`` and ``out`` of each call in turn."""
        triples = zip(self._calls, arrays[::2], arrays[1::2], strict=True)
        calls = [replace(call, array=array, out=out) for call, array, out in triples]
        return internal.members_of(self._group).run_many(calls, self.__name__)


class Later(Work):
    """The asynchronous ``work`` of a recorded step. A wait for it is recorded, too.

    ``again(*args)`` starts the work in a replay. The work uses the arrays ``changed`` until it is
    completed.
    """

    def __init__(
        self, recording: Recording, work: Work, again: RepeatedCalls, args: Any, changed: Any
    ) -> None:
        self._recording, self._work, self._again, self._changed = recording, work, again, changed
        recording.effect(again.start, args, changed=changed)
        recording.pending.add(self)

    def is_completed(self) -> bool:
        if thread_state.recorder is self._recording:
            self._recording.leave("is_completed() of an operation is called,")
        return self._work.is_completed()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the work and return its result. Every replay waits at this point of the step."""
        recording, again, changed = self._recording, self._again, self._changed
        if thread_state.recorder is not recording:  # the recording has ended
            return self._work.wait(timeout)
        result = recording.without(lambda: self._work.wait(timeout))
        recording.pending.discard(self)
        return recording.effect(lambda: again.work.wait(timeout), result=result, changed=changed)


def _returning(function: Callable[..., Any], recorded: Any) -> Callable[..., None]:
    """Return a function that calls ``function``, and raises unless it returns ``recorded``."""

    def call(*args: Any, **options: Any) -> None:
        result = function(*args, **options)
        if result != recorded:
            raise RuntimeError(
                f"a captured step: expected {function.__qualname__} to return {recorded!r} as in "
                f"the recording, got {result!r}. Do not capture it if its control flow varies"
            )

    return call


class Draws:
    """A stand-in for a random ``generator``. Replays repeat the draws of this thread."""

    generator: Any = None
    recording: Any = "has ended"  # users may keep this object

    def __getattr__(self, name: str) -> Any:
        if name == "bit_generator" and thread_state.recorder is self.recording:
            self.recording.leave("the state of the random generator is read, as by recompute(),")
        value = getattr(self.generator, name)
        return functools.partial(self._draw, name) if callable(value) else value

    def _draw(self, name: str, *args: Any, **options: Any) -> Any:
        recording = self.recording
        result = getattr(self.generator, name)(*unwrap(args), **unwrap(options))
        if thread_state.recorder is not recording:  # another thread calls
            return result
        if any(type(argument) in KINDS for argument in (*args, *options.values())):
            recording.leave("random numbers are drawn with an array of the step")
        again = lambda: getattr(random.generator(), name)(*args, **options)  # noqa: E731
        return recording.effect(again, result=result)


class CtrlC:
    """A context that delays Ctrl-C until it ends, except in the function called by ``let_in``.

    The start and the end of a recording therefore complete. Only the main thread handles signals.
    """

    _waits, _was_pressed = True, False

    def __enter__(self) -> "CtrlC":
        is_main = threading.current_thread() is threading.main_thread()
        self._handler: Any = signal.getsignal(signal.SIGINT) if is_main else None
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._handler)
        if self._was_pressed:
            self._handler(signal.SIGINT, None)

    def let_in(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return ``function(*args, **options)``. Ctrl-C interrupts this function immediately."""
        self._waits = False
        try:
            return function(*args, **options)
        finally:
            self._waits = True

    def _handle(self, number: int, frame: Any) -> None:
        if self._waits:
            self._was_pressed = True
            return
        self._waits = True  # stays True if the handler raises
        self._handler(number, frame)
        self._waits = False


class _Noted:
    """Base of the classes of observed variables. New variables of such a class are not observed."""

    __slots__ = ()
    __init_subclass__ = object.__init_subclass__  # skips the method of a user's class


@functools.cache
def _noted_kind(kind: Any) -> Any:
    def read(variable: Variable) -> Any:
        recorder = thread_state.recorder
        if recorder is not None and variable not in recorder.grads_set:
            recorder.grads_read.add(variable)
        return slot.__get__(variable)  # super() fails if another thread resets the class

    def write(variable: Variable, grad: Any) -> None:
        if thread_state.recorder is not None:
            thread_state.recorder.grads_set.add(variable)
        slot.__set__(variable, grad)

    slot, make = kind.grad, lambda _, *args, **options: kind(*args, **options)
    members = {"__slots__": (), "__new__": make, "grad": property(read, write)}
    return type(kind.__name__, (_Noted, kind), members)


def user_frame(libraries: tuple[str, ...] = _LIBRARIES) -> tuple[Any, int]:
    """Return the innermost frame outside of ``libraries``, and its stacklevel for warnings."""
    frame: Any = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        frame, level = frame.f_back, level + 1
    return frame, level


def warn(text: str) -> None:
    """Show a RuntimeWarning with the line of the user's code."""
    warnings.warn(text, RuntimeWarning, stacklevel=user_frame()[1])


def line_of_user() -> str:
    frame, _ = user_frame()
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f" ({text})" if text else "")


def _is_dot(args: Sequence[Any], result: Any) -> bool:
    """Return whether ``dot`` gives the same bits as ``result``, which is from ``matmul``."""
    a, b = args[:2]
    if not (type(a) is type(b) is np.ndarray and a.ndim == b.ndim == 2 and a.shape[1] > 1):
        return False  # with one column, signs of zeros differ
    product = a.dot(b)
    return bool(product.dtype == result.dtype and product.tobytes() == result.tobytes())


def _has_other_outs(function: Any, args: Any, options: dict[str, Any], result: Any) -> bool:
    """Return whether ``function`` may have modified an argument other than ``out``."""
    if function in _MAY_OVERWRITE:
        return bool in map(type, args) or not {"copy", "overwrite_input"}.isdisjoint(options)
    is_number = isinstance(result, np.generic)  # an array without dimensions may become a number
    others = [x.plain for x in args[2:] if type(x) is Recorded] if len(args) > 2 else ()
    return result is None or any(x is result or (is_number and not x.ndim) for x in others)


_MAY_OVERWRITE = {np.nan_to_num, np.median, np.nanmedian, np.percentile, np.nanpercentile,
                  np.quantile, np.nanquantile}  # fmt: skip


# address_of(array): the address of the first element.
address_of: Callable[[Array], int] = _tape.address
# array_at(owner, address, like): a view of the memory of ``owner``, with the layout of ``like``.
array_at: Callable[[Array, int, Array], Array] = _tape.at


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ``ranges`` in ascending order, with overlapping ranges joined."""
    merged_ranges: list[tuple[int, int]] = []
    for low, high in sorted(set(ranges)):
        if merged_ranges and low < merged_ranges[-1][1]:
            merged_ranges[-1] = merged_ranges[-1][0], max(high, merged_ranges[-1][1])
        elif low < high:
            merged_ranges.append((low, high))
    return merged_ranges


def overlaps(spans: Sequence[tuple[int, int]], array: Any) -> bool:
    """Return whether ``array`` has elements in one of ``spans``, a result of :func:`merged`."""
    low, high = bounds(array)
    index = bisect_right(spans, (high,)) - 1
    return index >= 0 and low < spans[index][1]
