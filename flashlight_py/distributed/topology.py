"""Which ranks share memory: found by trying, since names lie about it in containers."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence

from flashlight_py import _native
from flashlight_py.distributed.memory_file import MemoryFile, needs_names, open_memory
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import BackendUnavailableError

__all__ = ["groups_of", "ranks_by_memory"]


def ranks_by_memory(store: Store) -> list[list[int]]:
    """Return the groups of ranks that share memory with each other. Collective.

    Each rank puts a secret into a small file in shared memory; who can read it shares it. The
    files are gone on return. A rank that cannot make one is alone. Ranks whose environment has
    different values of FLASHLIGHT_MEMORY_DOMAIN are kept apart, as if on different hosts.
    """
    nonce, domain = secrets.token_hex(16), os.environ.get("FLASHLIGHT_MEMORY_DOMAIN", "")
    file, problem = _create(nonce, needs_names(store.spaces))
    try:
        offer = json.dumps(["" if file is None else file.path, nonce, domain])
        offers = [json.loads(other) for other in store.exchange(offer.encode())]
        readable = (r for r, other in enumerate(offers) if _can_read(other, domain))
        first = store.rank if problem else next(readable, store.rank)
        leaders = [int(leader) for leader in store.exchange(str(first).encode())]
    finally:
        if file is not None:
            file.close()
    return groups_of(leaders)


def groups_of(leaders: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each leader, leaders in order.

    Example:
        >>> groups_of([0, 0, 2, 0, 2])
        [[0, 1, 3], [2, 4]]
    """
    return [
        [rank for rank, other in enumerate(leaders) if other == leader]
        for leader in sorted(set(leaders))
    ]


def _create(nonce: str, named: bool) -> tuple[MemoryFile | None, str]:
    """Return a file with ``nonce`` in it, or the reason why there is none."""
    try:
        _native.load("shm")
        file = MemoryFile(named)
    except (OSError, BackendUnavailableError) as error:
        return None, str(error)
    try:
        os.posix_fallocate(file.fd, 0, len(nonce))
        os.pwrite(file.fd, nonce.encode(), 0)
    except OSError as error:
        file.close()
        return None, str(error)
    return file, ""


def _can_read(offer: list[str], own_domain: str) -> bool:
    path, nonce, domain = offer
    if not path or domain != own_domain:
        return False
    try:
        fd = open_memory(path)
    except OSError:
        return False
    try:
        return os.pread(fd, len(nonce), 0) == nonce.encode()
    finally:
        os.close(fd)
