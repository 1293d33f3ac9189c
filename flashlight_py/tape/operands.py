"""Operands of notes, the memory of operands, and the order of notes."""

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
    """An error with the reason why the step cannot be captured."""


@dataclass(eq=False)
class Piece:
    """A range of memory: an ``array`` that the step created, an argument, or other memory.

    In a replay, the piece starts at address ``at`` in the array ``home``. But arguments, and
    results that each replay allocates, have a new address in each call. ``argument`` is their
    number, and ``at`` is an offset in bytes from the first element. If a Python function uses an
    argument, ``home`` is memory for a copy of it.
    """

    low: int
    high: int
    array: Any = None
    is_made: bool = False
    argument: int = -1
    at: int = 0
    home: Any = None
    is_strip: bool = False  # whether the piece has memory for one strip of elements only

    def is_placed_freely(self) -> bool:
        return self.is_made and self.argument < 0 and self.home is None


@dataclass(eq=False, slots=True)
class Operand:
    """An array of a note, the ``piece`` that contains it, and its address range."""

    array: Array
    piece: Piece
    low: int
    high: int
    entry: int = -1  # index of its address in the program's table, or -1

    def overlaps(self, other: Operand) -> bool:
        return self.low < other.high and other.low < self.high


class Memory:
    """The memory of a recorded step. ``arguments``: arrays, and None for other arguments."""

    def __init__(self, recording: Recording, arguments: Sequence[Array | None]) -> None:
        self.recording, self.arguments = recording, arguments
        self.inputs: dict[int, Piece] = {}  # by position of the argument
        for number, array in enumerate(arguments):
            if array is not None:
                piece = self.inputs[number] = Piece(*bounds(array), array)
                piece.argument, piece.at = number, piece.low - address_of(array)
        made = [Piece(*bounds(array), array, True) for array in recording.made]
        self.elsewhere = Piece(0, 0)
        pieces = [piece for piece in (*self.inputs.values(), *made) if piece.low < piece.high]
        self._pieces = [self.elsewhere, *sorted(pieces, key=attrgetter("low"))]
        self._operands: dict[int, Operand] = {}  # by id of the array
        where, notes = self.elsewhere, list(map(self.with_operands, recording.notes))
        self.touched, self.changed = (  # address ranges of the state that notes use, and write
            merged([(x.low, x.high) for n in notes for x in getattr(n, name) if x.piece is where])
            for name in ("operands", "written")
        )

    def make(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array. Each replay has memory for it, too."""
        array = np.empty(shape, dtype)
        insort(self._pieces, Piece(*bounds(array), array, True), key=attrgetter("low"))
        return array

    def of(self, array: Array) -> Operand:
        operand = self._operands.get(id(array))
        if operand is None:
            low, high = bounds(array)
            piece = self._pieces[bisect_right(self._pieces, low, key=attrgetter("low")) - 1]
            piece = piece if low < piece.high else self.elsewhere
            operand = self._operands[id(array)] = Operand(array, piece, low, high)
        return operand

    def with_operands(self, note: Note) -> Note:
        values = *note.made, *note.changed, *note.args, *note.options.values(), note.required
        note.operands = list(map(self.of, arrays_in(values)))
        return note


# Order of notes ---------------------------------------------------------------------------------

_INDEXING = {operator.getitem, np.take, np.ndarray.take, np.take_along_axis, np.choose}


def may_raise(note: Note) -> bool:
    """Return whether ``note`` may raise, depending on values. Replays always execute it."""
    function = note.function.args[0] if isinstance(note.function, partial) else note.function
    if function in (np.power, operator.pow):
        return any(array.dtype.kind in "iu" for array in note.made)
    if function is operator.setitem:
        return True
    if function in _INDEXING:
        return any(True for _ in arrays_in(note.args[1:]))
    return getattr(note.function, "__module__", None) == "numpy.linalg"


def hoisted(memory: Memory) -> tuple[Sequence[Note], bool]:
    """Move conditions before changes. Return notes, and whether a replay may stop at a condition.

    A replay stops if a condition fails, for example for an invalid label. Until then it has changed
    nothing, so the step can run eagerly. A check by ``structure.require_all`` may need values that
    the step changes, such as drawn indices. Then the check keeps its place, and raises its error in
    replays. Other conditions that need changed values raise CannotCapture.
    """
    notes = memory.recording.notes
    end = max((at for at, note in enumerate(notes, 1) if note.required is not None), default=0)
    first: list[Note] = []
    late: list[Note] = []
    changed: dict[Piece, list[Operand]] = {}
    for note in notes[:end]:
        is_condition = note.required is not None
        if (is_condition or not (note.effect or note.changed)) and not any(
            x.overlaps(other) for x in note.operands for other in changed.get(x.piece, ())
        ):
            first.append(note)
            continue
        is_late = any(x.effect for x in late) or any(not p.is_made for p in changed)
        if is_condition and is_late and note.function is np.all:
            raise CannotCapture(
                "a value is checked after a change of state, so a failed check could not restart "
                "the step"
            )
        raises = is_condition and is_late
        late.append(memory.with_operands(replace(note, required=None)) if raises else note)
        for operand in note.written:
            changed.setdefault(operand.piece, []).append(operand)
    may_leave = any(x.required is not None for x in (*first, *late))
    return [*first, *late, *notes[end:]], may_leave
