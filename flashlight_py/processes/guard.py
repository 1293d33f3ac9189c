"""Kills the ranks of a launcher that was killed: ``python guard.py``, with a pipe as its input.

Each line of the input is the number of a process. It is sent at the start of the process, and again
at its end. The input ends with the launcher.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on Windows, where sessions do not exist
    pids = set[int]()
    for line in sys.stdin:
        pids ^= {int(line)}
    for pid in pids:
        with suppress(OSError):  # it has ended
            getattr(os, "killpg", os.kill)(pid, 9)


if __name__ == "__main__":
    main()
