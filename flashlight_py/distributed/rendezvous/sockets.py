"""Sockets of rank 0, and what the kernel says of them: where to listen, and whose an end is."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashlight_py.interfaces import is_loopback, is_own, listen_everywhere

LISTENER = "FLASHLIGHT_LISTENER"
"""The environment variable with the descriptor of a socket that listens at MASTER_PORT already."""
LOOPBACK = "127.0.0.1"

UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
"""What a connection ends by whose other end is silent: it was not closed there."""
_PROBES = 5


def listen(host: str, port: int, backlog: int, one_host: bool) -> list[socket.socket]:
    """Return sockets that listen at ``port`` for who reaches this host as ``host``; to be closed.

    At an address, on the loopback, and where all ranks are on ``one_host``, they listen at nothing
    but what ``host`` means here. What another host takes a name for, only that host knows: then
    they listen at all addresses, of both families.

    Raises:
        OSError: ``host`` is not this host, or the port is in use; says what to do.
    """
    listener = _handed_over(port, os.environ)
    if listener is not None:
        return [listener]
    try:
        found = resolved(host, port)
    except OSError as error:
        raise OSError(f"cannot resolve MASTER_ADDR: {error}") from error
    if one_host or is_local(host) or is_address(host):
        return _listen_at([address for _, address in found], backlog)
    if not any(is_own(address[0], address[2:]) for _, address in found):
        raise OSError(_explain_bind(OSError(errno.EADDRNOTAVAIL, "")))
    try:
        return [listen_everywhere(port, backlog)]
    except OSError as error:
        raise OSError(_explain_bind(error)) from error


def _listen_at(addresses: Sequence[tuple[Any, ...]], backlog: int) -> list[socket.socket]:
    """Listen at those of ``addresses`` that are this host's."""
    listeners, problem = [], OSError(errno.EADDRNOTAVAIL, "")
    try:
        for address in addresses:
            try:
                family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
                # It sets SO_REUSEADDR, without which the port of a run that has just ended would
                # stay blocked for a minute.
                listeners.append(socket.create_server(address, family=family, backlog=backlog))
            except OSError as error:  # noqa: PERF203 - each for itself
                problem = error
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        if not listeners:
            raise problem
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise OSError(_explain_bind(error)) from error
    return listeners


def resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Return the families and socket addresses that ``host`` means here.

    Raises:
        OSError: it means none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # of a name that cannot be one
        raise OSError(str(error)) from error
    return list(dict.fromkeys((family, address) for family, *_, address in found))


def is_address(host: str) -> bool:
    """Return whether ``host`` is an address, not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """Return whether ``host``, a name or an address, means each host itself, wherever it is."""
    return host == "localhost" or (is_address(host) and is_loopback(host.partition("%")[0]))


def _handed_over(port: int, environ: Mapping[str, str]) -> socket.socket | None:
    """Return a copy of the socket that the launcher has handed over, if there is one for ``port``.

    A copy, so that the port stays ours for a later ``distributed_init``. A process that inherited
    the variable alone has some other file under that number, or none.
    """
    text = environ.get(LISTENER, "")
    descriptor = int(text) if text.isdecimal() else -1
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
    except OSError:
        return None
    listener = socket.socket(fileno=os.dup(descriptor))
    is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if is_listening and listener.getsockname()[1:2] == (port,):
        os.set_inheritable(descriptor, False)
        return listener
    listener.close()
    return None


def _explain_bind(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            "the port is in use, by another program or by a second rank 0; "
            "choose another MASTER_PORT for every rank"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            "MASTER_ADDR is no address of this host, where rank 0 runs; "
            "set it to one that the other hosts can reach"
        )
    return f"cannot listen: {os.strerror(error.errno or 0)}; choose another MASTER_PORT"


def watch_over(wire: socket.socket, seconds: float) -> None:
    """End the connection when the kernel at its other end is silent for ``seconds``.

    Also when the process there takes nothing for so long while its kernel has no more room.
    """
    interval = max(1, int(seconds / _PROBES))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def user_of(theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> int | None:
    """Return the user whose socket at ``theirs`` is connected to ours; None if none of this host.

    The kernel's own word, net/tcp of proc(5). A socket that its process has closed has no inode
    there and is listed as root's.
    """
    wanted = [_in_hex(theirs), _in_hex(ours)]
    table = Path("/proc/net/tcp6" if ":" in theirs[0] else "/proc/net/tcp")
    if not table.exists():
        return None
    for line in table.read_text().splitlines()[1:]:
        _, *ends, _, _, _, _, user, _, inode = line.split()[:10]
        if ends == wanted and inode != "0":
            return int(user)
    return None


def _in_hex(address: tuple[Any, ...]) -> str:
    """Return an address as net/tcp has it: words of 32 bits of the host's byte order."""
    packed = ipaddress.ip_address(address[0].partition("%")[0]).packed
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    host = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{host}:{address[1]:04X}"
