"""Ranks that are forked from this process, so that a start takes milliseconds.

A ``ForkServer`` is a copy of this process that forks ranks. ``Ranks`` runs a task on every rank and
returns the outcomes. A task is a function and its arguments, which are sent by pickle. The first
argument of the function is the rank.
"""

import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from flashlight_py import system
from flashlight_py.launch.failures import Failure, describe_exit
from flashlight_py.launch.loop import SIGKILL
from flashlight_py.launch.ranks import signal_group
from flashlight_py.processes.rank_main import end_with, kill_if_parent_ends

HAS_FORK = hasattr(os, "fork")
# Raises RankStuckError in a rank that runs a task. On Windows, any signal would end the rank.
STUCK_SIGNAL = signal.SIGUSR2 if HAS_FORK else SIGKILL
# Signals to a rank that has not answered, and seconds until the next one. SIGABRT prints stacks.
_ENDING_SECONDS = 5.0
_ENDINGS = ((STUCK_SIGNAL, 1.0), *((k, _ENDING_SECONDS) for k in (signal.SIGABRT, SIGKILL)))
_OUTPUT_LINES = 60


class RankStuckError(BaseException):
    """A rank has not finished its task in time. ``except Exception`` does not catch it."""

    def __init__(self, rank: int) -> None:
        when = "at the timeout, or after a failure of another rank"
        super().__init__(f"rank {rank} had not finished {when}. If needed, pass a longer timeout")


class Outcome(NamedTuple):
    """The outcome of a task on one rank: its return value, or a failure, and its last output."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    output: str = ""


class Rank:
    """A forked rank: ``link`` for tasks, ``log`` of its output, and process id."""

    def __init__(self, link: Connection, status: Connection, log: Path) -> None:
        self.link, self.log, self._status = link, log, status
        self.pid: int = status.recv()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code (minus the signal), or None after ``timeout`` seconds."""
        if self._code is None and self._status.poll(timeout):
            self._code = self._status.recv()
        return self._code


class ForkServer:
    """A copy of this process, made now, that forks ranks. ``prepare`` runs in the copy.

    Other threads of this process do not exist in the copy. The copy ends when this process ends,
    and the ranks end with the copy.
    """

    def __init__(self, prepare: Callable[[], object] = gc.collect) -> None:
        sys.stdout.flush()  # otherwise each rank could print the buffered text again
        self._channel, other_end = Pipe()
        with warnings.catch_warnings(), other_end:
            # Python warns of any other thread. Those of BLAS libraries survive a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
            if self.pid == 0:
                self._channel.close()
                _exit_after(_serve, other_end, prepare)

    def start(self, rank: int, env: Mapping[str, str], log: Path | None) -> Rank:
        """Start a rank in a new session, with this environment, that appends its output to ``log``.

        Without ``log`` it uses our streams. Raises ConnectionError if the server has ended.
        """
        self._channel.send((rank, dict(env), log))
        ends = list[Connection]()
        for own_end, other_end in (Pipe(), Pipe()):
            with other_end:
                send_handle(self._channel, other_end.fileno(), self.pid)
            ends.append(own_end)
        log = log or Path(os.devnull)
        log.touch()
        return Rank(ends[0], ends[1], log)

    def close(self) -> None:
        self._channel.close()
        os.waitpid(self.pid, 0)


def _serve(channel: Connection, prepare: Callable[[], object]) -> None:
    """Fork a rank for each plan that arrives, and send its exit code."""
    os.setsid()  # Ctrl-C interrupts only the process that uses the ranks
    atexit._clear()  # the handlers of the original process
    prepare()
    gc.freeze()  # a collection in a rank would copy every shared page
    running: dict[int, Connection] = {}
    woken, wakes = Pipe(duplex=False)  # readable after the end of a rank
    os.set_blocking(wakes.fileno(), False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    life, own_life = Pipe(duplex=False)  # readable after the end of this process
    while True:
        if woken in wait([channel, woken]):
            os.read(woken.fileno(), 4096)
            for pid, status in list(running.items()):
                ended, code = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    with status, contextlib.suppress(BrokenPipeError):  # the receiver has ended
                        status.send(os.waitstatus_to_exitcode(code))
        if not channel.poll():
            continue
        try:
            plan = channel.recv()
        except EOFError:
            return
        link, status = (Connection(recv_handle(channel)) for _ in range(2))
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (channel, woken, wakes, own_life, status, *running.values()):
                end.close()
            _exit_after(_become_rank, os.getppid(), life, link, *plan)
        link.close()
        status.send(pid)
        running[pid] = status


def _become_rank(
    server: int, life: Connection, link: Connection, rank: int, env: dict[str, str],
    log: Path | None,
) -> None:  # fmt: skip
    if system.IS_PORTABLE:
        threading.Thread(target=end_with, args=(life,), daemon=True).start()
    else:
        life.close()
        kill_if_parent_ends(server)
    os.setsid()
    use_log(log)
    os.environ.clear()
    os.environ.update(env)
    run_tasks(link, rank)


def use_log(log: Path | None) -> None:
    if log is not None:
        with log.open("ab") as output, open(os.devnull, "rb") as nothing:
            for descriptor, file in enumerate((nothing, output, output)):
                os.dup2(file.fileno(), descriptor)
    for stream in (sys.stdout, sys.stderr):  # a rank that is killed has sent its last line
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _exit_after(run: Callable[..., None], *args: Any) -> NoReturn:
    """Call ``run(*args)`` and exit like an interpreter, without a return to our callers."""
    code: Any = 0
    try:
        run(*args)
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - printed, as at the end of an interpreter
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    if "coverage" in sys.modules and (measurement := sys.modules["coverage"].Coverage.current()):
        measurement.save()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def run_tasks(link: Connection, rank: int) -> None:
    """Run the tasks that arrive on ``link``, and send their outcomes, until an empty message."""
    faulthandler.enable(all_threads=True)  # prints the stacks at SIGABRT
    with contextlib.suppress(ImportError):  # Windows
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    is_busy = False

    def stop(*_: object) -> None:
        if is_busy:
            raise RankStuckError(rank)

    if HAS_FORK:
        signal.signal(STUCK_SIGNAL, stop)
    while task := link.recv_bytes():
        try:
            is_busy = True
            function, args = pickle.loads(task)  # imports modules, and may fail
            answer = pickle.dumps((function(rank, *args), None))
            is_busy = False
        except (Exception, RankStuckError) as error:  # noqa: BLE001 - the caller decides
            is_busy = False
            failure = Failure.of_exception(error)
            answer = pickle.dumps((None, failure._replace(traceback=traceback.format_exc())))
        link.send_bytes(answer)


class Ranks:
    """A world of ``ranks``. ``groups`` are the process groups that end with it."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self.groups = {rank.pid for rank in ranks}

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float, grace: float
    ) -> list[Outcome]:
        """Return the outcomes of ``function(rank, *args)`` in rank order.

        A rank that has not finished after ``timeout`` seconds, or ``grace`` seconds after another
        rank has failed, is interrupted. If it does not react, it prints its stacks and is killed.
        """
        task, outcomes = pickle.dumps((function, args)), dict[int, Outcome]()
        seen = [rank.log.stat().st_size for rank in self._ranks]
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # the rank has ended, which is found below
                rank.link.send_bytes(task)
        self._collect(outcomes, seen, timeout, grace)
        for number, seconds in _ENDINGS:
            for silent in set(range(len(self._ranks))) - set(outcomes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._ranks[silent].pid, number)
            self._collect(outcomes, seen, seconds, seconds)
        return [outcomes[rank] for rank in range(len(self._ranks))]

    def _collect(
        self, outcomes: dict[int, Outcome], seen: list[int], timeout: float, grace: float
    ) -> None:
        ends = time.monotonic() + timeout
        while pending := {r.link: k for k, r in enumerate(self._ranks) if k not in outcomes}:
            ready = wait(list(pending), max(0.0, ends - time.monotonic()))
            if not ready:
                return
            for rank in (pending[link] for link in ready):  # type: ignore[index]
                outcomes[rank] = self._answer(rank, seen[rank])
                if outcomes[rank].failure is not None:
                    ends = min(ends, time.monotonic() + grace)

    def _answer(self, number: int, seen: int) -> Outcome:
        rank = self._ranks[number]
        try:
            value, failure = rank.link.recv()
        except (EOFError, ConnectionResetError):
            code = rank.wait(_ENDING_SECONDS)
            value, failure = None, Failure(describe_exit(code), time.monotonic(), exit_code=code)
        with rank.log.open("rb") as log:
            log.seek(seen)
            lines = log.read().decode(errors="replace").splitlines()
        if len(lines) > _OUTPUT_LINES:
            lines = [f"[{len(lines) - _OUTPUT_LINES} earlier lines]", *lines[-_OUTPUT_LINES:]]
        return Outcome(number, value, failure, "\n".join(lines))

    def close(self, timeout: float) -> list[int | None]:
        """Let the ranks exit. Return each exit code, None for a rank that had to be killed."""
        ends = time.monotonic() + timeout
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.link.send_bytes(b"")
        codes = [rank.wait(max(0.0, ends - time.monotonic())) for rank in self._ranks]
        self.kill()
        return codes

    def kill(self) -> None:
        """Kill the process groups of all ranks, and wait for the ends of the ranks."""
        running = [rank.pid for rank in self._ranks if rank.wait(0.0) is None]
        for group in self.groups if HAS_FORK else ():
            signal_group(group, SIGKILL)
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)
        for rank in self._ranks:
            rank.wait()
            rank.link.close()
