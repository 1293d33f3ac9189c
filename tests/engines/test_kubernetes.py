"""Pods with a recorded environment of a TrainJob on two nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.distributed.jobs import finish, free_port, start

COMMAND = [sys.executable, str(Path(__file__).with_name("program.py"))]


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_distributed_init_reads_pod_variables_of_one_rank_per_pod() -> None:
    recorded = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "MASTER_SECRET": "of a Secret",
    }
    pods = [
        start(COMMAND, {**recorded, "PET_NODE_RANK": index, "JOB_COMPLETION_INDEX": index})
        for index in ("0", "1")
    ]
    assert [finish(pod) for pod in pods] == [(0, f"{rank} of 2 sum 1\n") for rank in range(2)]
