"""Rendezvous at a port, at a path or in a tree, with late, missing, killed and duplicate ranks."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.rendezvous_helpers import Ranks, all_closed, ranks_at

AT_A_PORT = pytest.mark.parametrize("ranks", ["tcp", "tree"], indirect=True)
WITHOUT_TREE = pytest.mark.parametrize("ranks", ["tcp", "file"], indirect=True)

ranks = ranks_at("tcp", "file", "tree")


@pytest.fixture(autouse=True)
def _no_file_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [1, 4])
def test_exchange_returns_all_payloads_on_every_rank(ranks: Ranks, size: int) -> None:
    ranks.run(size, lengths=[3, 0, 1_000_000, 1])


@pytest.mark.parametrize("late", [0, 1, 2])
def test_exchange_waits_for_a_late_rank(ranks: Ranks, late: int) -> None:
    started = ranks.start_all(3, {late: {"pause_at": "started"}})
    for rank in started:
        rank.await_event("started" if rank is started[late] else "constructed")
    started[late].resume()
    assert all_closed(started)


@pytest.mark.slow
def test_exchange_error_names_missing_ranks_on_every_rank(ranks: Ranks) -> None:
    for rank in ranks.start_together((0, 1, 4), 5, timeout=1.0):
        assert "ranks 2, 3 of 5 have not arrived within 1 s" in rank.refusal()


@WITHOUT_TREE
def test_exchange_error_names_rank_0_if_it_is_missing(ranks: Ranks, port: int) -> None:
    text = ranks.start(1, 2, timeout=0.2).refusal()
    assert "rank 0 of 2 has not arrived within 0.2 s" in text
    assert f"127.0.0.1:{port}" in text or ranks.defaults["store"] == "file"


@pytest.mark.slow
@WITHOUT_TREE
@pytest.mark.parametrize("twice", [1, 2])
def test_exchange_error_names_both_processes_that_claim_a_rank(ranks: Ranks, twice: int) -> None:
    pair = [ranks.start_ready(twice, 3) for _ in range(2)]
    rest = [ranks.start(rank, 3, pause_at="started") for rank in {0, 1, 2} - {twice}]
    # Both announcements are in the directory before a third rank completes the run.
    pids = [str(rank.pid) for rank in pair]
    rest[0].resume()
    for rank in (*pair, rest[0]):
        text = rank.refusal()
        assert f"two processes claim rank {twice}" in text
        assert all(pid in text for pid in pids)


@WITHOUT_TREE
def test_late_process_is_rejected_and_the_run_continues(ranks: Ranks) -> None:
    """Its rank and world size do not matter."""
    client = ranks.start(1, 2, pause_at="exchanged 0")
    server = ranks.start(0, 2)
    client.await_event("exchanged 0")
    assert "two processes claim rank 1" in ranks.start(1, 2).refusal()
    kind = {"tcp": "address", "file": "path"}[ranks.defaults["store"]]
    for rank, size in ((1, 2), (1, 3), (5, 8)):
        assert f"another run has started at this {kind}" in ranks.start(rank, size).refusal()
    client.resume()
    assert all_closed([server, client])


@WITHOUT_TREE
def test_exchange_error_names_a_wrong_world_size_on_every_rank(ranks: Ranks) -> None:
    for rank in [ranks.start(0, 3), ranks.start(1, 3), ranks.start(2, 4)]:
        text = rank.refusal()
        assert "rank 2" in text
        assert "world size 4" in text


@pytest.mark.parametrize("who", [0, 1])
def test_abort_sends_its_reason_to_every_rank(ranks: Ranks, who: int) -> None:
    started = ranks.start_all(3, {who: {"abort": "no network", "lengths": [3]}})
    assert started.pop(who).outcome() == "closed"
    assert all(f"rank {who} aborted: no network" in rank.refusal() for rank in started)


@pytest.mark.parametrize("moment", ["exchanged 0", "exchanged 2"])
@pytest.mark.parametrize("victim", [0, 1])
def test_exchange_names_a_killed_rank_early(ranks: Ranks, victim: int, moment: str) -> None:
    """The timeout of 60 s exceeds that of the test, so the death must be detected."""
    started = ranks.start_all(3, {victim: {"pause_at": moment}}, timeout=60.0)
    started[victim].await_event(moment)
    started.pop(victim).kill()
    for text in [rank.outcome() for rank in started]:
        if text == "closed":  # it needed no more data of the dead rank
            assert moment == "exchanged 2"
        else:
            assert f"rank {victim} of 3" in text
            assert "has died" in text
    if ranks.defaults["store"] == "file":
        ranks.run(3)  # removes the files of a killed rank 0


@AT_A_PORT
def test_rank_may_die_and_restart_during_the_rendezvous(ranks: Ranks) -> None:
    server, first = ranks.start_ready(0, 3), ranks.start(1, 3)
    first.kill()
    assert all_closed([server, ranks.start(1, 3), ranks.start(2, 3)])
