"""Identity of hosts, and ranks that share one."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path


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


def local_place(rank: int, identities: Sequence[str]) -> tuple[int, int]:
    """Return this rank's number among the ranks of its host, and how many they are."""
    local_peers = [other for other, host in enumerate(identities) if host == identities[rank]]
    return local_peers.index(rank), len(local_peers)
