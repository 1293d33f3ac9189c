"""Ranks meet at a path: its files, ranks that claim one rank, and paths that cannot be used."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from flashlight_py.distributed.rendezvous import file_store, wire
from flashlight_py.distributed.rendezvous.file_store import FileStore
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import own_addresses
from tests.distributed.rendezvous_helpers import Ranks, closed, ranks
from tests.distributed.threads import on_threads

__all__ = ["ranks"]


def test_a_path_that_is_a_directory_holds_the_files_of_this_user_alone(
    ranks: Ranks, tmp_path: Path
) -> None:
    started = ranks.start_all(2, path=tmp_path, hold="exchanged 0")
    for rank in started:
        rank.await_event("exchanged 0")
    assert all(name.startswith("flashlight.") for name in os.listdir(tmp_path))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    for rank in started:
        rank.resume()
    assert closed(started)
    assert os.listdir(tmp_path) == []


def test_a_name_is_matched_literally(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, path=tmp_path / "job[1].*+ä")
    assert os.listdir(tmp_path) == []


def test_runs_with_different_names_do_not_see_each_other(ranks: Ranks, tmp_path: Path) -> None:
    assert closed(
        ranks.start_all(3, path=tmp_path / "a") + ranks.start_all(2, path=tmp_path / "a.run")
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_rank_missing_in_a_later_exchange_is_named(ranks: Ranks) -> None:
    ranks.start(2, 3, hold="exchanged 0")
    for rank in ranks.start_together((0, 1), 3, timeout=1.0):
        assert "rank 2 of 3 has not arrived within 1 s" in rank.refusal()


@pytest.mark.slow
def test_two_ranks_0_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    servers = [ranks.start(0, 3) for _ in range(2)]
    client = ranks.start(1, 3)
    for rank in servers:
        assert re.search("two processes claim rank 0: .*pid.* and .*pid", rank.refusal())
    assert "two processes claim rank 0" in client.refusal()
    assert os.listdir(tmp_path) == []


def test_of_two_ranks_0_with_everybody_present_at_most_one_gets_a_run(ranks: Ranks) -> None:
    """Both gather the same clients, each of which votes once."""
    clients = [ranks.start_ready(rank, 3, timeout=3.0) for rank in (1, 2)]
    servers = [ranks.start(0, 3, timeout=3.0) for _ in range(2)]
    outcomes = [rank.outcome() for rank in (*servers, *clients)]
    # The worker checks every payload it gets: a closed rank has met one complete run.
    assert outcomes[:2].count("closed") <= 1
    if "closed" in outcomes:
        assert outcomes.count("closed") == 3


def test_a_second_run_at_the_same_path_never_mixes_with_the_first(ranks: Ranks) -> None:
    """It is turned away as a whole, or complete before the first one looks again."""
    client = ranks.start(1, 2, hold="exchanged 0")
    server = ranks.start(0, 2)
    client.await_event("exchanged 0")
    outcomes = [rank.outcome() for rank in ranks.start_all(2)]
    refused = ["a run is under way at this path already" in outcome for outcome in outcomes]
    assert all(refused) or outcomes == ["closed", "closed"]
    client.resume()
    assert closed([server, client])


def test_a_parent_that_cannot_hold_files_is_named(tmp_path: Path) -> None:
    """It is missing, no directory, or one in which nobody can create a file."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "absent", tmp_path / "file", Path("/proc/self")):
        with pytest.raises(RendezvousError, match=re.escape(str(folder))):
            FileStore(folder / "meeting", 0, 2, 1.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_an_unwritable_directory_is_named(ranks: Ranks, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert "ermission denied" in ranks.start(0, 2, uid=65534).refusal()


@pytest.mark.parametrize(("rank", "size", "timeout"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_senseless_arguments_are_refused(
    tmp_path: Path, rank: int, size: int, timeout: float
) -> None:
    with pytest.raises(ValueError, match="got"):
        FileStore(tmp_path / "meeting", rank, size, timeout)
    assert os.listdir(tmp_path) == []


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "meeting", 0, 1, 1.0)
    assert store.exchange(b"alone") == [b"alone"]
    store.close()
    store.close()


@pytest.mark.parametrize("outside", ["127.0.0.2", "::1"])
def test_a_rank_of_another_host_has_rank_0_listen_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: str
) -> None:
    """Nobody answers it at the loopback; ``outside`` stands for an address that it can reach."""
    reached: list[str] = []
    resolve = wire.resolved

    def from_another_host(host: str, port: int) -> Any:
        if host == "127.0.0.1":
            raise ConnectionRefusedError("this is another host")
        reached.append(host)
        return resolve(host, port)

    monkeypatch.setattr(wire, "resolved", from_another_host)
    monkeypatch.setattr(file_store, "own_addresses", lambda: [outside])
    got: list[list[bytes]] = []

    def take_part(rank: int) -> None:
        store = FileStore(tmp_path / "meeting", rank, 2, 20.0)
        got.append(store.exchange(b"%d" % rank))
        assert store.secret
        store.close()

    on_threads(2, take_part)
    assert got == [[b"0", b"1"]] * 2
    assert reached[-1] == outside
    assert os.listdir(tmp_path) == []


def test_the_loopback_is_no_address_for_other_hosts() -> None:
    assert not {"127.0.0.1", "::1"} & set(own_addresses())
    assert all(":" in address or address.count(".") == 3 for address in own_addresses())
