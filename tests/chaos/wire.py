"""Strangers: processes that send bytes to the listening sockets of ranks, and record the
answers."""

import os
import random
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

Address = tuple[str, int]
CONNECTED, LISTENS = "01", "0A"
# Seconds that a stranger waits to be accepted.
PATIENCE = 0.05
GREETING = struct.Struct("!4sHHQ")  # greeting of the TCP rendezvous


def listening(pids: Iterable[int]) -> set[Address]:
    return set().union(*(ends for _, ends in ends_of(pids)))


def connected(pid: int) -> set[Address]:
    """Return the local ends of a process's IPv4 connections."""
    return ends_of([pid])[0][0]


def ends_of(pids: Iterable[int]) -> list[tuple[set[Address], set[Address]]]:
    """Return the local ends of each process's IPv4 connections, and its listening addresses.

    The kernel takes milliseconds to write its table, so one read serves all processes.
    """
    owned = [set(_socket_inodes(pid)) for pid in pids]
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        (_in_state(table, CONNECTED, inodes), _in_state(table, LISTENS, inodes)) for inodes in owned
    ]


def _in_state(table: list[list[str]], state: str, inodes: set[str]) -> set[Address]:
    ends = (row[1].split(":") for row in table if row[3] == state and row[9] in inodes)
    return {(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in ends}


def _socket_inodes(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    with suppress(FileNotFoundError):  # the process has ended
        for fd in os.listdir(folder):
            with suppress(FileNotFoundError):
                target = os.readlink(f"{folder}/{fd}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def blobs(draw: random.Random, count: int) -> Iterator[bytes]:
    """Yield data of strangers: noise, zeros, other protocols, JSON, damaged messages of this
    package."""
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
                struct.pack("=q", draw.randrange(8)) + noise,  # the first bytes of a Gloo peer
            )
        )


def crowd(address: Address, blobs: Iterable[bytes]) -> Iterator[socket.socket]:
    """Connect strangers that send data and stay connected, until one is not accepted."""
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
    """Return all data that a stranger received, and disconnect; the sender must have ended."""
    reported = b""
    with stranger, suppress(OSError):
        while more := stranger.recv(65536):
            reported += more
    return reported
