"""A call of a function on all ranks of a new world, by ``spawn`` or an engine."""

from __future__ import annotations

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
    """A call of a function: its words for errors, the number of ranks, and the latest end.

    ``ends`` is a time of ``time.monotonic`` for all attempts together, of which there may be
    ``max_restarts`` more than one.
    """

    name: str
    size: int
    ends: float
    max_restarts: int

    @classmethod
    def checked(
        cls,
        what: str,
        fn: object,
        args: object,
        nprocs: int | None,
        params: Mapping[str, Any] | None,
        timeout: float | None,
        max_restarts: int,
    ) -> SpawnCall:
        """Return the call of ``fn`` by ``what``, if all arguments make sense."""
        if not callable(fn):
            raise TypeError(f"{what}: fn must be a function of (rank, *args), got {fn!r}")
        if not isinstance(args, tuple | list):
            raise TypeError(f"{what}: args must be a tuple such as (x,), got {type(args).__name__}")
        size = usable_cores() if nprocs is None else _whole(nprocs)
        if not 1 <= size <= MOST_RANKS:
            raise ValueError(
                f"{what}: nprocs must be an integer from 1 to {MOST_RANKS}, got {nprocs!r}"
            )
        if timeout is not None and not (0 < timeout <= MOST_SECONDS or timeout == math.inf):
            raise ValueError(
                f"{what}: timeout must be a positive number of seconds, at most {MOST_SECONDS:.0f} "
                f"(None: no limit), got {timeout!r}"
            )
        if params is not None and "FILE_PATH" in params:
            raise ValueError(f"{what}: the ranks meet at a path of their own; leave FILE_PATH out")
        if _whole(max_restarts) < 0:
            raise ValueError(
                f"{what}: max_restarts must be an integer from 0 on, got {max_restarts!r}"
            )
        name = f"{what} of {getattr(fn, '__qualname__', repr(fn))}"
        ends = math.inf if timeout is None else time.monotonic() + timeout
        return cls(name, size, ends, int(max_restarts))

    def attempted(self, attempt: Callable[[int], T]) -> T:
        """Return what ``attempt`` does, called with the number of restarts before it.

        RankFailedErrors of attempts before the last are logged as warnings.
        """
        restarts = 0
        while True:
            try:
                return attempt(restarts)
            except RankFailedError as error:  # noqa: PERF203 - each lasts
                if restarts == self.max_restarts:
                    raise
                restarts += 1
                _log.warning("%s\nstarting again: %d of %d", error, restarts, self.max_restarts)

    def failed(self, rank: int, failure: Failure) -> RankFailedError:
        others = "; the other ranks were ended" if self.size > 1 else ""
        text = f"\n\n{failure.traceback}" if failure.traceback else ""
        message = f"{self.name}: rank {rank} of {self.size} {failure.what}{others}{text}"
        return RankFailedError(message, rank, failure.exit_code)

    def late(self, ranks: Iterable[int]) -> TimeoutError:
        """Return the error that reports that time was up before ``ranks`` had returned."""
        names = ", ".join(map(str, sorted(ranks)))
        return TimeoutError(
            f"{self.name}: rank(s) {names} of {self.size} had not returned when the timeout was "
            "over; all ranks were ended"
        )

    def results(self, pickled: Sequence[bytes]) -> list[Any]:
        """Return what the ranks returned, from the pickles in rank order."""
        results = []
        try:
            for each in pickled:
                results.append(pickle.loads(each))  # noqa: PERF401 - its length says whose fails
        except Exception as error:
            rank = len(results)
            raise RankFailedError(
                f"{self.name}: what rank {rank} of {self.size} returned cannot be unpickled here: "
                f"{error}",
                rank,
            ) from error
        return results


def _whole(number: SupportsIndex) -> int:
    """Return an integer of any kind, also NumPy's, as an int; -1 for anything else."""
    try:
        return -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return -1
