"""Runs that died at any moment: what they leave must neither mislead nor disturb the next run."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from flashlight_py.distributed.rendezvous._shared_directory import VERSION
from tests.distributed.rendezvous_helpers import Rank, Ranks, ranks

__all__ = ["ranks"]

DEAD, NONCE = "0123456789abcdef", "fedcba9876543210"
NOBODY = {"host": "elsewhere", "pid": 1, "machine": "another", "started": "1"}
PAYLOAD = base64.b64encode(b"stale").decode()
STALE = {
    "run": (f"run-{DEAD}", NOBODY),
    "join": (f"join-{DEAD}-1-{NONCE}", {**NOBODY, "size": 3, "payload": PAYLOAD}),
    "join of another size": (f"join-{DEAD}-2-{NONCE}", {**NOBODY, "size": 9, "payload": PAYLOAD}),
    "roster": (
        f"roster-{DEAD}-0",
        {"payloads": [PAYLOAD] * 3, "nonces": [DEAD, NONCE, NONCE], "people": [NOBODY] * 3},
    ),
    "vote": (f"roster-{DEAD}-1", {"payloads": [PAYLOAD] * 3}),
    "gift": (f"gift-{DEAD}-2-1", {"payload": PAYLOAD}),
    "error": (f"error-{DEAD}-0-{DEAD}", {"reason": "long ago", "to": [NONCE]}),
    "error of a guest": (f"error-{DEAD}-1-{NONCE}", {"reason": "long ago", "to": []}),
    "refusal": (f"refusal-{DEAD}-{NONCE}", {"reason": "long ago"}),
    "done": (f"done-{DEAD}-1-{NONCE}", {}),
    "temporary": (f"tmp-{DEAD}-{NONCE}-7", {}),
}
SPOILT = {
    "empty": b"",
    "garbage": b"\x00\xff\x80 not json",
    "truncated": json.dumps({"version": VERSION, "host": "h"}).encode()[:-4],
    "another version": json.dumps({"version": VERSION + 1, **NOBODY}).encode(),
    "no object": b"[1, 2]",
    "fields missing": json.dumps({"version": VERSION}).encode(),
}


def put(directory: Path, name: str, content: bytes) -> None:
    (directory / f"meeting.{name}").write_bytes(content)


def put_stale(directory: Path, *kinds: str) -> None:
    for name, record in (STALE[kind] for kind in kinds):
        put(directory, name, json.dumps({"version": VERSION, **record}).encode())


@pytest.mark.parametrize("kind", STALE)
def test_one_stale_file_of_each_kind_is_ignored_and_removed(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    put_stale(tmp_path, kind)
    ranks.run(3)
    assert os.listdir(tmp_path) == []


def test_all_that_a_dead_run_can_leave_is_ignored_and_removed(ranks: Ranks, tmp_path: Path) -> None:
    put_stale(tmp_path, *STALE)
    guests = [ranks.start(rank, 3) for rank in (1, 2)]
    for guest in guests:
        guest.await_event("constructed")
    host = ranks.start(0, 3)
    assert [rank.outcome() for rank in (host, *guests)] == ["closed"] * 3
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", SPOILT)
def test_spoilt_leftovers_are_ignored_and_removed(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for name, _ in STALE.values():
        put(tmp_path, name, SPOILT[kind])
    ranks.run(2)
    assert os.listdir(tmp_path) == []


def test_foreign_files_are_left_alone(ranks: Ranks, tmp_path: Path) -> None:
    names = {"meeting", "meeting.txt", "meeting.run-short", f"other.run-{DEAD}", "meeting.join-"}
    for name in names:
        (tmp_path / name).write_text("mine")
    ranks.run(2)
    assert set(os.listdir(tmp_path)) == names


def test_a_symbolic_link_is_not_followed(ranks: Ranks, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text(json.dumps({"version": VERSION, **NOBODY}))
    before = target.read_text()
    (tmp_path / f"meeting.run-{DEAD}").symlink_to(target)
    ranks.run(2)
    assert target.read_text() == before
    assert os.listdir(tmp_path) == ["precious"]


def test_a_fifo_in_the_way_blocks_nobody(ranks: Ranks, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"meeting.run-{DEAD}")
    ranks.run(2)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_another_user_is_not_believed(ranks: Ranks, tmp_path: Path) -> None:
    """A roster that is right in every respect, except that somebody else wrote it."""
    guest = ranks.start(1, 2, timeout=1.5)
    put_stale(tmp_path, "run")
    join = ""
    while not join:
        join = next((n for n in os.listdir(tmp_path) if n.startswith("meeting.join-")), "")
    nonce = join.rsplit("-", 1)[1]
    record = {"payloads": [PAYLOAD] * 2, "nonces": [DEAD, nonce], "people": [NOBODY] * 2}
    hidden = tmp_path / "hidden"
    hidden.write_text(json.dumps({"version": VERSION, **record}))
    os.chown(hidden, 65534, 65534)
    hidden.rename(tmp_path / f"meeting.roster-{DEAD}-0")
    text = guest.refusal()
    assert "has not answered" in text
    assert "exchanged 0" not in guest.events


def survivors_end(rest: list[Rank], victim: int) -> None:
    """Every survivor either had all it needed or names the dead rank."""
    for rank in rest:
        outcome = rank.outcome()
        assert outcome == "closed" or f"rank {victim}" in outcome, outcome


# Rank 0 does 16 operations before it removes about 15 files, another rank about 14.
MOMENTS = [(0, first) for first in range(0, 32, 2)] + [(1, first) for first in range(0, 14, 2)]


@pytest.mark.parametrize(("victim", "first"), MOMENTS)
def test_kill_9_between_any_two_file_operations(
    ranks: Ranks, tmp_path: Path, victim: int, first: int
) -> None:
    """Two adjacent moments of death, each followed by a whole run at the same path."""
    for moment in (first, first + 1):
        plans = [{"die_before": moment} if rank == victim else {} for rank in range(3)]
        started = [ranks.start(r, 3, timeout=1.5, **plan) for r, plan in enumerate(plans)]
        assert started[victim].outcome() in ("dying", "closed")
        survivors_end([rank for rank in started if rank is not started[victim]], victim)
        ranks.run(3)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_long_before_the_timeout(ranks: Ranks, victim: int) -> None:
    """60 s of timeout exceed the deadline of the test: only noticing the death can pass."""
    plans = [{"hold": "exchanged 0"} if rank == victim else {} for rank in range(3)]
    started = [ranks.start(r, 3, timeout=60.0, **plan) for r, plan in enumerate(plans)]
    started[victim].await_event("exchanged 0")
    started[victim].kill()
    for rank in started:
        if rank is not started[victim]:
            assert f"rank {victim} of 3" in (text := rank.refusal())
            assert "has died" in text


def test_a_whole_run_killed_again_and_again_does_not_stop_the_next(
    ranks: Ranks, tmp_path: Path
) -> None:
    for moment in ("exchanged 0", "exchanged 1", "constructed", "exchanged 2"):
        started = ranks.start_all(3, hold=moment)
        for rank in started:
            rank.await_event(moment)
        for rank in started:
            rank.kill()
    ranks.run(3)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("restarted", [0, 1])
def test_one_rank_may_die_and_start_again_while_others_are_awaited(
    ranks: Ranks, tmp_path: Path, restarted: int
) -> None:
    waiting = ranks.start(1 - restarted, 3)
    first = ranks.start(restarted, 3)
    while not any("join-" in name for name in os.listdir(tmp_path)):
        first.await_event("constructed")
    first.kill()
    rest = [ranks.start(restarted, 3), ranks.start(2, 3)]
    assert [rank.outcome() for rank in (waiting, *rest)] == ["closed"] * 3
    assert os.listdir(tmp_path) == []
