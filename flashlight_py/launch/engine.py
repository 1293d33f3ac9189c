"""``spawn`` on an engine that is there already: what Dask and Spark have in common.

``run`` is called where the program is. An engine brings a function that starts every rank once, and
each rank calls ``Start.serve``, in a process of the engine's, which goes on to live afterwards.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flashlight_py.launch.failures import Failure, first_cause
from flashlight_py.launch.pickling import dumps
from flashlight_py.launch.ranks import LISTENER, SECRET, without_place
from flashlight_py.launch.spawning import checked_size, result_of

_log = logging.getLogger("flashlight_py")

# How long is waited for the cause, in seconds, once a rank has ended by a mere consequence.
CAUSE_SECONDS = 3.0
# How long a rank has to end after it was told to, in seconds, before its process is killed.
ENDING_SECONDS = 5.0


Outcomes = dict[int, bytes | Failure]
"""By rank, the pickled result, or how it failed."""


class RankFailure(Exception):
    """``rank`` has failed in one attempt."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(rank, failure)
        self.rank, self.failure = rank, failure


class TimeIsUp(Exception):
    """The whole run has lasted too long; ``ranks`` had not returned."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


@dataclass(frozen=True)
class Start:
    """One attempt, as the engine hands it to every rank."""

    name: str
    size: int
    restarts: int
    task: bytes = field(repr=False)
    secret: str = field(repr=False, default_factory=lambda: secrets.token_hex(32))

    def serve(self, rank: int, host: str, port: int) -> bytes | Failure:
        """Be ``rank``, which meets the others at ``port`` of rank 0's ``host``, until all returned.

        Returns the pickled result, or how this rank has failed. Its environment is that of a rank
        while the function runs, and as before afterwards.
        """
        listener = _listeners.pop(port, None) if rank == 0 else None
        variables = {
            **without_place(os.environ),
            **{"RANK": str(rank), "WORLD_SIZE": str(self.size), SECRET: self.secret},
            **{"MASTER_ADDR": host, "MASTER_PORT": str(port)},
            "FLASHLIGHT_RESTART_COUNT": str(self.restarts),
            **({LISTENER: str(listener.fileno())} if listener else {}),
        }
        try:
            with _environment(variables), _as_the_only_rank():
                return self._call(rank)
        except BaseException as error:  # noqa: BLE001 - whatever it is, ``run`` raises it
            return Failure.of_exception(error, time.monotonic())
        finally:
            if listener is not None:
                listener.close()

    def _call(self, rank: int) -> bytes:
        import flashlight_py as fl

        fn, args, params = pickle.loads(self.task)
        try:
            with _can_be_ended(), fl.abort_on_exception():
                fl.distributed_init(fl.DistributedInit.ENV, params=params)
                result = fn(rank, *args)
                try:
                    pickled = dumps(result, main_can_be_imported=False)
                except TypeError as error:
                    kind = type(result).__qualname__
                    raise TypeError(f"the result, of type {kind}, {error}") from error
                fl.barrier()  # nobody leaves while others compute
            return pickled
        finally:
            fl.distributed_shutdown()


def run(
    what: str,
    attempt: Callable[[Start, float], Sequence[bytes]],
    fn: Callable[..., Any],
    args: Sequence[Any],
    nprocs: int,
    params: Mapping[str, Any] | None,
    timeout: float | None,
    max_restarts: int,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``nprocs`` ranks that ``attempt`` starts; see ``spawn``.

    ``attempt(start, ends)`` returns the pickled results in rank order; the second argument is when
    time is up, by ``time.monotonic``. It leaves no rank behind when it raises.
    """
    size = checked_size(what, fn, args, nprocs, params, timeout)
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"{what}: max_restarts must be an integer from 0 on, got {max_restarts!r}")
    name = f"{what} of {getattr(fn, '__qualname__', repr(fn))}"
    try:
        task = dumps((fn, tuple(args), dict(params or {})), main_can_be_imported=False)
    except TypeError as error:
        raise TypeError(f"{name}: the function or its arguments {error}") from error
    ends = math.inf if timeout is None else time.monotonic() + timeout
    for restarts in range(max_restarts + 1):
        results = _try(attempt, Start(name, size, restarts, task), ends, max_restarts)
        if results is not None:
            return [result_of(name, rank, size, each) for rank, each in enumerate(results)]
    raise AssertionError("the last attempt raises or returns")


def _try(
    attempt: Callable[[Start, float], Sequence[bytes]], start: Start, ends: float, most: int
) -> Sequence[bytes] | None:
    """Return the results of one attempt; None: it failed, and another one may follow."""
    try:
        return attempt(start, ends)
    except RankFailure as failed:
        error = failed.failure.as_error(start.name, failed.rank, start.size)
        if start.restarts == most:
            raise error from None
        _log.warning("%s\nstarting again: %d of %d", error, start.restarts + 1, most)
        return None
    except TimeIsUp as late:
        names = ", ".join(map(str, late.ranks))
        raise TimeoutError(
            f"{start.name}: rank(s) {names} of {start.size} had not returned when the timeout was "
            "over; all ranks were ended"
        ) from None


def collect(
    ranks: Iterable[int], outcomes: Callable[[Set[int], float], Outcomes], ends: float
) -> list[bytes]:
    """Return the results of all ``ranks``, in order, by the time ``ends``.

    ``outcomes(ranks, until)`` waits for the end of one of ``ranks``, for a while, and returns how
    those did that have.

    Raises:
        RankFailure: a rank failed; the first cause.
        TimeIsUp: ``ends`` has come.
    """
    waiting, results, failures = set(ranks), dict[int, bytes](), dict[int, Failure]()
    while waiting and time.monotonic() < ends:
        for rank, outcome in outcomes(waiting, ends).items():
            waiting.discard(rank)
            if isinstance(outcome, Failure):
                failures[rank] = outcome
            else:
                results[rank] = outcome
        if any(not failure.follows for failure in failures.values()):
            break
        if failures:
            ends = min(ends, time.monotonic() + CAUSE_SECONDS)
    if failures:
        raise RankFailure(*first_cause(failures.items()))
    if waiting:
        raise TimeIsUp(sorted(waiting))
    return [results[rank] for rank in sorted(results)]


# In the process of a rank -------------------------------------------------------------------------

_listeners: dict[int, socket.socket] = {}
_lock = threading.Lock()
# The thread that is a rank, and the one that can be ended now.
_rank: int | None = None
_endable: int | None = None


def listen(host: str) -> int:
    """Listen at a free port of ``host``, for rank 0 of this process to come; returns the port."""
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    _listeners[port] = listener
    return port


def end_rank() -> bool:
    """End the rank that a thread of this process is: it raises SystemExit. False: there is none."""
    import flashlight_py as fl

    with _lock:
        if _endable is not None:
            fl.distributed.control.abort.report(SystemExit("the launcher has ended this rank"))
            _raise_in(_endable, SystemExit)
        return _rank is not None


@contextmanager
def _as_the_only_rank() -> Iterator[None]:
    global _rank  # noqa: PLW0603 - a process is one rank
    with _lock:
        if _rank is not None:
            raise RuntimeError("this process is a rank already; each rank needs one of its own")
        _rank = threading.get_ident()
    try:
        yield
    finally:
        with _lock:
            _raise_in(_rank, None)  # what end_rank has asked for, and did not happen before
            _rank = None


@contextmanager
def _can_be_ended() -> Iterator[None]:
    """A part in which the thread may raise SystemExit anywhere; leaving the world is none."""
    global _endable  # noqa: PLW0603
    _endable = threading.get_ident()
    try:
        yield
    finally:
        with _lock:
            _raise_in(_endable, None)
            _endable = None


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Have ``thread`` raise ``kind`` as soon as it executes Python; None takes that back."""
    exception = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
