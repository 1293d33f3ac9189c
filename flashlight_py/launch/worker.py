"""A process of this machine that serves this one: it runs a function with a link between both."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Any

from flashlight_py.errors import RankFailedError
from flashlight_py.launch.failures import Failure, describe_exit
from flashlight_py.launch.loop import code_of
from flashlight_py.launch.ranks import without_place
from flashlight_py.launch.spawning import RANK_MAIN, interpreter, pack_task


class Worker:
    """Starts ``fn(link, *args)`` in a new process; ``what`` and ``number`` of ``count`` name it.

    A fresh interpreter, as the ranks of ``spawn``, but in no world. It ends with this process, and
    Ctrl-C on a terminal does not reach it. ``descriptors`` are inherited under the same numbers,
    ``variables`` are added to the environment. Does not wait until it has started.

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
        # The kernel ends a child when the thread that has started it ends: only the main one lasts.
        is_main = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if is_main else 0
        with theirs, open(os.memfd_create("flashlight task"), "wb") as memory:
            memory.write(task)
            memory.flush()
            passed = [theirs.fileno(), memory.fileno()]
            self._process = subprocess.Popen(
                [*interpreter(), str(RANK_MAIN), "", str(passed[1]), str(passed[0]), str(parent)],
                env={**without_place(os.environ), **variables},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[*passed, *descriptors],
            )
        with suppress(ConnectionError):  # one that has died already is noticed by wait_for_start
            self._link.send_bytes(multiprocessing.current_process().authkey)

    def wait_for_start(self) -> None:
        """Block until it has its task.

        Raises:
            RankFailedError: it cannot, because it fails to import the script, or has ended.
        """
        failure: Failure | None = self.receive()
        if failure is not None:
            raise self.error(failure.what, failure.traceback)

    def send(self, message: object) -> None:
        """Send ``message``, which can be pickled; blocks where it is long until it is taken.

        Raises:
            RankFailedError: the process has ended.
        """
        try:
            self._link.send(message)
        except ConnectionError:
            raise self._ended() from None

    def receive(self) -> Any:
        """Return the next message; blocks until it is there.

        Raises:
            RankFailedError: the process has ended.
        """
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
        # Not reaped, so that end() still reaches what it has left in its group.
        end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None, "waitid returns None only with WNOHANG"
        error = self.error(describe_exit(code_of(end)))
        error.exit_code = code_of(end)
        return error
