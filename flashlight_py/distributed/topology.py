"""Which ranks share memory: found by trying, since names lie about it in containers."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from flashlight_py import _native
from flashlight_py.distributed.backends.native import MESSAGE_BYTES
from flashlight_py.distributed.backends.shm import new_path
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import BackendUnavailableError

__all__ = ["groups_of", "ranks_by_memory"]


def ranks_by_memory(store: Store) -> list[list[int]]:
    """Return the groups of ranks that share memory with each other. Collective.

    Each rank puts a secret into a small file in shared memory; who can read it shares it. The
    files are gone on return. A rank that cannot create one is alone. Ranks whose environment has
    different values of FLASHLIGHT_MEMORY_DOMAIN are kept apart, as if on different hosts.
    """
    path, nonce, problem = new_path(), secrets.token_hex(16), ""
    domain = os.environ.get("FLASHLIGHT_MEMORY_DOMAIN", "")
    try:
        _create(path, nonce)
    except (OSError, BackendUnavailableError) as error:
        problem = str(error)
    try:
        offer = json.dumps([str(path), nonce, domain, problem])
        offers = [json.loads(other) for other in store.exchange(offer.encode())]
        readable = (r for r, other in enumerate(offers) if _can_read(other, domain))
        first = store.rank if problem else next(readable, store.rank)
        leaders = [int(leader) for leader in store.exchange(str(first).encode())]
    finally:
        if not problem:
            path.unlink(missing_ok=True)
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


def _create(path: Path, nonce: str) -> None:
    native = _native.load("shm")
    room = native.ffi.new("char[]", MESSAGE_BYTES)
    if native.lib.fl_shm_probe_create(str(path).encode(), nonce.encode(), room, MESSAGE_BYTES):
        raise OSError(native.ffi.string(room).decode(errors="replace"))


def _can_read(offer: list[str], own_domain: str) -> bool:
    path, nonce, domain, problem = offer
    if problem or domain != own_domain:
        return False
    native = _native.load("shm")
    room = native.ffi.new("char[]", MESSAGE_BYTES)
    status = native.lib.fl_shm_probe_read(path.encode(), nonce.encode(), room, MESSAGE_BYTES)
    return bool(status == 0)
