"""New processes of this machine: the world of a call of ``spawn``, and workers, in no world.

Each runs ``rank_main``, and reports through a link to this process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from multiprocessing import spawn as mp_spawn
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from flashlight_py.cores import check_processes, thread_variables, usable_cores
from flashlight_py.errors import RankFailedError
from flashlight_py.interfaces import keep_port
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure, describe_exit
from flashlight_py.launch.loop import Poll, await_end, kept_exit_codes
from flashlight_py.launch.output import STREAMS, RankOutput
from flashlight_py.launch.pickling import pack_task
from flashlight_py.launch.ranks import RankProcesses, for_others, rank_variables, without_place
from flashlight_py.launch.supervisor import Supervisor

T = TypeVar("T")

_RANK_MAIN = Path(__file__).with_name("rank_main.py")

# How long ranks have to clean up, in seconds, before they are killed.
ENDING_SECONDS = 5.0
_CHUNK = 1 << 16


# Processes of multiprocessing would leave a resource tracker and children behind, and cannot get an
# environment (threads of BLAS). Only how a child becomes the parent's script is taken from there.
def spawn(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    params: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
) -> list[T]:
    """Run ``fn(rank, *args)`` in new processes of this machine, with the world initialised.

    Blocks until every rank has returned. Each process is a fresh interpreter that imports this
    program's script under another name, without the code under ``if __name__ == "__main__":``,
    where the call of ``spawn`` belongs. The ranks print to this process's standard output and
    error; if ``sys.stdout`` or ``sys.stderr`` is replaced, as in a notebook, lines are written
    there behind ``[rank]``. No process is left behind, even if a rank or this process is killed.
    This process may itself be a rank of another world.

    Unless the environment says otherwise, OMP_, OPENBLAS_ and MKL_NUM_THREADS of each rank are
    the number of usable cores divided by ``nprocs``.

    Args:
        fn: function of a module or of the script; with cloudpickle installed (the extra
            ``notebook``) also a lambda, a closure or a function of a notebook.
        args: further arguments of ``fn``, the same for every rank, sent by pickle.
        nprocs: number of processes; default the cores that this process may use.
        params: of :func:`flashlight_py.distributed_init`, without FILE_PATH.
        timeout: seconds for the whole run, with restarts; default no limit.
        max_restarts: maximum number of restarts of all ranks after a failure, which is logged as a
            warning. FLASHLIGHT_RESTART_COUNT of the ranks counts them, from 0 on.

    Returns:
        The results of the ranks' calls, in rank order.

    Raises:
        TypeError: ``fn`` cannot be called, or ``fn`` or ``args`` cannot be pickled. No process
            was started.
        ValueError: ``nprocs``, ``timeout``, ``params`` or ``max_restarts`` make no sense. No
            process was started.
        RankFailedError: in the last attempt, a rank raised (the message holds its traceback),
            exited or was killed. The first cause is named, not PeerLostErrors that follow from it.
            The other ranks were ended by SIGTERM (SystemExit there), after 5 seconds by SIGKILL.
        TimeoutError: ``timeout`` has passed; the ranks have been ended.
        OSError: the system starts no more processes, or what the ranks print cannot be written to
            a replaced ``sys.stdout`` or ``sys.stderr``; the ranks have been ended.
        RuntimeError: called while a rank imports the script: the call is not under
            ``if __name__ == "__main__":``.
        KeyboardInterrupt: Ctrl-C; the ranks were interrupted too, and have ended.

    Example:
        >>> def total(rank, start):
        ...     x = np.array([start + rank])
        ...     return int(fl.all_reduce(x)[0])
        >>> if __name__ == "__main__":
        ...     print(fl.spawn(total, args=(10,), nprocs=2))  # [21, 21]
    """
    call = SpawnCall.checked("spawn", fn, args, nprocs, params, timeout, max_restarts)
    check_processes("spawn: nprocs", call.size, 3)
    task = pack_task(call.name, fn, tuple(args), dict(params or {}))
    with _in_memory(task) as memory:
        results, codes = call.attempted(partial(_attempt, call, memory))
    for rank, code in enumerate(codes):
        if code != 0:
            warnings.warn(
                f"{call.name}: rank {rank} of {call.size} {describe_exit(code)} after it had "
                "returned its result",
                RuntimeWarning,
                stacklevel=2,
            )
    return call.results([results[rank] for rank in range(call.size)])


def _attempt(call: SpawnCall, task: int, restarts: int) -> tuple[dict[int, bytes], list[int]]:
    """Return the pickled results of all ranks, with the task that a descriptor has, and the codes.

    Nothing is left when it raises.
    """
    with (
        tempfile.TemporaryDirectory(prefix="flashlight-", ignore_cleanup_errors=True) as folder,
        closing(Poll()) as poll,
        kept_exit_codes(),
    ):
        world = SpawnedWorld(poll, call)
        return world.results, world.run(folder, task, restarts)


class SpawnedWorld:
    """The ranks of one run, and our ends of the links to them; ``results`` are pickles, by rank."""

    def __init__(self, poll: Poll, call: SpawnCall) -> None:
        self.results: dict[int, bytes] = {}
        self._poll, self._call, self._size = poll, call, call.size
        self._links: dict[int, Connection] = {}
        # A notebook, a test or redirect_stdout has put an object in the place of sys.stdout; what
        # a process inherits would go past it.
        replaced = [
            stream
            for stream in STREAMS
            if getattr(sys, f"std{stream}") not in (None, getattr(sys, f"__std{stream}__"))
        ]
        self._output = RankOutput(call.size, descriptors=(sys.stdout, sys.stderr))
        self._attempt = Supervisor(
            poll, self._signal, self._output, range(call.size), ENDING_SECONDS
        )
        self._ranks = RankProcesses(poll, self._output.take, replaced)
        self._kept = keep_port()

    def start(self, folder: str, task: int, restarts: int) -> None:
        """Start all ranks; they inherit the descriptor ``task`` and meet in ``folder``."""
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # what was printed before stands before what the ranks print
        common = {
            **os.environ,
            **thread_variables(os.environ, self._size, usable_cores()),
            "FLASHLIGHT_RESTART_COUNT": str(restarts),
        }
        common |= for_others("127.0.0.1", self._kept.getsockname()[1])
        for rank in range(self._size):
            environ = {**common, **rank_variables(rank, self._size, f"{folder}/meeting")}
            ours, theirs = Pipe()
            os.set_blocking(ours.fileno(), True)  # also where gevent has patched sockets
            with theirs:
                command = _command(folder, task, theirs, os.getpid())
                self._ranks.start(rank, command, environ, descriptors=[theirs.fileno(), task])
            self._links[rank] = ours
            self._poll.watch(ours.fileno(), partial(self._on_report, rank))
            with suppress(ConnectionError):  # a rank that has died already is noticed later
                ours.send_bytes(multiprocessing.current_process().authkey)

    def run(self, folder: str, task: int, restarts: int) -> list[int]:
        """Start all ranks, wait for every result, and end; returns the exit codes.

        Raises what ``spawn`` does of an attempt.
        """
        attempt = self._attempt
        try:
            self.start(folder, task, restarts)
            attempt.run(self._call.ends)
            if attempt.cause is not None:
                raise self._call.failed(*attempt.cause)
            if attempt.undecided and not attempt.is_ending:
                raise self._call.late(attempt.undecided)
        except BaseException as error:
            try:
                attempt.on_end(set(range(self._size)) - self._links.keys())  # were not started
                is_interrupt = isinstance(error, KeyboardInterrupt)
                attempt.end(signal.SIGINT if is_interrupt else signal.SIGTERM)
                attempt.run()
            finally:
                self._signal(signal.SIGKILL)
            raise
        finally:
            codes = self._ranks.wait()
            for rank in list(self._links):
                self._close_link(rank)
            self._ranks.close()
            self._output.end()
            self._kept.close()
        if self._output.error:
            raise OSError(f"{self._call.name}: {self._output.error}; all ranks were ended")
        return codes

    def _signal(self, number: int) -> None:
        self._ranks.signal(number)
        if number == signal.SIGKILL:
            self._attempt.on_end(range(self._size))

    def _on_report(self, rank: int) -> None:
        """Read a report of ``rank``, or its end."""
        link = self._links[rank]
        try:
            if self._attempt.is_ending:  # nobody needs it any more, but it must not wait for us
                if not os.read(link.fileno(), _CHUNK):
                    self._on_end(rank)
                return
            failure: Failure | None = link.recv()
            if failure is not None:
                self._attempt.on_failure({rank: failure})
                return
            self.results[rank] = link.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._on_end(rank)
            return
        self._attempt.on_return(rank)
        if len(self.results) == self._size:  # let all go
            for each in self._links.values():
                with suppress(ConnectionError):  # it has ended since
                    each.send_bytes(b"")

    def _on_end(self, rank: int) -> None:
        """The link has ended, and with it the process."""
        self._close_link(rank)
        code = self._ranks.exit_code(rank)
        self._ranks.drain(rank)
        what = f"{describe_exit(code)} before it had returned"
        self._attempt.on_failure({rank: Failure(what, time.monotonic(), exit_code=code)})
        self._attempt.on_end([rank])

    def _close_link(self, rank: int) -> None:
        link = self._links.pop(rank)
        self._poll.forget(link.fileno())
        link.close()


@contextmanager
def _in_memory(task: bytes) -> Iterator[int]:
    """Yield a descriptor of memory that holds ``task``: no file, so that nobody may write it."""
    with open(os.memfd_create("flashlight task"), "wb") as memory:
        memory.write(task)
        memory.flush()
        yield memory.fileno()


def _command(folder: str, task: int, link: Connection, parent: int) -> list[str]:
    """Return what runs ``rank_main`` in an interpreter that is called as this one: -O, -W, ..."""
    command = [os.fsdecode(word) for word in mp_spawn.get_command_line()]
    numbers = map(str, (task, link.fileno(), parent))
    return [*command[: command.index("-c")], str(_RANK_MAIN), folder, *numbers]


# Workers ------------------------------------------------------------------------------------------


# The kernel kills a child when the thread that started it ends: see PR_SET_PDEATHSIG in prctl(2).
def _in_a_lasting_thread(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Return the process that ``start`` returns, called in a thread that waits for its end."""
    started = Future[subprocess.Popen[bytes]]()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            started.set_exception(error)
            return
        await_end(started.result())

    threading.Thread(target=run, daemon=True).start()
    return started.result()


class Worker:
    """Starts ``fn(*args)(link)`` in a new process; ``what`` and ``number`` of ``count`` name it.

    It is a fresh interpreter, in no world, and ends with this process. Ctrl-C does not reach it.
    ``descriptors`` are inherited, ``variables`` are added to the environment. The constructor does
    not wait for the start. All methods raise a RankFailedError if the process has ended.

    Raises:
        TypeError: ``fn`` or ``args`` cannot be pickled.
        RuntimeError: called while a worker or a rank imports the script.
        OSError: the system starts no more processes.
    """

    def __init__(
        self,
        name: tuple[str, int, int],
        fn: Callable[..., object],
        args: Sequence[Any],
        descriptors: Sequence[int],
        variables: Mapping[str, str],
    ) -> None:
        self._what, self.number, self._count = name
        task = pack_task(self._what, fn, tuple(args), {})
        self._link, theirs = Pipe()
        os.set_blocking(self._link.fileno(), True)  # also where gevent has patched sockets
        with theirs, _in_memory(task) as memory:
            command = _command("", memory, theirs, os.getpid())

            def start() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    command,
                    env={**without_place(os.environ), **variables},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[theirs.fileno(), memory, *descriptors],
                )

            is_main = threading.get_native_id() == os.getpid()  # also in a greenlet
            self._process = start() if is_main else _in_a_lasting_thread(start)
        with suppress(ConnectionError):  # one that has died already is noticed by wait_for_start
            self._link.send_bytes(multiprocessing.current_process().authkey)

    def wait_for_start(self) -> None:
        """Block until it has its task; a RankFailedError: it fails to import the script, too."""
        failure: Failure | None = self.receive()
        if failure is not None:
            raise self.error(failure.what, failure.traceback)

    def send(self, message: object) -> None:
        """Send ``message``, which can be pickled; blocks where it is long until it is taken."""
        try:
            self._link.send(message)
        except ConnectionError:
            raise self._ended() from None

    def receive(self) -> Any:
        """Return the next message; blocks until it is there."""
        try:
            return self._link.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None

    def error(self, what: str, traceback: str = "") -> RankFailedError:
        """Return the exception that reports what this worker did."""
        words = f"{self._what}: worker {self.number} of {self._count} {what}"
        return RankFailedError(f"{words}\n\n{traceback}" if traceback else words, self.number)

    def end(self) -> None:
        """Kill the process and what it has started; blocks until it is gone."""
        if self._process.returncode is None:  # its number cannot be another's before it is reaped
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._link.close()

    def _ended(self) -> RankFailedError:
        code = await_end(self._process)
        error = self.error(describe_exit(code))
        error.exit_code = code
        return error
