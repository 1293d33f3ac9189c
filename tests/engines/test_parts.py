"""What the engines have in common, without an engine."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import AbstractContextManager

import pytest

from flashlight_py.engines import rank as engine_rank
from flashlight_py.engines import ray, spark
from flashlight_py.engines import run as engine
from flashlight_py.engines.rank import RendezvousAddress, Start
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure

NOWHERE = RendezvousAddress(["127.0.0.1"], 1)


def call_of(size: int, timeout: float | None = None) -> SpawnCall:
    return SpawnCall.checked("run", len, (), size, None, timeout, 0)


# A rank in a process of the engine ----------------------------------------------------------------


def test_a_second_rank_of_a_process_leaves_the_environment_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> AbstractContextManager[None]:
        raise AssertionError("changed the environment that the first one reads")

    monkeypatch.setattr(Start, "_environment", forbidden)
    with engine_rank._registered_rank("first"):
        outcome = Start(2, 0, b"").serve(1, NOWHERE)
    assert isinstance(outcome, Failure)
    assert "raised RuntimeError: this process is already a rank" in outcome.description


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_rank_0_listens_on_the_loopback_where_all_ranks_are(host: str) -> None:
    try:
        addresses, port = engine_rank.listen_for_ranks("a", host, [host, host])
    except OSError as error:
        if "Cannot assign" not in str(error):
            raise
        pytest.skip(f"this host has no {host}")
    assert addresses == [host]
    socket.create_connection((host, port)).close()
    engine_rank.stop_listening("a")
    engine_rank.stop_listening("a")  # as where rank 0 has come
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


@pytest.mark.parametrize(
    ("host", "hosts"), [("h0", []), ("127.0.1.1", ["127.0.1.1", "h1"]), ("192.0.2.7", [])]
)
def test_rank_0_listens_at_all_addresses_where_others_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch, host: str, hosts: list[str]
) -> None:
    """Debian gives a host's own name the address 127.0.1.1, which others have themselves."""
    monkeypatch.setattr(engine_rank, "own_addresses", lambda: ["192.0.2.7", "2001:db8::7"])
    addresses, port = engine_rank.listen_for_ranks("b", host, hosts)
    assert addresses == list(dict.fromkeys([host, "192.0.2.7", "2001:db8::7"]))
    socket.create_connection(("127.0.0.1", port)).close()
    engine_rank.stop_listening("b")


def test_a_rank_that_begins_after_its_attempt_has_ended_ends_at_once() -> None:
    start = Start(2, 0, b"")
    _, port = engine_rank.listen_for_ranks(start.key, "127.0.0.1")
    assert not engine_rank.end_rank(start.key)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    outcome = start.serve(1, NOWHERE)
    assert isinstance(outcome, Failure)
    assert "ended this rank before it started" in outcome.traceback
    assert Start(2, 0, b"").key != start.key  # the next attempt has nothing to do with it


def test_another_attempt_does_not_end_a_rank() -> None:
    with engine_rank._registered_rank("mine"), engine_rank._interruptible("mine"):
        assert not engine_rank.end_rank("another")


class Interrupting:
    """A lock, of which ``end_rank`` asks the third who wants it to end while it is waited for."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1
        if self.count == 3:
            engine_rank._raise_in(threading.get_ident(), SystemExit)

    def __exit__(self, *_: object) -> None:
        """Nobody else wants it."""


def test_a_rank_that_is_ended_while_it_leaves_interruptible_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_rank, "_lock", Interrupting())
    with (
        pytest.raises(SystemExit),
        engine_rank._registered_rank("a"),
        engine_rank._interruptible("a"),
    ):
        pass
    assert engine_rank._rank is None
    assert engine_rank._interruptible_thread is None  # a thread that may do anything else by now


# Where the program is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("tcp://127.0.0.1:8786", "127.0.0.1"),
        ("tcp://[2001:db8::1]:8786", "2001:db8::1"),
        ("[::1]:7077", "::1"),
        ("h0:7077", "h0"),
        ("ucx://h0.example:7077", "h0.example"),
    ],
)
def test_the_host_of_an_engines_address(address: str, host: str) -> None:
    assert engine.host_of(address) == host


def test_places_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.001)
    counts = itertools.chain([0, 1], itertools.repeat(2))
    engine.wait_for_slots(call_of(2), 60, counts.__next__, "slots", "Add some")
    said = "expected at least 3 slots, one per rank, got 2. Add some"
    with pytest.raises(ValueError, match=said):
        engine.wait_for_slots(call_of(3), 0, lambda: 2, "slots", "Add some")
    with pytest.raises(TimeoutError, match=r"slots, one per rank, got 2 after 0 s\. Add some"):
        engine.wait_for_slots(call_of(3, 0.01), 60, lambda: 2, "slots", "Add some")


def test_work_that_blocks_is_cancelled_when_time_is_up() -> None:
    cancelled = threading.Event()

    def work() -> None:
        cancelled.wait()
        raise RuntimeError("cancelled")

    with pytest.raises(TimeoutError, match=r"rank\(s\) 0, 1 of 2 did not return"):
        spark.interruptible(call_of(2, 0.01), work, cancelled.set)
    assert spark.interruptible(call_of(2), lambda: 5, cancelled.clear) == 5
    with pytest.raises(RuntimeError, match="cancelled"):
        spark.interruptible(call_of(2), work, cancelled.clear)


class Ended:
    """Ranks of which each look finds one more that has ended so."""

    def __init__(self, *ends: Failure) -> None:
        self.ends, self.has_ended = dict(enumerate(ends)), False

    def start(self) -> None:
        pass

    def outcomes(self, ranks: object, until: float) -> engine.Outcomes:
        rank = min(self.ends)
        return {rank: self.ends.pop(rank)}

    def end(self) -> None:
        self.has_ended = True


def test_the_first_cause_is_waited_for_where_a_rank_has_lost_another() -> None:
    lost = Failure("raised PeerLostError", time.monotonic(), follows=2)
    ranks = Ended(lost, Failure("raised ValueError", time.monotonic()))
    with pytest.raises(RankFailedError, match="run of len: rank 1 of 3 raised ValueError; the"):
        engine.follow(call_of(3), ranks)
    assert ranks.has_ended


@pytest.mark.parametrize(
    ("strategy", "cpus", "most"),
    [
        ("PACK", [4, 2, 1], 3),
        ("STRICT_PACK", [5, 4], 2),
        ("STRICT_SPREAD", [4, 2, 1], 2),
        ("STRICT_PACK", [], 0),
    ],
)
def test_room_on_the_nodes_of_ray(strategy: str, cpus: list[int], most: int) -> None:
    nodes = [{"CPU": float(count), "node:127.0.0.2": 1.0} for count in cpus]
    assert ray.most_ranks(nodes, {"CPU": 2, "GPU": 0}, strategy) == most
    assert ray.most_ranks(nodes, {"CPU": 1, "GPU": 1}, strategy) == 0
