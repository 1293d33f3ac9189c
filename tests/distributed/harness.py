"""Real processes for tests: start ranks, run a function on each, and leave no process behind.

``run_ranks(fn, size, *args)`` calls ``fn(rank, size, *args)`` on every rank of a new world and
returns the results in rank order. ``RankPool`` keeps a world and runs many functions in it, which
saves the start of processes. ``run_outcomes`` is for tests in which a rank fails or dies. ``fn`` is
a module-level function; its arguments and results can be pickled.

Every wait has a deadline in seconds. After it, the remaining processes print their stacks (SIGABRT,
faulthandler) and are killed with their process groups.
"""

from __future__ import annotations

import os
import pickle
import signal
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.distributed import fork_server, processes
from tests.distributed.world import Environment, Outcome, World, mpirun_command

if TYPE_CHECKING:
    from tests.cluster.hosts import Host

__all__ = [
    "Outcome",
    "RankPool",
    "RanksFailedError",
    "living_processes",
    "mpirun_command",
    "run_outcomes",
    "run_ranks",
    "run_survivors",
]

# Limit in seconds for one hanging rank, if all tests together have little time.
MOST = float(os.environ.get("FLASHLIGHT_TEST_DEADLINE", "inf"))
START_DEADLINE = min(60.0, MOST)
# Seconds for other ranks to detect that a rank has raised and will not join their operation.
GRACE = 10.0

_living: weakref.WeakSet[RankPool] = weakref.WeakSet()


class RanksFailedError(RuntimeError):
    """A rank raised, died or hung. The message lists every rank; ``outcomes`` has their
    outcomes."""

    def __init__(self, summary: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        reports = "\n".join(outcome.report() for outcome in outcomes)
        super().__init__(f"{summary} failed on {len(outcomes)} rank(s)\n{reports}")


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, deadline: float = 60.0, **world: Any
) -> list[Any]:
    """Run ``fn(rank, size, *args)`` on ``size`` new ranks. Return the results in rank order.

    ``world`` are the arguments ``init``, ``params``, ``env`` and ``hosts`` of ``RankPool``.
    """
    with RankPool(size, **world) as pool:
        return pool.run(fn, *args, deadline=deadline)


def run_outcomes(
    fn: Callable[..., Any], size: int, *args: Any, deadline: float = 60.0, **world: Any
) -> list[Outcome]:
    """Run like ``run_ranks``, for ranks that raise, exit or are killed, and return all outcomes."""
    with RankPool(size, **world) as pool:
        return pool.outcomes(fn, *args, deadline=deadline)


def run_survivors(
    fn: Callable[..., Any], size: int, lost: int, *args: Any, **options: Any
) -> list[Any]:
    """Run like ``run_ranks`` if rank ``lost`` is killed. Return the results of the other ranks."""
    outcomes = run_outcomes(fn, size, *args, **options)
    killed = outcomes.pop(lost)
    if killed.signal != signal.SIGKILL or not all(outcome.ok for outcome in outcomes):
        raise RanksFailedError(fn.__qualname__, [*outcomes, killed])
    return [outcome.value for outcome in outcomes]


def living_processes() -> set[int]:
    """Return the processes of open pools, and the fork server."""
    worlds = [pool._world for pool in _living if pool._world is not None]
    groups = {group for world in worlds for group in world.groups()}
    started = {pid for world in worlds for pid in world.started()}
    return fork_server.server_pids() | started | processes.members(groups)


class RankPool:
    """``size`` ranks of one initialised world, which run one function after another.

    ``init`` is ``"file"`` (FILE_SYSTEM in a private directory), ``"mpi"`` (started by mpirun) or
    None (the function initialises, or needs no world). ``params`` are passed to
    ``distributed_init``. ``env`` is added to the environment: one for all ranks, or a function of
    the rank. ``hosts`` has the host of each rank (tests/cluster), grouped by host; then ``init``
    may also be ``"env"`` (RANK, MASTER_ADDR etc.). After a failure, the next call starts new ranks.
    """

    def __init__(
        self,
        size: int,
        *,
        init: str | None = "file",
        params: Mapping[str, Any] | None = None,
        env: Environment | None = None,
        hosts: Sequence[Host] | None = None,
    ) -> None:
        self.size = size
        self.world: dict[str, Any] = {
            "init": init,
            "params": dict(params or {}),
            "env": env,
            "hosts": hosts,
        }
        self._world: World | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def run(self, fn: Callable[..., Any], *args: Any, deadline: float = 60.0) -> list[Any]:
        """Return the results of ``fn(rank, size, *args)`` in rank order.

        Raises ``RanksFailedError`` if a rank raises, dies or does not answer in time.
        """
        outcomes = self._execute(fn, args, deadline, grace=GRACE)
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailedError(fn.__qualname__, outcomes)
        return [outcome.value for outcome in outcomes]

    def run_each(
        self, fn: Callable[..., Any], cases: Iterable[tuple[Any, ...]], deadline: float = 60.0
    ) -> None:
        """Run ``fn(rank, size, *case)`` for each of ``cases`` on every rank, in one request.

        Raises ``RanksFailedError`` with the first case that failed or did not finish.
        """
        self.run(_call_each, fn, list(cases), deadline=deadline)

    def outcomes(self, fn: Callable[..., Any], *args: Any, deadline: float = 60.0) -> list[Outcome]:
        """Return the outcome of each rank. Only a stuck rank raises."""
        outcomes = self._execute(fn, args, deadline, grace=deadline)
        if any(outcome.kind == "stuck" for outcome in outcomes):
            raise RanksFailedError(fn.__qualname__, outcomes)
        return outcomes

    def pids(self) -> set[int]:
        return set() if self._world is None else self._world.pids()

    def close(self) -> None:
        """Shut the world down. Raises ``RanksFailedError`` if a rank does not end properly."""
        if self._world is None:
            return
        world, self._world = self._world, None
        outcomes = world.end(START_DEADLINE)
        if any(outcome.exit_code != 0 for outcome in outcomes):
            raise RanksFailedError("distributed_shutdown", outcomes)

    def kill(self) -> None:
        """End the ranks at once."""
        if self._world is not None:
            self._world.destroy()
            self._world = None

    def _execute(
        self, fn: Callable[..., Any], args: tuple[Any, ...], deadline: float, grace: float
    ) -> list[Outcome]:
        task = pickle.dumps((fn, args))
        try:
            world = self._started()
            outcomes = world.execute(task, min(deadline, MOST), min(grace, MOST))
        except BaseException:
            self.kill()
            raise
        if not all(outcome.ok for outcome in outcomes):
            self.kill()
        return outcomes

    def _started(self) -> World:
        if self._world is None:
            self._world = World(self.size, **self.world)
            _living.add(self)
            outcomes = self._world.start(START_DEADLINE)
            if not all(outcome.ok for outcome in outcomes):
                raise RanksFailedError("distributed_init", outcomes)
        return self._world


def _call_each(rank: int, size: int, fn: Callable[..., Any], cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        name = f"{fn.__name__}{case!r} on rank {rank} of {size}"
        print(name, flush=True)  # printed so that the log of a stuck rank ends with it
        try:
            fn(rank, size, *case)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
