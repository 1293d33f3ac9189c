"""``spawn``: a world of new processes for one call of a function.

Each rank reports a result, or how it failed, through a link to this process.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing import spawn as mp_spawn
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from flashlight_py.cores import thread_variables, usable_cores
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure, describe_exit
from flashlight_py.launch.loop import Poll
from flashlight_py.launch.output import STREAMS, RankOutput
from flashlight_py.launch.pickling import dumps
from flashlight_py.launch.ranks import RankProcesses, rank_variables
from flashlight_py.launch.supervisor import Supervisor

T = TypeVar("T")

RANK_MAIN = Path(__file__).with_name("rank_main.py")

# How long ranks have to clean up, in seconds, before they are killed.
ENDING_SECONDS = 5.0
_CHUNK = 1 << 16


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
    program's script, as under another name, without running what stands under
    ``if __name__ == "__main__":``; there the call of ``spawn`` belongs. What the ranks print goes
    to this process's standard output and error; where ``sys.stdout`` or ``sys.stderr`` is replaced,
    as in a notebook, it is written there, line by line behind ``[rank]``, as it arrives.
    No process is left behind, also when a rank or this process is killed: the ranks end with this
    process. It may itself be a rank of another world.

    Unless the environment says otherwise, OMP_, OPENBLAS_ and MKL_NUM_THREADS of each rank are
    the number of usable cores divided by ``nprocs``.

    Args:
        fn: function of a module or of the script; with cloudpickle installed (the extra
            ``notebook``) also a lambda, a closure or a function of a notebook.
        args: further arguments of ``fn``, the same for every rank, sent by pickle.
        nprocs: number of processes; default the cores that this process may use.
        params: of :func:`flashlight_py.distributed_init`, without FILE_PATH.
        timeout: seconds that the whole run may take, from the first process to the last
            result, restarts included; default no limit.
        max_restarts: how often all ranks are started again, as new processes, when one has failed
            and all have ended; FLASHLIGHT_RESTART_COUNT of the ranks counts, from 0 on. Each
            failure before the last is logged as a warning.

    Returns:
        What each rank's call returned, in rank order.

    Raises:
        TypeError: ``fn`` cannot be called, or ``fn`` or ``args`` cannot be pickled. No process
            was started.
        ValueError: ``nprocs``, ``timeout``, ``params`` or ``max_restarts`` make no sense. No
            process was started.
        RankFailedError: in the last attempt, a rank raised (the message holds its traceback),
            exited or was killed. The first cause is named, not the PeerLostErrors that follow from
            it; the other ranks have been ended, by SIGTERM (it raises SystemExit there) and after 5
            seconds by SIGKILL.
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
    task = pack_task(call.name, fn, tuple(args), dict(params or {}))
    with open(os.memfd_create("flashlight task"), "wb") as memory:  # no file: nobody may write it
        memory.write(task)
        memory.flush()
        world, codes = call.attempted(partial(_attempt, call, memory.fileno()))
    _warn_of(call.name, codes)
    return call.results([world.results[rank] for rank in range(call.size)])


def _attempt(call: SpawnCall, task: int, restarts: int) -> tuple[SpawnedWorld, list[int]]:
    """Start all ranks, with the task that a descriptor has, and wait for their end.

    Returns the world, with a result of each, and the exit codes. Nothing is left when it raises.
    """
    with (
        tempfile.TemporaryDirectory(prefix="flashlight-", ignore_cleanup_errors=True) as folder,
        closing(Poll()) as poll,
    ):
        world = SpawnedWorld(poll, call)
        try:
            world.start(folder, task, restarts)
            world.run()
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            world.end(signal.SIGINT if is_interrupt else signal.SIGTERM)
            raise
        finally:
            codes = world.close()
    if world.output.error:
        raise OSError(f"{call.name}: {world.output.error}; all ranks were ended")
    return world, codes


def pack_task(name: str, fn: object, args: object, params: object) -> bytes:
    """Return two pickles: how to become this program's script, and what to call there.

    Raises:
        RuntimeError: this process is importing the script.
        TypeError: the function or its arguments cannot be pickled.
    """
    preparation = _preparation(name)
    del preparation["authkey"]  # a secret: it goes through the links and never lies in a file
    has_script = _has_script(preparation)
    if not has_script:
        preparation.pop("init_main_from_path", None)
    try:
        return pickle.dumps(preparation) + dumps((fn, args, params), has_script)
    except TypeError as error:
        raise TypeError(f"{name}: the function or its arguments {error}") from error


def main_can_be_imported(name: str) -> bool:
    """Return whether processes that are started for ``name`` can import this one's script.

    Raises:
        RuntimeError: this process is importing the script.
    """
    return _has_script(_preparation(name))


def _preparation(name: str) -> dict[str, Any]:
    try:
        return mp_spawn.get_preparation_data("rank")
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: called while a rank imports the script; put what starts the ranks under "
            "if __name__ == '__main__':"
        ) from error


def _has_script(preparation: Mapping[str, Any]) -> bool:
    """Return whether other processes can import this one's ``__main__`` (no notebook, no shell)."""
    module = preparation.get("init_main_from_name", "__main__")
    path = preparation.get("init_main_from_path")
    # multiprocessing does not import a package's __main__, which is seldom guarded.
    return not f".{module}".endswith(".__main__") or (path is not None and os.path.isfile(path))


def _warn_of(name: str, codes: list[int]) -> None:
    for rank, code in enumerate(codes):
        if code != 0:
            warnings.warn(
                f"{name}: rank {rank} of {len(codes)} {describe_exit(code)} after it had returned "
                "its result",
                RuntimeWarning,
                stacklevel=3,  # at who called spawn
            )


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
        self.output = RankOutput(call.size, descriptors=(sys.stdout, sys.stderr))
        self._attempt = Supervisor(poll, self.signal, self.output, range(call.size), ENDING_SECONDS)
        self._ranks = RankProcesses(poll, self._attempt.on_output, replaced)

    def start(self, folder: str, task: int, restarts: int) -> None:
        """Start all ranks; they inherit the descriptor ``task`` and meet in ``folder``."""
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # what was printed before stands before what the ranks print
        common = {
            **os.environ,
            **thread_variables(os.environ, self._size, usable_cores()),
            "FLASHLIGHT_RESTART_COUNT": str(restarts),
        }
        meeting = os.path.join(folder, "meeting")
        for rank in range(self._size):
            environ = {**common, **rank_variables(rank, self._size, meeting)}
            ours, theirs = Pipe()
            with theirs:
                place = [folder, str(task), str(theirs.fileno()), str(os.getpid())]
                command = [*interpreter(), str(RANK_MAIN), *place]
                self._ranks.start(rank, command, environ, descriptors=[theirs.fileno(), task])
            self._links[rank] = ours
            self._poll.watch(ours.fileno(), partial(self._on_report, rank))
            with suppress(ConnectionError):  # a rank that has died already is noticed later
                ours.send_bytes(multiprocessing.current_process().authkey)

    def run(self) -> None:
        """Wait for every rank's result, and end.

        Raises:
            RankFailedError: a rank failed; the first cause.
            TimeoutError: time is up.
        """
        self._attempt.run(self._call.ends)
        if self._attempt.cause is not None:
            raise self._call.failed(*self._attempt.cause)
        if self._attempt.undecided and not self._attempt.is_ending:
            raise self._call.late(self._attempt.undecided)

    def end(self, number: int) -> None:
        """Send ``number`` to the ranks and what they started; kill what is left of them later."""
        try:
            self._attempt.on_end(set(range(self._size)) - self._links.keys())  # were not started
            self._attempt.end(number)
            self._attempt.run()
        finally:
            self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send ``number`` to the ranks and what they started."""
        self._ranks.signal(number)
        if number == signal.SIGKILL:
            self._attempt.on_end(range(self._size))

    def close(self) -> list[int]:
        """Wait for the end of all ranks, show what they have printed, return their exit codes."""
        codes = self._ranks.wait()
        for rank in list(self._links):
            self._close_link(rank)
        self._ranks.close()
        self.output.end()
        return codes

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
        if len(self.results) == self._size:
            self._let_all_go()

    def _let_all_go(self) -> None:
        for link in self._links.values():
            with suppress(ConnectionError):  # it has ended since
                link.send_bytes(b"")

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


def interpreter() -> list[str]:
    """Return how this Python was called: the program and its own options, such as -O and -W."""
    command = [os.fsdecode(word) for word in mp_spawn.get_command_line()]
    return command[: command.index("-c")]
