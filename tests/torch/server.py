"""A server that forks ranks with torch: ``python -m tests.torch.server``.

It reads a task per line from its input, in JSON, and answers with the results of all ranks. The
tests import torch only once, which takes seconds.
"""

import atexit
import ctypes
import faulthandler
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LAST_BYTES = 8000


def main() -> None:
    import torch
    import torch.distributed

    import flashlight_py.torch.joining  # noqa: F401  (with what ranks need: they are forked)

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(f"{json.dumps(run(**json.loads(line)))}\n")
        answers.flush()


def run(
    program: str, size: int, args: list[Any], environ: dict[str, str], seconds: float
) -> list[dict[str, Any]]:
    """Call ``program``, "module.function", on ``size`` ranks, for at most ``seconds``."""
    folder = Path(tempfile.mkdtemp(prefix="torch-ranks-"))
    files = [folder / f"{rank}" for rank in range(size)]
    module, _, name = program.rpartition(".")
    function = getattr(importlib.import_module(f"tests.torch.programs.{module}"), name)
    began = time.monotonic()
    ranks = {
        _forked(function, rank, size, args, environ, files[rank]): rank for rank in range(size)
    }
    statuses = _ended(ranks, began + seconds)
    outcomes = []
    for rank, file in enumerate(files):
        status, ended = statuses[rank]
        outcome_file = file.with_suffix(".said")
        outcome = json.loads(outcome_file.read_text()) if outcome_file.exists() else {}
        output = file.read_bytes()[-_LAST_BYTES:].decode(errors="replace")
        code = os.waitstatus_to_exitcode(status)
        outcomes.append({"exitcode": code, "output": output, "ended": ended - began, **outcome})
    shutil.rmtree(folder)
    return outcomes


def _ended(ranks: dict[int, int], end: float) -> dict[int, tuple[int, float]]:
    """Return each rank's exit status and end time. Ranks that run at ``end`` print their stacks."""
    left, statuses = dict(ranks), {}
    last = signal.SIGABRT
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[left.pop(pid)] = status, time.monotonic()
        if left and time.monotonic() > end:
            for pid in left:
                os.kill(pid, last)
            last, end = signal.SIGKILL, time.monotonic() + 2.0
        time.sleep(0.005)
    return statuses


def _forked(
    function: Any, rank: int, size: int, args: list[Any], environ: dict[str, str], file: Path
) -> int:
    """Fork a rank that calls ``function`` and ends. Return its process ID."""
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(all_threads=True)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), **environ})
    outcome_file, code = file.with_suffix(".said"), 0
    try:
        outcome_file.write_text(json.dumps({"returned": function(rank, size, *args)}))
    except BaseException as error:  # noqa: BLE001  (whoever started it is told)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        outcome_file.write_text(json.dumps({"raised": kinds, "words": str(error)}))
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    # Ends like a program, without the seconds in which torch frees its memory.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
