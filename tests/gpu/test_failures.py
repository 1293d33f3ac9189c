"""A rank that is gone, late or calls with another size: an error in time, never a hang."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.harness import run_outcomes
from tests.gpu import verbs
from tests.gpu.conftest import world

pytestmark = pytest.mark.gpu

TIMEOUT = 8.0


def outcomes(fn: Any, size: int = 2) -> Any:
    return run_outcomes(fn, size, deadline=100.0, **world(size, TIMEOUT=TIMEOUT))


def connected() -> Any:
    x = verbs.on_gpu(np.ones(1 << 20))
    fl.all_reduce(x)
    fl.sync_distributed()
    return x


def killed_in_mid_collective(rank: int, size: int) -> None:
    x = connected()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fl.all_reduce(x)
    fl.sync_distributed()


def test_a_killed_peer_ends_the_survivors_in_time() -> None:
    survivor, dead = outcomes(killed_in_mid_collective)
    assert dead.signal is signal.SIGKILL
    assert survivor.error_type in ("PeerLostError", "CollectiveTimeoutError"), survivor
    assert "rank 1" in survivor.message


def never_calls(rank: int, size: int) -> None:
    x = connected()
    if rank == 0:
        fl.all_reduce(x)
        fl.sync_distributed()


def test_a_rank_that_never_calls_is_named() -> None:
    late, idle = outcomes(never_calls)
    assert idle.ok
    assert late.error_type == "CollectiveTimeoutError", late
    assert "rank 1" in late.message


def never_joins(rank: int, size: int) -> None:
    if rank == 0:
        fl.all_reduce(verbs.on_gpu(np.ones(3)))


def test_a_rank_that_never_joins_is_named() -> None:
    late, idle = outcomes(never_joins)
    assert idle.ok
    assert "CollectiveTimeoutError" in late.error_classes, late
    assert "rank 1" in late.message


def different_sizes(rank: int, size: int) -> None:
    connected()
    fl.all_reduce(verbs.on_gpu(np.ones(10 if rank else 1 << 22)))
    fl.sync_distributed()
    fl.barrier()


def test_different_sizes_do_not_hang() -> None:
    """NCCL does not compare what ranks give; the timeout is what ends this (docs/nccl.md)."""
    assert not all(outcome.ok for outcome in outcomes(different_sizes))


def on_the_wrong_device(rank: int, size: int) -> str:
    cupy = verbs.cupy()
    x = connected()
    other = 1 - int(x.device.id)
    with cupy.cuda.Device(other):
        elsewhere = cupy.ones(3)
    try:
        fl.all_reduce(elsewhere)
    except ValueError as error:
        return str(error)
    return ""


def test_an_array_on_another_device_is_refused(pool: Any) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    assert all("move it" in text for text in pool(2, **world(2)).run(on_the_wrong_device))
