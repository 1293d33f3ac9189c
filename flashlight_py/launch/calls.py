"""A call of a function on all ranks of a new world, by ``spawn`` or an engine."""

import logging
import math
import operator
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeVar

from flashlight_py.cores import MOST_RANKS, usable_cores
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.loop import MOST_SECONDS

T = TypeVar("T")

_log = logging.getLogger("flashlight_py")


class SpawnCall(NamedTuple):
    """Checked arguments of a call of ``spawn`` or of an engine.

    ``name`` is the call's name in errors. ``size`` is the number of ranks. ``ends`` is the
    ``time.monotonic`` time at which all attempts must have ended.
    """

    name: str
    size: int
    ends: float
    max_restarts: int

    @classmethod
    def checked(
        cls, operation: str, fn: object, args: object, nprocs: int | None,
        params: Mapping[str, Any] | None, timeout: float | None, max_restarts: int,
    ) -> "SpawnCall":  # fmt: skip
        """Return the call of ``fn``; raise TypeError or ValueError if an argument is invalid."""
        if not callable(fn):
            raise TypeError(f"{operation}: fn must be a function of (rank, *args), got {fn!r}")
        if not isinstance(args, tuple | list):
            raise TypeError(f"{operation}: args must be a tuple, got {type(args).__name__}")
        size = usable_cores() if nprocs is None else _index(nprocs)
        if not 1 <= size <= MOST_RANKS:
            raise ValueError(
                f"{operation}: nprocs must be an integer from 1 to {MOST_RANKS}, got {nprocs!r}"
            )
        if timeout is not None and not (0 < timeout <= MOST_SECONDS or timeout == math.inf):
            raise ValueError(
                f"{operation}: timeout must be a positive number of seconds, at most "
                f"{MOST_SECONDS:.0f} (None: no limit), got {timeout!r}"
            )
        if params is not None and "FILE_PATH" in params:
            raise ValueError(f"{operation}: params must not contain FILE_PATH. Remove FILE_PATH")
        if _index(max_restarts) < 0:
            raise ValueError(
                f"{operation}: max_restarts must be an integer of at least 0, got {max_restarts!r}"
            )
        name = f"{operation} of {getattr(fn, '__qualname__', repr(fn))}"
        ends = math.inf if timeout is None else time.monotonic() + timeout
        return cls(name, size, ends, int(max_restarts))

    def attempted(self, attempt: Callable[[int], T]) -> T:
        """Return the result of ``attempt(restarts)``, where ``restarts`` counts from 0.

        If it raises RankFailedError, log a warning and repeat it at most ``max_restarts`` times.
        """
        restarts = 0
        while True:
            try:
                return attempt(restarts)
            except RankFailedError as error:  # noqa: PERF203 - an attempt takes seconds
                if restarts == self.max_restarts:
                    raise
                restarts += 1
                _log.warning("%s\nstarting again: %d of %d", error, restarts, self.max_restarts)

    def failed(self, rank: int, failure: Failure) -> RankFailedError:
        others = "; the other ranks were ended" if self.size > 1 else ""
        text = f"\n\n{failure.traceback}" if failure.traceback else ""
        message = f"{self.name}: rank {rank} of {self.size} {failure.description}{others}{text}"
        return RankFailedError(message, rank, failure.exit_code)

    def late(self, ranks: Iterable[int]) -> TimeoutError:
        names = ", ".join(map(str, sorted(ranks)))
        return TimeoutError(
            f"{self.name}: rank(s) {names} of {self.size} did not return before the timeout. All "
            "ranks were ended. Raise timeout if the function needs more time"
        )

    def results(self, pickled: Sequence[bytes]) -> list[Any]:
        results = []
        try:
            for content in pickled:
                results.append(pickle.loads(content))  # noqa: PERF401 - its length is the rank
        except Exception as error:
            rank = len(results)
            raise RankFailedError(
                f"{self.name}: the result of rank {rank} of {self.size} cannot be unpickled: "
                f"{error}. Return objects whose classes this process can import",
                rank,
            ) from error
        return results


def _index(number: SupportsIndex) -> int:
    """Return an integer of any type, including NumPy's, as an int; -1 for other types."""
    try:
        return -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return -1
