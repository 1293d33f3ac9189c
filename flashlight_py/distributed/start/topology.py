"""The process of each rank, and the ranks that share memory.

That is found by trying, since names lie about it in containers.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence

from flashlight_py import _native
from flashlight_py.distributed.failures.wording import names
from flashlight_py.distributed.memory.memory_file import (
    MemoryFile,
    needs_names,
    open_memory,
    process_space,
)
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.start.hosts import host_identity
from flashlight_py.errors import BackendUnavailableError, UnavailableEverywhereError


def exchange_process_info(store: Store, checks: bool) -> None:
    """Have the ranks of ``store`` know each other's host and process. Collective, blocking.

    Raises:
        UnavailableEverywhereError: ranks differ in ``checks``, whether to compare their calls.
    """
    mine = [f"process {os.getpid()} on {socket.gethostname()}", process_space(), checks]
    cards = [json.loads(card) for card in store.exchange(json.dumps(mine).encode())]
    without = [rank for rank, (_, _, checked) in enumerate(cards) if not checked]
    if 0 < len(without) < store.size:
        raise UnavailableEverywhereError(
            f"rank {store.rank} of {store.size}: FLASHLIGHT_CHECKS is 0 on {names(without)}, and "
            "not on the others; set it on all ranks, or on none"
        )
    store.processes = [str(who) for who, _, _ in cards]
    store.spaces = [str(space) for _, space, _ in cards]


def ranks_by_memory(store: Store) -> tuple[list[list[int]], str]:
    """Return the groups of ranks that share memory with each other, and why no more. Collective.

    Each rank puts a secret into a small file in shared memory; who can read it shares it. The
    files are gone on return. A rank that cannot make one is alone. Ranks whose environment has
    different values of FLASHLIGHT_MEMORY_DOMAIN are kept apart, as if on different hosts.

    The reason is empty unless two ranks of one host, which could share memory, do not.
    """
    nonce, domain = secrets.token_hex(16), os.environ.get("FLASHLIGHT_MEMORY_DOMAIN", "")
    file, problem = _create(nonce, needs_names(store.spaces))
    try:
        host = [host_identity().decode(errors="backslashreplace"), domain]
        offer = json.dumps([host, "" if file is None else file.path, nonce, problem])
        offers = [json.loads(other) for other in store.exchange(offer.encode())]
        unreadable = [_why_unreadable(other, domain) for other in offers]
        readable = (rank for rank, why in enumerate(unreadable) if not why)
        first = store.rank if problem else next(readable, store.rank)
        mine = json.dumps([first, unreadable])
        answers = [json.loads(answer) for answer in store.exchange(mine.encode())]
    finally:
        if file is not None:
            file.close()
    hosts = [offered[0] for offered in offers]
    problems = [offered[3] for offered in offers]
    leaders = [leader for leader, _ in answers]
    return groups_of(leaders), _why_apart(leaders, hosts, problems, [why for _, why in answers])


def _why_apart(
    leaders: Sequence[int],
    hosts: Sequence[list[str]],
    problems: Sequence[str],
    unreadable: Sequence[Sequence[str]],
) -> str:
    """Name the first rank that shares no memory with the first one of its host, and the reason."""
    for rank, host in enumerate(hosts):
        first = hosts.index(host)
        if leaders[rank] != leaders[first]:
            why = problems[rank] or problems[first] or unreadable[rank][first]
            return f"rank {rank} shares no memory with rank {first} of its host: {why}"
    return ""


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


def _why_unreadable(offer: tuple[list[str], str, str, str], own_domain: str) -> str:
    """Return "" if what another rank offers can be read here, else why not."""
    (_, domain), path, nonce, problem = offer
    if problem or domain != own_domain:
        return problem or f"FLASHLIGHT_MEMORY_DOMAIN is {domain!r} there"
    try:
        fd = open_memory(path)
    except OSError as error:
        return str(error)
    try:
        same = os.pread(fd, len(nonce), 0) == nonce.encode()
    finally:
        os.close(fd)
    return "" if same else f"{path} holds something else than it wrote"
