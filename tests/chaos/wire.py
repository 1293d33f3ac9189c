"""Strangers: bytes thrown at whatever the ranks of a run listen on, and what comes back."""

import os
import random
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Address", "blobs", "connected", "crowd", "ends_of", "listening", "received"]

Address = tuple[str, int]
CONNECTED, LISTENS = "01", "0A"
# So long a stranger waits to be let in, in seconds.
PATIENCE = 0.05
GREETING = struct.Struct("!4sHHQ")  # of the TCP rendezvous


def listening(pids: Iterable[int]) -> set[Address]:
    """Return the IPv4 addresses that the processes ``pids`` listen on."""
    return set().union(*(ends for _, ends in ends_of(pids)))


def connected(pid: int) -> set[Address]:
    """Return the own ends of a process's IPv4 connections."""
    return ends_of([pid])[0][0]


def ends_of(pids: Iterable[int]) -> list[tuple[set[Address], set[Address]]]:
    """Return of each process the own ends of its IPv4 connections, and where it listens.

    The kernel takes milliseconds to write its table, so it is read once for all of them.
    """
    own = [set(_socket_inodes(pid)) for pid in pids]
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        (_in_state(table, CONNECTED, inodes), _in_state(table, LISTENS, inodes)) for inodes in own
    ]


def _in_state(table: list[list[str]], wanted: str, inodes: set[str]) -> set[Address]:
    found = (row[1].split(":") for row in table if row[3] == wanted and row[9] in inodes)
    return {(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in found}


def _socket_inodes(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    with suppress(FileNotFoundError):  # it has ended
        for fd in os.listdir(folder):
            with suppress(FileNotFoundError):
                target = os.readlink(f"{folder}/{fd}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def blobs(draw: random.Random, count: int) -> Iterator[bytes]:
    """Yield what a stranger may send: noise, zeros, other protocols, JSON, ours with a fault."""
    for _ in range(count):
        noise = draw.randbytes(draw.choice((1, 7, 8, 9, 64, 5000)))
        kind, length = draw.randrange(12), draw.choice((0, 4, len(noise), 1 << 20, 1 << 62))
        yield draw.choice(
            (
                noise,
                bytes(draw.choice((1, 8, 100))),
                draw.choice((b"[", b'{"a":')) * draw.choice((1, 100_000)),
                b'"\\ud800"',
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                GREETING.pack(b"FLrv", draw.choice((0, 2, 3)), kind, length) + noise,
                struct.pack("=q", draw.randrange(8)) + noise,  # how a peer of Gloo's begins
            )
        )


def crowd(address: Address, blobs: Iterable[bytes]) -> Iterator[socket.socket]:
    """Have strangers connect, send a blob each, and stay, until one is not let in."""
    for blob in blobs:
        stranger = socket.socket()
        stranger.settimeout(PATIENCE)
        try:
            stranger.connect(address)
            stranger.sendall(blob)
        except OSError:
            stranger.close()
            return
        yield stranger


def received(stranger: socket.socket) -> bytes:
    """Return all that a stranger has received, and hang up; whoever sent it must have ended."""
    reported = b""
    with stranger, suppress(OSError):
        while more := stranger.recv(65536):
            reported += more
    return reported
