"""The table of verbs. A verb is a communication function: a collective or a message.

Each row states the arguments of a verb, the array that it fills, and whether ranks may pass
different first dimensions. All code that handles every verb reads this table: argument checks
(``verb_call.py``), native signatures, flight records, comparison of calls (``call.py``), tests.
``combining.py`` defines the results.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from flashlight_py._native import codes


@dataclass(frozen=True, eq=False)  # compared by identity, which is fast
class Verb:
    """A row of the table.

    Args:
        name: Name of the public function.
        code: Number of the verb in the native libraries (scripts/codes).
        takes: Names of arguments besides the array, in the order in which errors show them.
        writes: Array that the verb fills. ``"array"``: the array that the user passes. ``"root's
            array"``: the same, but only on the root. ``"later array"``: the same, but not on rank
            0. ``"result"``: a new array or ``out``. ``"root's result"``: the same, but only on the
            root. ``""``: no array.
        cuts: True if the first dimension is split into one part per rank.
        ragged: True if the first dimension may differ between ranks.
        prefix: True if rank r combines the arrays of ranks 0 to r (exscan: 0 to r - 1).
        numbers: True if the verb accepts a number instead of an array.
        lists: True if the verb accepts a list or tuple of arrays.
    """

    name: str
    code: int
    takes: tuple[str, ...] = ()
    writes: Literal["array", "root's array", "later array", "result", "root's result", ""] = "array"
    cuts: bool = False
    ragged: bool = False
    prefix: bool = False
    numbers: bool = False
    lists: bool = False

    @cached_property
    def uneven(self) -> int:
        """Number of the verb for calls with ``rows``, or 0 if ``rows`` is not supported."""
        return getattr(codes, f"{self.name}_UNEVEN".upper(), 0)

    @property
    def reduces(self) -> bool:
        return "op" in self.takes

    @property
    def rooted(self) -> bool:
        return "root" in self.takes

    @property
    def is_message(self) -> bool:
        return "tag" in self.takes

    @property
    def in_place(self) -> bool:
        """Whether the verb writes to its argument."""
        return self.writes.endswith("array")

    def shape(self, shape: tuple[int, ...], size: int, rows: int | None) -> tuple[int | None, ...]:
        """Return the shape of the result for an array of ``shape`` on ``size`` ranks.

        ``rows`` is the number of rows for this rank, or None if parts are equal. If the first
        dimension depends on other ranks, it is None.
        """
        if self.cuts and self.reduces:
            return (shape[0] // size if rows is None else rows, *shape[1:])
        return (None, *shape[1:]) if self.ragged or rows is not None else shape

    def fills(self, rank: int, root: int) -> bool:
        """Return whether ``rank`` receives a result."""
        if self.writes.startswith("later"):
            return rank > 0
        return rank == root or not self.writes.startswith("root's")

    def __repr__(self) -> str:
        return self.name


ALL_REDUCE = Verb("all_reduce", codes.ALL_REDUCE, ("op", "scale"), numbers=True)
REDUCE = Verb("reduce", codes.REDUCE, ("op", "scale", "root"), "root's array", numbers=True)
SCAN = Verb("scan", codes.SCAN, ("op", "scale"), prefix=True, numbers=True)
# The backend leaves the array of rank 0 unchanged; the function ``exscan`` then fills it.
EXSCAN = Verb("exscan", codes.EXSCAN, ("op", "scale"), "later array", prefix=True, numbers=True)
REDUCE_SCATTER = Verb(
    "reduce_scatter", codes.REDUCE_SCATTER, ("op", "scale", "rows"), "result", cuts=True, lists=True
)
BROADCAST = Verb("broadcast", codes.BROADCAST, ("root",), numbers=True)
ALL_GATHER = Verb("all_gather", codes.ALL_GATHER, (), "result", ragged=True, lists=True)
GATHER = Verb("gather", codes.GATHER, ("root",), "root's result", ragged=True)
SCATTER = Verb("scatter", codes.SCATTER, ("root",), "result")
ALL_TO_ALL = Verb("all_to_all", codes.ALL_TO_ALL, ("rows",), "result", cuts=True)
BARRIER = Verb("barrier", codes.BARRIER, (), "")
SEND = Verb("send", codes.SEND, ("tag",), "")
RECV = Verb("recv", codes.RECV, ("tag",))

VERBS = (
    *(ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL),
    *(SCAN, EXSCAN, BARRIER, SEND, RECV),
)
