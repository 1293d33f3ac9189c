"""Who shares a host, and which address the others can reach this one at."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from flashlight_py.errors import RendezvousError

LOOPBACK = "127.0.0.1"


def host_identity() -> bytes:
    """Return bytes that are equal for two processes exactly if loopback joins them.

    Host names lie (containers share them, or have several on one machine). The kernel's boot id
    distinguishes machines, the network namespace containers.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    if not boot.exists() or not namespace.exists():
        return socket.gethostname().encode()
    return f"{boot.read_text().strip()} {os.readlink(namespace)}".encode()


def local_place(rank: int, identities: Sequence[bytes]) -> tuple[int, int]:
    """Return this rank's number among the ranks of its host, and how many they are."""
    local_peers = [other for other, host in enumerate(identities) if host == identities[rank]]
    return local_peers.index(rank), len(local_peers)


def address_to_bind(interface: str, one_host: bool) -> tuple[str, str]:
    """Return (host, interface) for the sockets; exactly one of the two is not empty.

    ``interface`` is what the user asked for: an interface's name, a local address, or nothing.
    With nothing, a job on one host stays on the loopback, out of reach of other machines; a job
    on several takes the interface of the default route, else the only one that is up.

    Raises:
        RendezvousError: several hosts, and no interface that others could reach.
    """
    if interface:
        names = {name for _, name in socket.if_nameindex()}
        return ("", interface) if interface in names else (interface, "")
    if one_host:
        return LOOPBACK, ""
    address = _default_route_address() or _address_of_host_name()
    if address is None:
        known = ", ".join(name for _, name in socket.if_nameindex() if name != "lo")
        raise RendezvousError(
            "this job spans several hosts and no network interface was found by itself; choose "
            f"one with params={{'INTERFACE': ...}}: this host has {known or 'none'}"
        )
    return address, ""


def _default_route_address() -> str | None:
    """Return the address that packets to the outside leave from. None is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation (RFC 5737)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_of_host_name() -> str | None:
    """Return what the host's own name stands for, unless that is the loopback."""
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        return None
    addresses = [str(info[4][0]) for info in infos]
    return next((address for address in addresses if not address.startswith("127.")), None)
