"""Rank 0 logs missing ranks during the start."""

import logging
import time
from pathlib import Path

import pytest

from flashlight_py.distributed.rendezvous import store
from flashlight_py.distributed.rendezvous.store import Waiting
from flashlight_py.distributed.rendezvous.stores import FileStore, TcpStore
from flashlight_py.errors import RendezvousError
from tests.distributed.conformance import slow
from tests.distributed.jobs import free_port
from tests.distributed.threads import connect_ranks, run_on_threads


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log after 0.1 s, and then every 0.1 s."""
    monkeypatch.setattr(store, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(store, "NEXT_SECONDS", 0.1)


@pytest.mark.parametrize("kind", ["file", *slow("tcp")])
def test_waiting_logs_ranks(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()

    def join(number: int) -> None:
        args = 2 * number, 4, 0.5
        is_tcp = kind == "tcp"
        store = TcpStore("127.0.0.1", port, *args) if is_tcp else FileStore(tmp_path, *args)
        with pytest.raises(RendezvousError):
            store.exchange(b"")

    with caplog.at_level(logging.WARNING, "flashlight_py"):
        run_on_threads(2, join)
    lines = [record.getMessage() for record in caplog.records if "Still" in record.getMessage()]
    assert 2 <= len(lines) <= 5
    assert all(line.startswith("Still waiting for ranks 1, 3 (") for line in lines)
    assert all("rendezvous at " in line for line in lines)


def test_rendezvous_logs_a_long_wait(caplog: pytest.LogCaptureFixture) -> None:
    quick = Waiting("here")
    quick.log_missing([1])
    time.sleep(0.12)
    quick.log_missing([])
    assert caplog.records == []
    quick.log_missing([1])
    (record,) = caplog.records
    assert record.getMessage() == "Still waiting for rank 1 (0 s): here"


def test_gloo_logs_the_rank_that_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    assert connect_ranks([b"key"] * 3, pause=0.3) == [[0, 1, 2]] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert lines
    assert all(line.startswith("Still waiting for rank 2 (") for line in lines)
