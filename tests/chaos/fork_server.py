"""A process that forks ranks on command; the other end is ``rendezvous_helpers.Ranks``.

It reads one plan per line (JSON). Forking spares each of many ranks the start of an interpreter,
and yet a rank ends as a script does: through its own ``sys.excepthook`` and exit handlers. How it
has ended, the process that waits for it reports as one more event.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads must not be forked

import json
import signal
import sys

from tests.chaos import rank


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for ranks
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
            rank.PARTS[plan["part"]](plan)
            return


if __name__ == "__main__":
    sys.exit(main())
