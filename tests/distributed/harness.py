"""Real processes for tests: start ranks, run a function on each, and leave none behind.

``run_ranks(fn, size, *args)`` calls ``fn(rank, size, *args)`` on every rank of a fresh world and
returns the results in rank order. ``RankPool`` keeps a world and runs many functions in it, which
spares the start of the processes. ``run_outcomes`` is for tests in which a rank is meant to fail
or die. ``fn`` is a function of a module, its arguments and results are picklable.

Every wait has a deadline in seconds. What is still running then shows where it stands (SIGABRT,
answered by faulthandler on its stderr) and is killed together with its process group.
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

# Where all tests together have little time, a rank that hangs must leave some for the others.
MOST = float(os.environ.get("FLASHLIGHT_TEST_DEADLINE", "inf"))
START_DEADLINE = min(60.0, MOST)
# A rank that raised will not join its peers' next operation; so long they may take to notice.
GRACE = 10.0

_living: weakref.WeakSet[RankPool] = weakref.WeakSet()


class RanksFailedError(RuntimeError):
    """Some rank raised, died or hung; the message shows every rank, ``outcomes`` has them."""

    def __init__(self, what: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        reports = "\n".join(outcome.report() for outcome in outcomes)
        super().__init__(f"{what} failed on {len(outcomes)} rank(s)\n{reports}")


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, deadline: float = 60.0, **world: Any
) -> list[Any]:
    """Run ``fn(rank, size, *args)`` on ``size`` new ranks; return the results in rank order.

    ``world`` holds ``init``, ``params``, ``env`` and ``hosts`` of ``RankPool``.
    """
    with RankPool(size, **world) as pool:
        return pool.run(fn, *args, deadline=deadline)


def run_outcomes(
    fn: Callable[..., Any], size: int, *args: Any, deadline: float = 60.0, **world: Any
) -> list[Outcome]:
    """Like ``run_ranks`` for ranks that are meant to raise, exit or be killed."""
    with RankPool(size, **world) as pool:
        return pool.outcomes(fn, *args, deadline=deadline)


def run_survivors(
    fn: Callable[..., Any], size: int, lost: int, *args: Any, **how: Any
) -> list[Any]:
    """Like ``run_ranks`` where rank ``lost`` is killed; returns the results of the others."""
    outcomes = run_outcomes(fn, size, *args, **how)
    killed = outcomes.pop(lost)
    if killed.signal != signal.SIGKILL or not all(outcome.ok for outcome in outcomes):
        raise RanksFailedError(fn.__qualname__, [*outcomes, killed])
    return [outcome.value for outcome in outcomes]


def living_processes() -> set[int]:
    """The processes that belong to pools which are open now, and the one that forks them."""
    worlds = [pool._world for pool in _living if pool._world is not None]
    groups = {group for world in worlds for group in world.groups()}
    started = {pid for world in worlds for pid in world.started()}
    return fork_server.server_pids() | started | processes.members(groups)


class RankPool:
    """``size`` ranks in one initialised world, which execute one function after another.

    ``init`` is ``"file"`` (FILE_SYSTEM in a directory of its own), ``"mpi"`` (started by mpirun)
    or None (the function initialises, or needs no world). ``params`` go to ``distributed_init``;
    ``env`` is added to the ranks' environment, the same for all or a function of the rank.
    ``hosts`` has the host of each rank (tests/cluster; those of one host stand together), where
    ``init`` may be ``"env"`` too: by RANK, MASTER_ADDR etc. A pool whose ranks failed is replaced
    by a new one at the next call.
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
        """Return what ``fn(rank, size, *args)`` returned on each rank.

        Raises ``RanksFailedError`` when a rank raised, died or did not answer in time.
        """
        outcomes = self._execute(fn, args, deadline, grace=GRACE)
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailedError(fn.__qualname__, outcomes)
        return [outcome.value for outcome in outcomes]

    def run_each(
        self, fn: Callable[..., Any], cases: Iterable[tuple[Any, ...]], deadline: float = 60.0
    ) -> None:
        """Run ``fn(rank, size, *case)`` for each of ``cases`` on every rank, in one request.

        Raises ``RanksFailedError``, which names the first case that failed or was not finished.
        """
        self.run(_each, fn, list(cases), deadline=deadline)

    def outcomes(self, fn: Callable[..., Any], *args: Any, deadline: float = 60.0) -> list[Outcome]:
        """Return what became of each rank; only a rank that is stuck is an error."""
        outcomes = self._execute(fn, args, deadline, grace=deadline)
        if any(outcome.kind == "stuck" for outcome in outcomes):
            raise RanksFailedError(fn.__qualname__, outcomes)
        return outcomes

    def pids(self) -> set[int]:
        return set() if self._world is None else self._world.pids()

    def close(self) -> None:
        """Shut the world down; raises ``RanksFailedError`` if a rank cannot even end properly."""
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


def _each(rank: int, size: int, fn: Callable[..., Any], cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        name = f"{fn.__name__}{case!r} on rank {rank} of {size}"
        print(name, flush=True)  # the end of a rank's output is shown when it is stuck
        try:
            fn(rank, size, *case)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
