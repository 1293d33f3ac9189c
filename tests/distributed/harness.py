"""Real processes for tests: start ranks, run a function on each, and leave no process behind.

``run_ranks(fn, size, *args)`` calls ``fn(rank, size, *args)`` on every rank of a new world and
returns the results in rank order. ``RankPool`` keeps a world and runs many functions in it, which
saves the start of processes. ``run_outcomes`` is for tests in which a rank fails or dies. ``fn`` is
a module-level function; its arguments and results can be pickled.

Every wait has a deadline in seconds. After it, the remaining ranks raise ``RankStuckError`` or
print their stacks, and are killed with their process groups.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import pickle
import signal
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlight_py import blas
from flashlight_py.testing import ranks as testing
from tests.distributed import launched, processes

if TYPE_CHECKING:
    from tests.cluster.hosts import Host

# Limit in seconds for one hanging rank, if all tests together have little time.
MOST = float(os.environ.get("FLASHLIGHT_TEST_DEADLINE", "inf"))
START_DEADLINE = min(60.0, MOST)
# Seconds for other ranks to detect that a rank has raised and will not join their operation.
GRACE = 10.0
# Modules that most ranks use. CUDA and MPI are excluded, because a process that has initialised
# them must not be forked.
PRELOADED = (
    *("numpy", "numpy.testing", "ml_dtypes", "pytest", "hypothesis.strategies"),
    *("concurrent.futures.thread", "flashlight_py.distributed.start.initialize"),
    *("flashlight_py.nn", "flashlight_py.optim", "flashlight_py.parallel"),
    "flashlight_py.parallel.functional",
)
# BLAS threads would only add noise with four ranks on two cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]]

_living: weakref.WeakSet[RankPool] = weakref.WeakSet()
_servers: list[testing.ForkServer] = []


def start_server() -> testing.ForkServer:
    """Return the process that forks ranks; start it at the first call."""
    if not _servers:
        _servers.append(testing.ForkServer(_prepare))
        atexit.register(_servers[0].close)
    return _servers[0]


def _prepare() -> None:
    for name in PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    blas.limit_each(1, override_user=True)
    warnings.simplefilter(os.environ.get("FLASHLIGHT_TEST_WARNINGS", "error"))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank: ``kind`` is returned, raised, exited or stuck."""

    rank: int
    kind: str
    value: Any = None
    error_classes: tuple[str, ...] = ()
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    stderr: str = ""

    @classmethod
    def of(cls, outcome: testing.Outcome) -> Outcome:
        """Convert the outcome of ``_call``, which returns the fields of this class."""
        failure = outcome.failure
        if failure is None:
            return cls(outcome.rank, *outcome.value, stderr=outcome.output)
        kind = "stuck" if failure.exit_code == -signal.SIGABRT else "exited"
        text, code = failure.description, failure.exit_code
        return cls(outcome.rank, kind, message=text, exit_code=code, stderr=outcome.output)

    @property
    def ok(self) -> bool:
        return self.kind == "returned"

    @property
    def error_type(self) -> str:
        """The class of the exception; ``error_classes`` includes its bases."""
        return self.error_classes[0] if self.error_classes else ""

    @property
    def signal(self) -> signal.Signals | None:
        died_by_signal = self.exit_code is not None and self.exit_code < 0
        return signal.Signals(-self.exit_code) if died_by_signal else None  # type: ignore[operator]

    def describe(self) -> str:
        texts = {
            "raised": f"raised {self.error_type}: {self.message}",
            "exited": f"its process {self.message}",
            "stuck": f"did not answer before the deadline and was stopped {self.message}",
        }
        return texts.get(self.kind, self.kind)

    def report(self) -> str:
        parts = [f"--- rank {self.rank}: {self.describe()}", self.traceback.rstrip()]
        if self.stderr.strip():
            parts.append(f"[rank {self.rank}, end of its output]\n{self.stderr.rstrip()}")
        return "\n".join(part for part in parts if part)


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
    return {pid for pool in _living for pid in pool.pids()} | {server.pid for server in _servers}


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
        self.world: dict[str, Any] = {"init": init, "params": params, "env": env, "hosts": hosts}
        self._world: testing.Ranks | None = None

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
        outcomes = self._execute(fn, args, deadline, grace=deadline)
        if any(outcome.kind == "stuck" for outcome in outcomes):
            raise RanksFailedError(fn.__qualname__, outcomes)
        return outcomes

    def pids(self) -> set[int]:
        return set() if self._world is None else processes.members(self._world.groups)

    def close(self) -> None:
        """Shut the world down. Raises ``RanksFailedError`` if a rank does not end properly."""
        if self._world is None:
            return
        try:
            left = self._world.run(_leave, self.world["init"], timeout=START_DEADLINE, grace=GRACE)
            codes = self._world.close(START_DEADLINE)
        finally:
            self.kill()
        if any(outcome.failure for outcome in left) or any(codes):
            outcomes = [Outcome.of(outcome) for outcome in left]
            raise RanksFailedError(f"distributed_shutdown, with exit codes {codes},", outcomes)

    def kill(self) -> None:
        """End the ranks and their children at once, and wait for their ends."""
        if self._world is not None:
            running = self.pids()
            self._world.kill()
            processes.wait_for_end(running, GRACE)
            self._world = None
            self._folder.cleanup()

    def _execute(
        self, fn: Callable[..., Any], args: tuple[Any, ...], deadline: float, grace: float
    ) -> list[Outcome]:
        try:
            outcomes = self._run(self._started(), fn, args, min(deadline, MOST), min(grace, MOST))
        except BaseException:
            self.kill()
            raise
        if not all(outcome.ok for outcome in outcomes):
            self.kill()
        return outcomes

    def _run(
        self, world: testing.Ranks, fn: Any, args: Any, deadline: float, grace: float
    ) -> list[Outcome]:
        task = self.size, pickle.dumps((fn, args))
        outcomes = world.run(_call, *task, timeout=deadline, grace=grace)
        return [Outcome.of(outcome) for outcome in outcomes]

    def _started(self) -> testing.Ranks:
        if self._world is None:
            hosts = self.world["hosts"]
            shared = hosts[0].shared if hosts else None
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=shared)
            self._world = self._start(Path(self._folder.name))
            _living.add(self)
            task = self.world["init"], dict(self.world["params"] or {}), self._folder.name
            outcomes = self._run(self._world, _initialise, task, START_DEADLINE, START_DEADLINE)
            if not all(outcome.ok for outcome in outcomes):
                raise RanksFailedError("distributed_init", outcomes)
        return self._world

    def _start(self, folder: Path) -> testing.Ranks:
        hosts, envs = self.world["hosts"], [self._environment(rank) for rank in range(self.size)]
        if hosts or self.world["init"] == "mpi":
            return launched.start(self.size, envs, folder, hosts, START_DEADLINE)
        logs = [folder / f"output-{rank}" for rank in range(self.size)]
        every = [(rank, {**os.environ, **envs[rank]}, logs[rank]) for rank in range(self.size)]
        start = start_server().start if testing.HAS_FORK else launched.SpawnedRank
        return testing.Ranks([start(*one) for one in every])

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank that this process may not have."""
        env = self.world["env"]
        return {**ONE_THREAD, **((env(rank) if callable(env) else env) or {})}


def _call(rank: int, size: int, task: bytes) -> tuple[Any, ...]:
    """Return the fields of ``Outcome`` after a call of the pickled function."""
    try:
        fn, args = pickle.loads(task)  # imports the module of the test
        value = fn(rank, size, *args)
        pickle.dumps(value)
        return "returned", value
    except (Exception, testing.RankStuckError) as error:  # noqa: BLE001 - the harness reports it
        kind = "stuck" if isinstance(error, testing.RankStuckError) else "raised"
        classes = tuple(base.__name__ for base in type(error).__mro__)
        return kind, None, classes, str(error), traceback.format_exc()


def _initialise(rank: int, size: int, init: str | None, params: Any, folder: str) -> None:
    if init is None:
        return
    import flashlight_py as fl

    if init == "mpi":
        fl.distributed_init(fl.DistributedInit.MPI, -1, -1, params)
    elif init == "env":
        fl.distributed_init(fl.DistributedInit.ENV, params=params)
    else:
        params.setdefault("FILE_PATH", f"{folder}/rendezvous")
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params)
    joined = fl.get_world_rank(), fl.get_world_size()
    if joined != (rank, size):
        raise AssertionError(f"rank {rank} of {size} became rank {joined[0]} of {joined[1]}")


def _leave(rank: int, init: str | None) -> tuple[str]:
    if init is not None:
        import flashlight_py as fl

        fl.distributed_shutdown()
    return ("returned",)


def _call_each(rank: int, size: int, fn: Callable[..., Any], cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        name = f"{fn.__name__}{case!r} on rank {rank} of {size}"
        print(name, flush=True)  # printed so that the log of a stuck rank ends with it
        try:
            fn(rank, size, *case)
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
