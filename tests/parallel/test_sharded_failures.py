"""Ranks that get out of step with a sharded module: every rank knows, before anything is wrong."""

from __future__ import annotations

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel import fully_sharded
from tests.distributed.harness import run_outcomes

BACKWARD, STEP = "backward of a sharded module", "optimizer.step of a sharded module"


def one_leaves_out_a_step(rank: int, size: int, step_in_backward: bool) -> None:
    fully_sharded.SMALL_BYTES = 0
    model = fl.nn.Linear(3, 2)
    fl.fully_shard(model, step_in_backward=step_in_backward)
    optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1)
    for turn in range(3):
        optimizer.zero_grad()
        model(fl.input(np.ones((2, 3), np.float32))).mean().backward()
        if rank != 1 or turn:
            optimizer.step()


@pytest.mark.parametrize("step_in_backward", [False, True])
def test_a_rank_that_leaves_out_a_step_is_a_mismatch(step_in_backward: bool) -> None:
    world = {"params": {"BACKEND": "shm", "TIMEOUT": 20.0}}
    for rank, outcome in enumerate(
        run_outcomes(one_leaves_out_a_step, 3, step_in_backward, **world)
    ):
        report = outcome.report()
        if step_in_backward and rank == 1:
            assert "ValueError" in report
            assert "a second backward pass without" in report
        else:
            for what in ("MismatchError", BACKWARD, STEP):
                assert what in report
        assert "TornStateError" not in report
