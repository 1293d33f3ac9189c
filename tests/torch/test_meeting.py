"""Ranks that torch joins: how they meet and leave, their groups, and what torch builds on them."""

from pathlib import Path
from typing import Any

import pytest


def test_ranks_meet_again_at_a_file_that_is_left(torch_ranks: Any, tmp_path: Path) -> None:
    assert torch_ranks("meeting.again_at_a_file", 3, f"{tmp_path}/f") == [[3.0] * 3] * 3


def test_ranks_meet_by_a_port(torch_ranks: Any) -> None:
    assert torch_ranks("meeting.by_method", 2, "env://") == [2.0] * 2


@pytest.mark.parametrize("kind", ["tcp", "file", "prefix", "hash"])
def test_ranks_meet_in_any_store(torch_ranks: Any, tmp_path: Path, kind: str) -> None:
    size = 1 if kind == "hash" else 3
    assert torch_ranks("meeting.by_store", size, kind, f"{tmp_path}/f") == [size] * size


def test_torch_uses_a_world_of_ours(torch_ranks: Any, tmp_path: Path) -> None:
    assert torch_ranks("meeting.in_our_world", 3, f"{tmp_path}/f") == [[3.0] * 3] * 3


def test_our_verbs_use_a_world_of_torch(torch_ranks: Any) -> None:
    assert torch_ranks("meeting.in_torchs_world", 3) == [[3.0] * 4] * 3


def test_both_must_count_ranks_alike(torch_ranks: Any, tmp_path: Path) -> None:
    words = torch_ranks("meeting.in_another_world", 2, f"{tmp_path}/f")
    assert ["give both the same" in each for each in words] == [True, True]


@pytest.mark.slow
def test_nothing_is_left_of_fifty_worlds(torch_ranks: Any, tmp_path: Path) -> None:
    place = f"{tmp_path}/f"
    for held in torch_ranks("meeting.again_and_again", 3, place, 50, seconds=300):
        for first, last in held.values():
            assert last <= first + 2


def test_groups_may_overlap(torch_ranks: Any) -> None:
    assert torch_ranks("meeting.overlapping", 3) == [[3.0]] * 3


@pytest.mark.parametrize("way", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_load_data(torch_ranks: Any, way: str) -> None:
    assert torch_ranks("meeting.loads_data", 2, way) == [[2 * sum(range(24))]] * 2


def test_ranks_may_just_end(torch_ranks: Any) -> None:
    outcomes = torch_ranks.outcomes("meeting.just_ends", 3)
    for outcome in outcomes:
        assert (outcome["returned"], outcome["exitcode"], outcome["output"]) == (3.0, 0, "")


def test_params_are_those_of_distributed_init(torch_ranks: Any) -> None:
    assert torch_ranks("meeting.with_params", 2) == [["GLOO", "0:00:20"]] * 2


DDP = ["ddp", "ddp_views", "ddp_static", "ddp_no_sync", "ddp_join", "ddp_float16"]
SHARDED = ["zero", "fsdp", "fsdp_bfloat16", "in_place", "messages", "chained"]
SLOW = ["ddp_power_sgd", "sync_batch_norm", "hybrid", "dtensor", "checkpoint", "functional"]
LAST = ["differentiated", "pipeline"]


@pytest.mark.parametrize(
    "names", [DDP, SHARDED, pytest.param([*SLOW, *LAST], marks=pytest.mark.slow)], ids=str
)
def test_results_are_those_of_gloo(torch_ranks: Any, tmp_path: Path, names: list[str]) -> None:
    places = [f"{tmp_path}/flashlight", f"{tmp_path}/gloo"]
    assert torch_ranks("training.beside_gloo", 4, places, names, seconds=100) == [{}] * 4


@pytest.mark.parametrize(("backend", "hosts"), [("shm", 1), ("gloo", 1), (None, 2)])
def test_bfloat16_moves_without_ml_dtypes(torch_ranks: Any, backend: str, hosts: int) -> None:
    errors = torch_ranks("training.bfloat16_moves", 4, backend, hosts)
    assert all("pip install 'flashlight-py[bfloat16]'" in error for error in errors)
