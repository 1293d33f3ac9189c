"""Clocks, sockets, threads and processes of the operating system, for the control plane.

Rendezvous, launcher, startup and failure handling call these functions as ``system.monotonic()``,
so that tests/simulation can replace them by simulated hosts, networks and clocks. Other code, such
as ``spawn``, flrun's main thread and code for files, uses the standard library.
"""

import array
import os
import select as _select
import selectors
import signal as _signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subprocess import Popen as Popen  # noqa: PLC0414 - mypy exports it so

monotonic, wall_clock, sleep = time.monotonic, time.time, time.sleep

Socket = socket.socket
create_server, getaddrinfo = socket.create_server, socket.getaddrinfo
gethostname, if_nameindex = socket.gethostname, socket.if_nameindex
has_dualstack_ipv6 = socket.has_dualstack_ipv6

Selector = selectors.DefaultSelector  # stored here, because gevent removes it from selectors
select = _select.select
read, write, close, dup, pipe = os.read, os.write, os.close, os.dup, os.pipe
send = write  # to an end of a pipe
fstat, isatty, set_inheritable = os.fstat, os.isatty, os.set_inheritable

environ, getpid, readlink, random_bytes = os.environ, os.getpid, os.readlink, os.urandom
RLock, kill = threading.RLock, os.kill
# None if the system lacks the function: macOS has no waitid before Python 3.13.
waitid: Any = getattr(os, "waitid", None)
killpg: Any = getattr(os, "killpg", None)
set_blocking: Any = getattr(os, "set_blocking", None)
register_at_fork: Any = getattr(os, "register_at_fork", lambda **functions: None)
user_id = getattr(os, "geteuid", lambda: 0)  # os.stat returns 0 on Windows, too
IS_LINUX = sys.platform == "linux"  # has abstract sockets, and numbers of ioctl as below
# Whether the system lacks a call by which Linux ends, adopts or prepares processes.
IS_PORTABLE = not (IS_LINUX and waitid and hasattr(os, "memfd_create"))


class Thread(threading.Thread):
    """A thread that can end even if gevent or eventlet has patched ``threading``."""

    def _delete(self) -> None:  # the base class uses get_ident(), which may be patched
        threading._active.pop(self.ident, None)  # type: ignore[attr-defined]


signal, getsignal, set_wakeup_fd = _signal.signal, _signal.getsignal, _signal.set_wakeup_fd
setitimer: Any = getattr(_signal, "setitimer", None)
getitimer: Any = getattr(_signal, "getitimer", None)


def __getattr__(name: str) -> Any:
    """Import ``subprocess`` at the first use of ``Popen``, since the import takes 3 ms."""
    if name == "Popen":
        from subprocess import Popen

        return Popen
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not hasattr(_select, "poll"):  # Windows, where selectors accept only sockets
    from flashlight_py.processes import windows

    globals().update({name: getattr(windows, name) for name in windows.__all__})

# Constants of netdevice(7).
_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_IFREQ_BYTES, _MOST_ADDRESSES = 24 + 2 * struct.calcsize("l"), 1024
# Values in if_inet6: scope of global addresses, and flags of addresses that are not usable yet.
_GLOBAL, _IFA_F_UNUSABLE = "00", 0x08 | 0x40


def can_write(descriptor: int, seconds: float = 0.0) -> bool:
    """Wait up to ``seconds`` until ``descriptor`` is writable, and return whether it is."""
    # Unlike epoll, these selectors need no descriptor.
    with getattr(selectors, "PollSelector", selectors.SelectSelector)() as selector:
        selector.register(descriptor, selectors.EVENT_WRITE)
        return bool(selector.select(seconds))


def read_text(path: str) -> str:
    """Return the text of a file in /proc. Raises OSError if the file does not exist."""
    return Path(path).read_text(errors="replace")


def children() -> list[int]:
    """Return the IDs of this process's children, including zombies. Empty without /proc."""
    parent, pids = os.getpid(), []
    for pid in filter(str.isdigit, os.listdir("/proc") if Path("/proc/self").exists() else ()):
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            # The command is in brackets and may contain ")". State and parent are the next fields.
            if int(stat.rpartition(b")")[2].split()[1]) == parent:
                pids.append(int(pid))
    return pids


def addresses() -> list[tuple[str, str, bool]]:
    """Return (interface, address, whether the interface is running). Addresses have no zone.

    IPv4 comes before IPv6. IPv6 addresses are global, or belong to the loopback interface. Outside
    of Linux, only the addresses of the host's name are listed, without their interfaces.
    """
    if not IS_LINUX:
        entries = [("address", "127.0.0.1")]
        with suppress(OSError):  # the name has no address
            answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            texts = (str(address[0]) for *_, address in sorted(answers))
            entries += [("address", text) for text in texts if not text.startswith("fe80:")]
        return [(*entry, True) for entry in dict.fromkeys(entries)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        entries = [*_version_4(probe), *_version_6()]
        running = {name for name in {name for name, _ in entries} if _is_running(probe, name)}
    return [(name, address, name in running) for name, address in entries]


def _version_4(probe: socket.socket) -> list[tuple[str, str]]:
    import fcntl  # Windows lacks it

    buffer = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    used, _ = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    entries = []
    for offset in range(0, used, _IFREQ_BYTES):
        label, address = struct.unpack_from("16s4x4s", buffer, offset)
        name = label.partition(b"\0")[0].decode().partition(":")[0]  # eth0 of the label "eth0:1"
        entries.append((name, socket.inet_ntoa(address)))
    return entries


def _version_6() -> list[tuple[str, str]]:
    table, entries = Path("/proc/net/if_inet6"), []
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, scope, flags, name = line.split()
        if (scope == _GLOBAL or name == "lo") and not int(flags, 16) & _IFA_F_UNUSABLE:
            entries.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return entries


def _is_running(probe: socket.socket, name: str) -> bool:
    import fcntl

    try:
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15]))
    except OSError:  # the interface was removed after the list was read
        return False
    flags = int(struct.unpack_from("H", reply, 16)[0])
    return bool(flags & _IFF_UP and flags & _IFF_RUNNING)
