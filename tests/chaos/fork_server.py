"""A process that forks ranks on command; the other end is ``rendezvous_helpers.Ranks``.

It reads one plan per line (JSON). Forking spares each of many ranks the start of an interpreter,
and yet a rank ends as a script does: through its own ``sys.excepthook`` and exit handlers. How it
has ended, this process reports as one more event.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads must not be forked

import json
import selectors
import signal
import socket
import sys
from typing import Any

from tests.chaos import rank

Plan = dict[str, Any]


class Server:
    """Forks for each plan that stands on its standard input, and reaps."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._buffer = b""
        self._bell, self._alarm = socket.socketpair()
        for end in (self._bell, self._alarm):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._alarm.fileno())

    def serve(self) -> Plan | None:
        """Return a plan in the process that is to follow it; None when there are no more."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._bell in ready:
                    self._reap()
                if 0 in ready:
                    if not (read := os.read(0, 65536)):
                        return None
                    plan = self._fork_each(read)
                    if plan is not None:
                        return plan

    def _fork_each(self, read: bytes) -> Plan | None:
        *lines, self._buffer = (self._buffer + read).split(b"\n")
        for line in lines:
            plan: Plan = json.loads(line)
            child = os.fork()
            if child == 0:
                self._become_a_rank(plan)
                return plan
            self._ids[child] = plan["id"]
        return None

    def _become_a_rank(self, plan: Plan) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._bell.close()
        self._alarm.close()
        with open(os.devnull, "rb") as nothing, open(plan["log"], "ab") as log:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 2)

    def _reap(self) -> None:
        self._bell.recv(4096)
        while self._ids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            rank.report({"id": self._ids.pop(pid)}, "ended", code=code)


def main() -> None:
    plan = Server().serve()
    if plan is not None:
        rank.PARTS[plan["part"]](plan)


if __name__ == "__main__":
    sys.exit(main())
