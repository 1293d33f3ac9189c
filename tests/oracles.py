"""Processes that compute with other libraries, each in another interpreter.

A process runs from the first comparison to the end of the session, so that a comparison takes
milliseconds.
"""

import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORDS = 2000  # number of characters of a process's output in errors


class Oracle:
    """A process that answers requests. If it has ended, the next request starts it again.

    It runs a module of these tests, which calls ``answer_requests``.
    """

    def __init__(self, python: str | Path, module: str, **environment: str) -> None:
        self._command = [str(python), "-m", module]
        # Without the mark of this session and variables that a test may have set for MPI.
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        self._environment = kept | {"PYTHONPATH": str(ROOT), **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (close() does)

    def ask(self, **request: Any) -> Any:
        """Return the answer to a request.

        Raises:
            RuntimeError: If the request raises an error or ends the process. The message contains
                the traceback, or the output of the process.
        """
        if self._line is None:
            self._start()
        assert self._line is not None
        try:
            self._line.send(request)
            kind, answer = self._line.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"ended with status {self._end()}: {self._words()}") from error
        if kind == "error":
            raise RuntimeError(f"{self._command[-1]}: {answer}")
        return answer

    def close(self) -> None:
        if self._line is not None:
            self._end()
        self._log.close()

    def _start(self) -> None:
        ours, its = socket.socketpair()
        self._log.truncate(0)
        self._process = subprocess.Popen(
            [*self._command, str(its.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=self._environment,
            pass_fds=[its.fileno()],
        )
        its.close()
        self._line = Connection(ours.detach())

    def _end(self) -> int:
        """Wait for a process without open connections. Return its exit status."""
        assert self._line is not None
        assert self._process is not None
        self._line.close()
        self._line = None
        return self._process.wait()

    def _words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-WORDS:]


def answer_requests(answer: Callable[..., Any]) -> None:
    """Answer requests in the oracle's process, until the tests end.

    The only argument is the descriptor of the connection to the tests.
    """
    line = Connection(int(sys.argv[1]))
    while True:
        try:
            request = line.recv()
        except EOFError:  # the tests have ended
            return
        try:
            result = answer(**request)
        except Exception:  # noqa: BLE001  (whatever it is, the test is shown it)
            line.send(("error", traceback.format_exc()))
        else:
            line.send(("answer", result))
