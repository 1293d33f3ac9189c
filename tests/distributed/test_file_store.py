"""Rendezvous at a path: its files, unusable paths, and files of dead runs."""

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flashlight_py.distributed.rendezvous import stores, wire
from flashlight_py.distributed.rendezvous.stores import VERSION, FileStore
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import own_addresses
from tests.distributed.rendezvous_helpers import Ranks, all_closed, ranks_at
from tests.distributed.threads import run_on_threads

ranks = ranks_at("file")


def test_file_store_creates_private_files_in_a_directory(ranks: Ranks, tmp_path: Path) -> None:
    started = ranks.start_all(2, path=tmp_path, pause_at="exchanged 0")
    for rank in started:
        rank.await_event("exchanged 0")
    assert all(name.startswith("flashlight.") for name in os.listdir(tmp_path))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    for rank in started:
        rank.resume()
    assert all_closed(started)
    assert os.listdir(tmp_path) == []


def test_file_store_separates_runs_with_different_names(ranks: Ranks, tmp_path: Path) -> None:
    names = "a", "a.run", "a[1].*+ä"
    assert all_closed([r for name in names for r in ranks.start_all(2, path=tmp_path / name)])
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_file_store_rejects_a_second_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    servers = [ranks.start(0, 3) for _ in range(2)]
    client = ranks.start(1, 3)
    for rank in servers:
        assert re.search("two processes claim rank 0: .*pid.* and .*pid", rank.refusal())
    assert "two processes claim rank 0" in client.refusal()
    assert os.listdir(tmp_path) == []


def test_file_store_completes_at_most_one_run_with_two_ranks_0(ranks: Ranks) -> None:
    """Both collect the same clients, and each client votes once."""
    clients = [ranks.start_ready(rank, 3, timeout=3.0) for rank in (1, 2)]
    servers = [ranks.start(0, 3, timeout=3.0) for _ in range(2)]
    outcomes = [rank.outcome() for rank in (*servers, *clients)]
    # The worker checks every payload, so a rank that closed has completed one consistent run.
    assert outcomes[:2].count("closed") <= 1
    if "closed" in outcomes:
        assert outcomes.count("closed") == 3


def test_file_store_never_mixes_two_runs_at_one_path(ranks: Ranks) -> None:
    """The second run is rejected as a whole, or completes before the first one checks again."""
    client = ranks.start(1, 2, pause_at="exchanged 0")
    server = ranks.start(0, 2)
    client.await_event("exchanged 0")
    outcomes = [rank.outcome() for rank in ranks.start_all(2)]
    refused = ["another run has started at this path" in outcome for outcome in outcomes]
    assert all(refused) or outcomes == ["closed", "closed"]
    client.resume()
    assert all_closed([server, client])


def test_file_store_names_an_unusable_parent_directory(tmp_path: Path) -> None:
    """The parent is missing, is no directory, or does not allow new files."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "absent", tmp_path / "file", Path("/proc/self")):
        with pytest.raises(RendezvousError, match=re.escape(str(folder))):
            FileStore(folder / "meeting", 0, 2, 1.0)


@pytest.mark.parametrize(("rank", "size", "timeout"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_store_checks_its_arguments(tmp_path: Path, rank: int, size: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="got"):
        FileStore(tmp_path / "meeting", rank, size, timeout)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("outside", ["127.0.0.2", "::1"])
def test_rank_0_listens_outside_if_a_rank_is_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: str
) -> None:
    """No rank answers at the loopback. ``outside`` stands for an address that the other host
    reaches."""
    reached: list[str] = []
    resolve = wire.resolved

    def from_another_host(host: str, port: int) -> Any:
        if host == "127.0.0.1":
            raise ConnectionRefusedError("this is another host")
        reached.append(host)
        return resolve(host, port)

    monkeypatch.setattr(wire, "resolved", from_another_host)
    monkeypatch.setattr(stores, "own_addresses", lambda: [outside])
    got: list[list[bytes]] = []

    def take_part(rank: int) -> None:
        store = FileStore(tmp_path / "meeting", rank, 2, 20.0)
        got.append(store.exchange(b"%d" % rank))
        assert store.secret
        store.close()

    run_on_threads(2, take_part)
    assert got == [[b"0", b"1"]] * 2
    assert reached[-1] == outside
    assert os.listdir(tmp_path) == []


def test_file_store_offers_no_loopback_address_to_other_hosts() -> None:
    assert not {"127.0.0.1", "::1"} & set(own_addresses())
    assert all(":" in address or address.count(".") == 3 for address in own_addresses())


DEAD, NONCE = "0123456789abcdef", "fedcba9876543210"
NOBODY = {"peer": ["elsewhere", 1, "another", "1"]}
# No program listens at port 1 of the loopback.
GONE = {"version": VERSION, **NOBODY, "addresses": [["127.0.0.1", 1]], "secret": "00" * 32}
STALE = {
    "run": f"run-{DEAD}-0",
    "later announcement of it": f"run-{DEAD}-3",
    "ask": f"ask-{DEAD}-{NONCE}",
    "temporary": f"tmp-{DEAD}-7",
}
SPOILT = {
    "empty": b"",
    "garbage": b"\x00\xff\x80 not json",
    "nested": b"[" * 100_000,
    "truncated": json.dumps(GONE).encode()[:-4],
    "another version": json.dumps({**GONE, "version": VERSION + 1}).encode(),
    "no object": b"[1, 2]",
    "fields missing": json.dumps({"version": VERSION}).encode(),
    "a process of nonsense": json.dumps({**GONE, "peer": [1]}).encode(),
    "an address of nonsense": json.dumps({**GONE, "addresses": [["no address", 1]]}).encode(),
    "a port of nonsense": json.dumps({**GONE, "addresses": [["127.0.0.1", 1 << 20]]}).encode(),
    "a secret of nonsense": json.dumps({**GONE, "secret": "\ud800"}).encode(),
}


def put(directory: Path, name: str, content: bytes) -> None:
    (directory / f"meeting.{name}").write_bytes(content)


@pytest.mark.parametrize("kinds", [[*STALE], *([kind] for kind in STALE)])
def test_file_store_removes_stale_files(ranks: Ranks, tmp_path: Path, kinds: list[str]) -> None:
    for kind in kinds:
        put(tmp_path, STALE[kind], json.dumps(GONE).encode())
    clients = [ranks.start_ready(rank, 3) for rank in (1, 2)]
    assert all_closed([ranks.start(0, 3), *clients])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", SPOILT)
def test_file_store_removes_damaged_leftovers(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for name in STALE.values():
        put(tmp_path, name, SPOILT[kind])
    ranks.run(2)
    assert os.listdir(tmp_path) == []


def test_file_store_keeps_foreign_files(ranks: Ranks, tmp_path: Path) -> None:
    names = {"meeting", "meeting.txt", "meeting.run-short", f"other.run-{DEAD}-0", "meeting.ask-"}
    for name in names:
        (tmp_path / name).write_text("mine")
    ranks.run(2)
    assert set(os.listdir(tmp_path)) == names


def test_file_store_does_not_open_symbolic_links_and_fifos(ranks: Ranks, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text(json.dumps(GONE))
    (tmp_path / f"meeting.run-{DEAD}-0").symlink_to(target)
    ranks.run(2)
    assert target.read_text() == json.dumps(GONE)
    assert os.listdir(tmp_path) == ["precious"]
    os.mkfifo(tmp_path / f"meeting.run-{DEAD}-0")
    ranks.run(2)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Return a server of another program at the port of a dead run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def announce(directory: Path, server: socket.socket) -> Path:
    """Write an announcement as if ``server`` belonged to a run."""
    port = server.getsockname()[1]
    put(directory, STALE["run"], json.dumps({**GONE, "addresses": [["127.0.0.1", port]]}).encode())
    return directory / f"meeting.{STALE['run']}"


def test_file_store_skips_foreign_port(ranks: Ranks, tmp_path: Path, server: socket.socket) -> None:
    announce(tmp_path, server)

    def serve() -> None:
        with suppress(OSError):  # the test has ended
            while True:
                with server.accept()[0] as wire:
                    wire.sendall(b"220 mail.example ESMTP\r\n")

    with ThreadPoolExecutor(1) as threads:
        threads.submit(serve)
        ranks.run(3)
        server.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
    assert os.listdir(tmp_path) == []


def test_file_store_ignores_a_stale_port_that_another_run_uses(
    ranks: Ranks, tmp_path: Path, server: socket.socket
) -> None:
    other = ranks.start_ready(0, 2, path=tmp_path / "another")
    while not (records := list(tmp_path.glob("another.run-*"))):
        time.sleep(0.001)
    record = json.loads(records[0].read_text())
    put(tmp_path, STALE["run"], json.dumps({**record, **NOBODY, "secret": "00" * 32}).encode())
    ranks.run(3)
    assert [path.name.split(".")[0] for path in tmp_path.iterdir()] == ["another"]
    assert ranks.start(1, 2, path=tmp_path / "another").outcome() == other.outcome() == "closed"


@pytest.mark.slow
def test_file_store_continues_after_a_delay_if_a_stale_port_does_not_answer(
    ranks: Ranks, tmp_path: Path, server: socket.socket
) -> None:
    """The listener may be a run of another host between two exchanges, so its file is kept."""
    stale = announce(tmp_path, server)
    ranks.run(3)
    assert list(tmp_path.iterdir()) == [stale]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_store_ignores_other_users(ranks: Ranks, tmp_path: Path, server: socket.socket) -> None:
    """No rank connects to an address that another user announced."""
    os.chown(announce(tmp_path, server), 65534, 65534)
    text = ranks.start(1, 2, timeout=0.3).refusal()
    assert "rank 0 of 2 has not arrived within 0.3 s" in text
    assert f"ignored files: run-{DEAD}-0 must be a regular file of this user" in text
    server.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        server.accept()


# Numbers of the file operations before which a rank is killed: about 20 of rank 0, 8 of rank 1.
MOMENTS = [(0, moment) for moment in range(20)] + [(1, moment) for moment in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "moment"), MOMENTS)
def test_file_store_survives_kills(ranks: Ranks, tmp_path: Path, victim: int, moment: int) -> None:
    """Run at the same path after a death. Each survivor has all payloads or names the dead rank."""
    started = ranks.start_all(3, {victim: {"die_before": moment}}, timeout=1.0)
    assert started.pop(victim).outcome() in ("dying", "closed")
    for outcome in [rank.outcome() for rank in started]:
        assert outcome == "closed" or f"rank {victim}" in outcome, outcome
    ranks.run(3)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("restarted", [0, 1])
def test_store_accepts_a_restarted_rank(ranks: Ranks, tmp_path: Path, restarted: int) -> None:
    waiting = ranks.start(1 - restarted, 3)
    # Rank 1 makes no checks meanwhile: if it were killed between creating and removing its file,
    # the next run would find the file. The successor of rank 0 removes the files of rank 0.
    first = ranks.start_ready(restarted, 3, **({"pause_at": "constructed"} if restarted else {}))
    while restarted == 0 and not any("run-" in name for name in os.listdir(tmp_path)):
        time.sleep(0.001)  # no event when a file appears
    first.kill()
    assert all_closed([waiting, ranks.start(restarted, 3), ranks.start(2, 3)])
    assert os.listdir(tmp_path) == []
