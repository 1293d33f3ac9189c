"""Common code of the engines, without an engine."""

import socket
import threading
import time
from contextlib import AbstractContextManager

import pytest

from flashlight_py.engines import rank as engine_rank
from flashlight_py.engines import run as engine
from flashlight_py.engines import spark
from flashlight_py.engines.rank import RendezvousAddress, Start
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure

NOWHERE = RendezvousAddress(["127.0.0.1"], 1)


def call_of(size: int, timeout: float | None = None) -> SpawnCall:
    return SpawnCall.checked("run", len, (), size, None, timeout, 0)


def test_start_serve_rejects_a_second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> AbstractContextManager[None]:
        raise AssertionError("changed the environment that the first one reads")

    monkeypatch.setattr(Start, "_environment", forbidden)
    with engine_rank._registered_rank("first"):
        outcome = Start(2, 0, b"").serve(1, NOWHERE)
    assert isinstance(outcome, Failure)
    assert "raised RuntimeError: this process is already a rank" in outcome.description


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_listen_for_ranks_uses_the_loopback_if_all_hosts_are_local(host: str) -> None:
    try:
        addresses, port = engine_rank.listen_for_ranks("a", host, [host, host])
    except OSError as error:
        if "Cannot assign" not in str(error):
            raise
        pytest.skip(f"this host has no {host}")
    assert addresses == [host]
    socket.create_connection((host, port)).close()
    engine_rank.stop_listening("a")
    engine_rank.stop_listening("a")  # as after the start of rank 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


@pytest.mark.parametrize(
    ("host", "hosts"), [("h0", []), ("127.0.1.1", ["127.0.1.1", "h1"]), ("192.0.2.7", [])]
)
def test_listen_for_ranks_uses_all_addresses_if_a_host_is_remote(
    monkeypatch: pytest.MonkeyPatch, host: str, hosts: list[str]
) -> None:
    """Debian maps the name of a host to 127.0.1.1, an address that every host has."""
    monkeypatch.setattr(engine_rank, "own_addresses", lambda: ["192.0.2.7", "2001:db8::7"])
    addresses, port = engine_rank.listen_for_ranks("b", host, hosts)
    assert addresses == list(dict.fromkeys([host, "192.0.2.7", "2001:db8::7"]))
    socket.create_connection(("127.0.0.1", port)).close()
    engine_rank.stop_listening("b")


def test_start_serve_ends_at_once_after_its_attempt_ended() -> None:
    start = Start(2, 0, b"")
    _, port = engine_rank.listen_for_ranks(start.key, "127.0.0.1")
    assert not engine_rank.end_rank(start.key)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    outcome = start.serve(1, NOWHERE)
    assert isinstance(outcome, Failure)
    assert "ended this rank before it started" in outcome.traceback
    assert Start(2, 0, b"").key != start.key  # the next attempt is unaffected


def test_end_rank_ignores_ranks_of_other_attempts() -> None:
    with engine_rank._registered_rank("mine"), engine_rank._interruptible("mine"):
        assert not engine_rank.end_rank("another")


class Interrupting:
    """A lock that calls ``end_rank`` before its third acquisition."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1
        if self.count == 3:
            engine_rank._raise_in(threading.get_ident(), SystemExit)

    def __exit__(self, *_: object) -> None:
        """Do nothing: no other thread uses the lock."""


def test_end_rank_does_not_interrupt_a_rank_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rank, "_lock", Interrupting())
    with (
        pytest.raises(SystemExit),
        engine_rank._registered_rank("a"),
        engine_rank._interruptible("a"),
    ):
        pass
    assert engine_rank._rank is None
    assert engine_rank._interruptible_thread is None  # the thread may do other work now


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
def test_host_of_parses_addresses_of_engines(address: str, host: str) -> None:
    assert engine.host_of(address) == host


def test_follow_cancels_a_stage_of_spark_on_timeout() -> None:
    cancelled, pairs = threading.Event(), [(1, b"b"), (0, b"a")]

    def stage() -> list[tuple[int, bytes]]:
        cancelled.wait()
        raise RuntimeError("cancelled")

    with pytest.raises(TimeoutError, match=r"rank\(s\) 0, 1 of 2 did not return"):
        engine.follow(call_of(2, 0.01), spark.SparkRanks(stage, cancelled.set))
    ranks = spark.SparkRanks(lambda: pairs, cancelled.clear)
    assert engine.follow(call_of(2), ranks) == [b"a", b"b"]
    with pytest.raises(RuntimeError, match="cancelled"):
        engine.follow(call_of(2), spark.SparkRanks(stage, cancelled.clear))


class Ended:
    """Ranks of which each poll reports one more end."""

    def __init__(self, *ends: Failure) -> None:
        self.ends, self.has_ended = dict(enumerate(ends)), False

    def start(self) -> None:
        pass

    def outcomes(self, ranks: object, until: float) -> engine.Outcomes:
        rank = min(self.ends)
        return {rank: self.ends.pop(rank)}

    def end(self) -> None:
        self.has_ended = True


def test_follow_waits_for_the_cause_after_a_lost_peer() -> None:
    lost = Failure("raised PeerLostError", time.monotonic(), follows=2)
    ranks = Ended(lost, Failure("raised ValueError", time.monotonic()))
    with pytest.raises(RankFailedError, match="run of len: rank 1 of 3 raised ValueError; the"):
        engine.follow(call_of(3), ranks)
    assert ranks.has_ended
