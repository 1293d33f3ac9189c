"""Logs: rank 0 reports missing ranks, and RankFilter selects the ranks that log."""

import io
import logging
import time
from pathlib import Path
from typing import Any

import pytest

import flashlight_py as fl
from flashlight_py.distributed.rendezvous import store
from flashlight_py.distributed.rendezvous.store import Waiting
from flashlight_py.distributed.rendezvous.stores import FileStore, TcpStore
from flashlight_py.distributed.start import world
from flashlight_py.errors import RendezvousError
from tests.distributed.conformance import on_ranks, slow
from tests.distributed.processes import free_port
from tests.distributed.threads import connect_ranks, run_on_threads


def logged(*filters: fl.RankFilter) -> list[str]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(rank)s/%(local_rank)s/%(world_size)s %(message)s"))
    for rank_filter in filters:
        handler.addFilter(rank_filter)
    logger = logging.getLogger("tests.rank_filter")
    logger.propagate, logger.level, logger.handlers = False, logging.INFO, [handler]
    logger.getChild("below").info("info")
    logger.error("error")
    return written.getvalue().splitlines()


@on_ranks(("shm", 2))
def test_rank_filter_passes_records_of_the_selected_ranks(rank: int, size: int) -> None:
    records, is_first = [f"{rank}/{rank}/2 info", f"{rank}/{rank}/2 error"], rank == 0
    assert fl.is_main_process() == is_first
    assert logged(fl.RankFilter()) == records
    assert (
        logged(fl.RankFilter(rank=0)) == logged(fl.RankFilter(local_rank=0)) == records * is_first
    )
    assert logged(fl.RankFilter(rank=1)) == records * (not is_first)
    assert logged(fl.RankFilter(rank=0, pass_level=logging.ERROR)) == records[rank:]
    assert logged(fl.RankFilter(rank=1, local_rank=0)) == []


def test_rank_filter_uses_the_local_rank_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before init, a process is rank 0."""
    assert fl.is_main_process()
    assert logged(fl.RankFilter(rank=0)) == ["0/0/1 info", "0/0/1 error"]
    monkeypatch.setattr(world, "_world", world.World(local_rank=1))
    assert logged(fl.RankFilter(local_rank=0)) == []
    assert logged(fl.RankFilter(local_rank=1)) == ["0/1/1 info", "0/1/1 error"]
    assert logged(fl.RankFilter(rank=0)) == ["0/1/1 info", "0/1/1 error"]


@pytest.mark.parametrize(
    ("args", "kind", "name"),
    [
        ({"rank": "0"}, TypeError, "rank"),
        ({"rank": True}, TypeError, "rank"),
        ({"local_rank": -1}, ValueError, "local_rank"),
        ({"pass_level": "ERROR"}, TypeError, "pass_level"),
    ],
)
def test_rank_filter_checks_options(args: dict[str, Any], kind: type[Exception], name: str) -> None:
    with pytest.raises(kind, match=f"RankFilter: {name} must be"):
        fl.RankFilter(**args)


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
    assert lines[-1].startswith("Still waiting for ranks 1, 3 (")  # earlier, rank 2 may be late
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
