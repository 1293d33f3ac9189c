"""Construction of the program that replays a step, from the notes of a recording."""

import operator
import sys
import weakref
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd.graph import Node
from flashlight_py.distributed.internal import bounds
from flashlight_py.tape import arrays as tape_arrays
from flashlight_py.tape.arrays import Array, CannotCapture, arrays_in, arrays_of, map_items
from flashlight_py.tape.lowering import Group, Instruction, Loops, Memory, Operand, Piece, lowered
from flashlight_py.tape.recording import Note, address_of, array_at, merged

# Kinds of arguments, see csrc/tape/program.h.
ARRAY_ARGUMENT, VARIABLE_ARGUMENT, VALUE_ARGUMENT, OBJECT_ARGUMENT = range(4)

_LARGE_RESULT = 1 << 14  # each replay allocates results of at least this size in bytes


class Builder:
    """A builder of the program of a recorded step.

    ``values``: arguments of the step. ``kept``: for each gradient that the step sets, the array
    that represents it in notes, and the gradient. ``result``: the returned value. ``forget``:
    function to call when one of ``values`` is deleted.
    """

    def __init__(
        self, memory: Memory, values: Sequence[Any], kept: Sequence[Any], result: Any, forget: Any
    ) -> None:
        self._memory, self._values, self._result, self._forget = memory, values, result, forget
        self._noted = memory.recording.noted
        self._returned = [memory.of(self._noted(array)) for array in arrays_of(result)]
        self._kept: list[Piece] = []  # pieces that have an array of their own
        for stand_in, array in kept:
            if memory.of(stand_in).piece.is_made:
                self._keep(memory.of(stand_in).piece, array)
        self._table: dict[tuple[int, int], int] = {}
        self._owners: dict[int, Array] = {}  # for each table entry: the array with this memory

    def _keep(self, piece: Piece, array: Array) -> None:
        piece.home, piece.at = array, bounds(array)[0]
        self._kept.append(piece)

    def describe(self, names: tuple[str, ...], state: Any, bindings: list[Any]) -> tuple[Any, ...]:
        """Return the program for csrc/tape/program.cc, or raise CannotCapture."""
        memory, grads = self._memory, [*self._kept]
        notes = self._needed(hoisted(memory))
        groups = lowered(notes, memory)
        called = {x.piece for call in groups if isinstance(call, Note) for x in call.operands}
        written = {x.piece for note in notes for x in note.written}
        self._find_homes(called, written)
        since = Arena(groups, [x.piece for x in self._returned], grads).since
        bindings = [(*binding, since.get(id(binding[-1]), -1)) for binding in bindings]
        instructions = [self._emit(group) for group in groups]
        result = self._describe_result(self._result)
        arguments = tuple(map(self._describe_argument, range(len(self._values)), self._values))
        # Arguments of a replay must not overlap the ranges ``occupied``.
        are_apart = written.isdisjoint(memory.inputs.values())
        occupied = [*(memory.changed if are_apart else memory.touched)]
        occupied += [bounds(piece.home) for piece in self._kept]
        program = list(self._table), instructions, bindings, result, merged(occupied)
        return arguments, names, state, *program, [*self._owners.values()]

    def _describe_result(self, result: Any) -> tuple[Any, ...]:
        memory, kind = self._memory, type(result)
        if kind in _CONTAINERS:
            parts = tuple(map(self._describe_result, result.values() if kind is dict else result))
            return _CONTAINERS[kind], tuple(result) if kind is dict else None, None, 0, None, parts
        if result is None or kind in (int, float, bool, str, complex):
            return CONSTANT, result, None, 0, None, ()
        is_variable = kind is Variable
        if not is_variable and kind not in _STAND_INS:
            raise CannotCapture(f"it returns an object of type {kind.__name__}")
        if is_variable:
            source, inputs, is_state = result, self._values, result in memory.recording.variables
        else:
            (source,), inputs = arrays_of(result), memory.arguments
            is_state = memory.of(self._noted(source)).piece is memory.elsewhere
        for number, value in enumerate(inputs):
            if value is source:
                return ARGUMENT_ITSELF, None, None, number, None, ()
        if is_state:
            return CONSTANT, tape_arrays.array_or_number(result), None, 0, None, ()
        if not (computed := arrays_of(result)):
            raise CannotCapture("it returns a new variable of an array that it has not computed")
        array: Any = computed[0]
        operand = memory.of(self._noted(array))
        at = len(self._values) - 1 - operand.piece.argument  # a replay allocates the array
        if not operand.piece.is_made or operand.piece.argument < 0:
            (at,) = self._entries([operand])
        if not is_variable:
            return _STAND_INS[kind], None, None, at, array, ()
        node = Node(array.shape, array.dtype, None) if result.node else None  # type: ignore[arg-type]
        return VARIABLE, result.calc_grad, node, at, array, ()

    def _needed(self, notes: Sequence[Note]) -> list[Note]:
        """Return the notes with side effects, or with results that the user or other notes need.

        All replays use the array of a note that creates a constant. But replays copy the constant
        if the step writes to it, or if it is a gradient or result.
        """
        changed = {*self._kept, *(x.piece for x in self._returned)}
        needed = {*changed, self._memory.elsewhere, *self._memory.inputs.values()}
        kept = []
        for note in reversed(notes):
            pieces = [x.piece for x in note.written]
            if needed.isdisjoint(pieces) and not (note.effect or may_raise(note)):
                continue
            if _is_constant(note):
                constant, made = note.function(*note.args, **note.options), note.made[0]
                if pieces[0] not in changed:
                    self._keep(pieces[0], constant)
                    continue
                copy = Note(np.copyto, (made, constant), {}, [], [made])
                note = self._memory.with_operands(copy)  # noqa: PLW2901
            kept.append(note)
            changed.update(pieces if note.changed else ())
            needed.update([x.piece for x in note.operands])
        return kept[::-1]

    def _find_homes(self, called: set[Piece], written: set[Piece]) -> None:
        """Assign a ``home`` to arguments that Python functions use, and mark large returned arrays.

        A replay copies these arguments to their ``home``, and allocates the marked arrays.
        """
        cells = {piece for piece in called if piece.argument >= 0}
        if not cells.isdisjoint(written):
            raise CannotCapture("an argument is changed in place, and passed to a Python function")
        for piece in cells:
            piece.home = empty_with_strides(piece.array)
        pieces = [x.piece for x in self._returned]
        count = len(self._values)
        for array, piece in [(x.array, x.piece) for x in self._returned]:
            is_free = piece.is_placed_freely() and piece not in called and pieces.count(piece) == 1
            is_whole = array.flags.c_contiguous and array.nbytes == piece.high - piece.low
            if is_free and is_whole and array.nbytes >= _LARGE_RESULT:
                piece.argument, count = count, count + 1

    def _entries(self, operands: Sequence[Operand]) -> tuple[int, ...]:
        """Return the indices of ``operands`` in the program's table of addresses."""
        table = self._table
        for operand in operands:
            if operand.entry < 0:
                piece = operand.piece
                key = piece.argument, address_of(operand.array) - piece.low + piece.at
                operand.entry = table.setdefault(key, len(table))
                owner = operand.array if piece.array is None else piece.home
                self._owners.setdefault(operand.entry, owner)
        return tuple([operand.entry for operand in operands])

    def _view(self, value: Any) -> Any:
        """Return ``value`` for a Python call, with views of ``Piece.home`` in place of arrays."""
        if isinstance(value, Variable):
            view = self._view(value.data)
            return value if view is value.data else Variable(view)
        piece = self._memory.of(value).piece if type(value) is np.ndarray else None
        if piece is None or piece.home is None:
            return value
        begin = piece.at if piece.argument < 0 else bounds(piece.home)[0]
        return array_at(piece.home, begin + address_of(value) - piece.low, value)

    def _emit(self, group: Group) -> tuple[Any, ...]:
        if isinstance(group, Loops):
            operations = []
            for ufunc, types, operands, steps in group.operations:
                sizes = [0 if x.piece.is_strip else x.array.itemsize for x in operands]
                operations.append((ufunc, types, self._entries(operands), steps, tuple(sizes)))
            return "loops", group.dimensions, operations
        if isinstance(group, Instruction):
            return *group.begin, *self._entries(group.operands)
        args, options = map_items((group.args, group.options), self._view)
        function: Any = group.function
        if hasattr(function, "prepared"):
            function, args = function.prepared(*args), ()
        targets = list(map(self._view, group.made))
        if group.effect and not targets and not options:
            return "call", function, args
        fill: Any = partial(function, *args, **options)
        if isinstance(function, np.ufunc) and len(targets) == 1:
            fill = partial(fill, out=targets[0])
        elif targets:
            fill = partial(_fill, targets, fill)
        return "call", fill, ()

    def _describe_argument(self, number: int, value: Any) -> tuple[Any, ...]:
        if (piece := self._memory.inputs.get(number)) is not None:
            is_variable = isinstance(value, Variable)
            return VARIABLE_ARGUMENT if is_variable else ARRAY_ARGUMENT, piece.array, piece.home
        kind: Any = type(value)
        if kind.__eq__ is object.__eq__ and kind.__weakrefoffset__:
            return OBJECT_ARGUMENT, weakref.ref(value, self._forget), None
        return VALUE_ARGUMENT, value, None


def empty_with_strides(array: Array) -> Array:
    """Return a new array with the strides of ``array``. Gaps between elements have memory, too."""
    low, high = bounds(array)
    room = np.zeros(high - low, np.uint8)
    return array_at(room, address_of(room) + address_of(array) - low, array)


def _fill(targets: list[Array], function: Any) -> None:
    for target, result in zip(targets, tape_arrays.items_in(function()), strict=True):
        if np.shape(result) != target.shape:
            name = getattr(function.func, "__name__", function.func)
            raise RuntimeError(
                f"a captured step: expected {name} to return shape {target.shape} as in the "
                f"recording, got {np.shape(result)}. Do not capture it if its shapes vary"
            )
        target[...] = result


def _is_constant(note: Note) -> bool:
    if note.effect or note.changed or note.function not in _CONSTANT or len(note.made) != 1:
        return False
    return note.function in _VALUE_FREE or not arrays_in((note.args, note.options))


_VALUE_FREE = {np.zeros_like, np.ones_like, np.empty_like}
_CONSTANT = {*_VALUE_FREE, np.asarray, np.array, np.zeros, np.ones, np.full, np.empty, np.arange,
             np.linspace, np.eye, np.identity}  # fmt: skip


_LINE = 64  # bytes of a cache line
_APART = 4 * _LINE  # bytes between strips, so that they start at different offsets in pages
_LARGE = 1 << 15  # arrays of at least this size in bytes may use the memory of other arrays
_STRIP = 2048  # elements of a strip, as in csrc/tape/loops.cc
_ALWAYS = sys.maxsize
# A used memory range: begin, end, and the first and last instruction that use it.
Part = tuple[int, int, int, int]


class Arena:
    """Memory for pieces that the step creates. Pieces may use the same memory one after another.

    Pieces ``returned`` are in use until the end. ``grads`` are gradients, which have separate
    arrays. Pieces may use these arrays after the last condition, at which a replay may stop, until
    instruction ``since[id(array)]``, the first for the gradient.
    """

    def __init__(
        self, groups: Sequence[Group], returned: Iterable[Piece], grads: Sequence[Piece]
    ) -> None:
        self._instead: dict[Piece, Piece] = {}  # from a piece to the piece whose memory it uses
        self._strips: dict[Piece, int] = {}  # from a piece to the number of its strip
        self._strip_size = 0  # bytes
        self._last_condition = -1
        uses: dict[Piece, list[int]] = {}  # first and last instruction that use a piece
        used = [*([x.piece for x in group.operands] for group in groups), returned]
        for when, pieces in enumerate(used):
            for piece in pieces:
                uses.setdefault(piece, [when, when])[1] = when
        self._uses = {piece: span for piece, span in uses.items() if piece.is_placed_freely()}
        self._large = {piece for piece in self._uses if piece.array.nbytes >= _LARGE}
        for when, group in enumerate(groups if self._large else ()):
            if isinstance(group, Loops):
                self._share(group, when)
            elif isinstance(group, Instruction) and group.begin == ("require",):
                self._last_condition = when
        self.since = {id(piece.home): uses.get(piece, [0])[0] for piece in grads}
        lent = [x.home for x in grads if x.home.flags.c_contiguous and x.home.nbytes >= _LARGE]
        self._assign(sorted(lent, key=lambda home: self.since[id(home)]))

    def _share(self, group: Loops, when: int) -> None:
        """Select large arrays that need only one strip, or can use the memory of another array.

        A strip has the elements that a loop processes at a time. An array that no other loop uses
        needs one strip. A new array can use the memory of an array that is read for the last time,
        if the loop visits all elements of both arrays in the same order.
        """
        columns = group.dimensions[-1] if len(group.dimensions) > 1 else 1
        strip_elements = max(1, _STRIP // columns) * columns  # elements per strip
        first, last = dict[Piece, int](), dict[Piece, int]()
        partial = set()  # pieces that are used in part, or in another order
        for index, operation in enumerate(group.operations):
            for operand, steps in zip(operation.operands, operation.steps, strict=True):
                size, piece = operand.array.itemsize, self._placed(operand.piece)
                first.setdefault(piece, index)
                last[piece] = index
                is_packed = steps == (columns * size, size)[-len(steps) :]
                if not (is_packed and operand.array.nbytes == piece.high - piece.low):
                    partial.add(piece)
        free, count = list[int](), 0
        for index, operation in enumerate(group.operations):
            *read, new = pieces = [x.piece for x in operation.operands]
            is_new = new in self._large and first[new] == index and new not in partial
            is_new = is_new and self._uses[new][0] == when
            if is_new and self._uses[new][1] == when and new.array.size > strip_elements:
                count += not free
                self._strips[new] = free.pop() if free else count - 1
                nbytes = strip_elements * new.array.itemsize + _APART
                self._strip_size = max(self._strip_size, nbytes)
                self._large.remove(new)
                del self._uses[new]
            elif is_new:
                for old in map(self._placed, read):
                    if self._uses.get(old, [-1, -1])[1] != when or last[old] != index:
                        continue
                    if old not in partial and old.array.itemsize == new.array.itemsize:
                        self._instead[new] = old
                        self._uses[old][1] = self._uses.pop(new)[1]
                        self._large.remove(new)
                        last[old] = last[new]
                        break
            used = [piece for piece in dict.fromkeys(pieces) if piece in self._strips]
            free += [self._strips[piece] for piece in used if last[piece] == index]

    def _assign(self, homes: list[Array]) -> None:
        """Assign memory to each piece, largest first: room in ``homes``, or new memory."""
        rooms: list[list[Part]] = []
        for array in homes:
            end = address_of(array) + array.nbytes - _begin(array)
            in_use = [(0, self._last_condition), (self.since[id(array)], _ALWAYS)]
            rooms.append([*((0, end, *span) for span in in_use), (end, _ALWAYS, 0, _ALWAYS)])
        rooms.append([])
        new = len(homes)  # number of the new memory in ``rooms``
        places: dict[Piece, tuple[int, int]] = {}
        slots: dict[int, list[tuple[int, int]]] = {}  # by size: heap of (last use, offset)
        end = 0
        sizes = {p: -(-max(1, p.high - p.low) // _LINE) * _LINE for p in self._uses}
        for piece in sorted(sizes, key=lambda p: (-sizes[p], self._uses[p])):
            size, (first, last) = sizes[piece], self._uses[piece]
            if size >= _LARGE:
                candidates = ((n, _gap(parts, size, first, last)) for n, parts in enumerate(rooms))
                number, at = next(pair for pair in candidates if pair[1] < _ALWAYS)
                insort(rooms[number], (at, at + size + _APART, first, last))
            else:  # a slot has room for one small piece
                slot, number = slots.setdefault(size, []), new
                at = heappop(slot)[1] if slot and slot[0][0] < first else end
                heappush(slot, (last, at))
            places[piece] = number, at
            end = max(end, at + size) if number == new else end
        for piece, strip in self._strips.items():
            piece.is_strip = True
            places[piece] = new, end + strip * self._strip_size
        size = end + self._strip_size * (1 + max(self._strips.values(), default=-1))
        homes.append(np.zeros(size + _LINE, np.uint8))
        for piece in (*places, *self._instead):
            number, at = places[self._placed(piece)]
            piece.home, piece.at = homes[number], _begin(homes[number]) + at

    def _placed(self, piece: Piece) -> Piece:
        while piece in self._instead:
            piece = self._instead[piece]
        return piece


def _begin(array: Any) -> int:
    return -(-address_of(array) // _LINE) * _LINE


def _gap(parts: list[Part], size: int, first: int, last: int) -> int:
    """Return the offset of the first ``size`` bytes that instructions first .. last do not use."""
    at = 0
    for begin, end in [part[:2] for part in parts if part[2] <= last and first <= part[3]]:
        if at + size <= begin:
            break
        at = max(at, end)
    return at


# Kinds of results in csrc/tape/program.h.
CONSTANT, ARRAY, VARIABLE, NUMBER, SCALAR, ARGUMENT_ITSELF, TUPLE, LIST, DICT = range(9)
_CONTAINERS: dict[type, int] = {tuple: TUPLE, list: LIST, dict: DICT}
_STAND_INS: dict[type, int] = dict(zip(tape_arrays.STAND_INS, (ARRAY, SCALAR, NUMBER), strict=True))


_INDEXING = {operator.getitem, np.take, np.ndarray.take, np.take_along_axis, np.choose}


def may_raise(note: Note) -> bool:
    """Return whether ``note`` may raise, depending on values. Replays always execute it."""
    function = note.function.args[0] if isinstance(note.function, partial) else note.function
    if function in (np.power, operator.pow):
        return any(array.dtype.kind in "iu" for array in note.made)
    if function in _INDEXING:
        return bool(arrays_in(note.args[1:]))
    is_linear_algebra = getattr(note.function, "__module__", None) == "numpy.linalg"
    return is_linear_algebra or function is operator.setitem


def hoisted(memory: Memory) -> list[Note]:
    """Return the notes, with conditions and the notes that they need before changes.

    A replay stops if a condition fails, for example for an invalid label. Until then it has changed
    nothing, so the step can run eagerly. A check by ``structure.require_all`` may need values that
    the step changes, such as drawn indices. Then the check keeps its place, and raises its error in
    replays. Other conditions that need changed values raise CannotCapture.
    """
    notes = memory.recording.notes
    end = max((at for at, note in enumerate(notes, 1) if note.required is not None), default=0)
    order: list[tuple[bool, Note]] = []  # with True, a note does not depend on changes
    changed: dict[Piece, list[Operand]] = {}
    for note in notes[:end]:
        is_condition = note.required is not None
        is_free = (is_condition or not (note.effect or note.changed)) and not any(
            x.overlaps(other) for x in note.operands for other in changed.get(x.piece, ())
        )
        if is_condition and not is_free and any(not piece.is_made for piece in changed):
            if note.function is np.all:
                problem = "a value is checked after a change of state"
                raise CannotCapture(f"{problem}, so a failed check could not restart the step")
            note = memory.with_operands(replace(note, required=None))  # noqa: PLW2901
        order.append((is_free, note))
        if note.effect and not is_free:
            changed.setdefault(memory.elsewhere, [])
        for operand in () if is_free else note.written:
            changed.setdefault(operand.piece, []).append(operand)
    first, late, needed = list[Note](), list[Note](), set[Piece]()
    for is_free, note in reversed(order):
        writes_needed = not needed.isdisjoint([x.piece for x in note.written])
        is_first = is_free and (note.required is not None or writes_needed)
        needed.update([x.piece for x in note.operands] if is_first else ())
        (first if is_first else late).append(note)
    return [*reversed(first), *reversed(late), *notes[end:]]
