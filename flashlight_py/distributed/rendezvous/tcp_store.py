"""Ranks meet at a TCP port of rank 0, as MASTER_ADDR and MASTER_PORT say.

If MASTER_ADDR is an address, rank 0 listens there alone; if it is a name, at all addresses of its
host. The other ranks connect until rank 0 answers at an address. Both sides prove that they know
the job's secret, which is never sent. A job on several hosts that was given no secret has none:
then any process that can reach the port can join.
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

# Rank 0 inherits a listening socket: another program could take a port that is only chosen.
LISTENER = "FLASHLIGHT_LISTENER"
"""The environment variable with the descriptor of a socket that listens at MASTER_PORT already."""


class TcpStore(TreeStore):
    """A store at ``host``:``port``, an address of rank 0; ``timeout`` seconds per exchange.

    ``one_host``: all ranks are on one host, so that they know the user's secret if the job was
    given none. ``also`` are further addresses of rank 0. Raises ValueError if an argument is out of
    range; RendezvousError if rank 0 cannot listen there, or as ``Secret.find``.
    """

    kind, own, is_common = "address", "MASTER_PORT", True

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        timeout: float,
        one_host: bool = False,
        also: Sequence[str] = (),
    ) -> None:
        check_member(rank, size, timeout)
        if not 0 < port < 65536:
            raise ValueError(f"the port must be in [1, 65535], got {port}")
        self.name, self._host, self._port = f"{host}:{port}", host, port
        self._addresses = [(each, port) for each in dict.fromkeys([host, *also])]
        self.one_host = one_host
        self.known = Secret.find(one_host, system.environ)
        self.secret = self.known.common
        own: list[str] = []
        if is_local(host):
            with suppress(OSError):  # who listens or connects there says why it has no address
                own = [str(address) for address, *_ in resolved(host, port)]
        super().__init__(rank, size, timeout, own)

    def remedy(self) -> str:
        advice = (
            "see whether every rank was started, with the same MASTER_ADDR and MASTER_PORT, and "
            "can reach that address"
        )
        if self.note:
            return f"{advice}. Rank 0 listens at {self._host}{self.note}"
        if self.rank == 0 or self.one_host:
            return advice
        with suppress(OSError):
            found = [each for address in self._addresses for each in resolved(*address)]
            if all(is_own(each[0], each[2:]) for each in found):
                advice += (
                    f". Here {self._host} is this host, {system.gethostname()}, itself: if rank 0 "
                    "runs on another one, set MASTER_ADDR to a name or an address of that one, on "
                    "every rank"
                )
        return advice

    def listen(self, backlog: int) -> list[system.Socket]:
        """Listen at the address, or for a name at all that this host has; see ``MeetingPoint``."""
        listeners = listen(self._host, self._port, backlog, self.one_host)
        if not self.one_host and all(is_local(each.getsockname()[0]) for each in listeners):
            self.note = f", the loopback of {system.gethostname()}, which no other host reaches"
        return listeners

    def offers(self) -> list[Offer]:
        return [Offer(self._addresses, self.known, advice="; choose another MASTER_PORT")]


# Where rank 0 listens ----------------------------------------------------------------------------


def listen(host: str, port: int, backlog: int, one_host: bool) -> list[system.Socket]:
    """Return sockets that listen at ``port`` of this host, called ``host``; the caller closes them.

    For an address, the loopback, and ranks of ``one_host``, they listen at what ``host`` means
    here. Other hosts may resolve a name differently: then they listen at all addresses. Raises
    OSError, which says what to do, if ``host`` is not this host, or the port is in use.
    """
    if (listener := _handed_over(port)) is not None:
        return [listener]
    try:
        found = resolved(host, port)
    except OSError as error:
        raise OSError(f"cannot resolve MASTER_ADDR: {error}") from error
    try:
        if one_host or is_local(host) or _is_address(host):
            return _listen_at(found, backlog)
        if any(is_own(address[0], address[2:]) for address in found):
            return [listen_everywhere(port, backlog)]
        raise OSError(errno.EADDRNOTAVAIL, "")
    except OSError as error:
        raise OSError(_explain_bind(error)) from error


def _listen_at(addresses: Sequence[tuple[Any, ...]], backlog: int) -> list[system.Socket]:
    """Listen at those of ``addresses`` that are this host's."""
    listeners, problem = [], OSError(errno.EADDRNOTAVAIL, "")
    for address in addresses:
        try:
            # It sets SO_REUSEADDR, without which the port of a run that has just ended would stay
            # blocked for a minute.
            family = family_of(address[0])
            listeners.append(system.create_server(address, family=family, backlog=backlog))
        except OSError as error:  # noqa: PERF203 - each for itself
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
    """Return whether ``host``, a name or an address, means each host itself, wherever it is."""
    return host == "localhost" or (_is_address(host) and is_loopback(host.partition("%")[0]))


def _handed_over(port: int) -> system.Socket | None:
    """Return a copy of the socket that the launcher has handed over, if there is one for ``port``.

    A later ``distributed_init`` uses the original. A process that inherited the variable alone has
    another file under that number, or none.
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


def _explain_bind(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        advice = "choose another MASTER_PORT for every rank"
        return f"the port is in use, by another program or by a second rank 0; {advice}"
    if error.errno == errno.EADDRNOTAVAIL:
        advice = "set it to one that the other hosts can reach"
        return f"MASTER_ADDR is no address of this host, where rank 0 runs; {advice}"
    return f"cannot listen: {os.strerror(error.errno or 0)}; choose another MASTER_PORT"
