"""The operands of a step's notes: the memory that each is in, and the notes that are needed."""

from __future__ import annotations

import operator
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from flashlight_py.tape.arrays import Array
from flashlight_py.tape.recording import Note, Recording, address_of, arrays_in, bounds, merged


class CannotCapture(Exception):
    """A step has no program; the message says why."""


@dataclass(eq=False)
class Piece:
    """A piece of memory: all of an ``array`` that the step made, an argument, or other memory.

    In a replay it begins ``at`` an address, in the memory of ``home``. The memory of an
    ``argument``, or of an array that each replay makes anew, differs from call to call: it begins
    ``at`` a number of bytes from the first element, and ``home`` has a copy.
    """

    low: int
    high: int
    array: Any = None
    is_made: bool = False
    argument: int = -1
    at: int = 0
    home: Any = None
    is_strip: bool = False  # room for a strip of elements, which all use in turn

    def is_placed_freely(self) -> bool:
        """Return whether its memory in a replay may be any."""
        return self.is_made and self.argument < 0 and self.home is None


@dataclass(eq=False, slots=True)
class Operand:
    """An array, and the piece of memory in which it lies between two addresses."""

    array: Array
    piece: Piece
    low: int
    high: int
    entry: int = -1  # of the program's table, once it has one

    def overlaps(self, other: Operand) -> bool:
        """Return whether both may have elements in common."""
        return self.low < other.high and other.low < self.high


class Memory:
    """The memory of a recorded step, whose ``arguments`` are arrays, or None where one is none."""

    def __init__(self, recording: Recording, arguments: Sequence[Array | None]) -> None:
        self.recording, self.arguments = recording, arguments
        self.given: dict[int, Piece] = {}  # by the argument's number
        for number, array in enumerate(arguments):
            if array is not None:
                piece = self.given[number] = Piece(*bounds(array), array)
                piece.argument, piece.at = number, piece.low - address_of(array)
        made = [Piece(*bounds(each), each, True) for each in recording.made]
        self.elsewhere = Piece(0, 0)
        pieces = [each for each in (*self.given.values(), *made) if each.low < each.high]
        self._pieces = [self.elsewhere, *sorted(pieces, key=attrgetter("low"))]
        self._operands: dict[int, Operand] = {}  # by their arrays' ids
        where, notes = self.elsewhere, list(map(self.with_operands, recording.notes))
        self.touched, self.changed = (  # in order, of what is neither made nor an argument
            merged([(x.low, x.high) for n in notes for x in getattr(n, name) if x.piece is where])
            for name in ("operands", "written")
        )

    def make(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array that the step makes as well."""
        array = np.empty(shape, dtype)
        insort(self._pieces, Piece(*bounds(array), array, True), key=attrgetter("low"))
        return array

    def of(self, array: Array) -> Operand:
        """Return the operand that an array is."""
        found = self._operands.get(id(array))
        if found is None:
            low, high = bounds(array)
            piece = self._pieces[bisect_right(self._pieces, low, key=attrgetter("low")) - 1]
            piece = piece if low < piece.high else self.elsewhere
            found = self._operands[id(array)] = Operand(array, piece, low, high)
        return found

    def with_operands(self, note: Note) -> Note:
        """Return ``note``, whose operands are found."""
        values = *note.made, *note.changed, *note.args, *note.options.values(), note.required
        note.operands = list(map(self.of, arrays_in(values)))
        return note


# Which notes ------------------------------------------------------------------------------------

_INDEXING = {operator.getitem, np.take, np.ndarray.take, np.take_along_axis, np.choose}


def may_raise(note: Note) -> bool:
    """Return whether values decide if a note raises, which the step then does."""
    function = note.function.args[0] if isinstance(note.function, partial) else note.function
    if function in (np.power, operator.pow):
        return any(each.dtype.kind in "iu" for each in note.made)
    if function is operator.setitem:
        return True
    if function in _INDEXING:
        return any(True for _ in arrays_in(note.args[1:]))
    return getattr(note.function, "__module__", None) == "numpy.linalg"


def hoisted(memory: Memory) -> tuple[Sequence[Note], bool]:
    """Return notes with conditions before whatever changes something, and whether there are any.

    So a step is left, because of a label that is no class, before anything has changed. A check
    by ``structure.require_all`` of values that depend on a change, such as drawn indices, stays in
    its place and raises its error there.

    Raises:
        CannotCapture: another condition depends on a change.
    """
    notes = memory.recording.notes
    end = max((at for at, note in enumerate(notes, 1) if note.required is not None), default=0)
    first: list[Note] = []
    late: list[Note] = []
    changed: dict[Piece, list[Operand]] = {}
    for note in notes[:end]:
        is_condition = note.required is not None
        if (is_condition or not (note.effect or note.changed)) and not any(
            each.overlaps(other) for each in note.operands for other in changed.get(each.piece, ())
        ):
            first.append(note)
            continue
        is_late = any(each.effect for each in late) or any(not p.is_made for p in changed)
        if is_condition and is_late and note.function is np.all:
            raise CannotCapture(
                "a value is checked after something was changed, so that the step could not begin "
                "anew where the check fails"
            )
        raises = is_condition and is_late
        late.append(memory.with_operands(replace(note, required=None)) if raises else note)
        for each in note.written:
            changed.setdefault(each.piece, []).append(each)
    may_leave = any(each.required is not None for each in (*first, *late))
    return [*first, *late, *notes[end:]], may_leave
