"""Network interfaces of this host, their addresses, and the source addresses of packets."""

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from flashlight_py import system

# Addresses that no network has (RFC 5737, RFC 3849), so packets to them take the default route.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


def interfaces() -> list[tuple[str, str]]:
    """Return (name, address) of running interfaces, IPv4 first. Addresses have no zone ("%eth0").

    Loopback and link-local addresses are excluded. An interface without a cable, or a bridge
    without a container, is not running.
    """
    return [
        (name, address)
        for name, address, is_running in system.addresses()
        if is_running and not is_loopback(address)
    ]


def own_addresses() -> list[str]:
    """Return this host's addresses for other hosts. The addresses of default routes come first."""
    running = [address for _, address in interfaces()]
    sources = filter(None, map(source_address, _OUTSIDE))
    by_default = [source for source in sources if source in running or not system.IS_LINUX]
    return list(dict.fromkeys([*by_default, *running]))


def addresses_of(names: str) -> list[str]:
    """Return the local addresses that ``names`` selects, or an empty list.

    ``names`` is an interface or a local address, or a comma-separated list of them. Of a list, only
    the first entry that selects an address is used.
    """
    return next(filter(None, map(_addresses_of, names.split(","))), [])


def _addresses_of(word: str) -> list[str]:
    if word in (name for _, name in system.if_nameindex()):
        return [address for name, address, _ in system.addresses() if name == word]
    try:
        socket_addresses = resolved(word, 0) if word else []
    except OSError:
        return []
    return [str(address) for address, _, *zone in socket_addresses if is_own(address, zone)]


def resolved(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return the socket addresses of ``host``. Raises OSError if ``host`` cannot be resolved."""
    try:
        entries = system.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a malformed host name
        raise OSError(str(error)) from error
    return list(dict.fromkeys(address for *_, address in entries))


def source_address(target: str) -> str:
    """Return the source address of packets to ``target``, or "" without a route. Sends nothing."""
    try:
        with system.Socket(family_of(target), socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:  # also if the kernel has no IPv6
        return ""


def is_own(address: str, zone: Sequence[Any] = ()) -> bool:
    """Return whether a socket can bind to ``address``. ``zone``: flow info and scope ID of IPv6."""
    try:
        with system.Socket(family_of(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0, *zone))
    except (OSError, UnicodeError):  # also if ``address`` is malformed
        return False
    return True


def listen_everywhere(port: int, backlog: int) -> system.Socket:
    """Return a socket that listens on all addresses of this host. Port 0 selects a free port."""
    both = system.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return system.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)


def keep_port() -> system.Socket:
    """Return a socket that reserves a free port without listening on it.

    The kernel does not assign the port to a program that asks for any free port. A program that
    asks for this port with SO_REUSEADDR, as servers do, can listen on it.
    """
    both = system.has_dualstack_ipv6()
    kept = system.Socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if both:
        kept.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    kept.bind(("", 0))
    return kept


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
