"""From the notes of a step to the program that replays it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.tape.lowering import Loops, Lowered, Lowering, Product, Reduce, clashes
from flashlight_py.tape.operands import (
    ARGUMENT,
    MADE,
    OUTSIDE,
    Arena,
    StepMemory,
    Where,
    arrays_in,
    operands_of,
    without_dead,
)
from flashlight_py.tape.recording import Note, Recording, address_of, bounds, merged
from flashlight_py.tape.results import CannotCapture, Results, arrays_of

Array = np.ndarray[Any, Any]

# Kinds of arguments, and slots, in csrc/tape/program.h.
ARRAY_ARGUMENT, VARIABLE_ARGUMENT, VALUE_ARGUMENT = range(3)
SLOTS = {"data": 0, "grad": 1}

Group = list[Loops] | Reduce | Product | Note  # what becomes one instruction


class Builder:
    """Makes a program of a recording.

    ``arguments``: for each argument its array, or None, and ``values`` the argument itself.
    ``kept``: arrays that variables have when the step is over. ``result``: what it returned.
    """

    def __init__(
        self,
        recording: Recording,
        arguments: Sequence[Array | None],
        values: Sequence[Any],
        kept: Sequence[Array],
        result: Any,
        has_blas: bool,
    ) -> None:
        self._arguments, self._values = arguments, values
        self._memory = StepMemory(recording.made, arguments)
        self._lowering = Lowering(self._make, has_blas)
        places = map(self._memory.where, kept)
        self._kept = {where.number for where in places if where.space == MADE}
        self._returned = arrays_of(result)
        self._result = result
        self._table: dict[tuple[int, int], int] = {}
        self._keep: list[Any] = [recording.made, list(kept)]
        returned = {
            where.number for where in map(self._memory.where, self._returned) if where.space == MADE
        }
        notes = self._without_constants(recording.notes, returned)
        self._notes = without_dead(notes, self._memory, self._kept | returned)
        self._cells: dict[int, Array] = {}

    def describe(self, names: tuple[str, ...], bindings: list[Any], guards: Any) -> tuple[Any, ...]:
        """Return the program as csrc/tape/program.cc reads it.

        Raises:
            CannotCapture: it cannot be done.
        """
        steps = [(note, self._lowering.lower(note)) for note in self._notes]
        self._check_requirements()
        self._find_cells(note for note, lowered in steps if lowered is None)
        groups = _grouped(steps)
        self._arena = Arena(self._memory.made, self._lifetimes(groups))
        instructions = [self._emit(group) for group in groups]
        results = Results(
            self._values,
            self._arguments,
            lambda array: self._memory.where(array).space != OUTSIDE,
            self._entry,
        )
        result = results.describe(self._result)
        arguments = tuple(
            self._describe_argument(number, value) for number, value in enumerate(self._values)
        )
        table = [place for place, _ in sorted(self._table.items(), key=lambda item: item[1])]
        keep = (self._keep, self._arena, self._cells, self._lowering.constants)
        occupied = merged(map(bounds, self._occupied()))
        return arguments, names, table, instructions, bindings, result, occupied, guards, keep

    def _make(self, shape: tuple[int, ...], dtype: Any) -> Array:
        made = np.empty(shape, dtype)
        self._memory.add(made)
        return made

    # Constants ----------------------------------------------------------------------------------

    def _without_constants(self, notes: list[Note], returned: set[int]) -> list[Note]:
        """Leave out what makes arrays whose values never change, unless they are written to.

        Nor those ``returned``: the user has the array of the recorded call, and may write to it.
        """
        written = {
            self._memory.where(array).number
            for note in notes
            for array in note.changed
            if self._memory.where(array).space == MADE
        }
        left = []
        for note in notes:
            if not _is_constant(note):
                left.append(note)
                continue
            made = note.made[0]
            if self._memory.where(made).number in written | returned:
                original = _again(note)
                self._keep.append(original)
                left.append(Note(np.copyto, (made, original), {}, [], [made]))
            else:
                self._kept.add(self._memory.where(made).number)
        return left

    # Memory -------------------------------------------------------------------------------------

    def _check_requirements(self) -> None:
        """A step that is left on the way must not have changed anything."""
        changed = False
        for note in self._notes:
            if note.required is not None:
                if changed:
                    raise CannotCapture(
                        "a value is checked after something was changed, so that the step could "
                        "not begin anew where the check fails"
                    )
            elif note.effect or any(
                self._memory.where(array).space != MADE for array in (*note.made, *note.changed)
            ):
                changed = True

    def _occupied(self) -> list[Array]:
        """Return what no argument may share memory with: what is written to, and stays.

        Where arguments are written to, also what is read.
        """
        arrays = [array for note in self._notes for array in (*note.made, *note.changed)]
        if any(self._memory.where(each).space == ARGUMENT for each in arrays):
            arrays = [array for note in self._notes for array in operands_of(note)]
        return [each for each in arrays if self._stays(self._memory.where(each))]

    def _stays(self, where: Where) -> bool:
        return where.space == OUTSIDE or (where.space == MADE and where.number in self._kept)

    def _find_cells(self, called: Any) -> None:
        """Give a place of its own to each argument that a function of Python is called with."""
        for note in called:
            for array in operands_of(note):
                where = self._memory.where(array)
                argument = self._arguments[where.number] if where.space == ARGUMENT else None
                if argument is not None and where.number not in self._cells:
                    self._cells[where.number] = np.empty(argument.shape, argument.dtype)
        for note in self._notes:
            for array in (*note.made, *note.changed):
                where = self._memory.where(array)
                if where.space == ARGUMENT and where.number in self._cells:
                    raise CannotCapture(
                        "an argument is changed in place, and passed to a function of Python"
                    )

    def _lifetimes(self, groups: list[Group]) -> dict[int, tuple[int, int]]:
        """Return in which groups each array is used; within one, strips come in any order."""
        found: dict[int, tuple[int, int]] = {}

        def use(array: Array, when: int) -> None:
            where = self._memory.where(array)
            if where.space == MADE and where.number not in self._kept:
                first, last = found.get(where.number, (when, when))
                found[where.number] = min(first, when), max(last, when)

        for when, group in enumerate(groups):
            for array in _arrays_of(group):
                use(array, when)
        for array in self._returned:
            use(array, len(groups))
        return found

    def _entry(self, array: Array) -> int:
        """Return the entry of the table that says where ``array`` begins."""
        where = self._memory.where(array)
        if where.space == OUTSIDE:
            self._keep.append(array)
            place = -1, where.offset
        elif where.space == ARGUMENT:
            place = where.number, where.offset
        elif where.number in self._kept:
            place = -1, address_of(array)
        else:
            place = -1, self._arena.address(where.number) + where.offset
        return self._table.setdefault(place, len(self._table))

    def _view(self, array: Array) -> Array:
        """Return what Python gets in the place of ``array``."""
        where = self._memory.where(array)
        if where.space == MADE and where.number not in self._kept:
            return self._arena.view(where.number, where.offset, array)
        if where.space == ARGUMENT:
            cell = self._cells[where.number]
            return np.ndarray(array.shape, array.dtype, cell.data, where.offset, array.strides)
        return array

    def _views(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return self._view(value)
        if isinstance(value, (tuple, list)):
            return type(value)([self._views(each) for each in value])
        if isinstance(value, dict):
            return {name: self._views(each) for name, each in value.items()}
        if isinstance(value, Variable):
            where = self._memory.where(value.data)
            return value if where.space == OUTSIDE else Variable(self._view(value.data))
        if hasattr(value, "__captured_arrays__"):
            return value.with_arrays([self._view(each) for each in value.__captured_arrays__])
        return value

    # Instructions -------------------------------------------------------------------------------

    def _emit(self, group: Group) -> tuple[Any, ...]:
        if isinstance(group, list):
            return self._emit_loops(group)
        if isinstance(group, Reduce):
            return self._emit_reduction(group)
        return self._emit_product(group) if isinstance(group, Product) else self._emit_call(group)

    def _emit_loops(self, loops: list[Loops]) -> tuple[Any, ...]:
        shape = loops[0].operands[-1].shape
        every = [each for loop in loops for each in loop.operands]
        dimensions, steps = _collapsed(shape, [each.strides for each in every])
        operations = []
        at = 0
        for loop in loops:
            count = len(loop.operands)
            entries = tuple(map(self._entry, loop.operands))
            own = tuple(steps[at : at + count])
            itemsizes = tuple(each.itemsize for each in loop.operands)
            operations.append((loop.function, loop.types, entries, own, itemsizes))
            at += count
        return "loops", dimensions, tuple(operations)

    def _emit_reduction(self, each: Reduce) -> tuple[Any, ...]:
        rows, columns = each.source.shape
        row_step, column_step = each.source.strides
        initial = 0 if each.initial is None else address_of(each.initial)
        entries = self._entry(each.source), self._entry(each.target)
        size = each.source.itemsize
        is_of_floats = each.ufunc is np.add and each.source.dtype.char in "fd"
        if is_of_floats and not each.along_rows and column_step == size and row_step % size == 0:
            return "add_rows", size == 8, *entries, rows, columns, row_step // size
        sizes = rows, columns, row_step, column_step, each.target.itemsize, each.target.itemsize
        return "reduce", each.ufunc, each.types, *entries, *sizes, each.along_rows, initial

    def _emit_product(self, each: Product) -> tuple[Any, ...]:
        return *each.begin, *map(self._entry, each.operands), *each.numbers

    def _emit_call(self, note: Note) -> tuple[Any, ...]:
        if note.required is not None:
            return "require", self._entry(note.required)
        function, args, options = note.function, self._views(note.args), self._views(note.options)
        if hasattr(function, "__captured_arrays__"):
            function = self._views(function).call()
        targets = [self._view(each) for each in note.made]
        if note.effect and not targets and not options:
            return "call", function, args, None
        fill = _filling(function, args, options, targets)
        if hasattr(function, "short") and not targets:
            return "call", *function.short(*args, **options), fill
        return "call", fill, (), None

    def _describe_argument(self, number: int, value: Any) -> tuple[Any, ...]:
        array = self._arguments[number]
        if array is None:
            return VALUE_ARGUMENT, 0, (), 0, value, 0
        kind = VARIABLE_ARGUMENT if isinstance(value, Variable) else ARRAY_ARGUMENT
        cell = self._cells.get(number)
        address = 0 if cell is None else address_of(cell)
        return kind, array.dtype.num, array.shape, address, None, int(array.flags.writeable)


def _filling(
    function: Callable[..., Any], args: Any, options: Any, targets: list[Array]
) -> Callable[[], None]:
    """Return what calls ``function`` and writes what it returns to ``targets``."""
    if not targets:
        return lambda: function(*args, **options)
    if isinstance(function, np.ufunc) and len(targets) == 1:
        return lambda: function(*args, **options, out=targets[0])

    def fill() -> None:
        results = function(*args, **options)
        for target, result in zip(targets, _flattened(results), strict=True):
            if np.shape(result) != target.shape:
                raise RuntimeError(
                    f"a captured step: {getattr(function, '__name__', function)} returned an array "
                    f"of shape {np.shape(result)}, and of {target.shape} when it was recorded; do "
                    "not capture a step whose shapes depend on values"
                )
            target[...] = result

    return fill


def _flattened(results: Any) -> list[Any]:
    if isinstance(results, (tuple, list)):
        return [each for result in results for each in _flattened(result)]
    return [results]


def _grouped(steps: list[tuple[Note, list[Lowered] | None]]) -> list[Group]:
    """Return what becomes one instruction each."""
    groups: list[Group] = []
    for note, lowered in steps:
        if lowered is None:
            groups.append(note)
        for each in lowered or ():
            last = groups[-1] if groups else None
            if not isinstance(each, Loops):
                groups.append(each)
            elif isinstance(last, list) and _go_together(last, each):
                last.append(each)
            else:
                groups.append([each])
    return groups


def _arrays_of(group: Group) -> list[Array]:
    if isinstance(group, list):
        return [array for loops in group for array in loops.operands]
    if isinstance(group, Reduce):
        return [group.source, group.target]
    return list(group.operands if isinstance(group, Product) else operands_of(group))


def _is_constant(note: Note) -> bool:
    if note.effect or note.changed or len(note.made) != 1 or note.options.get("out") is not None:
        return False
    if note.function in _VALUE_FREE:
        return True
    return note.function in _CONSTANT and not [*arrays_in((note.args, note.options))]


def _again(note: Note) -> Array:
    made: Array = note.function(*note.args, **note.options)
    return made


_CONSTANT = {np.asarray, np.array, np.zeros, np.ones, np.full, np.empty, np.arange, np.linspace,
             np.eye, np.identity}  # fmt: skip
_VALUE_FREE = {np.zeros_like, np.ones_like, np.empty_like}


def _go_together(waiting: list[Loops], new: Loops) -> bool:
    """Return whether an operation can be done strip by strip with those before it."""
    shape = new.operands[-1].shape
    if waiting[0].operands[-1].shape != shape:
        return False
    every = [each for loop in (*waiting, new) for each in loop.operands]
    dimensions, _ = _collapsed(shape, [each.strides for each in every])
    if len(dimensions) > 2:
        return False
    target = new.operands[-1]
    for loop in waiting:
        if any(clashes(operand, target) for operand in loop.operands):
            return False
        if any(clashes(operand, loop.operands[-1]) for operand in new.operands):
            return False
    return True


def _collapsed(
    shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return fewer dimensions with the same elements in the same order, and their steps."""
    dimensions: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            continue
        if dimensions and all(
            each[axis] == own[0] * dimensions[0] for each, own in zip(strides, steps, strict=True)
        ):
            dimensions[0] *= shape[axis]
            continue
        dimensions.insert(0, shape[axis])
        for each, own in zip(strides, steps, strict=True):
            own.insert(0, each[axis])
    if not dimensions:
        return (1,), [(0,)] * len(strides)
    return tuple(dimensions), [tuple(own) for own in steps]
