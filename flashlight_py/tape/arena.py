"""One piece of memory for all that is only used inside a step."""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from flashlight_py.tape.lowering import Group, Loops
from flashlight_py.tape.operands import Piece
from flashlight_py.tape.recording import address_of

_LINE = 64  # bytes
_APART = 4 * _LINE  # so that strips do not begin at the same place of pages
_LARGE = 1 << 15  # bytes from which on it pays to find other memory
_STRIP = 2048  # elements, in csrc/tape/loops.cc
_ALWAYS = sys.maxsize
# A part of memory: begin and end, and the first and the last instruction that uses it.
Part = tuple[int, int, int, int]


class Arena:
    """Memory for pieces that were made by a step: as long as they are used, and no longer.

    Arrays ``returned`` are used until the end. The ``grads`` have memory of their own. ``since``:
    which instruction first writes to each, by their ids; with ``lend`` others use it until then.
    """

    def __init__(
        self, groups: Sequence[Group], returned: Iterable[Piece], grads: Sequence[Piece], lend: bool
    ) -> None:
        self._instead: dict[Piece, Piece] = {}  # whose place one takes
        self._strips: dict[Piece, int] = {}  # which of the strips is one's room
        self._strip_size = 0  # bytes
        uses: dict[Piece, list[int]] = {}  # the first and the last instruction
        for when, group in enumerate(groups):
            for operand in group.operands:
                uses.setdefault(operand.piece, [when, when])[1] = when
        for piece in returned:
            uses.setdefault(piece, [len(groups)] * 2)[1] = len(groups)
        self._uses = {piece: each for piece, each in uses.items() if piece.is_placed_freely()}
        self._large = {piece for piece in self._uses if piece.array.nbytes >= _LARGE}
        for when, group in enumerate(groups if self._large else ()):
            if isinstance(group, Loops) and len(group.operations) > 1:
                self._share(group, when)
        self.since = {id(piece.home): uses.get(piece, [0])[0] for piece in grads}
        lent = grads if lend else ()
        large = [p for p in lent if p.home.nbytes >= _LARGE and p.home.flags.c_contiguous]
        self._place(sorted([(uses.get(p, [0])[0], id(p), p.home) for p in large]))

    def _share(self, group: Loops, when: int) -> None:
        """Find large arrays that need no memory: a strip is enough, or another one is read no more.

        The place of one that is read for the last time is taken where both are whole: the loops
        read each element before they write the one in its place.
        """
        columns = group.dimensions[-1] if len(group.dimensions) > 1 else 1
        each_has = max(1, _STRIP // columns) * columns  # elements of a strip
        first: dict[Piece, int] = {}
        last: dict[Piece, int] = {}
        partial = set()  # what the loops use a part of, or in another order
        for index, operation in enumerate(group.operations):
            for operand, steps in zip(operation.operands, operation.steps, strict=True):
                size, piece = operand.array.itemsize, self._placed(operand.piece)
                first.setdefault(piece, index)
                last[piece] = index
                is_packed = steps == (columns * size, size)[-len(steps) :]
                if not (is_packed and operand.array.nbytes == piece.high - piece.low):
                    partial.add(piece)
        free: list[int] = []
        count = 0
        for index, operation in enumerate(group.operations):
            *read, new = pieces = [each.piece for each in operation.operands]
            is_new = new in self._large and first[new] == index and new not in partial
            is_new = is_new and self._uses[new][0] == when
            if is_new and self._uses[new][1] == when and new.array.size > each_has:
                count += not free
                self._strips[new] = free.pop() if free else count - 1
                self._strip_size = max(self._strip_size, each_has * new.array.itemsize + _APART)
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
            used = [each for each in dict.fromkeys(pieces) if each in self._strips]
            free += [self._strips[each] for each in used if last[each] == index]

    def _place(self, lent: list[tuple[int, int, Any]]) -> None:
        """Find a place for each piece, the largest first: in what is ``lent``, or new memory."""
        homes = [array for _, _, array in lent]
        rooms: list[list[Part]] = []
        for since, _, array in lent:
            end = address_of(array) + array.nbytes - _begin(array)
            rooms.append([(0, end, since, _ALWAYS), (end, _ALWAYS, 0, _ALWAYS)])
        rooms.append([])
        places: dict[Piece, tuple[int, int]] = {}
        slots: dict[int, list[tuple[int, int]]] = {}  # by size: until when, and where
        end = 0
        sizes = {p: -(-max(1, p.high - p.low) // _LINE) * _LINE for p in self._uses}
        for piece in sorted(sizes, key=lambda each: (-sizes[each], self._uses[each])):
            size, (first, last) = sizes[piece], self._uses[piece]
            if size >= _LARGE:
                found = ((n, _gap(parts, size, first, last)) for n, parts in enumerate(rooms))
                number, at = next(place for place in found if place[1] < _ALWAYS)
                insort(rooms[number], (at, at + size, first, last))
            else:  # it takes turns with those of its size
                own, number = slots.setdefault(size, []), len(lent)
                at = heappop(own)[1] if own and own[0][0] < first else end
                heappush(own, (last, at))
            places[piece] = number, at
            end = max(end, at + size) if number == len(lent) else end
        for piece, strip in self._strips.items():
            piece.is_strip = True
            places[piece] = len(lent), end + strip * self._strip_size
        size = end + self._strip_size * (1 + max(self._strips.values(), default=-1))
        homes.append(np.zeros(size + _LINE, np.uint8))
        begins = list(map(_begin, homes))
        for piece, (number, at) in places.items():
            piece.home, piece.at = homes[number], begins[number] + at
        for piece in self._instead:
            placed = self._placed(piece)
            piece.home, piece.at = placed.home, placed.at

    def _placed(self, piece: Piece) -> Piece:
        """Return the one whose place ``piece`` takes: often its own."""
        while piece in self._instead:
            piece = self._instead[piece]
        return piece


def _begin(array: Any) -> int:
    return -(-address_of(array) // _LINE) * _LINE


def _gap(parts: list[Part], size: int, first: int, last: int) -> int:
    """Return where the first ``size`` bytes are that nobody uses from ``first`` to ``last``."""
    at = 0
    for begin, end in [each[:2] for each in parts if each[2] <= last and first <= each[3]]:
        if at + size <= begin:
            break
        at = max(at, end)
    return at
