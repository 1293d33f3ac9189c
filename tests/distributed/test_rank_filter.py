"""RankFilter and is_main_process: one rank logs, and every record contains its rank."""

import io
import logging
from typing import Any

import pytest

import flashlight_py as fl
from flashlight_py.distributed.start import world
from tests.distributed.conformance import on_ranks


def logged(*filters: fl.RankFilter) -> list[str]:
    """Return the output of an info and an error with these filters on the handler."""
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
