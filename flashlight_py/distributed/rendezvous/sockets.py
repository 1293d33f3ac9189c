"""Sockets of rank 0 and what the kernel says of them: listening, own addresses, whose an end is."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LISTENER = "FLASHLIGHT_LISTENER"
"""The environment variable with the descriptor of a socket that listens at MASTER_PORT already."""
LOOPBACK = "127.0.0.1"

UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
"""What a connection ends by whose other end is silent: it was not closed there."""
_PROBES = 5

_SIOCGIFADDR = 0x8915  # netdevice(7)


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at ``port`` of ``host``, which is the caller's to close.

    Raises:
        OSError: the address is not one of this host's, or the port is in use; says what to do.
    """
    listener = _handed_over(port, os.environ)
    if listener is not None:
        return listener
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"cannot resolve MASTER_ADDR: {error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    # Without it the port of a run that has just ended would stay blocked for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise OSError(_explain_bind(error)) from error
    return listener


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


def own_addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one: IPv4, then global IPv6."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has none
                continue
            found.append(socket.inet_ntoa(reply[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, scope, *_ = line.split()
        if scope == "00":
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


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
