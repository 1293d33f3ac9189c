"""Who has left a group, and who has not come: told and asked by notes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from typing import Any

from flashlight_py.distributed.backends.mpi.failures import Farewell
from flashlight_py.distributed.backends.mpi.notes import Kind, Notes

__all__ = ["Presence", "RollCall"]

# Whoever waits in any group looks at its notes every few milliseconds, and answers.
_ANSWER_SECONDS = 1.0


class RollCall:
    """A question to some ranks, and what they answered: (collectives begun, what they wait for)."""

    def __init__(self, asked: Collection[int]) -> None:
        self.asked = tuple(asked)
        self.answers: dict[int, tuple[int, list[str]]] = {}
        self._ends = time.monotonic() + _ANSWER_SECONDS

    def is_over(self) -> bool:
        """Return whether all have answered, or had the time to."""
        return len(self.answers) == len(self.asked) or time.monotonic() >= self._ends

    def behind(self, number: int) -> tuple[int, ...]:
        """Return the ranks that have not begun collective ``number``, or do not say so."""
        return tuple(rank for rank in self.asked if self.answers.get(rank, (0, []))[0] < number)


class Presence:
    """What this rank knows of the others of its group.

    ``where_am_i(rank)`` is what it answers to ``rank``.
    """

    def __init__(
        self, rank: int, size: int, notes: Notes, where_am_i: Callable[[int], tuple[int, list[str]]]
    ) -> None:
        self.others = [other for other in range(size) if other != rank]
        self.farewells: dict[int, Farewell] = {}
        self._gone: dict[int, int | None] = {}
        self._notes, self._where_am_i = notes, where_am_i
        self._numbers = itertools.count()
        self._roll_calls: dict[int, RollCall] = {}

    def leave(self, farewell: Farewell) -> None:
        """Notify all others that this rank leaves."""
        for rank in self.others:
            self._notes.send(rank, Kind.LEFT, farewell)

    def go(self, completed: int | None) -> None:
        """Notify all others that they need not wait for anything more of this rank.

        ``completed`` collectives were all that it has begun; None: some have not ended.
        """
        for rank in self.others:
            self._notes.send(rank, Kind.GONE, completed)

    def ask(self, ranks: Collection[int]) -> RollCall:
        """Ask ``ranks`` where they are."""
        number = next(self._numbers)
        question = self._roll_calls[number] = RollCall(ranks)
        for rank in ranks:
            self._notes.send(rank, Kind.ASK, number)
        return question

    def hear(self, source: int, kind: Kind, content: Any) -> None:
        """Take a note that is about who is where."""
        if kind is Kind.LEFT:
            self.farewells.setdefault(source, content)
        elif kind is Kind.GONE:
            self._gone[source] = content
        elif kind is Kind.ASK:
            self._notes.send(source, Kind.ANSWER, (content, *self._where_am_i(source)))
        else:
            number, begun, waits_for = content
            self._roll_calls[number].answers[source] = (begun, waits_for)

    def leaver(self, number: int) -> int | None:
        """Return a rank that left before it completed collective ``number``, if one did."""
        early = (rank for rank, farewell in self.farewells.items() if farewell.completed < number)
        return next(early, None)

    def are_all_gone(self) -> bool:
        """Return whether no other rank will send anything any more."""
        return len(self._gone) == len(self.others)

    def have_all_completed(self, completed: int) -> bool:
        """Return whether every other rank has gone after as many collectives, and ended all."""
        return self.are_all_gone() and set(self._gone.values()) <= {completed}
