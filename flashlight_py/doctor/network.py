"""The name of this host, and the address at which ranks on other hosts would reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from flashlight_py.distributed.hosts import address_to_bind
from flashlight_py.doctor.finding import Finding, State
from flashlight_py.errors import RendezvousError

__all__ = ["look"]


def look(interface: str) -> Iterator[Finding]:
    """Tell what the host name stands for, and what ``interface`` (else the default) gives."""
    name = socket.gethostname()
    yield of_name(name, _addresses(name))
    yield _chosen(interface)


def of_name(name: str, addresses: list[str]) -> Finding:
    """Tell of the host's name, given what it resolves to."""
    if not addresses:
        detail = f"{name} resolves to nothing. We use addresses; other programs may not start"
        return Finding("host name", State.WARNING, detail, f"add {name} to /etc/hosts or DNS")
    told = f"{name} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        detail = (
            f"{told}: the loopback. Harmless here: we ask the routes for our address. Programs "
            "that trust the name, as many do, would offer it to other hosts"
        )
        remedy = "on several hosts, give such programs an address instead of the name"
        return Finding("host name", State.WARNING, detail, remedy)
    return Finding("host name", State.OK, told)


def _addresses(name: str) -> list[str]:
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))


def _chosen(interface: str) -> Finding:
    known = ", ".join(name for _, name in socket.if_nameindex()) or "none"
    try:
        host, named = address_to_bind(interface, one_host=False)
    except RendezvousError:
        detail = f"none that other hosts could reach (there are: {known})"
        remedy = "one host needs none; for several: params={'INTERFACE': ...}"
        return Finding("interface", State.MISSING, detail, remedy)
    if host and not _is_ours(host):
        detail = f"{host} is neither an interface nor an address of this host (there are: {known})"
        return Finding("interface", State.FAILED, detail, "name one of them")
    return Finding("interface", State.OK, f"{named or host} between hosts; loopback inside one")


def _is_ours(address: str) -> bool:
    """Return whether a socket can be bound to ``address``."""
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True
