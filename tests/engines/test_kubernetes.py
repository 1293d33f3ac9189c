"""Pods by their recorded environment, as a TrainJob sets it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("program.py"))


def pods(command: list[str], environ: dict[str, str]) -> list[str]:
    """Run ``command`` as in each pod of a TrainJob of two nodes; their outputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    recorded = {
        "PET_NNODES": "2",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "MASTER_SECRET": "of a Secret",
        **environ,
    }
    running = [
        subprocess.Popen(
            command,
            env={**os.environ, **recorded, "PET_NODE_RANK": index, "JOB_COMPLETION_INDEX": index},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in ("0", "1")
    ]
    outputs = []
    try:
        outputs = [pod.communicate(timeout=60)[0] for pod in running]
    finally:
        for pod in running:
            pod.kill()
            pod.communicate()
    assert [pod.returncode for pod in running] == [0, 0], outputs
    return outputs


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_one_rank_in_each_pod() -> None:
    outputs = pods([sys.executable, PROGRAM], {"PET_NPROC_PER_NODE": "1"})
    assert outputs == [f"{rank} of 2 sum 1\n" for rank in range(2)]
