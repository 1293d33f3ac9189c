"""This host's network interfaces: their addresses, and from which of them packets leave."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# netdevice(7)
_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_IFREQ_BYTES, _MOST_ADDRESSES = 24 + 2 * struct.calcsize("l"), 1024
# if_inet6: the scope of addresses that are valid beyond one link; those that cannot be used (yet).
_GLOBAL, _IFA_F_UNUSABLE = "00", 0x08 | 0x40

# Reserved for documentation (RFC 5737, RFC 3849): what has no route of its own goes this way.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


class Interface(NamedTuple):
    """One address of an interface that is up, without a zone."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Return the addresses of interfaces that are up, IPv4 before IPv6; none of a loopback or link.

    An interface whose cable is unplugged, or that has nobody to talk to, as a bridge of containers
    where none runs, is not up.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = [*_version_4(probe), *_version_6()]
        running = {name for name in {each.name for each in found} if _is_running(probe, name)}
    return [each for each in found if each.name in running and not is_loopback(each.address)]


def own_addresses() -> list[str]:
    """Return where other hosts may reach this one: addresses of default routes, then all others."""
    there = [each.address for each in interfaces()]
    by_default = [address for address in map(source_address, _OUTSIDE) if address in there]
    return list(dict.fromkeys([*by_default, *there]))


def addresses_of(wanted: str) -> list[str]:
    """Return the addresses that ``wanted`` means here: those of an interface, or one of ours.

    None where it is neither. A list with commas means the first of its words that is either.
    """
    return next(filter(None, map(_addresses_of, wanted.split(","))), [])


def _addresses_of(word: str) -> list[str]:
    if word in (name for _, name in socket.if_nameindex()):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = [*_version_4(probe), *_version_6()]
        return [each.address for each in found if each.name == word]
    try:
        meant = resolved(word, 0) if word else []
    except OSError:
        return []
    return [str(address) for address, _, *zone in meant if is_own(address, zone)]


def resolved(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return the socket addresses that ``host`` means here.

    Raises:
        OSError: it means none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # of a name that cannot be one
        raise OSError(str(error)) from error
    return list(dict.fromkeys(address for *_, address in found))


def source_address(target: str) -> str:
    """Return the address from which packets to ``target`` leave; "" without a route.

    Nothing is sent.
    """
    try:
        with socket.socket(family_of(target), socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:  # a kernel without IPv6 has no such socket, either
        return ""


def is_own(address: str, zone: Sequence[Any] = ()) -> bool:
    """Return whether ``address`` is one of this host's, by binding a socket to it.

    ``zone`` is what follows the port in a socket address of IPv6.
    """
    try:
        with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0, *zone))
    except (OSError, UnicodeError):  # no address at all, perhaps
        return False
    return True


def listen_everywhere(port: int, backlog: int) -> socket.socket:
    """Return a socket that listens at all addresses of this host; port 0: at a free one."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _version_4(probe: socket.socket) -> list[Interface]:
    room = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    request = struct.pack("iP", len(room), room.buffer_info()[0])
    used, _ = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    entries = (bytes(room[at : at + _IFREQ_BYTES]) for at in range(0, used, _IFREQ_BYTES))
    return [
        # An address with a label, as "eth0:1", is one of the same interface.
        Interface(entry[:16].partition(b"\0")[0].decode().partition(":")[0], address)
        for entry in entries
        for address in [socket.inet_ntoa(entry[20:24])]
    ]


def _version_6() -> list[Interface]:
    table, found = Path("/proc/net/if_inet6"), []
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, scope, flags, name = line.split()
        if (scope == _GLOBAL or name == "lo") and not int(flags, 16) & _IFA_F_UNUSABLE:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            found.append(Interface(name, address))
    return found


def _is_running(probe: socket.socket, name: str) -> bool:
    try:
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, struct.pack("256s", name.encode()[:15]))
    except OSError:  # it has gone meanwhile
        return False
    flags = int(struct.unpack_from("H", reply, 16)[0])
    return bool(flags & _IFF_UP and flags & _IFF_RUNNING)
