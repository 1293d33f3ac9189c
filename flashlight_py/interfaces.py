"""This host's network interfaces: their addresses, and from which of them packets leave."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from flashlight_py import system

# Reserved for documentation (RFC 5737, RFC 3849): what has no route of its own goes this way.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


def interfaces() -> list[tuple[str, str]]:
    """Return name and address, without a zone, of interfaces that are up; IPv4 before IPv6.

    Addresses of the loopback, and those valid on one link alone, are left out. An interface without
    a cable, or a bridge without a container, is not up.
    """
    return [
        (name, address)
        for name, address, is_running in system.addresses()
        if is_running and not is_loopback(address)
    ]


def own_addresses() -> list[str]:
    """Return where other hosts may reach this one: addresses of default routes, then all others."""
    there = [address for _, address in interfaces()]
    by_default = [address for address in map(source_address, _OUTSIDE) if address in there]
    return list(dict.fromkeys([*by_default, *there]))


def addresses_of(wanted: str) -> list[str]:
    """Return the addresses that ``wanted`` means here: those of an interface, or one of ours.

    None where it is neither. A list with commas means the first of its words that is either.
    """
    return next(filter(None, map(_addresses_of, wanted.split(","))), [])


def _addresses_of(word: str) -> list[str]:
    if word in (name for _, name in system.if_nameindex()):
        return [address for name, address, _ in system.addresses() if name == word]
    try:
        meant = resolved(word, 0) if word else []
    except OSError:
        return []
    return [str(address) for address, _, *zone in meant if is_own(address, zone)]


def resolved(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return the socket addresses that ``host`` means here. Raises OSError if it means none."""
    try:
        found = system.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # of a name that cannot be one
        raise OSError(str(error)) from error
    return list(dict.fromkeys(address for *_, address in found))


def source_address(target: str) -> str:
    """Return the address from which packets to ``target`` leave, or ""; nothing is sent."""
    try:
        with system.Socket(family_of(target), socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:  # a kernel without IPv6 has no such socket, either
        return ""


def is_own(address: str, zone: Sequence[Any] = ()) -> bool:
    """Return whether a socket can bind to ``address`` here; ``zone`` follows the port in IPv6."""
    try:
        with system.Socket(family_of(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0, *zone))
    except (OSError, UnicodeError):  # no address at all, perhaps
        return False
    return True


def listen_everywhere(port: int, backlog: int) -> system.Socket:
    """Return a socket that listens at all addresses of this host; port 0: at a free one."""
    both = system.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return system.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)


def keep_port() -> system.Socket:
    """Return a socket that has a free port of this host, and does not listen there.

    The kernel gives the port to no program that asks for any. A program that asks for its number
    and reuses addresses, as servers do, can listen there.
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
