"""The program of a rank of ``spawn``, or a worker: ``python rank_main.py FOLDER TASK LINK PARENT``.

The ranks meet in FOLDER. TASK and LINK are inherited descriptors: of memory that holds two pickles,
and of a connection to the parent, whose process number is PARENT. Through the link the parent sends
the key of multiprocessing, the rank one report, and the parent, when all have returned, a message
that lets the rank leave the world.

Without a FOLDER it is a worker, in no world: it reports that it has its task, or the failure. Then
the function that the task has returned is called with the link.

Run by its path, it imports nothing of ours before the parent's ``sys.path`` is in place.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import mmap
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_SIG_IGN = 1  # of signal(2)
_leaving = False  # whether the task has ended


def main() -> None:
    """Do the task, report, and stay until all ranks have returned."""
    folder, task = sys.argv[1], int(sys.argv[2])
    link = Connection(int(sys.argv[3]))
    os.set_inheritable(link.fileno(), False)  # its end must mean the end of this process
    os.set_blocking(link.fileno(), True)  # also where gevent has patched the parent's sockets
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # which the parent may have blocked
    die_with_parent(int(sys.argv[4]))
    signal.signal(signal.SIGTERM, _leave_in_order)
    os.register_at_fork(after_in_child=lambda: _be_no_rank(link))
    if sys.stderr is not None:
        faulthandler.enable()  # a crash in native code shows where it was
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Whole lines, and at once: also in a pipe, and also with PYTHONUNBUFFERED.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    multiprocessing.current_process().authkey = link.recv_bytes()
    try:
        fn, args, params = _load(task)
        result: Any = _call(fn, args, params, Path(folder)) if folder else fn(*args)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent raises it
        from flashlight_py.launch.failures import Failure

        link.send(Failure.of_exception(error, time.monotonic()))
        if folder:
            import flashlight_py as fl

            fl.distributed.failures.abort.report(error)  # to the other ranks
        return
    link.send(None)
    if not folder:
        result(link)
        return
    link.send_bytes(result)
    with suppress(EOFError, ConnectionResetError):
        link.recv_bytes()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread of ``parent`` that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _leave_in_order(number: int, _: object) -> None:
    """Answer SIGTERM by an exception: half-done work, such as memory with a name, is undone."""
    if not _leaving:  # else the exception would end, and print, what runs at the exit
        sys.exit(128 + number)


def _be_no_rank(link: Connection) -> None:
    """In a process that the rank has forked: the end of the link must mean the end of the rank."""
    link.close()
    if signal.getsignal(signal.SIGTERM) is _leave_in_order:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _load(task: int) -> tuple[Any, Any, Any]:
    """Take over the parent's ``sys.path`` and arguments, import its script, and return the task.

    Meanwhile multiprocessing refuses to start processes: a script that does so unconditionally
    would start them in every process again.
    """
    process: Any = multiprocessing.current_process()
    # Mapped: the ranks share the descriptor, and with it the position up to which it was read.
    with mmap.mmap(task, 0, prot=mmap.PROT_READ) as file:
        os.close(task)
        process._inheriting = True
        try:
            spawn.prepare(pickle.load(file))
        finally:
            del process._inheriting
        fn, args, params = pickle.load(file)
    return fn, args, params


def _call(fn: Any, args: Any, params: Mapping[str, Any], folder: Path) -> bytes:
    """Call the function in an initialised world, and return the pickled result."""
    import flashlight_py as fl
    from flashlight_py.launch.pickling import dumps

    if not fl.is_distributed_init():  # the script may do so when it is imported
        fl.distributed_init(fl.DistributedInit.ENV, params=params)
    # All have met and have their task, so the folder can go: whatever happens, it is not left.
    if fl.get_world_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    os.environ["FLASHLIGHT_FILE"] = f"{folder}-again"  # after a shutdown they may meet anew
    result = fn(fl.get_world_rank(), *args)
    return dumps(result, what=f"the result, of type {type(result).__qualname__}, ")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the parent reports it
    finally:
        _leaving = True
        # First in the kernel: Python prints an error if a SIGTERM comes while signal() runs.
        ctypes.CDLL(None).signal(signal.SIGTERM, _SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
