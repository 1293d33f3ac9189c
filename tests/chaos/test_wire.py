"""Strangers that connect to the sockets of a run neither end it nor receive data."""

import os
import random
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos import wire
from tests.chaos.rounds import all_end_well, start_together
from tests.distributed.rendezvous_helpers import Rank, Ranks

# Limit of descriptors of a rank; a flood has twice as many connections.
DESCRIPTORS = 64
# Seconds within which ranks begin to connect, and starts of which at least one is caught.
LONGEST_START = 10.0
MOST_STARTS = 20
# Answer of a rank to a process without the job's secret: an empty greeting.
REFUSED = bytes(56)


def test_strangers_do_not_join_while_hosts_compute(ranks: Ranks, tmp_path: Path) -> None:
    started = start_together(ranks, tmp_path, 3, "hierarchical", seconds=0.6)
    for rank in started:
        rank.await_event("joined")
    for address in wire.listening(rank.pid for rank in started):
        with suppress(ConnectionError), socket.create_connection(address, 5) as stranger:
            stranger.sendall(bytes(1000))
    assert all_end_well(started)


def stopped_while_connecting(started: list[Rank]) -> set[wire.Address]:
    """Stop the ranks, and return their listening addresses; empty if they are connected already.

    On a busy machine all ranks may have ended.
    """
    pids = [rank.pid for rank in started]
    ends = time.monotonic() + LONGEST_START
    while are_alive(pids):
        assert time.monotonic() < ends  # no event signals the start
        now = wire.ends_of(pids)
        if any(listens for _, listens in now) or all(connected for connected, _ in now):
            break
    send(signal.SIGSTOP, started)
    return wire.listening(pids)


def are_alive(pids: list[int]) -> bool:
    return all(Path(f"/proc/{pid}").exists() for pid in pids)


def send(number: signal.Signals, started: list[Rank]) -> None:
    for rank in started:
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def visited(ranks: Ranks, folder: Path, count: int) -> tuple[list[bytes], set[int]]:
    """Send up to ``count`` strangers to every port of ranks that connect.

    Returns the data that each stranger received (empty if the ranks were too quick), and the ends
    of the ranks.
    """
    draw = random.Random(str(folder))
    plan = {"timeout": 1.0, "seconds": 0.2, "descriptors": DESCRIPTORS}
    started = start_together(ranks, folder, 3, "gloo", **plan)
    try:
        doors = stopped_while_connecting(started)
        crowds = [wire.crowd(door, wire.blobs(draw, count)) for door in doors]
        strangers = [stranger for crowd in crowds for stranger in crowd]
    finally:
        send(signal.SIGCONT, started)
    codes = {rank.await_event("ended")["code"] for rank in started}
    return [wire.received(stranger) for stranger in strangers], codes


@pytest.mark.parametrize("count", [2 * DESCRIPTORS, pytest.param(1, marks=pytest.mark.slow)])
def test_strangers_can_only_make_the_start_fail(ranks: Ranks, tmp_path: Path, count: int) -> None:
    """Strangers receive no data. A flood may make the start fail in time on every rank."""
    answers: list[bytes] = []
    starts = 0
    while not answers:
        assert starts < MOST_STARTS, "no stranger was ever let in"
        folder = tmp_path / str(starts)
        folder.mkdir()
        began = time.monotonic()
        answers, codes = visited(ranks, folder, count)
        starts += 1
    assert time.monotonic() - began < LONGEST_START + 5.0
    text = (folder / "log").read_text()
    assert codes <= {0, 1}, text
    if 1 in codes:
        assert "flashlight_py.errors." in text
    assert set(answers) <= {b"", REFUSED}
