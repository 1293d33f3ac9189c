"""What two processes say before they trust each other at a TCP port, as bytes.

Guest: a nonce. Rank 0: a nonce. Guest: a proof made of both, and who it is. Rank 0: its own proof.
Nothing but the lengths is believed before a proof was found right; and as a job may have no
secret, a greeting is read in a way that no content can harm.
"""

from __future__ import annotations

import hmac
import ipaddress
import sys
from pathlib import Path
from typing import Any, NamedTuple

from flashlight_py.distributed.rendezvous._peers import Peer
from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, proof

__all__ = ["Greeting", "Handshake", "user_of"]

_PROOF_BYTES = 32


class Greeting(NamedTuple):
    """Who a guest is: its rank, the world size that it was given, and its process."""

    rank: int
    size: int
    peer: Peer

    def pack(self) -> bytes:
        """Return lines of text."""
        peer = self.peer
        lines = (self.rank, self.size, peer.pid, peer.host, peer.machine, peer.started)
        return "\n".join(map(str, lines)).encode(errors="replace")

    @classmethod
    def parse(cls, text: bytes) -> Greeting | None:
        """Read what ``pack`` wrote; None if it is none. What cannot be printed is replaced."""
        try:
            rank, size, pid, host, machine, started = text.decode(errors="replace").split("\n")
            numbers = [int(number) for number in (rank, size, pid)]
        except ValueError:
            return None
        if not 0 <= numbers[0] < numbers[1] < 1 << 31:
            return None
        peer = Peer(_printable(host), numbers[2], _printable(machine), _printable(started))
        return cls(numbers[0], numbers[1], peer)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


class Handshake:
    """One side's view of a handshake: both nonces, and the key that both sides should know."""

    def __init__(self, key: bytes, guest_nonce: bytes, host_nonce: bytes) -> None:
        self.key, self._nonces = key, (guest_nonce, host_nonce)

    @staticmethod
    def is_nonce(body: bytes) -> bool:
        return len(body) == NONCE_BYTES

    def of_guest(self, greeting: bytes) -> bytes:
        """Return a guest's proof and greeting."""
        return proof(self.key, b"guest", *self._nonces, greeting) + greeting

    def of_host(self) -> bytes:
        """Return the proof of rank 0."""
        return proof(self.key, b"host", *self._nonces)

    def check_guest(self, body: bytes) -> bool:
        """Return whether ``body`` is what a guest with our key would send."""
        return hmac.compare_digest(body, self.of_guest(self.greeting_of(body)))

    def check_host(self, body: bytes) -> bool:
        """Return whether ``body`` is what a rank 0 with our key would send."""
        return hmac.compare_digest(body, self.of_host())

    @staticmethod
    def greeting_of(body: bytes) -> bytes:
        return body[_PROOF_BYTES:]


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
