"""Process groups of torch: joining, leaving, subgroups, and torch's features on top of them."""

from pathlib import Path
from typing import Any

import pytest

# Program, number of ranks, arguments ("file" is a file in a new folder), and result per rank.
slow = pytest.mark.slow
DONE: list[Any] = [
    *(("again_at_a_file", 3, ["file"], [3.0] * 3), ("in_our_world", 3, ["file"], [3.0] * 3)),
    *(("in_torchs_world", 3, [], [3.0] * 4), ("overlapping", 3, [], [3.0])),
    *(("by_store", 3, ["prefix", "file"], 3), ("with_params", 2, [], ["GLOO", "0:00:20"])),
    ("loads_data", 2, ["fork"], [2 * sum(range(24))]),
]
SLOW_DONE = [
    *(("by_method", 2, ["env://"], 2.0), ("loads_data", 2, ["spawn"], [2 * sum(range(24))])),
    *(("by_store", 3, ["file", "file"], 3), ("by_store", 1, ["hash", "file"], 1)),
]
DONE += [pytest.param(*case, marks=slow) for case in SLOW_DONE]


@pytest.mark.parametrize(("method", "size", "args", "result"), DONE)
def test_ranks_join_a_process_group(
    torch_ranks: Any, tmp_path: Path, method: str, size: int, args: list[str], result: Any
) -> None:
    arguments = [*args[:-1], f"{tmp_path}/f"] if "file" in args[-1:] else args
    assert torch_ranks(f"meeting.{method}", size, *arguments) == [result] * size


def test_init_raises_value_error_for_another_rank_or_size(torch_ranks: Any, tmp_path: Path) -> None:
    words = torch_ranks("meeting.in_another_world", 2, f"{tmp_path}/f")
    assert ["Pass the same to both" in word for word in words] == [True, True]


@pytest.mark.parametrize("is_ours", [False, True])
def test_groups_of_a_store_outlive_the_world(
    torch_ranks: Any, tmp_path: Path, is_ours: bool
) -> None:
    words = torch_ranks("meeting.after_the_default_group", 3, f"{tmp_path}/f", is_ours)
    assert ["lost rank 0" in word for word in words] == [True] * 3


@slow
def test_fifty_worlds_leak_nothing(torch_ranks: Any, tmp_path: Path) -> None:
    path = f"{tmp_path}/f"
    for held in torch_ranks("meeting.again_and_again", 3, path, 50, seconds=300):
        for first, last in held.values():
            assert last <= first + 2


FAST = [
    *("ddp_views", "ddp_join", "ddp_float16", "compiled", "sparse", "odd_tensors"),
    *("zero", "fsdp", "in_place", "messages", "chained"),
]
SLOW = [
    *("ddp_power_sgd", "sync_batch_norm", "fsdp_bfloat16", "hybrid", "dtensor", "checkpoint"),
    *("functional", "differentiated", "pipeline"),
]


@pytest.mark.parametrize("names", [FAST, pytest.param(SLOW, marks=slow)], ids=str)
def test_results_equal_gloo(torch_ranks: Any, tmp_path: Path, names: list[str]) -> None:
    places = [f"{tmp_path}/flashlight", f"{tmp_path}/gloo"]
    assert torch_ranks("training.beside_gloo", 4, places, names, seconds=100) == [{}] * 4


@pytest.mark.parametrize(
    ("backend", "hosts"), [(None, 2), *(pytest.param(b, 1, marks=slow) for b in ("shm", "gloo"))]
)
def test_bfloat16_is_sent_without_ml_dtypes(torch_ranks: Any, backend: str, hosts: int) -> None:
    errors = torch_ranks("training.bfloat16_moves", 4, backend, hosts)
    assert all("pip install 'flashlight-py[bfloat16]'" in error for error in errors)
