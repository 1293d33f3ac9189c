"""The place of each rank: its host, its GPU, who shares memory with it, and its address for others.

Shared memory is found by trying, because names do not show it in containers. A name may also be the
loopback's, and behind a NAT many hosts have one address. If both ends of a connection with rank 0
see the same addresses, these are good. Other routes are asked for, nothing is sent.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from socket import AF_INET, AF_INET6, AddressFamily
from typing import Any, NamedTuple

from flashlight_py import _native, errors, system
from flashlight_py.distributed.memory.memory_file import (
    MemoryFile,
    needs_names,
    open_memory,
    process_space,
)
from flashlight_py.distributed.rendezvous.store import Store, host_identity, name_ranks
from flashlight_py.interfaces import (
    addresses_of,
    family_of,
    interfaces,
    is_loopback,
    source_address,
)

_FAMILIES = {AF_INET: "IPv4", AF_INET6: "IPv6"}


@dataclass(frozen=True)
class DeviceRule:
    """A rank's place, from which its device follows.

    With ``max_per_node`` it is ``rank % MAX_DEVICE_PER_NODE``, as in flashlight. Without, it is the
    rank on the host modulo the number of visible devices, as a launcher may give each rank its own.
    """

    rank: int = 0
    local_rank: int = 0
    max_per_node: int | None = None

    def index(self, count: int) -> int:
        """Return the index of one of ``count`` devices, or raise BackendUnavailableError."""
        if self.max_per_node is None:
            return self.local_rank % count
        index = self.rank % self.max_per_node
        if index >= count:
            raise errors.BackendUnavailableError(
                f"rank {self.rank} is to use CUDA device {index} (rank % MAX_DEVICE_PER_NODE, "
                f"which is {self.max_per_node}), and {count} are visible; lower it, or leave it out"
            )
        return index


def gpu_identity(cupy: Any, index: int) -> str:
    """Return a text that two ranks share exactly if NCCL takes their GPUs for one and the same.

    NCCL compares host and PCI address, and believes NCCL_HOSTID. From 2.30 on
    NCCL_MULTI_RANK_GPU_ENABLE=1 allows several ranks on one GPU: then none is another's.
    """
    if system.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    host = system.environ.get("NCCL_HOSTID") or host_identity()
    return f"{host} {cupy.cuda.Device(index).pci_bus_id}"


# Shared memory ------------------------------------------------------------------------------------


# Two ranks in one process are found here, in the first exchange, not where they join: every rank
# learns it in the same moment, whichever way they have met.
def exchange_process_info(store: Store, checks: bool) -> None:
    """Have the ranks of ``store`` know each other's host and process. Collective, blocking.

    Raises UnavailableEverywhereError if ranks differ in ``checks``, whether to compare their calls.
    """
    process = f"process {system.getpid()} on {system.gethostname()}"
    mine = [process, process_space(), host_identity(), checks]
    texts = store.exchange(json.dumps(mine).encode())
    store.processes, store.spaces, store.hosts, store.named, without = texts.derived(_processes)
    if 0 < len(without) < store.size:
        raise errors.UnavailableEverywhereError(
            f"rank {store.rank} of {store.size}: FLASHLIGHT_CHECKS is 0 on {name_ranks(without)}, "
            "and not on the others; set it on all ranks, or on none"
        )


def _processes(texts: Sequence[bytes]) -> tuple[Any, ...]:
    known = dict[Any, Any]()  # of many ranks: words that are equal are kept once
    rows = ([known.setdefault(each, each) for each in json.loads(text)] for text in texts)
    processes, spaces, hosts, checks = zip(*rows, strict=True)
    without = [rank for rank, compares in enumerate(checks) if not compares]
    return processes, spaces, hosts, needs_names(spaces), without


class Sharing(NamedTuple):
    """The groups of ranks that share memory with each other, in the order of their first ranks.

    ``of`` is the number of each rank's group. ``across[i]`` are the ranks that are number i in
    their groups, while all groups have one. ``apart`` says why there are no fewer groups.
    """

    groups: Sequence[Sequence[int]]
    of: Sequence[int]
    across: Sequence[tuple[int, ...]]
    apart: str

    @classmethod
    def read(cls, texts: Sequence[bytes]) -> Sharing:
        """Return it, given what the ranks have found."""
        answers = [json.loads(text) for text in texts]
        by_leader: dict[int, list[int]] = {}
        for rank, (leader, _, _) in enumerate(answers):
            by_leader.setdefault(leader, []).append(rank)
        reasons = (
            f"rank {rank} shares no memory with rank {first} of its host: {why}"
            for rank, (leader, first, why) in enumerate(answers)
            if leader != answers[first][0]
        )
        apart = next(reasons, "")
        groups = [by_leader[leader] for leader in sorted(by_leader)]
        numbers = {rank: number for number, group in enumerate(groups) for rank in group}
        of = [numbers[rank] for rank in range(len(numbers))]
        return cls(groups, of, list(zip(*groups, strict=False)), apart)


def ranks_by_memory(store: Store) -> Sharing:
    """Return which ranks share memory with each other, and why no more. Collective.

    Each rank puts a secret into a small file in shared memory, for the ranks that can read it; a
    rank without such a file is alone. Different values of FLASHLIGHT_MEMORY_DOMAIN keep ranks apart
    like different hosts. The reason names the first rank that shares no memory with the first rank
    of its host, or is empty.
    """
    nonce = system.random_bytes(16).hex()
    domain = system.environ.get("FLASHLIGHT_MEMORY_DOMAIN", "")
    file, problem = None, ""
    try:
        try:
            _native.load("shm")
            file = MemoryFile(store.named)
            os.posix_fallocate(file.fd, 0, len(nonce))
            os.pwrite(file.fd, nonce.encode(), 0)
        except (OSError, errors.BackendUnavailableError) as error:
            problem = str(error)
        host = host_identity()
        path = "" if file is None else file.path
        texts = store.exchange(json.dumps([host, domain, path, nonce, problem]).encode())
        near = texts.derived(_by_kernel)[_kernel(host)]
        offers = {rank: json.loads(texts[rank]) for rank in near}
        unreadable = {rank: _why_unreadable(offer[1:], domain) for rank, offer in offers.items()}
        readable = (rank for rank, why in unreadable.items() if not why)
        first = store.rank if problem else next(readable, store.rank)
        first_here = next(rank for rank in near if offers[rank][:2] == [host, domain])
        answer = [first, first_here, problem or unreadable[first_here]]
        answers = store.exchange(json.dumps(answer).encode())
    finally:
        if file is not None:
            file.close()
    return answers.derived(Sharing.read)


def _kernel(host: str) -> str:
    """Return what is the same for hosts that may share memory: see ``host_identity``."""
    return host.partition(" ")[0]


def _by_kernel(texts: Sequence[bytes]) -> dict[str, list[int]]:
    by_kernel: dict[str, list[int]] = {}
    for rank, (host, *_) in enumerate(map(json.loads, texts)):
        by_kernel.setdefault(_kernel(host), []).append(rank)
    return by_kernel


def _why_unreadable(offer: Sequence[str], own_domain: str) -> str:
    """Return "" if what another rank offers can be read here, else why not."""
    domain, path, nonce, problem = offer
    if problem or domain != own_domain:
        return problem or f"FLASHLIGHT_MEMORY_DOMAIN is {domain!r} there"
    try:
        with open_memory(path) as fd:
            same = os.pread(fd, len(nonce), 0) == nonce.encode()
    except OSError as error:
        return str(error)
    return "" if same else f"{path} holds something else than it wrote"


# Addresses ----------------------------------------------------------------------------------------


class Card(NamedTuple):
    """The addresses of a rank, as it reports them.

    ``host`` identifies the host, and people read ``name``. ``has`` lists the interfaces of the
    host, ``own`` its addresses. The user chose interface ``asked`` with addresses ``wanted``.
    Packets to peers come from ``sources``, the best first; ``ends`` is the field of ``Store``.
    """

    host: str
    name: str
    has: str
    own: Sequence[str]
    asked: str = ""
    wanted: Sequence[str] = ()
    sources: Sequence[str] = ()
    ends: Mapping[str, Sequence[Any]] = {}


# The address of the default route may be a NAT's, equal on all hosts. Use one of a connection that
# both ends see alike. Ranks know all addresses first, so an impossible route is an error at once.
def address_between_hosts(
    store: Store,
    hosts: Sequence[str],
    own: Sequence[Sequence[str]],
    shared: Collection[str],
    interface: str,
) -> str:
    """Return this rank's address for connections with other hosts. Collective, blocking.

    ``hosts`` identify the hosts of the ranks, ``own`` are their ``own_addresses``, ``shared`` those
    of several hosts, and ``interface`` is the user's, or "". Raises RendezvousError on every rank
    if there is no address that other hosts could reach.
    """
    mine, first = hosts[store.rank], hosts[0]
    peer = next(rank for rank, host in enumerate(hosts) if (host == first) == (mine != first))
    targets = [address for address in own[peer] if address not in shared]
    card = Card(
        host=mine,
        name=system.gethostname(),
        has=", ".join(map(" ".join, interfaces())),
        own=own[store.rank],
        asked=interface,
        wanted=addresses_of(interface) if interface else (),
        sources=[source for source in map(source_address, targets) if source],
        ends={str(rank): ends for rank, ends in store.ends.items()},
    )
    texts = store.exchange(json.dumps(card).encode())
    try:
        return texts.derived(_chosen)[store.rank]
    except ValueError as error:
        raise errors.RendezvousError(
            f"rank {store.rank} of {store.size}: this job spans several hosts, and they cannot be "
            f"connected: {error}; name an interface or an address of each host that the others "
            "reach, by params={'INTERFACE': ...} or the variable FLASHLIGHT_INTERFACE"
        ) from error


def _chosen(texts: Sequence[bytes]) -> list[str]:
    # Most of the ranks of a host say the same.
    cards = {text: Card(*json.loads(text)) for text in dict.fromkeys(texts)}
    return choose([cards[text] for text in texts])


def address_inside(interface: str) -> str:
    """Return the address of this rank for connections with others of its host.

    Without an ``interface``, a name or an address, the loopback's: out of reach of other machines.
    Raises BackendUnavailableError if it is neither an interface nor an address of this host.
    """
    found = addresses_of(interface) if interface else ["127.0.0.1"]
    if not found:
        has = ", ".join(map(" ".join, interfaces())) or "none but the loopback"
        raise errors.BackendUnavailableError(
            f"{interface!r} is neither an interface nor an address of this host, which has {has}; "
            "choose another with params={'INTERFACE': ...}"
        )
    return found[0]


def choose(cards: Sequence[Card]) -> list[str]:
    """Return the address of each rank: all of one family, and none that two hosts have.

    Raises ValueError, which names the host and the reason, if a host has no such address.
    """
    shared = shared_addresses((card.host, card.own) for card in cards)
    by_host, translated = _connections(cards)
    proven = [card.wanted or by_host[card.host] for card in cards]
    bad = {host: shared | seen.keys() if seen else shared for host, seen in translated.items()}
    usable = [
        card.wanted or _usable(card, known, bad[card.host])
        for card, known in zip(cards, proven, strict=True)
    ]
    for rank, card in enumerate(cards):
        if not usable[rank] or bool(card.asked) != bool(card.wanted):
            raise ValueError(_why_none(cards, rank, shared, translated[card.host]))
    for known in (proven, usable):  # nothing is better than what has carried a connection
        for family in _FAMILIES:
            if all(_of_family(addresses, family) for addresses in known):
                chosen = [_of_family(addresses, family)[0] for addresses in usable]
                _check_wanted(cards, chosen)
                return chosen
    lacking = {
        name: next(rank for rank, each in enumerate(usable) if not _of_family(each, family))
        for family, name in _FAMILIES.items()
    }
    raise ValueError(
        "they have no version of IP in common: "
        + ", ".join(
            f"{cards[rank].name} (rank {rank}) has {', '.join(usable[rank])} and no {name}"
            for name, rank in lacking.items()
        )
    )


def _usable(card: Card, proven: Sequence[str], bad: Collection[str]) -> list[str]:
    """Return the addresses that a rank may use, the best first."""
    good = [each for each in card.sources if each not in bad and not is_loopback(each)]
    for family in _FAMILIES:  # without a route, what is the only one
        only = [each for each in _of_family(card.own, family) if each not in bad]
        good += only if len(only) == 1 else []
    return list(dict.fromkeys([*proven, *good]))


def _connections(cards: Sequence[Card]) -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
    """Return, by host, its addresses that connect it with another, and those of it that do not.

    Nothing in between translates if both hosts report the same ends. An address that is not among
    the host's own needs a zone. For translated addresses, also return what rank 0 sees.
    """
    proven: dict[str, list[str]] = {card.host: [] for card in cards}
    translated: dict[str, dict[str, str]] = {card.host: {} for card in cards}
    for rank, client in enumerate(cards):
        theirs, ours = client.ends.get("0"), cards[0].ends.get(str(rank))
        if not theirs or not ours:
            continue
        if theirs[0] != ours[1]:
            translated[client.host][theirs[0][0]] = ours[1][0]
        elif theirs[1] == ours[0] and client.host != cards[0].host:
            for card, (address, _) in ((client, theirs[0]), (cards[0], ours[0])):
                proven[card.host] += [address] if address in card.own else []
    return proven, translated


def shared_addresses(hosts: Iterable[tuple[str, Sequence[str]]]) -> set[str]:
    """Return the addresses that several hosts have."""
    owned = {(address, host) for host, addresses in hosts for address in addresses}
    count = Counter(address for address, _ in owned)
    return {address for address in count if count[address] > 1}


def _of_family(addresses: Iterable[str], family: AddressFamily) -> list[str]:
    return [address for address in addresses if family_of(address) == family]


# Why there is no address --------------------------------------------------------------------------


def _check_wanted(cards: Sequence[Card], chosen: Sequence[str]) -> None:
    """Refuse equal addresses of different hosts where users have asked for them."""
    having: dict[str, list[Card]] = {}
    for card, address in zip(cards, chosen, strict=True):
        having.setdefault(address, []).append(card)
    for address, those in having.items():
        asking = next((card for card in those if card.asked), None)
        other = next((each for each in those if asking and each.host != asking.host), None)
        if asking and other:
            raise ValueError(
                f"{asking.asked!r} is {address} on {asking.name} and on {other.name}, so neither "
                "reaches the other by it"
            )


def _why_none(
    cards: Sequence[Card], rank: int, shared: Collection[str], translated: Mapping[str, str]
) -> str:
    """Say why the host of ``rank`` has no address that others reach."""
    card, why = cards[rank], "has no route to the others"
    if card.asked:
        why = f"has no {card.asked!r}"
    elif translated:
        own, seen = next(iter(translated.items()))
        why = (
            f"calls itself {own}, and rank 0 sees it as {seen}: a NAT or a tunnel is in between, "
            f"and nobody can connect to {own}"
        )
    elif address := min((each for each in card.own if each in shared), default=""):
        others = {each.name for each in cards if address in each.own and each.host != card.host}
        why = (
            f"and {', '.join(sorted(others))} have the same address {address}, as hosts behind a "
            "NAT have, and it has no other"
        )
    has = card.has or "no interface that is up with an address valid beyond its link"
    return f"{card.name} (rank {rank}) {why}; it has {has}"
