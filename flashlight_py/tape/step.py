"""A training step that is recorded and replayed natively."""

from __future__ import annotations

import functools
import types
import warnings
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from flashlight_py import _native
from flashlight_py.autograd import Variable
from flashlight_py.device import captured_gpu, is_cupy, own_operations
from flashlight_py.tape import blas, kernels
from flashlight_py.tape.arrays import Recorded, RecordedScalar
from flashlight_py.tape.checking import beside, others_drawn, root_of
from flashlight_py.tape.kinds import known_layouts
from flashlight_py.tape.methods import current
from flashlight_py.tape.operands import Touched, outline
from flashlight_py.tape.program import SLOTS, Builder
from flashlight_py.tape.reach import Place, Reach
from flashlight_py.tape.recording import (
    Note,
    Recording,
    address_of,
    bounds,
    gpu_array_of,
    is_number,
    live,
    numbers_of,
    user_frame,
)
from flashlight_py.tape.results import CannotCapture, arrays_of, as_returned, unwrapped

if TYPE_CHECKING:
    from flashlight_py.tape.cuda_graph import GpuStep

_MOST_PROGRAMS = 16
_MOST_TRIES = 64
_CHECKED = 3  # replays, with check=True
_MOST_KINDS = 64  # of arguments
_MOST_OUTLINES = 8  # kept, for each kind of arguments

Array = np.ndarray[Any, Any]

_tape = _native.load("tape")
_SLOT_NAMES = ("data", "grad", "node", "hook", "buffer", "placement", "_calc_grad")
_slots = {name: place for name, (_, place) in known_layouts()[Variable].items()}
_tape.use_slots(Variable, tuple(_slots[name] for name in _SLOT_NAMES))
kernels.install()
_has_blas = blas.connect(_tape)


class Captured(_tape.Step):  # type: ignore[misc, name-defined]
    """The result of :func:`capture`: called like the step."""

    __captured_state__ = ()

    def __init__(self, step: Callable[..., Any], check: bool = False) -> None:
        self.__wrapped__ = step
        self.check = check
        self.slow, self.left = self._run, self._run_anew
        self.reason = ""  # why it stays eager; empty: it does not
        self._seen: dict[Any, deque[Any]] = {}  # what recordings did, by the kind of arguments
        self._tries = 0
        self._trials: list[_Trial] = []  # with check
        # Of what is put in the place of arrays: the array of that place, which nobody else has.
        self._homes: dict[str, Array] = {}
        self._gpu: GpuStep | None = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _run_anew(self, args: tuple[Any, ...], options: dict[str, Any] | None) -> Any:
        return self.__wrapped__(*args, **(options or {}))

    def _run(self, args: tuple[Any, ...], options: dict[str, Any] | None) -> Any:
        step, options = self.__wrapped__, options or {}
        values = (*args, *options.values())
        if self.reason or current.recording is not None or captured_gpu() is not None:
            return step(*args, **options)
        key = (tuple(options), *map(_kind_of, values))
        is_on_gpu = any(gpu_array_of(value) is not None for value in values)
        if None in key and not is_on_gpu:
            number = key.index(None) - 1
            self._stay_eager(
                f"argument {number} is {_described(values[number])}; pass arrays, variables "
                "without gradients, and what can be compared"
            )
            return step(*args, **options)
        for trial in self._trials:
            if trial.fits(args, options or None):
                return self._try(trial, args, options)
        session = None if is_on_gpu else Session(step, values, tuple(options), self._homes)
        if session is None or session.is_on_gpu:
            return self._run_on_gpu(args, options)
        if session.reason:
            self._stay_eager(session.reason)
            return step(*args, **options)
        if not session.can_record() or self._is_first(key):
            result = step(*args, **options)
        else:
            result = self._record(session, key, args, options)
        self._count()
        return result

    @property
    def replays(self) -> int:
        """How many calls were replayed."""
        native: int = super().replays
        return native + (0 if self._gpu is None else self._gpu.replays)

    def _run_on_gpu(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._gpu is None:
            from flashlight_py.tape.cuda_graph import GpuStep

            self._gpu = GpuStep(self.__wrapped__, _CHECKED if self.check else 0)
        before = self._gpu.replays
        try:
            result = self._gpu(args, options)
        except RuntimeError:
            self.reason = self._gpu.reason  # set where a check has failed
            raise
        if self._gpu.replays == before:
            self._count()
        if self._gpu.reason and not self.reason:
            self._stay_eager(self._gpu.reason)
        return result

    def _is_first(self, key: Any) -> bool:
        """Return whether arguments were of this kind for the first time."""
        if key in self._seen:
            return False
        if len(self._seen) >= _MOST_KINDS:
            self._seen.pop(next(iter(self._seen)))
        self._seen[key] = deque(maxlen=_MOST_OUTLINES)
        return True

    def _record(
        self, session: Session, key: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        result, outline = session.record(args, options)
        if session.reason:
            self._stay_eager(session.reason)
        elif outline in self._seen[key] and session.is_at_home:
            self._add(session)
        else:
            self._seen[key].append(outline)
        return result

    def _add(self, session: Session) -> None:
        try:
            description = session.description()
        except CannotCapture as error:
            self._stay_eager(str(error))
            return
        if self.check:
            self._trials.append(_Trial(description))
        else:
            self._use(description)

    def _use(self, description: tuple[Any, ...]) -> None:
        self.add(description)
        self.drop(_MOST_PROGRAMS)

    def _try(self, trial: _Trial, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the step returns, after a replay was found to do the same."""
        try:
            result = beside(self.__wrapped__, trial, args, options)
        except RuntimeError as error:
            self.reason = str(error)
            self._trials.clear()
            self.drop(0)
            raise
        trial.left_to_check -= 1
        if not trial.left_to_check:
            self._trials.remove(trial)
            self._use(trial.description)
        return result

    def _count(self) -> None:
        """Count a call that was not replayed; where most are not, recording does not pay."""
        self._tries += 1
        if self._tries > max(_MOST_TRIES, self.replays) and not self.reason:
            self._stay_eager(
                f"{self._tries} calls could not be replayed, and {self.replays} could. It was "
                "called with ever other shapes, dtypes or values of what are no arrays, with "
                "arrays that are not contiguous or share memory, or found other values of what it "
                "reads from Python; pass what changes as an array"
            )

    def _stay_eager(self, reason: str) -> None:
        self.reason = reason
        self.drop(0)
        name = getattr(self.__wrapped__, "__qualname__", "step")
        message = f"capture: {name} stays eager: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=user_frame()[1])


class _Trial(_tape.Step):  # type: ignore[misc, name-defined]
    """A program that is checked before it is used."""

    def __init__(self, description: tuple[Any, ...]) -> None:
        self.description = description
        self.left_to_check = _CHECKED
        self.add(description)


class Session:
    """One recorded run of a step."""

    def __init__(
        self,
        step: Callable[..., Any],
        values: tuple[Any, ...],
        names: tuple[str, ...],
        homes: dict[str, Array],
    ) -> None:
        self._homes = homes
        self.is_at_home = True  # what is put in the place of arrays can be copied into them
        self._step, self._values, self._names = step, values, names
        self._arrays = [_array_of(value) for value in values]
        # Of arguments that are no arrays, such as the instance of a method.
        self._objects = [v for v, a in zip(values, self._arrays, strict=True) if a is None]
        self._root = root_of(step, self._objects)
        self._reach = Reach(self._root)
        self.is_on_gpu = any(is_cupy(variable.data) for variable in self._reach.variables)
        placements = [variable.placement for variable in self._reach.variables]
        are_known = all(each is None or each.replays for each in placements)
        self.reason = "" if are_known else "it uses a module sharded in a way that is not recorded"

    def can_record(self) -> bool:
        """Return whether arguments are contiguous, and have no memory of others in common."""
        places = [place.get() for place in self._reach.arrays]
        known = [bounds(array) for array in places if type(array) is np.ndarray]
        given = [bounds(array) for array in self._arrays if array is not None]
        is_shared = any(a < end and begin < b for a, b in given for begin, end in known)
        return _are_plain(self._arrays) and not is_shared

    def record(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Run the step and return what it returns, and an outline of what it did."""
        places = self._reach.arrays
        held = [(place, place.get()) for place in places]
        plain = [array for _, array in held if type(array) is np.ndarray]
        self._recording = Recording([*plain, *(a for a in self._arrays if a is not None)])
        self._recorded: dict[int, Recorded] = {}
        self._before = [(variable, variable.grad) for variable in self._reach.variables]
        given = self._swap_in(places)
        position = len(args)
        drawn = others_drawn(self._reach)
        try:
            current.recording = self._recording
            own_operations.append(self._recording)
            result = self._step(
                *given[:position], **dict(zip(options, given[position:], strict=True))
            )
            self._recording.check_operations()
            replaced = self._put_back(held, result)
        finally:
            current.recording = None
            own_operations.remove(self._recording)
            self._swap_out()
        self._result = as_returned(result, {id(one) for one in self._reach.variables})
        self._live = {(id(variable), "grad") for variable in self._reach.variables}
        self._live |= numbers_of(live.values())
        self.reason = self._recording.left
        if others_drawn(self._reach) != drawn and not self.reason:
            self.reason = "it draws random numbers that are not of flashlight_py.random.generator()"
        if self._reach.opaque and not self.reason:
            self.reason = (
                f"it can reach what has a state that cannot be compared: {self._reach.opaque[0]}"
            )
        changed = self._reach.changed(self._live)
        if changed and not self.reason:
            what = "; ".join(changed)
            self.reason = f"it changes what is not an array, which a replay would not do: {what}"
        result = unwrapped(result)
        _unwrap(Reach(functools.partial(id, result)).arrays)  # in objects that it returned
        self._settle(replaced)
        named = {address_of(array): place.words() for place, array, _ in replaced}
        return result, outline(self._recording, self._arrays, named)

    def _settle(self, replaced: list[tuple[Place, Array, Array]]) -> None:
        """Copy what was put in the place of arrays, which others may have, to where replays do."""
        for place, array, now in replaced:
            home = self._homes.get(place.words())
            if self.reason:
                place.set(now)
            elif array is home:
                np.copyto(array, now)
            else:
                self.is_at_home = False
                self._homes[place.words()] = now.copy(order="K")
                place.set(self._homes[place.words()])

    def description(self) -> tuple[Any, ...]:
        """Return the program.

        Raises:
            CannotCapture: there is none.
        """
        touched = Touched(self._recording.notes)
        kept: list[Array] = []
        bindings: list[tuple[Any, ...]] = []
        grads: list[tuple[Any, ...]] = []  # guards of those that the step depends on
        for variable, before in self._before:
            now = variable.grad
            if before is None or touched.is_read_first(before):
                grads.append(("slots", variable, (_slots["grad"],), (before,)))
            if now is not before or (now is not None and touched.is_written(now)):
                bindings.append((variable, SLOTS["grad"], now))
                kept += [] if now is None else [now]
        builder = Builder(
            self._recording, self._arrays, self._values, kept, self._result, _has_blas
        )
        guards = _tape.guards([*Reach(self._root).guards(self._live), *grads])
        return builder.describe(self._names, bindings, guards)

    def _put_back(
        self, held: list[tuple[Place, Any]], result: Any
    ) -> list[tuple[Place, Array, Array]]:
        """Return what took the place of arrays, and let replays copy it into them."""
        returned = [place.get() for place in Reach(functools.partial(id, result)).arrays]
        returned = [each.array for each in returned if type(each) is Recorded]
        returned += arrays_of(as_returned(result, ()))
        new = [
            (place, array, now)
            for place, array in held
            if type(now := place.get()) in (Recorded, RecordedScalar)
            and place.key != "grad"
            and now.array is not array
        ]
        for place, array, now in new:
            is_made = any(now.array is made for made in self._recording.made)
            fits = now.array.shape == array.shape and now.array.dtype == array.dtype
            is_only = sum(one.array is now.array for _, _, one in new) == 1
            is_only &= sum(one is array for _, one in held) == 1
            if not (is_made and fits and is_only) or place.key == "buffer":
                self._recording.leave(f"another array takes the place of {place.words()}")
            if any(np.may_share_memory(array, each) for each in returned):
                self._recording.leave(
                    f"it returns the array in the place of which another one is put: "
                    f"{place.words()}; return a copy"
                )
        for place, array, now in () if self._recording.left else new:
            note = Note(np.copyto, (array, now.array), {}, [], [array])
            self._recording.notes.append(note)
            place.set(array)
        return [] if self._recording.left else [(place, a, now.array) for place, a, now in new]

    def _swap_in(self, places: list[Place]) -> list[Any]:
        for place in places:
            array = place.get()
            if type(array) is np.ndarray:
                place.set(self._stand_in(array))
        given = []
        for value, array in zip(self._values, self._arrays, strict=True):
            if array is None:
                given.append(value)
            elif isinstance(value, Variable):
                value.data = self._stand_in(array)  # type: ignore[assignment]
                given.append(value)
            else:
                given.append(self._stand_in(array))
        return given

    def _stand_in(self, array: Array) -> Recorded:
        return self._recorded.setdefault(id(array), Recorded(array))

    def _swap_out(self) -> None:
        _unwrap(self._reach.arrays)
        _unwrap(Reach(self._root).arrays)  # what the step itself has put somewhere
        for value, array in zip(self._values, self._arrays, strict=True):
            if isinstance(value, Variable):
                value.data = array  # type: ignore[assignment]


def _unwrap(places: list[Place]) -> None:
    """Put arrays in the place of what stands for them."""
    for place in places:
        array = place.get()
        if type(array) in (Recorded, RecordedScalar):
            place.set(array.array if type(array) is Recorded else array.array[()])


def _array_of(value: Any) -> Array | None:
    if isinstance(value, Variable):
        value = value.data
    return value if type(value) is np.ndarray else None


def _are_plain(arrays: list[Array | None]) -> bool:
    """Return whether all are contiguous, and none has memory of another one."""
    given = [array for array in arrays if array is not None]
    spans = sorted(bounds(array) for array in given)
    are_apart = all(one[1] <= other[0] for one, other in pairwise(spans))
    return are_apart and all(each.flags.c_contiguous and each.flags.aligned for each in given)


def _kind_of(value: Any) -> Any:
    """Return what arguments must have in common to be replayed alike; None: it cannot be."""
    array = _array_of(value)
    if array is not None:
        is_leaf = not isinstance(value, Variable) or not (value.calc_grad or value.node)
        is_usable = is_leaf and is_number(array.dtype)
        return (
            (type(value), array.dtype.str, array.shape, array.flags.writeable)
            if is_usable
            else None
        )
    try:
        hash(value)
    except TypeError:
        return None
    return type(value), value


def _described(value: Any) -> str:
    array = _array_of(value)
    if array is not None and not is_number(array.dtype):
        return f"an array of {array.dtype}"
    if isinstance(value, Variable):
        return "a variable with a gradient"
    return f"an object of type {type(value).__name__}"
