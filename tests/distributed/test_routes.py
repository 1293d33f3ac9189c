"""Choice of addresses between hosts, and connections to rank 0 at several addresses."""

import contextlib
import hmac
import json
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import _native, interfaces
from flashlight_py.distributed.calls.arrays import dtype_code
from flashlight_py.distributed.memory.topology import Card, choose_addresses
from flashlight_py.distributed.rendezvous import stores, wire
from flashlight_py.distributed.rendezvous.store import Peer, shared_process_error
from flashlight_py.distributed.rendezvous.wire import Attempts
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.distributed.verbs import ALL_REDUCE, BARRIER
from flashlight_py.errors import BackendUnavailableError
from tests.distributed.conformance import hosts_by_letter, on_ranks, raises
from tests.distributed.processes import finish, limit_descriptors, start
from tests.distributed.threads import run_on_threads
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


HERE = "127.0.0.1"
# Ranks that forward calls. Ranks that are not neighbours connect only for large arrays.
MANY, FAR = 9, 3
LARGE = 200_000
# Bytes of Gloo's header before each message, and the bytes of a call that arrive: a part of it.
PREAMBLE, BEGINNING = 48, 16


class Raw:
    """``size`` native ranks with the addresses of all ranks, which may change before they
    connect."""

    def __init__(self, size: int) -> None:
        try:
            native = _native.load_extension("gloo")
        except BackendUnavailableError as error:
            pytest.skip(str(error))
        self.ffi, self.lib, self.size = native.ffi, native.lib, size
        create = self.lib.fl_gloo_create
        self.groups = [create(r, size, HERE.encode(), b"", 20.0) for r in range(size)]
        assert self.ffi.NULL not in self.groups
        self.addresses = [list(map(self._address, self.groups)) for _ in range(size)]

    def _address(self, group: Any) -> bytes:
        room = self.ffi.new("char[]", 1024)
        count = self.lib.fl_address(group, room, 1024)
        return bytes(self.ffi.buffer(room, count))

    def port(self, rank: int) -> int:
        return int.from_bytes(self.addresses[rank][rank][2:4], "big")

    def lead(self, rank: int, peer: int, port: int) -> None:
        address = self.addresses[rank][peer]
        self.addresses[rank][peer] = address[:2] + port.to_bytes(2, "big") + address[4:]

    def connect(self, rank: int, lazily: bool = False) -> None:
        address = self.addresses[rank]
        addresses, key = map(self.ffi.from_buffer, (b"".join(address), bytes(32)))
        op = self.lib.fl_connect(self.groups[rank], addresses, len(address[0]), key, lazily, 20)
        assert self.end(op) == self.lib.FL_OK

    def all_reduce(self, rank: int, x: Any, blocking: bool = True) -> Any:
        call = self._signature(ALL_REDUCE.code, x)
        return self._run(rank, call, self.ffi.from_buffer(x), blocking)

    def barrier(self, rank: int) -> None:
        call = self._signature(BARRIER.code, np.empty((), np.float32))
        assert self.end(self._run(rank, call, self.ffi.NULL, True)) == self.lib.FL_OK

    def _signature(self, verb: int, x: Any) -> Any:
        call = self.ffi.new("fl_signature *", {"verb": verb, "scale": 1.0, "count": x.size})
        call.dtype, call.itemsize, call.ndim = dtype_code("", x.dtype), x.itemsize, x.ndim
        call.shape[0] = x.size
        return call

    def _run(self, rank: int, call: Any, data: Any, blocking: bool) -> Any:
        null = self.ffi.NULL
        return self.lib.fl_run(self.groups[rank], call, data, null, -1, 20.0, not blocking, null)

    def end(self, op: Any) -> int:
        if op == self.ffi.NULL:
            return int(self.lib.FL_OK)
        while self.lib.fl_op_wait(op, 0.1) == self.lib.FL_PENDING:
            pass
        status = int(self.lib.fl_op_wait(op, 0.0))
        self.lib.fl_op_free(op)
        return status

    def close(self) -> None:
        for group in self.groups:
            self.lib.fl_close(group)
        for group in self.groups:
            self.lib.fl_free(group)


def test_signal_ends_a_wait_for_a_connection() -> None:
    """Regression: the signal was lost, and later data arrived at a wrong address."""
    raw, silent_server = Raw(MANY), socket.create_server((HERE, 0))  # never answers
    silent = silent_server.getsockname()[1]
    raw.lead(0, FAR, silent)
    raw.lead(FAR, 0, silent)
    began, answers = time.monotonic(), [1]
    ended: dict[int, tuple[int, float]] = {}

    @raw.ffi.callback("int(void)")  # type: ignore[untyped-decorator]
    def check() -> int:
        """Return 1 once, like Python when a signal handler raises."""
        return answers.pop() if answers and time.monotonic() - began > 0.5 else 0

    def run(rank: int) -> None:
        raw.connect(rank)
        time.sleep(0.3)  # otherwise the connecting thread, without signals, may run it
        if rank == 0:
            raw.lib.fl_on_interrupt(raw.groups[0], check)
        status = raw.end(raw.all_reduce(rank, np.ones(LARGE, np.float32)))
        ended[rank] = status, time.monotonic() - began
        if rank == 0:
            silent_server.close()

    try:
        run_on_threads(raw.size, run)
        assert ended[0][0] == raw.lib.FL_CLOSED
        assert ended[0][1] < 6.0
        assert raw.lib.FL_OK not in {status for status, _ in ended.values()}
    finally:
        silent_server.close()
        raw.close()


class Cut:
    """A proxy of ``port``. After ``cut()`` it forwards only ``most`` more bytes."""

    def __init__(self, port: int) -> None:
        self._to, self._server = port, socket.create_server((HERE, 0))
        self.port = self._server.getsockname()[1]
        self._most = -1
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self, most: int) -> None:
        self._most = most

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            client = self._server.accept()[0]
            upstream = socket.create_connection((HERE, self._to))
            threading.Thread(target=self._pump, args=(client, upstream, False), daemon=True).start()
            self._pump(upstream, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, is_cut: bool) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(65536):
                if is_cut and self._most >= 0:
                    data = data[: self._most]
                    self._most -= len(data)
                sink.sendall(data)


def test_call_is_compared_only_after_its_whole_header_has_arrived() -> None:
    """Regression: the start of a call and the end of an earlier call were read as one call."""
    raw = Raw(2)
    cut = Cut(raw.port(1))
    raw.lead(0, 1, cut.port)
    call = raw.ffi.new("fl_signature *")
    try:
        run_on_threads(raw.size, lambda rank: raw.connect(rank, lazily=rank == 1))
        for _ in range(2):
            run_on_threads(raw.size, raw.barrier)
        time.sleep(0.1)  # all data has arrived
        # The rank waits for the next call, and sends.
        cut.cut(2 * PREAMBLE + BEGINNING)
        op = raw.all_reduce(1, np.ones(5, np.float32), blocking=False)
        time.sleep(0.3)
        assert not raw.lib.fl_is_ahead(raw.groups[0], 1, call)
        raw.lib.fl_close(raw.groups[1])
        raw.end(op)
    finally:
        cut.close()
        raw.close()


@on_ranks(("hierarchical", 2), fresh=True, env=hosts_by_letter("ab"))
def test_rank_without_free_descriptors_raises_its_own_error(rank: int, size: int) -> None:
    """Regression: the process aborted instead."""
    fl.barrier()
    with limit_descriptors(3):
        fl.distributed_shutdown()


ROOT = Path(__file__).parents[2]
COMPILER = [
    *("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread"),
    *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
    *("-idirafter", str(ROOT / "csrc/gloo/missing")),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("gloo")
    parts = "descriptors", "heartbeat", "line", "links", "pair", "proof"
    sources = [ROOT / "csrc/gloo" / f"{part}.cc" for part in parts]
    command = [*COMPILER, "-c", *sources, ROOT / "csrc/common/operation.cc"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "expected"),
    [
        # Regression: a thread that found the connection broken waited for the thread that created
        # it. If it closed the connection meanwhile, Gloo ended the process.
        ("ready", [], "0 1\n"),
        # Regression: the reading thread used the remaining part of a destroyed buffer.
        ("destroyed", ["20000"], None),
        # At the start, all ranks of a host connect at once, before they have authenticated.
        ("crowd", ["100"], "99\n"),
        # A forked child closes no foreign descriptors.
        ("child", [], ""),
        # Lengths below, at and above the end of a block of SHA-256.
        *(
            ("proof", [key, text], hmac.new(key.encode(), text.encode(), "sha256").hexdigest())
            for key, text in (("k" * (1 + n % 64), "t" * n) for n in (0, 55, 56, 64, 65, 119, 300))
        ),
    ],
)
def test_native_connections(
    objects: Path, name: str, case: list[str], expected: str | None
) -> None:
    """Build a program of tests/native/gloo, and compare its output."""
    if not (objects / name).exists():
        sources = [ROOT / "tests/native/gloo" / f"{name}.cc", *objects.glob("*.o")]
        subprocess.run([*COMPILER, *sources, "-lgloo", "-o", objects / name], check=True)
    run = [objects / name, *case]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in (None, done.stdout)
