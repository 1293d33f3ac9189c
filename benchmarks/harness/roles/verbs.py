"""What every library's collectives have in common: the tasks, and what the right answer is."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from harness.role import Call, Prepared, Refusal, Role, nothing

__all__ = ["VERBS", "Builder", "CollectiveRole", "Expected", "elements", "expected"]

# From an array: the call, and the array that holds the result where the call returns None.
Builder = Callable[[Any], tuple[Call, Any]]
Transfer = Callable[[Any, int], object]  # of an array, with a rank


class Expected(NamedTuple):
    """Of a result: elements per element of the input, the first one and the last one."""

    length: float
    first: float
    last: float


def _everywhere(length: float, first: float, last: float) -> Callable[[int], Expected | None]:
    return lambda rank: Expected(length, first, last)


def _on_root(length: float, first: float, last: float) -> Callable[[int], Expected | None]:
    return lambda rank: Expected(length, first, last) if rank == 0 else None


# The verbs, and per number of ranks what each rank has in the end if rank r gave r + 1 everywhere.
VERBS: dict[str, Callable[[int], Callable[[int], Expected | None]]] = {
    "all_reduce": lambda n: _everywhere(1, total(n), total(n)),
    "all_reduce, async": lambda n: _everywhere(1, total(n), total(n)),
    "all_reduce, min": lambda n: _everywhere(1, 1, 1),
    "all_reduce, max": lambda n: _everywhere(1, n, n),
    "reduce": lambda n: _on_root(1, total(n), total(n)),
    "broadcast": lambda n: _everywhere(1, 1, 1),
    "all_gather": lambda n: _everywhere(n, 1, n),
    "all_gather, list": lambda n: _everywhere(1, n, n),  # of the list the last
    "gather": lambda n: _on_root(n, 1, n),
    "scatter": lambda n: _everywhere(1 / n, 1, 1),
    "reduce_scatter": lambda n: _everywhere(1 / n, total(n), total(n)),
    "all_to_all": lambda n: _everywhere(1, 1, n),
    "send_recv": lambda n: lambda rank: Expected(1, 1, 1) if rank < 2 else None,
    # Around a ring: from the rank before.
    "sendrecv": lambda n: lambda rank: Expected(1, (rank - 1) % n + 1, (rank - 1) % n + 1),
    "barrier": lambda n: lambda rank: None,
    # Rank r gives (r + 1) / n of its array.
    "all_gather, unequal": lambda n: _everywhere((n + 1) / 2, 1, n),
    # Everybody keeps half of what it had for the next.
    "all_to_all, unequal": lambda n: _everywhere(1, 1, n),
    # To and from both neighbours around a ring.
    "batch_isend_irecv": lambda n: lambda rank: Expected(1, (rank - 1) % n + 1, (rank - 1) % n + 1),
    # The array as an object; of all of them the last.
    "broadcast_object": lambda n: _everywhere(1, 1, 1),
    "all_gather_object": lambda n: _everywhere(1, n, n),
}


# These cut their argument into so many parts for each rank.
CUTTING = {
    "scatter": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "all_gather, unequal": 1,
    "all_to_all, unequal": 2,
}


def total(size: int) -> int:
    """Return 1 + 2 + ... + size."""
    return size * (size + 1) // 2


def expected(verb: str, rank: int, size: int) -> Expected | None:
    """Return what this rank must have after ``verb``; None: nothing."""
    return VERBS[verb](size)(rank)


class CollectiveRole(Role):
    """A library's verbs. A subclass says how to make an array, and how to call each verb on it."""

    @property
    @abc.abstractmethod
    def builders(self) -> Mapping[str, Builder]:
        """Return how each verb of VERBS is called on an array."""

    def reduction(self, verb: str) -> Callable[[Any], object]:
        """Return how the library reduces in place by ``verb``, which VERBS does not have.

        Raises:
            Refusal: it has no such verb.
        """
        raise Refusal(f"has no {verb}")

    @abc.abstractmethod
    def array(self, nbytes: int, dtype: str, parts: int, kind: str) -> Any:
        """Return a one-dimensional array, not initialised, as long as ``elements`` says.

        ``kind`` is "" or what the library has besides plain ones.

        Raises:
            Refusal: the library has no such kind or dtype.
        """

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        """Return the verb's call on zeros, after one call whose result was checked."""
        verb = task["verb"]
        if verb in VERBS and verb not in self.builders:
            raise Refusal(f"has no {verb}")
        parts = self.size * CUTTING[verb] if verb in CUTTING else 1
        array = self.array(task["nbytes"], task["dtype"], parts, task.get("kind", ""))
        call, out = self.builders.get(verb, self._in_place(verb))(array)
        wanted = self._wanted(task)

        def check() -> None:
            array[...] = self.rank + 1
            outcome = call()
            self._compare(verb, wanted, array.shape[0], out if outcome is None else outcome)
            # Sums of sums would overflow, and other values than zero could become denormal.
            array[...] = 0

        check()
        return Prepared(call, check=check)

    def _in_place(self, verb: str) -> Builder:
        """Return how a verb of the table is called that VERBS does not have."""

        def build(x: Any) -> tuple[Call, Any]:
            call = self.reduction(verb)
            return lambda: call(x), x

        return build

    def _wanted(self, task: Mapping[str, Any]) -> Expected | None:
        """Return what this rank must have: of a verb of the table the task says it."""
        if task["verb"] in VERBS:
            return expected(task["verb"], self.rank, self.size)
        value = task["means"][self.rank]
        return Expected(1, value, value)

    def _compare(self, verb: str, wanted: Expected | None, count: int, result: Any) -> None:
        """A library that computes something else has no place in the table."""
        if wanted is None:
            return
        found = Expected(result.shape[0] / count, float(result[0]), float(result[-1]))
        if found != wanted:
            raise RuntimeError(f"{verb}, rank {self.rank}: expected {wanted}, got {found}")

    def neighbours(self) -> tuple[int, int]:
        """Return the ranks after and before this one, around a ring."""
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def share(self, x: Any) -> Any:
        """Return what this rank gives to an unequal all_gather."""
        return x[: x.shape[0] // self.size * (self.rank + 1)]

    def unequal_rows(self, count: int) -> tuple[list[int], list[int]]:
        """Return what this rank gives to each, and gets of each, in an unequal all_to_all."""
        after, before = self.neighbours()
        half = count // self.size // 2
        gives, gets = [2 * half] * self.size, [2 * half] * self.size
        gives[after], gets[before] = half, half
        gives[self.rank] = gets[self.rank] = 3 * half
        return gives, gets

    def ping_pong(self, send: Transfer, recv: Transfer, x: Any) -> tuple[Call, Any]:
        """Ranks 0 and 1: there and back. The others have nothing to do."""

        def serve() -> None:
            send(x, 1)
            recv(x, 1)

        def answer() -> None:
            recv(x, 0)
            send(x, 0)

        calls: list[Call] = [serve, answer]
        return (calls[self.rank] if self.rank < 2 else nothing), x


def elements(nbytes: int, itemsize: int, parts: int) -> int:
    """Return how many elements ``nbytes`` are, cut into ``parts`` equal ones, none of them empty.

    All sizes are in bytes.
    """
    return max(1, nbytes // itemsize // parts) * parts
