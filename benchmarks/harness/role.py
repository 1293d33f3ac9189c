"""Commands that the ranks of every library can execute."""

import abc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Call", "RankSetup", "Prepared", "Refusal", "Role", "nothing"]

Call = Callable[[], object]


class Refusal(Exception):
    """The library cannot run a task; the message is the reason. All ranks raise it."""


@dataclass(frozen=True)
class RankSetup:
    """Rank, size and folder of a rank. ``folder`` is an empty folder of the team. MPI itself knows
    rank and size.

    ``options`` are options of the library, such as a required backend.
    """

    rank: int
    size: int
    folder: str
    options: Mapping[str, Any] = field(default_factory=dict)


def nothing() -> None:
    """Do nothing: the call of a rank that does not participate."""


@dataclass(frozen=True)
class Prepared:
    """A repeatable call, a detail to report, and a check of its result.

    ``check`` is collective and raises RuntimeError if the result is wrong. ``clock`` measures the
    seconds;
    ``time.process_time`` measures only the processor time of this process.
    """

    call: Call
    detail: Any = None
    check: Call = nothing
    clock: Callable[[], float] = time.perf_counter


class Role(abc.ABC):
    """A rank of a library that is connected to its other ranks and prepares calls."""

    rank: int
    size: int

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """Return the exceptions that all ranks of the library raise if it cannot run a task."""
        return (Refusal,)

    @abc.abstractmethod
    def facts(self) -> dict[str, str]:
        """Return the versions and paths for the report."""

    @abc.abstractmethod
    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        """Return the call of the task. Collective.

        Raises:
            Refusal: If the library cannot run the task.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Block until all ranks have called it."""

    def leave(self) -> None:  # noqa: B027  (optional: most libraries end with the process)
        """Disconnect from the other ranks. Collective."""
