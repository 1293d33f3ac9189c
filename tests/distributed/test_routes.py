"""Choice of addresses between hosts, and connections to rank 0 at several addresses."""

import contextlib
import json
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashlight_py import interfaces
from flashlight_py.distributed.memory.topology import Card, choose_addresses
from flashlight_py.distributed.rendezvous import stores, wire
from flashlight_py.distributed.rendezvous.store import Peer, shared_process_error
from flashlight_py.distributed.rendezvous.wire import Attempts
from flashlight_py.distributed.start.settings import Settings
from tests.distributed.conformance import raises
from tests.distributed.processes import finish, start
from tests.distributed.without_ipv6 import SOCKET


def card(host: str, address_set: str = "", sources: str = "", **more: Any) -> Card:
    return Card(host, host, address_set, address_set.split(), sources=sources.split(), **more)


def joined(cards: list[Card], *connections: tuple[str, str], seen: str = "") -> list[Card]:
    """Connect rank i + 1 with rank 0 by these addresses; ``seen`` is a translated address."""
    of_0 = {}
    for number, (client, server) in enumerate(connections, 1):
        ends = [[client, 4000 + number], [server, 29511]]
        cards[number] = cards[number]._replace(ends={"0": ends})
        of_0[str(number)] = [ends[1], [seen or client, 4000 + number]]
    return [cards[0]._replace(ends=of_0), *cards[1:]]


NAT, A, B, C = "10.0.2.15", "10.1.0.1", "10.1.0.2", "10.1.0.3"
A6, B6, C6 = "fd00::1", "fd00::2", "fd00::3"


def test_choose_addresses_prefers_addresses_proven_by_rank_0() -> None:
    """Ranks without such a connection use the address of their host."""
    cards = [card("a", f"{NAT} {A}", B), card("a"), card("b", f"{NAT} {B}"), card("b")]
    local = ("127.0.0.1", "127.0.0.1")
    assert choose_addresses(joined(cards, local, (B, A))) == [A, A, B, B]


def test_choose_addresses_skips_an_address_of_every_host() -> None:
    """For example Docker's bridge. Of two networks, one is used."""
    bridge, other_a, other_b = "172.17.0.1", "192.168.7.1", "192.168.7.2"
    cards = [
        card("a", f"{bridge} {A} {other_a}", f"{bridge} {A}"),
        card("b", f"{bridge} {B} {other_b}", f"{bridge} {B}"),
    ]
    assert choose_addresses(cards) == [A, B]
    assert choose_addresses(joined(cards, (other_b, other_a))) == [other_a, other_b]
    only = [card("a", bridge, bridge), card("b", f"{bridge} {B}", B)]
    with pytest.raises(ValueError, match=f"a .* and b have the same address {bridge}"):
        choose_addresses(only)


def test_choose_addresses_skips_link_local_addresses() -> None:
    """MASTER_ADDR may be link-local. Another address of the host is used."""
    link_a, link_b = "fe80::1", "fe80::2"
    cards = [card("a", f"{A} {A6}", A), card("b", f"{B} {B6}", B)]
    assert choose_addresses(joined(cards, (link_b, link_a))) == [A, B]
    with pytest.raises(ValueError, match=r"a \(rank 0\) has no route .* valid beyond its link"):
        choose_addresses(joined([card("a"), card("b")], (link_b, link_a)))


def test_choose_addresses_uses_routes_without_proven_connections() -> None:
    """For example with MPI. Addresses of several hosts are skipped."""
    a, b = f"{NAT} {A}", f"{NAT} {B}"
    assert choose_addresses([card("a", a, f"{NAT} {A}"), card("b", b, B)]) == [A, B]
    assert choose_addresses([card("a", a), card("b", b)]) == [A, B]  # the only remaining address


def test_choose_addresses_uses_one_version_of_ip() -> None:
    cards = [card("a", f"{A} {A6}"), card("b", f"{B} {B6}"), card("c", C6)]
    assert choose_addresses(joined(cards, (B, A), (C6, A6))) == [A6, B6, C6]
    assert choose_addresses(joined(cards[:2], (B6, A6))) == [A6, B6]
    with pytest.raises(ValueError, match=r"b \(rank 1\) has fd00::2 and no IPv4, a .* and no IPv6"):
        choose_addresses([card("a", A), card("b", B6)])


def test_choose_addresses_uses_the_interface_of_the_user() -> None:
    with_interface = card("b", f"{NAT} {B}", interface="eth1", interface_addresses=["10.9.0.2"])
    cards = joined([card("a", f"{NAT} {A}"), with_interface], (B, A))
    assert choose_addresses(cards) == [A, "10.9.0.2"]
    both = [card(host, NAT, interface="eth0", interface_addresses=[NAT]) for host in "ab"]
    with pytest.raises(ValueError, match=r"'eth0' must have distinct addresses on .*15 on a and b"):
        choose_addresses(both)
    with pytest.raises(ValueError, match=r"b \(rank 1\) has no 'eth9'; its interfaces: 10.1.0.2"):
        choose_addresses([card("a", A), card("b", B, interface="eth9")])


def test_choose_addresses_error_gives_the_reason() -> None:
    unseen = joined([card("a", A), card("b", NAT, NAT)], (NAT, A), seen="10.1.0.254")
    for cards, why in (
        (
            [card("a", NAT, NAT), card("b", NAT, NAT)],
            "a (rank 0) and b have the same address 10.0.",
        ),
        (unseen, "b (rank 1) has the address 10.0.2.15, but rank 0 sees"),
        (
            [card("a", A), card("b")],
            "b (rank 1) has no route to the others; its interfaces: no act",
        ),
    ):
        with raises(ValueError, why):
            choose_addresses(cards)


def test_addresses_of_returns_the_addresses_of_this_host() -> None:
    assert interfaces.addresses_of("lo")[0] == "127.0.0.1"
    assert interfaces.addresses_of("eth99,127.0.0.3") == ["127.0.0.3"]
    assert interfaces.addresses_of("192.0.2.77") == []
    assert interfaces.source_address("127.0.0.9") == "127.0.0.1"
    assert not interfaces.is_own("no address")


JOIN = """
import numpy as np
import flashlight_py as fl
fl.distributed_init(params={"BACKEND": "gloo"})
assert fl.all_reduce(np.ones(3))[0] == 2
fl.distributed_shutdown()
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in SOCKET, reason="no number of socket(2) is known")
def test_flrun_works_on_a_kernel_without_ipv6(tmp_path: Path) -> None:
    path = tmp_path / "join.py"
    path.write_text(JOIN)
    run = [sys.executable, "-m"]
    flrun = [*run, "flashlight_py.launch", "-n", "2", str(path)]
    command = [*run, "tests.distributed.without_ipv6", *flrun]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "seccomp is not available" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("passed", "variables", "used"),
    [
        ("", {}, ""),
        ("", {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"),
        ("", {"GLOO_SOCKET_IFNAME": "ib0", "FLASHLIGHT_INTERFACE": "eth0"}, "eth0"),
        ("lo", {"GLOO_SOCKET_IFNAME": "ib0", "FLASHLIGHT_INTERFACE": "eth0"}, "lo"),
    ],
)
def test_params_interface_overrides_the_environment(
    passed: str, variables: dict[str, str], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Settings.from_params({"INTERFACE": passed}).interface == used


@contextlib.contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def black_hole(port: int) -> Iterator[str]:
    """Return an address at which ``port`` neither accepts nor rejects: its queue is full."""
    with contextlib.ExitStack() as stack:
        host = "127.0.0.7"
        server = stack.enter_context(socket.socket())
        server.bind((host, port))
        server.listen(0)
        for _ in range(3):
            wire = stack.enter_context(socket.socket())
            wire.setblocking(False)
            wire.connect_ex((host, port))
        yield host


@pytest.mark.slow
def test_attempts_are_not_delayed_by_a_silent_address() -> None:
    with listening() as port, black_hole(port) as nowhere:
        attempts = Attempts([(nowhere, port), ("127.0.0.1", port)])
        began = time.monotonic()
        wire = next(attempts.connected(began + 20))
        assert time.monotonic() - began < 10
        with wire:
            assert wire.getpeername() == ("127.0.0.1", port)
        assert attempts.pending == 1
        early = Attempts([(nowhere, port), ("127.0.0.8", port)])  # may listen soon
        assert list(early.connected(began + 100)) == []
        assert time.monotonic() - began < 20
        alone = Attempts([(nowhere, port)])
        assert list(alone.connected(time.monotonic() + 0.2)) == []
        assert alone.problems == {nowhere: "timed out"}


def test_attempts_record_the_problem_of_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        attempts = Attempts([("127.0.0.8", port), ("::1", port), ("no name.", port)])
        assert list(attempts.connected(time.monotonic() + 20)) == []
    assert attempts.problems.keys() == {"127.0.0.8", "::1", "no name."}
    assert "refused" in attempts.problems["127.0.0.8"]
    assert attempts.pending == 0

    def unknown(*_: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(wire, "resolved", unknown)  # names are resolved again for each attempt
    attempts = Attempts([("later", 1)])
    assert list(attempts.connected(time.monotonic() + 1)) == []
    assert attempts.problems == {"later": "Name or service not known"}


@pytest.mark.parametrize(
    ("host", "meant", "one_host", "at"),
    [
        ("127.0.0.2", "127.0.0.2", False, "127.0.0.2"),  # an address
        ("localhost", "127.0.0.1", False, "127.0.0.1"),
        ("a-name", "127.0.1.1", True, "127.0.1.1"),
        ("a-name", "127.0.1.1", False, "::"),
    ],
)
def test_create_listeners_chooses_addresses_by_host_name(
    host: str, meant: str, one_host: bool, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At all addresses for a name, since other hosts may resolve it to any of them."""
    monkeypatch.setattr(stores, "resolved", lambda *_: [(meant, 0)])
    with contextlib.ExitStack() as stack:
        created = stores.create_listeners(host, 0, 5, one_host)
        listeners = [stack.enter_context(listener) for listener in created]
        assert {listener.getsockname()[0] for listener in listeners} == {at}
        if at == "::":  # of both versions
            socket.create_connection(("127.0.0.1", listeners[0].getsockname()[1])).close()
    monkeypatch.setattr(stores, "resolved", lambda *_: [("192.0.2.77", 29511)])
    with pytest.raises(OSError, match="MASTER_ADDR is not an address of this host"):
        stores.create_listeners("a-name", 29511, 5, one_host=False)


TWO = """
import json, sys, threading
import flashlight_py as fl

def join(rank):
    try:
        fl.distributed_init("FILE", rank, 3, {"FILE_PATH": sys.argv[1], "TIMEOUT": 20})
    except fl.errors.RendezvousError as error:
        said.append(str(error))

said, ranks = [], [int(word) for word in sys.argv[2:]]
threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(said), fl.is_distributed_init())
""".replace('"FILE"', "fl.DistributedInit.FILE_SYSTEM")


def test_two_ranks_in_one_process_raise_on_every_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO, str(tmp_path / "meeting")]
    started = [start([*command, *ranks]) for ranks in (["0", "2"], ["1"])]
    outputs: list[str] = []
    for process in started:
        texts, _, is_joined = finish(process)[1].rpartition(" ")
        outputs += json.loads(texts)
        assert is_joined == "False\n"
    assert len(outputs) == 3
    reason = f"ranks 0, 2 are one process (host {socket.gethostname()}, pid {started[0].pid})"
    assert all(reason in text for text in outputs), outputs


def test_shared_process_error_ignores_unknown_processes() -> None:
    unknown = Peer("a", 1)
    assert shared_process_error([unknown, unknown]) == ""
    peer = Peer("a", 1, "boot", "7")
    assert shared_process_error([peer, Peer("a", 1, "boot", "8")]) == ""
    assert "ranks 0, 1 are one process" in shared_process_error([peer, peer])
