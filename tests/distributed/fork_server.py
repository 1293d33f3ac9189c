"""A process that forks ranks on command; the other end is ``rendezvous_helpers.Ranks``.

It reads one plan per line (JSON). Forking saves the start of an interpreter per rank. A rank still
ends like a script: with ``sys.excepthook`` and exit handlers. The parent of a rank reports its exit
status as a last event.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads must not fork

import json
import signal
import sys

from tests.chaos import rank
from tests.distributed import rendezvous_worker

PARTS = {"exchange": rendezvous_worker.run_rank, "endure": rank.endure, "compute": rank.compute}


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the parents of ranks
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            plan = json.loads(line)
            if child := os.fork():
                _, status = os.waitpid(child, 0)
                rank.report(plan, "ended", code=os.waitstatus_to_exitcode(status))
                os._exit(0)
            with open(os.devnull, "rb") as nothing, open(plan["log"], "ab") as log:
                os.dup2(nothing.fileno(), 0)
                os.dup2(log.fileno(), 2)
            PARTS[plan["part"]](plan)
            return


if __name__ == "__main__":
    sys.exit(main())
