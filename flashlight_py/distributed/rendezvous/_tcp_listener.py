"""The socket on which rank 0 of a TCP rendezvous listens: one that it was handed, or a new one."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Mapping

__all__ = ["LISTENER", "CannotListenError", "listen"]

LISTENER = "FLASHLIGHT_LISTENER"
"""The environment variable with the descriptor of a socket that listens at MASTER_PORT already."""


class CannotListenError(Exception):
    """Says why, and what to do."""


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at ``port`` of ``host``, which is the caller's to close.

    Raises:
        CannotListenError: the address is not one of this host's, or the port is in use.
    """
    listener = _handed_over(port, os.environ)
    if listener is not None:
        return listener
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListenError(f"cannot resolve MASTER_ADDR: {error}") from error
    # Without it the port of a run that has just ended would stay blocked for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise CannotListenError(_explain_bind(error)) from error
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
