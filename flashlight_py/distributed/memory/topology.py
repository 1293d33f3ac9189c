"""Topology: hosts, GPUs and shared memory of the ranks, and addresses between hosts.

In containers, host names do not show which ranks share memory, so ranks test it with a file. The
address of a host name may be the loopback, and hosts behind a NAT may have the same address. So
each rank compares the addresses that both ends of its connection with rank 0 report. If they agree,
other hosts can use the addresses. Otherwise the routing table of the host gives an address.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from socket import AF_INET, AF_INET6, AddressFamily
from typing import Any, NamedTuple

from flashlight_py import _native, errors, interfaces, system
from flashlight_py.distributed.memory import memory_file
from flashlight_py.distributed.rendezvous.store import Store, host_identity, name_ranks

_FAMILIES = {AF_INET: "IPv4", AF_INET6: "IPv6"}


@dataclass(frozen=True)
class DeviceRule:
    """The rule that selects a rank's CUDA device.

    With ``max_per_node`` (MAX_DEVICE_PER_NODE), the index is ``rank % max_per_node``, as in
    flashlight. Otherwise it is ``local_rank`` modulo the number of visible devices. A launcher may
    make only one device visible to each rank.
    """

    rank: int = 0
    local_rank: int = 0
    max_per_node: int | None = None

    def index(self, count: int) -> int:
        if self.max_per_node is None:
            return self.local_rank % count
        index = self.rank % self.max_per_node
        if index >= count:
            raise errors.BackendUnavailableError(
                f"rank {self.rank}: the CUDA device (rank % MAX_DEVICE_PER_NODE) must be below "
                f"{count} (visible devices), got {index}. Lower MAX_DEVICE_PER_NODE, or omit it"
            )
        return index


def gpu_identity(cupy: Any, index: int) -> str:
    """Return a text that is equal for two ranks if and only if NCCL considers their GPUs the same.

    NCCL compares PCI addresses and hosts, or NCCL_HOSTID. The text is "" if
    NCCL_MULTI_RANK_GPU_ENABLE=1 allows several ranks on one GPU (since NCCL 2.30).
    """
    if system.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    host = system.environ.get("NCCL_HOSTID") or host_identity()
    return f"{host} {cupy.cuda.Device(index).pci_bus_id}"


# Shared memory ------------------------------------------------------------------------------------


def exchange_process_info(store: Store, checks: bool) -> None:
    """Exchange the host and process of each rank of ``store``. Collective, blocking.

    Raises UnavailableEverywhereError if only some ranks compare their calls (``checks``).
    """
    process = f"process {system.getpid()} on {system.gethostname()}"
    facts = [process, memory_file.process_space(), host_identity(), checks]
    texts = store.exchange(json.dumps(facts).encode())
    store.processes, store.spaces, store.hosts, store.named, without = texts.derived(_processes)
    if 0 < len(without) < store.size:
        raise errors.UnavailableEverywhereError(
            f"rank {store.rank} of {store.size}: FLASHLIGHT_CHECKS is 0 on {name_ranks(without)} "
            "only. Set it on all ranks, or on no rank"
        )


def _processes(texts: Sequence[bytes]) -> tuple[Any, ...]:
    unique = dict[Any, Any]()  # equal values become one object, which saves memory
    rows = ([unique.setdefault(value, value) for value in json.loads(text)] for text in texts)
    processes, spaces, hosts, checks = zip(*rows, strict=True)
    without = [rank for rank, compares in enumerate(checks) if not compares]
    return processes, spaces, hosts, memory_file.needs_names(spaces), without


class Sharing(NamedTuple):
    """Groups of ranks that share memory, in the order of their first ranks.

    ``of[rank]`` is the index of the group of ``rank``. ``across[i]`` lists the i-th rank of each
    group, if every group has one. ``apart`` explains why a host has more than one group, else "".
    """

    groups: Sequence[Sequence[int]]
    of: Sequence[int]
    across: Sequence[tuple[int, ...]]
    apart: str

    @classmethod
    def read(cls, texts: Sequence[bytes]) -> "Sharing":
        answers = [json.loads(text) for text in texts]
        reasons = (
            f"rank {rank} shares no memory with rank {first} of its host: {why}"
            for rank, (leader, first, why) in enumerate(answers)
            if leader != answers[first][0]
        )
        apart = next(reasons, "")
        numbers = {leader: number for number, leader in enumerate(sorted({a[0] for a in answers}))}
        of = [numbers[leader] for leader, _, _ in answers]
        groups: list[list[int]] = [[] for _ in numbers]
        for rank, number in enumerate(of):
            groups[number].append(rank)
        return cls(groups, of, list(zip(*groups, strict=False)), apart)


def ranks_by_memory(store: Store) -> "Sharing":
    """Return which ranks share memory. Collective.

    Each rank writes a secret to a small file in shared memory. Ranks that can read it are in one
    group. A rank that cannot create a file is alone. Ranks with different values of
    FLASHLIGHT_MEMORY_DOMAIN are treated like ranks of different hosts.
    """
    nonce = system.random_bytes(16).hex()
    domain = system.environ.get("FLASHLIGHT_MEMORY_DOMAIN", "")
    file, problem = None, ""
    try:
        try:
            _native.load_extension("shm")
            file = memory_file.MemoryFile(store.named)
            os.posix_fallocate(file.fd, 0, len(nonce))
            os.pwrite(file.fd, nonce.encode(), 0)
        except (OSError, errors.BackendUnavailableError) as error:
            problem = str(error)
        host = host_identity()
        path = "" if file is None else file.path
        texts = store.exchange(json.dumps([host, domain, path, nonce, problem]).encode())
        kernel_ranks = texts.derived(_by_kernel)[host.partition(" ")[0]]
        offers = {rank: json.loads(texts[rank]) for rank in kernel_ranks}
        unreadable = {rank: _read_problem(offer[1:], domain) for rank, offer in offers.items()}
        readable = (rank for rank, why in unreadable.items() if not why)
        first = store.rank if problem else next(readable, store.rank)
        first_here = next(rank for rank in kernel_ranks if offers[rank][:2] == [host, domain])
        answer = [first, first_here, problem or unreadable[first_here]]
        answers = store.exchange(json.dumps(answer).encode())
    finally:
        if file is not None:
            file.close()
    return answers.derived(Sharing.read)


def _by_kernel(texts: Sequence[bytes]) -> dict[str, list[int]]:
    """Return the ranks by kernel. Only hosts (containers) with the same kernel can share memory."""
    by_kernel: dict[str, list[int]] = {}
    for rank, (host, *_) in enumerate(map(json.loads, texts)):
        by_kernel.setdefault(host.partition(" ")[0], []).append(rank)
    return by_kernel


def _read_problem(offer: Sequence[str], own_domain: str) -> str:
    """Return why this rank cannot read another rank's file, described by ``offer``, or ""."""
    domain, path, nonce, problem = offer
    if problem or domain != own_domain:
        return problem or f"it has FLASHLIGHT_MEMORY_DOMAIN={domain!r}"
    try:
        with memory_file.open_memory(path) as fd:
            is_same = os.pread(fd, len(nonce), 0) == nonce.encode()
    except OSError as error:
        return str(error)
    return "" if is_same else f"{path} does not contain its secret"


# Addresses ----------------------------------------------------------------------------------------


class Card(NamedTuple):
    """The addresses that a rank reports.

    ``host`` identifies the host. Errors contain its ``name`` and the text ``has``, which lists its
    interfaces. If the user chose an ``interface``, ``interface_addresses`` are its addresses.
    ``sources`` are addresses from which the host sends packets to other hosts, best first. ``ends``
    is the attribute of ``Store``.
    """

    host: str
    name: str
    has: str
    addresses: Sequence[str]
    interface: str = ""
    interface_addresses: Sequence[str] = ()
    sources: Sequence[str] = ()
    ends: Mapping[str, Sequence[Any]] = {}


def address_between_hosts(
    store: Store, hosts: Sequence[str], addresses: Sequence[Sequence[str]], shared: Collection[str],
    interface: str,
) -> str:  # fmt: skip
    """Return this rank's address for connections with other hosts. Collective, blocking.

    ``hosts`` has the ``host_identity`` of each rank, and ``addresses`` its ``own_addresses``.
    ``shared`` are addresses that several hosts have. ``interface`` is the user's choice or "".
    Raises RendezvousError on every rank if a host has no address that other hosts can reach.
    """
    own_host, first = hosts[store.rank], hosts[0]
    peer = next(rank for rank, host in enumerate(hosts) if (host == first) == (own_host != first))
    targets = [address for address in addresses[peer] if address not in shared]
    card = Card(
        host=own_host,
        name=system.gethostname(),
        has=", ".join(map(" ".join, interfaces.interfaces())),
        addresses=addresses[store.rank],
        interface=interface,
        interface_addresses=interfaces.addresses_of(interface) if interface else (),
        sources=[source for source in map(interfaces.source_address, targets) if source],
        ends={str(rank): ends for rank, ends in store.ends.items()},
    )
    texts = store.exchange(json.dumps(card).encode())
    try:
        return texts.derived(_addresses_of_ranks)[store.rank]
    except ValueError as error:
        raise errors.RendezvousError(
            f"rank {store.rank} of {store.size}: this job spans several hosts, and they cannot be "
            f"connected: {error}. Set params={{'INTERFACE': ...}} or FLASHLIGHT_INTERFACE to an "
            "interface or address of each host that the other hosts can reach"
        ) from error


def _addresses_of_ranks(texts: Sequence[bytes]) -> list[str]:
    # Parse each text once: most ranks of a host send equal texts.
    cards = {text: Card(*json.loads(text)) for text in dict.fromkeys(texts)}
    return choose_addresses([cards[text] for text in texts])


def address_inside(interface: str) -> str:
    """Return the address of this rank for connections inside its host.

    Without an ``interface`` (name or address) this is the loopback, which other machines cannot
    reach. Raises BackendUnavailableError if the host has no such interface or address.
    """
    addresses = interfaces.addresses_of(interface) if interface else ["127.0.0.1"]
    if not addresses:
        has = ", ".join(map(" ".join, interfaces.interfaces())) or "only the loopback"
        raise errors.BackendUnavailableError(
            f"{interface!r} is neither an interface nor an address of this host, which has {has}. "
            "Set params={'INTERFACE': ...} to one of these"
        )
    return addresses[0]


def choose_addresses(cards: Sequence[Card]) -> list[str]:
    """Return one address for each rank: of one IP version, and different on each host.

    Raises ValueError if a host has no such address. The text names the host and the reason.
    """
    shared = shared_addresses((card.host, card.addresses) for card in cards)
    by_host, translated = _connections(cards)
    proven = [card.interface_addresses or by_host[card.host] for card in cards]
    bad = {host: shared | seen.keys() if seen else shared for host, seen in translated.items()}
    usable = [
        card.interface_addresses or _usable(card, addresses, bad[card.host])
        for card, addresses in zip(cards, proven, strict=True)
    ]
    for rank, card in enumerate(cards):
        if not usable[rank] or bool(card.interface) != bool(card.interface_addresses):
            raise ValueError(_address_problem(cards, rank, shared, translated[card.host]))
    for candidates in (proven, usable):  # proven addresses have already been used by a connection
        for family in _FAMILIES:
            if all(_of_family(addresses, family) for addresses in candidates):
                chosen = [_of_family(addresses, family)[0] for addresses in usable]
                _check_wanted(cards, chosen)
                return chosen
    lacking = []
    for family, name in _FAMILIES.items():
        rank = next(r for r, addresses in enumerate(usable) if not _of_family(addresses, family))
        has = ", ".join(usable[rank])
        lacking.append(f"{cards[rank].name} (rank {rank}) has {has} and no {name}")
    raise ValueError(f"the hosts need a common version of IP: {', '.join(lacking)}")


def _usable(card: Card, proven: Sequence[str], bad: Collection[str]) -> list[str]:
    good = [ip for ip in card.sources if ip not in bad and not interfaces.is_loopback(ip)]
    for family in _FAMILIES:  # a host's only address of a family is a candidate
        only = [address for address in _of_family(card.addresses, family) if address not in bad]
        good += only if len(only) == 1 else []
    return list(dict.fromkeys([*proven, *good]))


def _connections(cards: Sequence[Card]) -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
    """Return the proven addresses of each host, and its addresses that a NAT translates.

    An address is proven if both ends of a connection with rank 0 report the same addresses, and the
    host lists this address. The second result maps an address that a host reports to the address
    that rank 0 sees.
    """
    proven: dict[str, list[str]] = {card.host: [] for card in cards}
    translated: dict[str, dict[str, str]] = {card.host: {} for card in cards}
    for rank, client in enumerate(cards):
        client_ends, own_ends = client.ends.get("0"), cards[0].ends.get(str(rank))
        if not client_ends or not own_ends:
            continue
        if client_ends[0] != own_ends[1]:
            translated[client.host][client_ends[0][0]] = own_ends[1][0]
        elif client_ends[1] == own_ends[0] and client.host != cards[0].host:
            for card, (address, _) in ((client, client_ends[0]), (cards[0], own_ends[0])):
                proven[card.host] += [address] if address in card.addresses else []
    return proven, translated


def shared_addresses(hosts: Iterable[tuple[str, Sequence[str]]]) -> set[str]:
    owned = {(address, host) for host, addresses in hosts for address in addresses}
    count = Counter(address for address, _ in owned)
    return {address for address in count if count[address] > 1}


def _of_family(addresses: Iterable[str], family: AddressFamily) -> list[str]:
    return [address for address in addresses if interfaces.family_of(address) == family]


# Why there is no address --------------------------------------------------------------------------


def _check_wanted(cards: Sequence[Card], chosen: Sequence[str]) -> None:
    owners: dict[str, Card] = {}
    for card, address in zip(cards, chosen, strict=True):
        owner = owners.setdefault(address, card)
        if owner.host != card.host and (wanted := owner.interface or card.interface):
            raise ValueError(
                f"{wanted!r} must have distinct addresses on each host, got {address} on "
                f"{owner.name} and {card.name}"
            )


def _address_problem(
    cards: Sequence[Card], rank: int, shared: Collection[str], translated: Mapping[str, str]
) -> str:
    card, why = cards[rank], "has no route to the others"
    if card.interface:
        why = f"has no {card.interface!r}"
    elif translated:
        address, seen = next(iter(translated.items()))
        why = (
            f"has the address {address}, but rank 0 sees {seen}: a NAT or a tunnel is between, "
            f"and no other host can connect to {address}"
        )
    elif address := min((address for address in card.addresses if address in shared), default=""):
        strangers = (other for other in cards if other.host != card.host)
        others = {other.name for other in strangers if address in other.addresses}
        why = (
            f"and {', '.join(sorted(others))} have the same address {address}, which is typical "
            f"behind a NAT, and {card.name} has no other address"
        )
    has = card.has or "no active interface with an address that is valid beyond its link"
    return f"{card.name} (rank {rank}) {why}; its interfaces: {has}"
