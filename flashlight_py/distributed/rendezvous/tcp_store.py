"""Rendezvous at a TCP port of rank 0, given by MASTER_ADDR and MASTER_PORT.

If MASTER_ADDR is an address, rank 0 listens only there; if it is a name, rank 0 listens at all
addresses of its host. The other ranks try the addresses of MASTER_ADDR until rank 0 answers. Both
sides prove that they know the job's secret, which is never sent. A job on several hosts may have no
secret: then any process that can reach the port can join.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from socket import SO_ACCEPTCONN, SOL_SOCKET
from typing import Any

from flashlight_py import system
from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.store import check_member
from flashlight_py.distributed.rendezvous.tree import TreeStore
from flashlight_py.distributed.rendezvous.wire import Offer
from flashlight_py.interfaces import family_of, is_loopback, is_own, listen_everywhere, resolved

# Variable for rank 0's inherited listening socket. No other program can take its port.
LISTENER = "FLASHLIGHT_LISTENER"
"""Environment variable: descriptor of an inherited socket that listens at MASTER_PORT."""


class TcpStore(TreeStore):
    """A store at ``host``:``port``, an address of rank 0; ``timeout`` is in seconds per exchange.

    If ``one_host``, all ranks are on one host, so they know the user's secret if the job has no
    secret. ``also`` are further addresses of rank 0. Raises ValueError if an argument is out of
    range. Raises RendezvousError like ``Secret.find``, or if rank 0 cannot listen at its address.
    """

    kind, run_option, is_common = "address", "MASTER_PORT", True

    def __init__(
        self, host: str, port: int, rank: int, size: int, timeout: float, one_host: bool = False,
        also: Sequence[str] = (),
    ) -> None:  # fmt: skip
        check_member(rank, size, timeout)
        if not 0 < port < 65536:
            raise ValueError(f"the port must be in [1, 65535], got {port}")
        self.name, self._host, self._port = f"{host}:{port}", host, port
        self._addresses = [(name, port) for name in dict.fromkeys([host, *also])]
        self.one_host = one_host
        self.job_secret = Secret.find(one_host, system.environ)
        self.secret = self.job_secret.common
        loopback: list[str] = []
        if is_local(host):
            with suppress(OSError):  # listen or connect raises the error later
                loopback = [str(address) for address, *_ in resolved(host, port)]
        super().__init__(rank, size, timeout, loopback)

    def remedy(self) -> str:
        advice = (
            "check that every rank was started with the same MASTER_ADDR and MASTER_PORT, and can "
            "reach that address"
        )
        if self.note:
            return f"{advice}. Rank 0 listens at {self._host}{self.note}"
        if self.rank == 0 or self.one_host:
            return advice
        with suppress(OSError):
            ends = [end for address in self._addresses for end in resolved(*address)]
            if all(is_own(end[0], end[2:]) for end in ends):
                advice += (
                    f". Here {self._host} is this host ({system.gethostname()}). If rank 0 runs on "
                    "another host, set MASTER_ADDR to a name or address of that host on every rank"
                )
        return advice

    def listen(self, backlog: int) -> list[system.Socket]:
        """Listen at the address ``host``; if it is a name, at all addresses of this host."""
        listeners = create_listeners(self._host, self._port, backlog, self.one_host)
        if not self.one_host and all(is_local(listener.getsockname()[0]) for listener in listeners):
            self.note = f", the loopback of {system.gethostname()}, which other hosts cannot reach"
        return listeners

    def offers(self) -> list[Offer]:
        return [Offer(self._addresses, self.job_secret, advice="; set another MASTER_PORT")]


# Address of rank 0 -------------------------------------------------------------------------------


def create_listeners(host: str, port: int, backlog: int, one_host: bool) -> list[system.Socket]:
    """Return sockets that listen at ``port`` of this host; the caller closes them.

    If ``one_host``, or if ``host`` is an address or the loopback, listen at the addresses of
    ``host``. Otherwise listen at all addresses, because other hosts may resolve the name ``host``
    differently. Raises OSError with a remedy if ``host`` is another host, or the port is in use.
    """
    if (listener := _inherited_listener(port)) is not None:
        return [listener]
    try:
        addresses = resolved(host, port)
    except OSError as error:
        raise OSError(f"cannot resolve MASTER_ADDR: {error}") from error
    try:
        if one_host or is_local(host) or _is_address(host):
            return _listen_at(addresses, backlog)
        if any(is_own(address[0], address[2:]) for address in addresses):
            return [listen_everywhere(port, backlog)]
        raise OSError(errno.EADDRNOTAVAIL, "")
    except OSError as error:
        raise OSError(_bind_problem(error)) from error


def _listen_at(addresses: Sequence[tuple[Any, ...]], backlog: int) -> list[system.Socket]:
    """Listen at each of ``addresses`` that belongs to this host. Raise OSError if none does."""
    listeners, problem = [], OSError(errno.EADDRNOTAVAIL, "")
    for address in addresses:
        try:
            # create_server sets SO_REUSEADDR. Otherwise the port of a run that has just ended would
            # be blocked for a minute.
            family = family_of(address[0])
            listeners.append(system.create_server(address, family=family, backlog=backlog))
        except OSError as error:  # noqa: PERF203 - an error for each address
            problem = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for listener in listeners:
                    listener.close()
                raise
    if not listeners:
        raise problem
    return listeners


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """Return whether ``host`` is "localhost" or a loopback address."""
    return host == "localhost" or (_is_address(host) and is_loopback(host.partition("%")[0]))


def _inherited_listener(port: int) -> system.Socket | None:
    """Return a copy of the socket that the launcher passed for ``port``, or None.

    The original socket remains for a later ``distributed_init``. If a process inherited the
    variable but not the socket, the descriptor may belong to another file.
    """
    text = system.environ.get(LISTENER, "")
    descriptor = int(text) if text.isdecimal() else -1
    try:
        if not stat.S_ISSOCK(system.fstat(descriptor).st_mode):
            return None
    except OSError:
        return None
    listener = system.Socket(fileno=system.dup(descriptor))
    is_listening = listener.getsockopt(SOL_SOCKET, SO_ACCEPTCONN)
    if is_listening and listener.getsockname()[1:2] == (port,):
        system.set_inheritable(descriptor, False)
        return listener
    listener.close()
    return None


def _bind_problem(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        advice = "Set another MASTER_PORT on every rank"
        return f"the port is in use by another program or a second rank 0. {advice}"
    if error.errno == errno.EADDRNOTAVAIL:
        advice = "Set it to an address that the other hosts can reach"
        return f"MASTER_ADDR is not an address of this host, where rank 0 runs. {advice}"
    return f"cannot listen: {os.strerror(error.errno or 0)}. Set another MASTER_PORT"
