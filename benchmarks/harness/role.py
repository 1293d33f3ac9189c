"""What every rank can do when it is asked, whatever library it has."""

import abc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Call", "Place", "Prepared", "Refusal", "Role", "nothing"]

Call = Callable[[], object]


class Refusal(Exception):
    """The library cannot do what was asked; the message says why. Every rank raises it alike."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands. ``folder`` is the team's own and empty; MPI knows rank and size itself.

    ``options`` are the library's, such as the backend to force.
    """

    rank: int
    size: int
    folder: str
    options: Mapping[str, Any] = field(default_factory=dict)


def nothing() -> None:
    """Do nothing, as a call of a rank that has no part in it."""


@dataclass(frozen=True)
class Prepared:
    """A call that can be repeated; what to report of it; and what proves its result right.

    ``check`` is collective and raises RuntimeError if the result is wrong. ``clock`` is what the
    seconds are read from; ``time.process_time`` counts what the process computes, whatever else
    the machine does.
    """

    call: Call
    detail: Any = None
    check: Call = nothing
    clock: Callable[[], float] = time.perf_counter


class Role(abc.ABC):
    """A library, joined to its other ranks, that prepares calls to be timed."""

    rank: int
    size: int

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """What the library raises, on all ranks alike, when it cannot do what it is asked."""
        return (Refusal,)

    @abc.abstractmethod
    def facts(self) -> dict[str, str]:
        """Return the versions and paths that a reader must know."""

    @abc.abstractmethod
    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        """Return the call that the task is; collective.

        Raises:
            Refusal: the library cannot do the task.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Block until all ranks are here."""

    def leave(self) -> None:  # noqa: B027  (optional: most libraries end with the process)
        """Say goodbye to the other ranks; collective."""
