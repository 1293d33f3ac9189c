"""A training step that is recorded by its first call and replayed natively by later calls."""

import functools
import gc
import inspect
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain, combinations, product, starmap, zip_longest
from typing import Any, cast

import numpy as np

from flashlight_py import _native
from flashlight_py.autograd import Variable
from flashlight_py.autograd.engine import extension
from flashlight_py.autograd.graph import Leaf
from flashlight_py.device import is_cupy
from flashlight_py.structure import changed, count, thread_state
from flashlight_py.tape import arrays as tape_arrays
from flashlight_py.tape.arrays import CannotCapture, arrays_in, arrays_of, data_of, map_items
from flashlight_py.tape.lowering import Memory
from flashlight_py.tape.program import Builder, empty_with_strides
from flashlight_py.tape.recording import CtrlC, Note, Recording, are_numbers, overlaps, warn
from flashlight_py.tape.state import EveryCall, Field, State, parts, plain_arrays, replace_all

_MOST_PROGRAMS = 16
_MOST_TRIES = 64
_MOST_ANEW = 3  # maximum number of successive recordings that fail but may succeed in the next call
_CHECKED = 3  # with check=True: number of replays to compare with the step

_tape = _native.load_extension("tape")
_slots = ("data", "grad", "node", "hook", "buffer", "placement", "changed", "_calc_grad")
_tape.use_variables(Variable, tuple(map(Leaf.__dict__.get, _slots)), _tape.address(count))
_ARE_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class Captured(_tape.Step):  # type: ignore[misc, name-defined]
    """The result of :func:`capture`. A call replays ``step``, or records it, or runs it eagerly."""

    programs: list[Any]  # the latest program is first

    def __init__(self, step: Any, state: Sequence[Any] = (), check: bool = False) -> None:
        functools.update_wrapper(self, step, updated=())
        self.check, self._state = check, state
        self._name = getattr(step, "__qualname__", "step")
        self.slow, self.left, self.programs = self._run, self._run_eagerly, list[Any]()
        self.reason = ""  # why the step stays eager, or ""
        self._tries = self._anew = 0
        self._constants: list[Any] = []  # constants of each of the latest recordings
        self._changes = EveryCall(_MOST_PROGRAMS)
        self._homes: Any = weakref.WeakValueDictionary()  # arrays that replace arrays of the state
        self._graphs: Any = None  # CUDA graphs of a step on GPUs
        self._unchecked: list[Any] = []  # one entry per replay that check=True still compares

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        is_method = instance is not None and not isinstance(self.__wrapped__, staticmethod)
        return types.MethodType(self, instance) if is_method else self

    def __reduce__(self) -> Any:
        names, module = self._name.split("."), sys.modules.get(self.__module__)
        value = functools.reduce(lambda one, name: getattr(one, name, None), names, module)
        if value is self:
            return self._name  # pickles refer to it by name, like a function
        return Captured, (self.__wrapped__, self._state, self.check)

    def _run_eagerly(self, args: tuple[Any, ...], options: dict[str, Any] | None) -> Any:
        return self.__wrapped__(*args, **(options or {}))

    def _run(self, args: tuple[Any, ...], options: dict[str, Any] | None) -> Any:
        # Read the count before the lock: a recording on another thread locks, then increases it.
        stamp = int(count[0])
        if self.reason or thread_state.recorder is not None:
            return self._run_eagerly(args, options)
        call = _Call(self.__wrapped__, self._state, args, options or {}, self._homes)
        # On GPUs ranks vote before each call, so no rank may skip the vote because of the lock.
        is_free = call.is_on_gpu or not Recording.only.locked()
        reason = call.why_not() if is_free else ""
        if reason or not is_free:
            result = self._run_eagerly(args, options)  # raises if the arguments are invalid
            if reason:
                self._stay_eager(reason)
            return result
        if call.is_on_gpu:
            from flashlight_py.tape.graphs import Graphs  # needs the NCCL binding

            self._graphs, self.slow = Graphs(self.__wrapped__, self._state), self._run_on_gpu
            return self.slow(args, options)
        for program in (*self.programs, *self._unchecked):
            if program.signature == call.state.signature:
                program.stamp = stamp
            if program.fits(args, options):
                is_tried = program in self._unchecked
                return self._try(program, call) if is_tried else self(*args, **call.options)
        with CtrlC() as ctrl_c:
            if Recording.only.acquire(blocking=False):
                try:
                    self._tries += 1
                    if reason := self._changes.reason(call.state, self.replays):
                        self._stay_eager(reason)
                    elif self._tries > max(_MOST_TRIES, self.replays):
                        self._stay_eager(
                            f"{self._tries} calls were not replayed and {self.replays} were, since "
                            "shapes, dtypes, values or memory vary; pass changing values as arrays"
                        )
                    # Another thread may have recorded in the meantime.
                    elif call.is_apart() and int(count[0]) == stamp:
                        changed()  # inner captured steps must not replay
                        return self._record(call, ctrl_c)
                finally:
                    Recording.only.release()
        return self._run_eagerly(args, options)

    def _run_on_gpu(self, args: tuple[Any, ...], options: dict[str, Any] | None) -> Any:
        options, graphs, before = options or {}, self._graphs, self._graphs.replays
        if self.reason or thread_state.recorder is not None:
            return self._run_eagerly(args, options)
        if is_checked := self.check and before < _CHECKED:
            call = _Call(self.__wrapped__, self._state, args, options, self._homes)
            saved = call.saved()
        result = graphs(args, options)
        if is_checked and graphs.replays > before:
            self._compare(call, saved, result)
        self.replays = graphs.replays
        if graphs.reason:
            self._stay_eager(graphs.reason)
        return result

    def _record(self, call: "_Call", ctrl_c: CtrlC) -> Any:
        give_back = getattr(extension(), "give_back", lambda: None)
        give_back()  # from now on, large arrays are not in malloc's heap, which seldom shrinks
        recording, collects = call.recording, gc.isenabled()
        gc.disable()  # notes keep all objects, so a collection finds nothing and takes 0.3 to 12 ms
        try:
            call.record(ctrl_c)
            # Results of calls without arrays are constants if they are equal in two recordings.
            constants = recording.constants
            if constants and constants not in self._constants:
                pairs = zip_longest(constants, [*self._constants, []][0][: len(constants)])
                line = next((x[0] for x, y in pairs if x != y), constants[-1][0])
                self._constants = [constants, *self._constants][:_MOST_PROGRAMS]
                if not recording.left:
                    call.is_to_be_continued = True
                    recording.left = (
                        f"arrays that NumPy makes in it differ each time, at {line}; draw random "
                        "ones from fl.random.generator(), whose draws replays draw, and pass others"
                    )
            self._anew = self._anew + 1 if call.is_to_be_continued else 0
            if not recording.left:
                give_back()
                program = _tape.Program(call.description(self._forget), *call.stamp)
                if self.check:
                    self._unchecked += [program] * _CHECKED
                else:
                    self.programs = [program, *self.programs][:_MOST_PROGRAMS]
        except CannotCapture as error:
            recording.left = str(error)
        except TypeError as error:
            note = getattr(error, "add_note", str)  # since Python 3.11
            note("(capture: functions in C may not take what a step is recorded with)")
            raise
        finally:
            result = call.released()
            give_back()
            if collects:
                gc.enable()
        if recording.left and not 0 < self._anew <= _MOST_ANEW:
            self._stay_eager(recording.left)
        return result

    def _forget(self, gone: weakref.ref[Any]) -> None:
        """Delete the programs that use the deleted argument ``gone``."""
        both = self.programs, self._unchecked
        self.programs, self._unchecked = [[x for x in kind if x.is_alive()] for kind in both]

    def _try(self, program: Any, call: "_Call") -> Any:
        """Replay ``program``, compare its result with the result of the step, and return it."""
        replay = _tape.Step()
        replay.programs, replay.slow, replay.left = [program], self.left, self.left
        before = call.saved()
        result = replay(*call.args, **call.options)
        self._compare(call, before, result)
        self._unchecked.remove(program)
        self._changes = EveryCall(_MOST_PROGRAMS)
        if program not in self._unchecked:
            self.programs = [program, *self.programs][:_MOST_PROGRAMS]
        return result

    def _compare(self, call: "_Call", before: State, result: Any) -> None:
        """Run the step from state ``before``. Raise RuntimeError unless it has the same results."""
        after = call.saved(result)
        before.restore()
        expected = call.saved(self._run_eagerly(call.args, call.options))
        if wrong := after.differences(expected):
            self._unchecked, self.programs = [], []
            self.reason = (
                f"capture(check=True): a replay of {self._name} differs from the step itself in "
                f"{', '.join(wrong)}. The step depends on other data than its arguments and named "
                "arrays. Pass the data, or their owner by state="
            )
            raise RuntimeError(self.reason)
        after.restore()  # the arrays of the replay stay in use

    def _stay_eager(self, reason: str) -> None:
        self.reason, self.programs = reason, []
        warn(f"capture: {self._name} stays eager: {reason}")


class _Call:
    """A call of ``step`` and its recording. See ``State`` for ``roots``."""

    def __init__(
        self, step: Any, roots: Sequence[Any], args: Any, options: dict[str, Any], homes: Any
    ) -> None:
        self.step, self.args, self.options, self._homes = step, args, options, homes
        self.values = (*args, *options.values())
        data = list(map(data_of, self.values))
        self.arrays = [x if type(x) is np.ndarray or is_cupy(x) else None for x in data]
        others = [x for x, array in zip(self.values, self.arrays, strict=True) if array is None]
        self._roots = (*roots, *others)  # other arguments, such as a model, may have state
        self.state = State(step, self._roots)
        self._variables = [value for value in self.values if isinstance(value, Variable)]
        arguments = [(Field(x, "data", "argument"), x.data) for x in self._variables]
        self._before = [*self.state.held, *arguments]
        self._grads = {variable: variable.grad for variable in self.state.variables}
        self._existing = plain_arrays(*[value for _, value in self._before], *self.arrays)
        self.is_on_gpu = any(map(is_cupy, self._existing))
        self._moved: dict[int, Any] = {}  # key: id of an old array or tuple of arrays
        # By the id of an object: the object, which is kept alive, and its stand-in.
        self._stand_ins: dict[int, tuple[Any, Any]] = {}
        self.is_to_be_continued = False  # whether the next run of the step may succeed
        self._result: Any = None

    @functools.cached_property
    def recording(self) -> Recording:
        fields = {id(value): field for field, value in self._before}
        variables = [*self.state.variables, *self._variables]
        return Recording(self._existing, self._swap, variables, fields)

    def saved(self, result: Any = None) -> State:
        others = {"what it returns": result, "an argument": self.arrays}
        return State(self.step, self._roots).save(others)

    def is_apart(self) -> bool:
        """Return whether no argument array shares memory with another argument or the state."""
        arguments = plain_arrays(*self.arrays)
        held = plain_arrays(*[value for _, value in self.state.held])
        pairs = chain(combinations(arguments, 2), product(arguments, held))
        return not any(starmap(np.may_share_memory, pairs))

    def why_not(self) -> str:
        """Return why the step or an argument is not supported, or ""."""
        if any(test(self.step) for test in _ARE_LATER):
            return "it is a generator or a coroutine function"
        if self.state.reason:
            return self.state.reason
        if self.is_on_gpu and any(type(v.data) is np.ndarray for v in self.state.variables):
            return "it names variables on the CPU, and arrays of a GPU"
        for number, (value, array) in enumerate(zip(self.values, self.arrays, strict=True)):
            is_variable, kind = isinstance(value, Variable), cast(Any, type(value))
            is_compared = array is None and kind.__eq__ is not object.__eq__
            if self.is_on_gpu and type(array) is np.ndarray:
                problem = "an array of the CPU, and others are on a GPU"
            elif array is not None and not self.is_on_gpu and not are_numbers(array):
                problem = f"an array of {array.dtype} that is not an aligned array of numbers"
            elif is_variable and (value.calc_grad or value.node):
                problem = "a variable with a gradient"
            elif array is None and not _is_hashable(value):
                problem = f"an object of type {kind.__name__}"
            elif is_compared and plain_arrays(*[part for *_, part in parts(value)]):
                problem = "compared by value, and has arrays that may be others"
            else:
                continue
            return f"argument {number} is {problem}; pass arrays and comparable values"
        return ""

    def record(self, ctrl_c: CtrlC) -> None:
        recording = self.recording
        args = list(map(self._stand_in, self.args))
        options = {name: self._stand_in(value) for name, value in self.options.items()}
        with ExitStack() as stack:
            recording.begin(stack)
            self._result = ctrl_c.let_in(self.step, *args, **options)
        after = State(self.step, self._roots)
        self._settle(after)
        for reason in self.state.changes(after):
            self._leave(*reason)
        after = State(self.step, self._roots) if self._moved else after
        self.stamp = after.signature, int(count[0])

    def _swap(self, on: bool) -> None:
        """If ``on``, replace arrays of the state by stand-ins. Otherwise restore the arrays."""
        change = self._stand_in if on else self._stood_for
        for field, _ in self._before:
            value = field.get()
            if value is not None and (replacement := change(value)) is not value:
                field.set(replacement)

    def _stand_in(self, value: Any) -> Any:
        entry: Any = self._stand_ins.get(id(value))
        if entry is None and type(value) is np.ndarray:
            entry = self._stand_ins[id(value)] = value, tape_arrays.Recorded(value)
            self.recording.stand_ins.append(weakref.ref(entry[1]))
        elif entry is None and isinstance(value, tuple):
            made = map_items(value, self._stand_in, only_tuples=True)
            entry = self._stand_ins[id(value)] = value, made
            self._stand_ins[id(entry[1])] = entry[::-1]
        return entry[1] if entry else value

    def _stood_for(self, value: Any) -> Any:
        if isinstance(value, tuple):
            entry = self._stand_ins.get(id(value))
            return entry[1] if entry else map_items(value, self._stood_for, only_tuples=True)
        return tape_arrays.array_or_number(value)

    def _settle(self, after: State) -> None:
        """For each replaced array of the state, record a copy of the new one to a fixed array."""
        recording, made = self.recording, []
        seen = {(id(field.holder), field.key) for field, _ in self._before}
        for field, value in [x for x in after.held if (id(x[0].holder), x[0].key) not in seen]:
            field.set(self._stood_for(value))
            made += (arrays := plain_arrays(value))
            if any(map(recording.is_made, arrays)) and not isinstance(field.holder, list):
                remedy = "create the array before the call, and write into it"
                self._leave(f"it puts a new array into {field.text}", remedy)
        changed = [
            (field, before, now)
            for field, before in self._before
            if (now := field.get()) is not before and field.slot != "grad"
        ]
        new: list[Any] = []  # (field, old array, new array)
        for field, before, now in changed:
            both = arrays_in(before), arrays_in(now) if type(now) is type(before) else ()
            new += [(field, x, y) for x, y in zip_longest(*both) if x is not y]
        values = [[x for _, x in self._before], [x.grad for x in self._grads], made] if new else []
        held, put = Counter(map(id, arrays_in(values))), Counter([id(now) for *_, now in new])
        for field, before, now in new:
            stays = before is not None and now is not None and recording.is_made(now)
            stays = stays and (now.shape, now.dtype) == (before.shape, before.dtype)
            is_alone = held[id(before)] == put[id(now)] == 1
            if field.slot == "buffer" or not (stays and is_alone):
                recording.leave(f"{field.text} is replaced; write into it instead")
            elif any(np.may_share_memory(x, before) for x in arrays_of(self._result)):
                recording.leave(f"it returns the old array of {field.text}, which it replaces")
        if recording.left:
            return
        homes: dict[int, Any] = {}
        for _, before, now in new:
            # All recordings use ``home``, because the user may keep the array of this run.
            home = self._homes.get(id(before))
            if home is None:
                home = empty_with_strides(before)
                recording.move(before, home)
                self._homes[id(home)] = home
            recording.notes.append(Note(np.copyto, (home, recording.noted(now)), {}, [], [home]))
            np.copyto(home, now)
            homes[id(now)] = self._moved[id(before)] = home
        for field, before, now in changed:
            moved = map_items(now, lambda x: homes.get(id(x), x), only_tuples=True)
            self._moved[id(before)] = moved
            field.set(moved)

    def _leave(self, reason: str, instead: str = "") -> None:
        """Give up this recording. The next call may record again, because its state may differ."""
        self.is_to_be_continued = True
        self.recording.leave(reason, instead)

    def released(self) -> Any:
        """Return the result of the step, and replace all stand-ins by their arrays."""

        def represented(value: Any) -> Any:
            data: Any = value.data if type(value) is Variable else None
            if isinstance(data, tape_arrays.Recorded):
                value.data = np.array(data.plain)
            return tape_arrays.array_or_number(value)

        result, self._result = map_items(self._result, represented), None
        self._stand_ins.clear()
        stand_ins = [x for ref in self.recording.stand_ins if (x := ref()) is not None]
        replace_all(stand_ins, self._stood_for)
        self.recording.notes.clear()  # before the garbage collector visits the objects in them
        return result

    def description(self, forget: Callable[[Any], None]) -> tuple[Any, ...]:
        """Return the program. ``forget`` is called when an argument is deleted."""
        recording, moved = self.recording, self._moved
        memory = Memory(recording, self.arrays)
        kept: list[Any] = []
        bindings, returned = [], arrays_of(self._result)
        for variable, before in self._grads.items():
            home = now = variable.grad
            if now is not None and now is not before:
                if any(np.may_share_memory(now, x) for x in returned):
                    home = variable.grad = now.copy(order="K")  # replays overwrite it
                stand_in = recording.noted(now)
                if memory.of(stand_in).piece in memory.inputs.values():
                    raise CannotCapture("an argument becomes a gradient; copy it")
                kept.append((stand_in, home))
            is_set = variable in recording.grads_set or now is not before
            if is_set or (now is not None and overlaps(memory.changed, now)):
                bindings.append((variable, home))
        builder = Builder(memory, self.values, kept, self._result, forget)
        arrays = plain_arrays(*[moved.get(id(value), value) for _, value in self._before])
        used = {id(x): x for x in arrays if overlaps(memory.touched, x)}
        names = [
            x.described(moved.get(id(value), value))
            for x, value in self.state.names
            # Skip the kept result of an earlier call, which differs each time.
            if not (isinstance(value, Variable) and value.node)
            or overlaps(memory.touched, value.data)
        ]
        # Gradients that the step reads before it sets them.
        reads = [item for item in self._grads.items() if item[0] in recording.grads_read]
        state = tuple(used.values()), tuple(names), reads
        return builder.describe(tuple(self.options), state, bindings)


def _is_hashable(value: Any) -> bool:  # a tuple of arrays is not hashable
    try:
        return hash(value) is not None
    except TypeError:
        return False
