"""New processes on this machine: the ranks of ``spawn``, and workers, which are in no world.

Each process runs ``rank_main`` and reports to this process over a link.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import cached_property, partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from flashlight_py import system
from flashlight_py.cores import check_processes
from flashlight_py.errors import RankFailedError
from flashlight_py.interfaces import keep_port
from flashlight_py.launch import ranks
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure, describe_exit
from flashlight_py.launch.loop import SIGKILL, Poll, await_end, keep_exit_codes
from flashlight_py.launch.output import STREAMS, RankOutput
from flashlight_py.launch.pickling import pack_task
from flashlight_py.launch.supervisor import Supervisor
from flashlight_py.processes.links import new_link, shared

T = TypeVar("T")

ENDING_SECONDS = 5.0  # seconds for cleanup before a rank is killed
_CHUNK = 1 << 16


# Only multiprocessing's import of the parent's script is used. Its processes would leave a resource
# tracker and children behind, and would have the parent's environment (BLAS threads).
def spawn(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    params: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
) -> list[T]:
    """Run ``fn(rank, *args)`` in new processes on this machine, with the world initialised.

    The call blocks until every rank has returned. Each process is a fresh interpreter. It imports
    the script of this program under another name, so the code under ``if __name__ == "__main__":``
    does not run. Call ``spawn`` under this condition. The ranks print to the standard output and
    error of this process. If ``sys.stdout`` or ``sys.stderr`` is replaced, as in a notebook, the
    lines are written to the replacement with the prefix ``[rank]``. No process is left behind, even
    if a rank or this process is killed. If the call raises an exception, no rank is running any
    more. This process may itself be a rank of another world.

    Unless the environment sets them, OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS of
    each rank are the number of usable cores divided by ``nprocs``.

    Args:
        fn: Function of a module or of the script. If cloudpickle is installed (the extra
            ``notebook``), ``fn`` may also be a lambda, a closure or a function of a notebook.
        args: Further arguments of ``fn``, the same for every rank, sent by pickle.
        nprocs: Number of processes. Default: the number of cores that this process may use.
        params: Parameters of :func:`flashlight_py.distributed_init`, without FILE_PATH.
        timeout: Seconds for the whole call, including restarts. Default: no limit.
        max_restarts: Maximum number of restarts of all ranks after a failure. Each restart is
            logged as a warning. FLASHLIGHT_RESTART_COUNT of the ranks counts the restarts from 0.

    Returns:
        The results of the ranks, in rank order.

    Raises:
        TypeError: If ``fn`` is not callable, or ``fn`` or ``args`` cannot be pickled. No process
            has started.
        ValueError: If ``nprocs``, ``timeout``, ``params`` or ``max_restarts`` is invalid. No
            process has started.
        RankFailedError: If a rank of the last attempt raises (the message has its traceback), exits
            or is killed. The error names the first cause and not the resulting PeerLostErrors. The
            other ranks receive SIGTERM, which raises SystemExit, and SIGKILL after 5 seconds.
        TimeoutError: If ``timeout`` passes.
        OSError: If the system starts no more processes, or a replaced ``sys.stdout`` or
            ``sys.stderr`` cannot be written.
        RuntimeError: If a rank calls ``spawn`` while it imports the script, because the call is not
            under ``if __name__ == "__main__":``.
        KeyboardInterrupt: If the user presses Ctrl-C. The ranks receive SIGINT too.

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
    with shared(task) as content:
        results, codes = call.attempted(partial(_attempt, call, content))
    for rank, code in enumerate(codes):
        if code != 0:
            warnings.warn(
                f"{call.name}: rank {rank} of {call.size} {describe_exit(code)} after it had "
                "returned its result",
                RuntimeWarning,
                stacklevel=2,
            )
    return call.results([results[rank] for rank in range(call.size)])


def _attempt(call: SpawnCall, task: Any, restarts: int) -> tuple[dict[int, bytes], list[int]]:
    """Run one attempt; return the pickled results by rank, and the exit codes."""
    with (
        tempfile.TemporaryDirectory(prefix="flashlight-", ignore_cleanup_errors=True) as folder,
        closing(Poll()) as poll,
        keep_exit_codes(),
    ):
        world = SpawnedWorld(poll, call)
        return world.results, world.run(folder, task, restarts)


class SpawnedWorld:
    """The ranks of one attempt, with links to this process. ``results`` has a pickle per rank."""

    def __init__(self, poll: Poll, call: SpawnCall) -> None:
        self.results: dict[int, bytes] = {}
        self._poll, self._call, self._size = poll, call, call.size
        self._links: dict[int, Connection] = {}
        # Streams that a notebook, a test or redirect_stdout has replaced. Inherited descriptors
        # would bypass the replacement.
        replaced = [
            stream
            for stream in STREAMS
            if getattr(sys, f"std{stream}") not in (None, getattr(sys, f"__std{stream}__"))
        ]
        self._output = RankOutput(call.size, descriptors=(sys.stdout, sys.stderr))
        self._attempt = Supervisor(
            poll, self._signal, self._output, range(call.size), ENDING_SECONDS
        )
        self._ranks = ranks.RankProcesses(poll, self._output.take, replaced)
        self._master_port = keep_port()

    def start(self, folder: str, task: Any, restarts: int) -> None:
        """Start all ranks with ``task`` (see ``links``); they rendezvous in ``folder``."""
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # our earlier output must precede the output of the ranks
        meeting = ranks.file_meeting(f"{folder}/meeting", self._master_port.getsockname()[1])
        links = []
        for slot in ranks.slots_of([self._size]):
            environ = ranks.rank_environ(os.environ, slot, self._size, restarts, meeting)
            links.append(link := new_link(folder, task))
            start = link.command, environ, link.stdin, link.descriptors
            link.on_start(self._ranks.start(slot.rank, *start))
        for rank, link in enumerate(links):
            self._links[rank] = link.connect()
            self._poll.watch(self._links[rank].fileno(), partial(self._on_report, rank))

    def run(self, folder: str, task: Any, restarts: int) -> list[int]:
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
                attempt.on_end(set(range(self._size)) - self._links.keys())  # not connected
                is_interrupt = isinstance(error, KeyboardInterrupt)
                attempt.end(signal.SIGINT if is_interrupt else signal.SIGTERM)
                attempt.run()
            finally:
                self._signal(SIGKILL)
            raise
        finally:
            codes = self._ranks.wait()
            for rank in list(self._links):
                self._close_link(rank)
            self._ranks.close()
            self._output.end()
            self._master_port.close()
        if self._output.error:
            raise OSError(f"{self._call.name}: {self._output.error}; all ranks were ended")
        return codes

    def _signal(self, number: int) -> None:
        self._ranks.signal(number)
        if number == SIGKILL:
            self._attempt.on_end(range(self._size))

    def _on_report(self, rank: int) -> None:
        link = self._links[rank]
        try:
            if self._attempt.is_ending:  # drop the report, so that the rank does not block
                if not system.read(link.fileno(), _CHUNK):
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
        if len(self.results) == self._size:  # all ranks have returned and may leave the world
            for other in self._links.values():
                with suppress(ConnectionError):  # the rank may already have ended
                    other.send_bytes(b"")

    def _on_end(self, rank: int) -> None:
        self._close_link(rank)
        code = self._ranks.exit_code(rank)
        self._ranks.drain(rank)
        description = f"{describe_exit(code)} before it had returned"
        self._attempt.on_failure({rank: Failure(description, time.monotonic(), exit_code=code)})
        self._attempt.on_end([rank])

    def _close_link(self, rank: int) -> None:
        link = self._links.pop(rank)
        self._poll.unwatch(link.fileno())
        link.close()


# The kernel kills a child when the thread that started it ends: see PR_SET_PDEATHSIG in prctl(2).
def _start_in_thread(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Call ``start`` in a thread that waits for the end of the process; return the process."""
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
    """A new process that calls ``fn(*args)(link)``. It is a fresh interpreter in no world.

    ``name`` consists of the operation for errors, the number of this worker, and the number of
    workers. The process ends with this process; Ctrl-C does not reach it. ``variables`` are added
    to its environment. The constructor does not wait for the start. All methods raise
    RankFailedError after the process has ended.

    Raises:
        TypeError: If ``fn`` or ``args`` cannot be pickled.
        RuntimeError: If a rank or a worker calls the constructor while it imports the script.
        OSError: If the system starts no more processes.
    """

    def __init__(
        self, name: tuple[str, int, int], fn: Callable[..., object], args: Sequence[Any],
        variables: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._operation, self.number, self._count = name
        task = pack_task(self._operation, fn, tuple(args), {})
        with shared(task) as content:
            self._new_link = link = new_link("", content)
            environ = {**ranks.unranked(os.environ), **variables}
            streams: Any = {"stdin": link.stdin, "pass_fds": link.descriptors, "bufsize": 0}
            alone: Any = {"env": environ, "start_new_session": True}
            start: Any = partial(subprocess.Popen, link.command, **streams, **alone)
            is_main = threading.get_native_id() == os.getpid()  # in a greenlet, too
            self.process = start() if is_main or system.IS_PORTABLE else _start_in_thread(start)
        link.on_start(self.process)

    @cached_property
    def link(self) -> Connection:
        return self._new_link.connect()

    def wait_for_start(self) -> None:
        """Block until the worker has its task; RankFailedError if it cannot import the script."""
        failure: Failure | None = self.receive()
        if failure is not None:
            raise self.error(failure.description, failure.traceback)

    def send(self, message: object) -> None:
        """Send ``message``. A long message blocks until the worker reads it."""
        try:
            self.link.send(message)
        except ConnectionError:
            raise self._exit_error() from None

    def receive(self) -> Any:
        try:
            return self.link.recv()
        except (EOFError, ConnectionError):
            raise self._exit_error() from None

    def error(self, description: str, traceback: str = "") -> RankFailedError:
        message = f"{self._operation}: worker {self.number} of {self._count} {description}"
        return RankFailedError(f"{message}\n\n{traceback}" if traceback else message, self.number)

    def end(self) -> None:
        """Kill the process and the processes that it started; block until it has ended."""
        if self.process.returncode is None:  # its pid cannot be reused before it is reaped
            ranks.signal_group(self.process.pid, SIGKILL)
            self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()
        self.link.close()

    def _exit_error(self) -> RankFailedError:
        code = await_end(self.process)
        error = self.error(describe_exit(code))
        error.exit_code = code
        return error
