"""The program of a spawned rank or worker: ``python rank_main.py FOLDER [TASK LINK PARENT]``.

The ranks rendezvous in FOLDER. TASK is an inherited descriptor of memory that has the two pickles
of ``pack_task``. LINK is an inherited descriptor of a connection to the parent. PARENT is the pid
of the parent. The parent first sends the authentication key of ``multiprocessing``. The rank sends
its result or its failure. After all results have arrived, the parent sends a message that allows
the rank to leave the world.

Without TASK, the process reads the task from standard input, connects to a port of the parent, and
ends when the input ends, which the parent keeps open.

If FOLDER is empty, the process is a worker, which is in no world. It calls the function of the task
and reports success or a failure. Then it calls the returned function with the link as argument.

The program runs by its path. It copies the parent's ``sys.path`` before it imports this package.
"""

import ctypes
import faulthandler
import io
import mmap
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_SIG_IGN = 1  # of signal(2)
_is_exiting = False  # True if SIGTERM must not raise SystemExit any more


def main() -> None:
    folder, *numbers = sys.argv[1:]
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent may have blocked signals
    task, link, authkey = _inherited(*map(int, numbers)) if numbers else _received()
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _detach_from_parent(link))
    if sys.stderr is not None:
        faulthandler.enable()  # print a traceback after a crash in native code
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write each line when it is complete, also to a pipe and if PYTHONUNBUFFERED is set.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    multiprocessing.current_process().authkey = authkey
    try:
        fn, args, params = _load(task)
        result: Any = _call(fn, args, params, Path(folder)) if folder else fn(*args)
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        from flashlight_py.launch.failures import Failure

        link.send(Failure.of_exception(error))
        if folder:
            import flashlight_py as fl

            fl.distributed.failures.abort.report(error)
        return
    link.send(None)
    if not folder:
        result(link)
        return
    link.send_bytes(result)
    with suppress(EOFError, ConnectionResetError):
        link.recv_bytes()


def _inherited(task: int, descriptor: int, parent: int) -> tuple[Any, Connection, bytes]:
    os.set_inheritable(descriptor, False)  # the link must close when this process ends
    os.set_blocking(descriptor, True)  # gevent in the parent makes sockets non-blocking
    kill_if_parent_ends(parent)
    # Mapped, because the ranks share the descriptor and therefore its file position.
    file = mmap.mmap(task, 0, prot=mmap.PROT_READ)
    os.close(task)
    link = Connection(descriptor)
    return file, link, link.recv_bytes()


def _received() -> tuple[Any, Connection, bytes]:
    pipe = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    port, key, length = pickle.load(pipe)
    file = io.BytesIO(pipe.read(length))
    threading.Thread(target=end_with, args=(pipe,), daemon=True).start()
    wire = socket.create_connection(("127.0.0.1", port))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = Connection(wire.detach())
    link.send_bytes(key)
    return file, link, key


def end_with(pipe: IO[bytes] | Connection) -> None:
    """End this process at the end of ``pipe``, when the other process has ended."""
    with suppress(OSError):
        os.read(pipe.fileno(), 1)
    os._exit(1)


def kill_if_parent_ends(parent: int) -> None:
    """Make the kernel kill this process if the thread of ``parent`` that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os.kill(os.getpid(), signal.SIGKILL)


def _exit_on_sigterm(number: int, _: object) -> None:
    """Raise SystemExit on SIGTERM, so that named shared memory and other state is cleaned up."""
    if not _is_exiting:  # otherwise the exception would interrupt exit handlers
        sys.exit(128 + number)


def _detach_from_parent(link: Connection) -> None:
    """Close the link in a child that the rank forked. Otherwise the child would keep it open."""
    link.close()
    if signal.getsignal(signal.SIGTERM) is _exit_on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _load(task: Any) -> tuple[Any, Any, Any]:
    """Import the parent's script with the parent's ``sys.path`` and ``sys.argv``.

    Returns the function of the task, its arguments and ``params``. During the import,
    multiprocessing rejects new processes. A script that starts processes unconditionally would
    otherwise start them again in every process.
    """
    process: Any = multiprocessing.current_process()
    with task as file:
        process._inheriting = True
        try:
            spawn.prepare(pickle.load(file))
        finally:
            del process._inheriting
        fn, args, params = pickle.load(file)
    return fn, args, params


def _call(fn: Any, args: Any, params: Mapping[str, Any], folder: Path) -> bytes:
    import flashlight_py as fl
    from flashlight_py.launch.pickling import dumps

    if not fl.is_distributed_init():  # the imported script may have initialised the world
        fl.distributed_init(fl.DistributedInit.ENV, params=params)
    # All ranks have connected. If the folder is removed now, no later failure leaves it behind.
    if fl.get_world_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    os.environ["FLASHLIGHT_FILE"] = f"{folder}-again"  # for an initialisation after a shutdown
    result = fn(fl.get_world_rank(), *args)
    return dumps(result, name=f"the result, of type {type(result).__qualname__}, ")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # the parent reports the interrupt
    finally:
        _is_exiting = True
        if hasattr(signal, "pthread_sigmask"):
            # First in the kernel: Python prints an error if SIGTERM arrives while signal() runs.
            ctypes.CDLL(None).signal(signal.SIGTERM, _SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
