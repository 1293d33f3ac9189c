"""What torch builds on its collectives gives what it gives on gloo."""

from __future__ import annotations

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
