"""The verbs as a table: what each takes and writes, and in what its ranks may differ.

Everything that handles all verbs reads it: preparation of arguments (``verb_call.py``), native
signatures, flight records, comparison and wording of calls (``call.py``), tests and benchmarks.
``combining.py`` says what the verbs compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashlight_py._native import codes
from flashlight_py._native.codes import ALL_TO_ALL_UNEVEN, REDUCE_SCATTER_UNEVEN


@dataclass(frozen=True, eq=False)  # compared by identity, which is fast
class Verb:
    """A row of the table.

    Args:
        name: the name of the public function.
        code: its number in the native libraries (scripts/codes).
        takes: the arguments besides the array, in the order of error messages.
        writes: what the verb fills. ``"array"``: the argument itself, in place. ``"root's array"``:
            the same on the root only. ``"later array"``: the same except on rank 0. ``"result"``: a
            new array, or ``out``. ``"root's result"``: the same on the root only. ``""``: nothing.
        cuts: the first dimension is cut into one part for each rank.
        ragged: the first dimension may differ between ranks.
        uneven: the code if the call has ``rows``; 0: the same code.
        prefix: rank r combines the arrays of ranks 0 to r, or to r - 1 (exscan).
        numbers: the verb takes a number instead of an array.
        lists: the verb takes a list or tuple of arrays.
    """

    name: str
    code: int
    takes: tuple[str, ...] = ()
    writes: Literal["array", "root's array", "later array", "result", "root's result", ""] = "array"
    cuts: bool = False
    ragged: bool = False
    uneven: int = 0
    prefix: bool = False
    numbers: bool = False
    lists: bool = False

    @property
    def reduces(self) -> bool:
        """Whether it combines the ranks' arrays."""
        return "op" in self.takes

    @property
    def rooted(self) -> bool:
        """Whether one rank is special."""
        return "root" in self.takes

    @property
    def is_message(self) -> bool:
        """Whether two ranks take part and not all of them."""
        return "tag" in self.takes

    @property
    def in_place(self) -> bool:
        """Whether what it writes is the array that it is given."""
        return self.writes.endswith("array")

    def shape(self, shape: tuple[int, ...], size: int, rows: int | None) -> tuple[int | None, ...]:
        """Return the shape of the result of an array of ``shape`` on ``size`` ranks.

        ``rows`` are those of this rank, if parts are unequal. A first dimension is None if it is
        known only after all ranks have called.
        """
        if self.cuts and self.reduces:
            return (shape[0] // size if rows is None else rows, *shape[1:])
        return (None, *shape[1:]) if self.ragged or rows is not None else shape

    def fills(self, rank: int, root: int) -> bool:
        """Return whether ``rank`` gets what it writes."""
        if self.writes.startswith("later"):
            return rank > 0
        return rank == root or not self.writes.startswith("root's")

    def __repr__(self) -> str:
        return self.name


ALL_REDUCE = Verb("all_reduce", codes.ALL_REDUCE, ("op", "scale"), numbers=True)
REDUCE = Verb("reduce", codes.REDUCE, ("op", "scale", "root"), "root's array", numbers=True)
SCAN = Verb("scan", codes.SCAN, ("op", "scale"), prefix=True, numbers=True)
# Rank 0 of an exscan keeps its array here, as nothing is before it; ``exscan`` fills it then.
EXSCAN = Verb("exscan", codes.EXSCAN, ("op", "scale"), "later array", prefix=True, numbers=True)
REDUCE_SCATTER = Verb(
    "reduce_scatter",
    codes.REDUCE_SCATTER,
    ("op", "scale", "rows"),
    "result",
    cuts=True,
    uneven=REDUCE_SCATTER_UNEVEN,
    lists=True,
)
BROADCAST = Verb("broadcast", codes.BROADCAST, ("root",), numbers=True)
ALL_GATHER = Verb("all_gather", codes.ALL_GATHER, (), "result", ragged=True, lists=True)
GATHER = Verb("gather", codes.GATHER, ("root",), "root's result", ragged=True)
SCATTER = Verb("scatter", codes.SCATTER, ("root",), "result")
ALL_TO_ALL = Verb(
    "all_to_all", codes.ALL_TO_ALL, ("rows",), "result", cuts=True, uneven=ALL_TO_ALL_UNEVEN
)
BARRIER = Verb("barrier", codes.BARRIER, (), "")
SEND = Verb("send", codes.SEND, ("tag",), "")
RECV = Verb("recv", codes.RECV, ("tag",))

VERBS = (
    *(ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL),
    *(SCAN, EXSCAN, BARRIER, SEND, RECV),
)
