"""Removes from the standard library what macOS or Windows lack, in every Python below this one.

Put this folder into PYTHONPATH. WITHOUT_LINUX is the value of ``sys.platform``: "linux" and
"darwin" remove the functions that macOS lacks, "win32" also those that Windows lacks. The modules
of the standard library and NumPy are loaded first, because they select their code by the platform.
Only Python code notices the change: paths, processes and the C library remain those of Linux.
"""

import asyncio
import ctypes
import io
import multiprocessing.connection
import multiprocessing.shared_memory
import multiprocessing.spawn
import os
import platform
import select
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from typing import Any

import numpy.testing

LOADED = asyncio, multiprocessing, numpy, platform, tempfile
PLATFORM = os.environ["WITHOUT_LINUX"]
IS_WINDOWS = PLATFORM == "win32"

MACOS = {
    os: "eventfd getrandom memfd_create pidfd_open pipe2 posix_fallocate posix_fadvise waitid "
    "copy_file_range sched_getaffinity sched_setaffinity timerfd_create unshare setns splice "
    "MFD_CLOEXEC P_PIDFD",
    select: "epoll",
    selectors: "EpollSelector",
    signal: "pidfd_send_signal sigwaitinfo sigtimedwait SIGPWR SIGSTKFLT SIGPOLL SIGRTMIN SIGRTMAX",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE TCP_USER_TIMEOUT TCP_KEEPIDLE "
    "AF_NETLINK AF_PACKET AF_VSOCK SO_PASSCRED SO_DOMAIN",
}
WINDOWS = {
    os: "fork forkpty killpg getpgid getpgrp setpgid setsid getsid getuid geteuid getgid getegid "
    "getgroups register_at_fork waitstatus sched_yield sysconf fchmod fchown chown lchown statvfs "
    "fstatvfs pread pwrite preadv pwritev sendfile mkfifo posix_spawn set_blocking get_blocking "
    "WNOWAIT WEXITED P_ALL P_PID CLD_EXITED wait wait3 wait4 tcgetpgrp tcsetpgrp ttyname "
    "getloadavg O_CLOEXEC O_NOFOLLOW O_NONBLOCK O_DIRECTORY nice uname WIFEXITED",
    select: "poll",
    selectors: "PollSelector",
    signal: "SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGKILL SIGCHLD SIGALRM SIGCONT SIGSTOP SIGPIPE "
    "SIGTSTP pthread_sigmask pthread_kill setitimer getitimer ITIMER_REAL alarm pause SIG_SETMASK "
    "SIG_BLOCK SIG_UNBLOCK SIGTTIN SIGTTOU SIGBUS sigpending sigwait siginterrupt",
    socket: "AF_UNIX send_fds recv_fds SCM_RIGHTS",
}
UNIX_MODULES = ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "tty")
LINUX_C = {"prctl", "process_vm_readv", "process_vm_writev", "memfd_create", "pidfd_open", "dlinfo"}


def remove(table: dict[Any, str]) -> None:
    for module, names in table.items():
        for name in names.split():
            vars(module).pop(name, None)


def without_linux_functions(self: ctypes.CDLL, name: str) -> Any:
    if name in LINUX_C:
        raise AttributeError(f"function {name!r} not found")
    return c_function(self, name)


def loaded(self: ctypes.CDLL, name: str | None, *args: Any, **options: Any) -> None:
    if name is None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")
    load(self, name, *args, **options)


class SocketsOnly(selectors.SelectSelector):
    """The selector of Windows, which accepts only sockets."""

    def register(self, file: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        check_socket(file)
        return super().register(file, events, data)


def check_socket(file: Any) -> None:
    descriptor = file if isinstance(file, int) else file.fileno()
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(10038, "An operation was attempted on something that is not a socket")


def select_sockets(*lists: Any) -> Any:
    for files in lists[:3]:
        for file in files:
            check_socket(file)
    return select_all(*lists)


def tcp_pair(*_: int) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets. Windows has no pairs of sockets, and Python makes them so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return server.accept()[0], client


class Popen(subprocess.Popen[Any]):
    """A process that inherits only its standard streams."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        for name in ("pass_fds", "preexec_fn"):
            if options.get(name) and "pytest" not in sys.argv[0]:
                raise ValueError(f"{name} not supported on Windows platforms")
        super().__init__(args, *rest, **options)


remove(MACOS)
c_function, load = ctypes.CDLL.__getattr__, ctypes.CDLL.__init__
ctypes.CDLL.__getattr__ = without_linux_functions  # type: ignore[method-assign]
selectors.DefaultSelector = getattr(selectors, "PollSelector", selectors.SelectSelector)
if IS_WINDOWS:
    remove(WINDOWS)
    io._WindowsConsoleIO = type("", (), {})  # type: ignore[attr-defined]  # for pytest
    for unix_module in UNIX_MODULES:
        sys.modules[unix_module] = None  # type: ignore[assignment]  # an import raises ImportError
    ctypes.CDLL.__init__ = loaded  # type: ignore[method-assign]
    selectors.DefaultSelector = SocketsOnly  # type: ignore[misc]
    select_all, select.select = select.select, select_sockets
    socket.socketpair = tcp_pair  # type: ignore[assignment]
    subprocess.Popen = Popen  # type: ignore[misc]
sys.platform = PLATFORM
