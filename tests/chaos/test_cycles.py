"""Repeated init and shutdown keep no memory, no descriptor and no thread."""

import os
from pathlib import Path

import pytest

from tests.chaos.rounds import BACKENDS, growth
from tests.distributed.rendezvous_helpers import Ranks

CYCLES = 12
# Kilobytes by which the allocator may still grow. The long form is stricter.
SLACK = 1500


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_init_and_shutdown_release_resources(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    grown = growth(ranks, tmp_path, backend, CYCLES)
    assert grown["descriptors"] <= 0
    assert grown["threads"] <= 0
    assert grown["memory"] < SLACK
    assert os.listdir(tmp_path) == ["log"]
