"""The processes of one ``spawn``: started, listened to, and ended whatever happens."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from multiprocessing import spawn as mp_spawn
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

from flashlight_py.cores import thread_variables, usable_cores
from flashlight_py.errors import RankFailedError
from flashlight_py.launch import processes
from flashlight_py.launch.failures import Failure, first_cause
from flashlight_py.launch.pickling import dumps
from flashlight_py.launch.relay import Relay
from flashlight_py.launch.variables import rank_variables

__all__ = ["run"]

RANK_MAIN = Path(__file__).with_name("rank_main.py")
T = TypeVar("T", Connection, int)

# How long to listen for the cause, in seconds, once a rank has told of a mere consequence.
CAUSE_SECONDS = 3.0
# How long ranks have to clean up, in seconds, before they are killed.
ENDING_SECONDS = 5.0


def run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    size: int,
    params: Mapping[str, Any],
    timeout: float | None,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``size`` ranks; see :func:`flashlight_py.spawn`."""
    name = f"spawn of {getattr(fn, '__qualname__', repr(fn))}"
    task = _task(name, fn, args, params)
    ends = math.inf if timeout is None else time.monotonic() + timeout
    with (
        tempfile.TemporaryDirectory(prefix="flashlight-", ignore_cleanup_errors=True) as folder,
        open(
            os.memfd_create("flashlight task"), "wb"
        ) as memory,  # no file: nobody else may write it
    ):
        memory.write(task)
        memory.flush()
        world = LocalWorld(name, size)
        try:
            world.start(folder, memory.fileno())
            results = world.results(ends)
            world.leave()
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            world.end(signal.SIGINT if is_interrupt else signal.SIGTERM)
            raise
    return [_result(name, rank, size, pickled) for rank, pickled in enumerate(results)]


def _task(name: str, fn: object, args: object, params: object) -> bytes:
    """Return two pickles: how to become this program's script, and what to call there."""
    try:
        preparation = mp_spawn.get_preparation_data("rank")
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: called while a rank imports the script; put what starts the ranks under "
            "if __name__ == '__main__':"
        ) from error
    del preparation["authkey"]  # a secret: it goes through the links and never lies in a file
    has_script = _has_script(preparation)
    if not has_script:
        preparation.pop("init_main_from_path", None)
    try:
        return pickle.dumps(preparation) + dumps((fn, args, params), has_script)
    except TypeError as error:
        raise TypeError(f"{name}: the function or its arguments {error}") from error


def _has_script(preparation: Mapping[str, Any]) -> bool:
    """Return whether other processes can import this one's ``__main__`` (no notebook, no shell)."""
    module = preparation.get("init_main_from_name", "__main__")
    path = preparation.get("init_main_from_path")
    # multiprocessing does not import a package's __main__, which is seldom guarded.
    return not f".{module}".endswith(".__main__") or (path is not None and os.path.isfile(path))


def _result(name: str, rank: int, size: int, pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        raise RankFailedError(
            f"{name}: what rank {rank} of {size} returned cannot be unpickled here: {error}", rank
        ) from error


class LocalWorld:
    """The ranks of one run, by number: their processes and our ends of the links to them."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._relay = Relay()

    def start(self, folder: str, task: int) -> None:
        """Start all ranks; they inherit the descriptor ``task`` and meet in ``folder``."""
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # what was printed before comes before what the ranks print
        threads = thread_variables(os.environ, self.size, usable_cores())
        meeting = os.path.join(folder, "meeting")
        for rank in range(self.size):
            environ = {**os.environ, **threads, **rank_variables(rank, self.size, meeting)}
            self._start_rank(rank, folder, task, environ)

    def _start_rank(self, rank: int, folder: str, task: int, environ: Mapping[str, str]) -> None:
        ours, theirs = Pipe()
        self._links.append(ours)
        pipes = self._relay.pipes(rank)
        with theirs:
            place = [folder, str(task), str(theirs.fileno()), str(os.getpid())]
            command = [*_interpreter(), str(RANK_MAIN), *place]
            try:
                process = processes.start(command, environ, [theirs.fileno(), task], **pipes)
            finally:
                for pipe in pipes.values():
                    os.close(pipe)
        self._processes.append(process)
        with suppress(BrokenPipeError):  # a rank that has died already is noticed later
            ours.send_bytes(multiprocessing.current_process().authkey)

    def results(self, ends: float) -> list[bytes]:
        """Wait for every rank's pickled result, until the time ``ends`` (of ``time.monotonic``).

        Raises:
            RankFailedError: a rank failed; the first cause.
            TimeoutError: time is up.
        """
        returned: dict[int, bytes] = {}
        failed: dict[int, Failure] = {}
        while len(returned) + len(failed) < self.size:
            ready = self._ready(returned.keys() | failed.keys(), ends)
            for rank in ready:
                report = self._report(rank)
                if isinstance(report, Failure):
                    failed[rank] = report
                else:
                    returned[rank] = report
            if not ready or any(not failure.follows for failure in failed.values()):
                break
            if failed:
                ends = min(ends, time.monotonic() + CAUSE_SECONDS)
        self._raise_cause(failed)
        self._raise_if_late(set(range(self.size)) - returned.keys())
        return [returned[rank] for rank in range(self.size)]

    def leave(self) -> None:
        """Let the ranks go, all of which have returned, and wait for their end."""
        for link in self._links:
            link.close()
        codes = [self._wait(process) for process in self._processes]
        self._relay.close()
        for rank, code in enumerate(codes):
            if code != 0:
                warnings.warn(
                    f"{self.name}: rank {rank} of {self.size} {processes.describe_exit(code)} "
                    "after it had returned its result",
                    RuntimeWarning,
                    stacklevel=4,  # at who called spawn
                )

    def end(self, number: signal.Signals) -> None:
        """Send ``number`` to the ranks and what they started; kill what is left of them later."""
        try:
            processes.signal_groups(self._processes, number)
            self._await_ends(time.monotonic() + ENDING_SECONDS)
        finally:
            processes.signal_groups(self._processes, signal.SIGKILL)
            for process in self._processes:
                process.wait()
            for link in self._links:
                link.close()
            self._relay.close()

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of ``process``, showing what ranks print meanwhile."""
        if self._relay.descriptors:
            ended = os.pidfd_open(process.pid)
            try:
                while ended not in self._readable([ended], math.inf):
                    pass
            finally:
                os.close(ended)
        return process.wait()

    def _ready(self, heard: Set[int], ends: float) -> list[int]:
        """Wait for ranks other than those ``heard`` to report or end; [] when time is up."""
        rank_of = {link: rank for rank, link in enumerate(self._links) if rank not in heard}
        return [rank_of[link] for link in self._readable(rank_of, ends)]

    def _readable(self, objects: Iterable[T], ends: float) -> list[T]:
        """Wait for ``objects``, showing what ranks print meanwhile; [] when time is up."""
        awaited: list[T] = list(objects)
        while True:
            seconds = None if ends == math.inf else max(0.0, ends - time.monotonic())
            ready = wait([*awaited, *self._relay.descriptors], seconds)
            for descriptor in set(self._relay.descriptors).intersection(ready):
                self._relay.read(descriptor)
            found = [each for each in awaited if each in ready]
            if found or not ready or time.monotonic() >= ends:
                return found

    def _report(self, rank: int) -> bytes | Failure:
        link = self._links[rank]
        try:
            failure: Failure | None = link.recv()
            return link.recv_bytes() if failure is None else failure
        except (EOFError, ConnectionResetError):
            code = processes.exit_code(self._processes[rank])
            return Failure.of_exit(code, time.monotonic())

    def _raise_cause(self, failed: Mapping[int, Failure]) -> None:
        if failed:
            rank, failure = first_cause(failed.items())
            raise failure.as_error(self.name, rank, self.size)

    def _raise_if_late(self, late: Set[int]) -> None:
        if late:
            names = ", ".join(map(str, sorted(late)))
            raise TimeoutError(
                f"{self.name}: rank(s) {names} of {self.size} had not returned when the timeout "
                "was over; all ranks were ended"
            )

    def _await_ends(self, ends: float) -> None:
        """Return when every rank has ended, or at the time ``ends``; drops what they report."""
        links = {link for link in self._links if not link.closed}
        while links and (ready := self._readable(links, ends)):
            links -= {link for link in ready if _has_ended(link)}


def _has_ended(link: Connection) -> bool:
    """Read and drop one report; True at the end of the link, which is that of its process."""
    try:
        link.recv_bytes()
    except (EOFError, ConnectionResetError):
        return True
    return False


def _interpreter() -> list[str]:
    """Return how this Python was called: the program and its own options, such as -O and -W."""
    command = [os.fsdecode(word) for word in mp_spawn.get_command_line()]
    return command[: command.index("-c")]
