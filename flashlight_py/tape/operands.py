"""The operands of a step's notes: the memory each is in, and the part needed of it."""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.tape.recording import Note, Recording, address_of, bounds

MADE, ARGUMENT, OUTSIDE = "made", "argument", "outside"
_LINE = 64  # bytes


class Where(NamedTuple):
    """Memory: ``number`` of the array that was made, or of the argument; ``offset`` in bytes."""

    space: str
    number: int
    offset: int


class StepMemory:
    """The array that an address lies in: of those ``made`` by the step, or its ``arguments``."""

    def __init__(
        self, made: Sequence[np.ndarray[Any, Any]], arguments: Sequence[np.ndarray[Any, Any] | None]
    ) -> None:
        self.made = list(made)
        ranges = [(*bounds(each), MADE, number) for number, each in enumerate(made)]
        ranges += [
            (*bounds(each), ARGUMENT, number)
            for number, each in enumerate(arguments)
            if each is not None
        ]
        self._ranges = sorted(each for each in ranges if each[0] < each[1])
        self._starts = [each[0] for each in self._ranges]

    def add(self, array: np.ndarray[Any, Any]) -> None:
        """Count ``array`` as made, too."""
        low, high = bounds(array)
        if low < high:
            place = bisect_right(self._starts, low)
            self._starts.insert(place, low)
            self._ranges.insert(place, (low, high, MADE, len(self.made)))
        self.made.append(array)

    def where(self, array: np.ndarray[Any, Any]) -> Where:
        """Return where the first element of ``array`` lies."""
        address = address_of(array)
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            low, high, space, number = self._ranges[place]
            if address < high:
                return Where(space, number, address - low)
        return Where(OUTSIDE, -1, address)


def arrays_in(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Return the arrays that an argument of a note consists of."""
    if type(value) is np.ndarray:
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from arrays_in(each)
    elif isinstance(value, dict):
        yield from arrays_in(list(value.values()))
    elif hasattr(value, "__captured_arrays__"):
        yield from value.__captured_arrays__


def operands_of(note: Note) -> Iterator[np.ndarray[Any, Any]]:
    """Return all arrays of a note."""
    yield from arrays_in(note.function)
    yield from arrays_in(note.args)
    yield from arrays_in(note.options)
    yield from note.made
    yield from note.changed
    if note.required is not None:
        yield note.required


def read_by(note: Note) -> Iterator[np.ndarray[Any, Any]]:
    """Return the arrays whose values a note depends on."""
    if note.effect:
        yield from operands_of(note)
        return
    is_masked = "where" in note.options  # so that the rest of what is written to stays as it was
    is_copy = note.function is np.copyto and len(note.args) == 2 and not is_masked
    yield from arrays_in(note.args[1:] if is_copy else note.args)
    for name, each in note.options.items():
        if name != "out" or is_masked:
            yield from arrays_in(each)


class Touched:
    """The memory that ``notes`` read and write, in their order."""

    def __init__(self, notes: Iterable[Note]) -> None:
        self._spans = [
            (
                [bounds(each) for each in read_by(note)],
                [(*bounds(each), each.nbytes) for each in (*note.made, *note.changed)],
            )
            for note in notes
        ]

    def is_read_first(self, array: np.ndarray[Any, Any]) -> bool:
        """Return whether they depend on what ``array`` held before they wrote to all of it."""
        low, high = bounds(array)
        for read, written in self._spans:
            if any(begin < high and low < end for begin, end in read):
                return True
            if any(b <= low and high <= e and e - b == nbytes for b, e, nbytes in written):
                return False
        return False

    def is_written(self, array: np.ndarray[Any, Any]) -> bool:
        """Return whether they write to ``array``."""
        low, high = bounds(array)
        return any(b < high and low < e for _, written in self._spans for b, e, _ in written)


def is_outcome(note: Note, memory: StepMemory, kept: set[int]) -> bool:
    """Return whether a note writes to memory that is seen from outside, or does more."""
    if note.effect:
        return True
    for array in (*note.made, *note.changed):
        where = memory.where(array)
        if where.space != MADE or where.number in kept:
            return True
    return False


def _may_raise(note: Note) -> bool:
    """Return whether values decide if a note raises, which the step then does."""
    if note.function in (np.power, operator.pow):
        return any(each.dtype.kind in "iu" for each in note.made)
    if note.function in _INDEXING:
        return any(True for _ in arrays_in(note.args[1:]))
    return getattr(note.function, "__module__", None) == "numpy.linalg"


_INDEXING = {operator.getitem, np.take, np.ndarray.take, np.take_along_axis, np.choose}


def without_dead(notes: Iterable[Note], memory: StepMemory, kept: Iterable[int]) -> list[Note]:
    """Return the notes that something depends on: those ``kept``, of what was made, and effects."""
    seen_outside = set(kept)
    needed = set(seen_outside)
    alive = []
    for note in reversed(list(notes)):
        written = [memory.where(array) for array in (*note.made, *note.changed)]
        is_needed = is_outcome(note, memory, seen_outside) or _may_raise(note)
        if is_needed or any(where.space == MADE and where.number in needed for where in written):
            alive.append(note)
            for array in operands_of(note):
                where = memory.where(array)
                if where.space == MADE:
                    needed.add(where.number)
    return alive[::-1]


class Arena:
    """One piece of memory for all that is only used inside a step; lifetimes do not overlap.

    ``lifetimes``: for each array that was made, by number, the first and the last instruction.
    """

    def __init__(
        self, made: Sequence[np.ndarray[Any, Any]], lifetimes: dict[int, tuple[int, int]]
    ) -> None:
        self._offsets: dict[int, int] = {}
        size = 0
        placed: list[tuple[int, int, int, int]] = []  # begin, end, first, last
        by_size = sorted(lifetimes, key=lambda number: -made[number].nbytes)
        for number in by_size:
            first, last = lifetimes[number]
            low, high = bounds(made[number])
            need = -(-max(1, high - low) // _LINE) * _LINE
            busy = sorted(each for each in placed if each[2] <= last and first <= each[3])
            at = 0
            for begin, end, _, _ in busy:
                if at + need <= begin:
                    break
                at = max(at, end)
            placed.append((at, at + need, first, last))
            self._offsets[number] = at
            size = max(size, at + need)
        self._memory = np.zeros(size + _LINE, np.uint8)
        start = address_of(self._memory)
        self._begin = -(-start // _LINE) * _LINE
        self.nbytes = size

    def address(self, number: int) -> int:
        """Return where array ``number`` begins."""
        return self._begin + self._offsets[number]

    def view(self, number: int, offset: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the array that lies where ``like`` lay in the array that was made."""
        at = self.address(number) + offset - address_of(self._memory)
        return np.ndarray(like.shape, like.dtype, self._memory, at, like.strides)


def outline(
    recording: Recording, arguments: Sequence[np.ndarray[Any, Any] | None], places: dict[int, str]
) -> list[Any]:
    """Return what two runs of a step have in common if they do the same.

    ``places``: of arrays that others are put in the place of, by their addresses, where that is.
    """
    memory = StepMemory(recording.made, arguments)
    unknown: dict[int, Any] = dict(places)
    unknown |= {address_of(each): number for number, each in enumerate(recording.constants)}

    def described(value: Any) -> Any:
        if type(value) is np.ndarray:
            where = memory.where(value)
            if where.space == OUTSIDE and where.offset in unknown:
                where = Where("constant", unknown[where.offset], 0)
            return (*where, value.shape, value.strides, value.dtype.str)
        if isinstance(value, (tuple, list)):
            return tuple(map(described, value))
        if isinstance(value, dict):
            return tuple((name, described(each)) for name, each in value.items())
        if hasattr(value, "__captured_arrays__"):
            return type(value), described(value.__captured_arrays__)
        if isinstance(value, (float, complex, np.generic)):
            return repr(value)
        return value if isinstance(value, (int, str, bool, type(None))) else str(type(value))

    constants: list[Any] = [
        (each.dtype.str, each.shape, hashlib.sha256(each.tobytes()).digest())
        for each in recording.constants
    ]
    notes = [
        (
            getattr(note.function, "__qualname__", type(note.function).__name__),
            *map(described, (note.function, note.args, note.options, note.made, note.changed)),
        )
        for note in recording.notes
    ]
    return [*constants, *notes]
