"""Bytes thrown at the sockets of a run neither kill it nor are answered."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import wire
from tests.distributed import conformance
from tests.distributed.rendezvous_helpers import Rank, Ranks

SECONDS = 0.6
# Descriptors that a rank may open: a flood of twice as many must not use them up.
DESCRIPTORS = 64


def start(ranks: Ranks, folder: Path, size: int, backend: str, **plan: Any) -> list[Rank]:
    """Start ranks that compute for ``SECONDS``, and whose every result is checked."""
    params = {"TIMEOUT": 20.0} | ({} if backend == "hierarchical" else {"BACKEND": backend})
    plan = {"part": "compute", "init": "file", "seconds": SECONDS, "params": params, **plan}
    place = {"path": str(folder / "meeting"), "log": str(folder / "log"), "size": size}
    several = backend == "hierarchical"
    envs = [conformance.two_hosts(rank) if several else {} for rank in range(size)]
    return [ranks.start(rank, env=envs[rank], **place, **plan) for rank in range(size)]


def all_is_well(started: list[Rank]) -> bool:
    for rank in started:
        end = rank.await_event("ended")
        assert end["code"] == 0, Path(rank.plan["log"]).read_text()
        assert "computed" in rank.events
    return True


@pytest.mark.parametrize("backend", ["gloo", "hierarchical"])
def test_bytes_at_the_sockets_of_a_run_are_not_answered(
    ranks: Ranks, tmp_path: Path, backend: str
) -> None:
    started = start(ranks, tmp_path, 3, backend)
    for rank in started:
        rank.await_event("joined")
    doors = wire.listening(rank.pid for rank in started)
    for door in doors:
        for blob in wire.blobs(random.Random(4), 3):
            assert wire.throw(door, blob) == b""
    assert all_is_well(started)


def test_a_flood_of_strangers_uses_up_no_descriptors(ranks: Ranks, tmp_path: Path) -> None:
    started = start(ranks, tmp_path, 2, "gloo", descriptors=DESCRIPTORS)
    for rank in started:
        rank.await_event("joined")
    doors = wire.listening(rank.pid for rank in started)
    strangers: list[socket.socket] = []
    try:
        for door in doors:
            strangers += wire.flood(door, 2 * DESCRIPTORS)
        assert all_is_well(started)
    finally:
        for stranger in strangers:
            stranger.close()


def test_bytes_while_ranks_connect_do_no_more_than_end_the_start(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Gloo takes whoever comes first: then the start may fail, in time, on every rank."""
    draw = random.Random(5)
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        params = {"BACKEND": "gloo", "TIMEOUT": 2.0}
        started = start(ranks, folder, 3, "gloo", params=params, seconds=0.05)
        pids = [rank.pid for rank in started]
        ends = time.monotonic() + 0.2
        while time.monotonic() < ends:
            for door in wire.listening(pids):
                wire.throw(door, next(wire.blobs(draw, 1)))
        codes = {rank.await_event("ended")["code"] for rank in started}
        assert codes <= {0, 1}, (folder / "log").read_text()
        if 1 in codes:
            assert "flashlight_py.errors." in (folder / "log").read_text()
