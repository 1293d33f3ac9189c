"""What torch builds on its collectives gives what it gives on gloo."""

from pathlib import Path
from typing import Any

import pytest

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
