"""Receiving from any rank, and into more room than is needed."""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import CollectiveTimeoutError, DistributedError, PeerLostError
from flashlight_py.trace.records import call_text
from tests.distributed import open_receives
from tests.distributed.conformance import BACKENDS, WORLDS, ranks_in
from tests.distributed.harness import run_outcomes, run_ranks

SEVERAL = [(name, size) for name, size in WORLDS if size > 1]


ranks = ranks_in(*SEVERAL)


@pytest.mark.parametrize("width", [1, 30_000])
def test_messages_of_any_rank_and_of_any_length(ranks: Any, width: int) -> None:
    ranks.run(open_receives.receive_from_any, width)


@pytest.mark.parametrize("sources", [("named",), ("any",), ("any", "named")])
def test_messages_of_a_rank_are_not_overtaken(ranks: Any, sources: tuple[str, ...]) -> None:
    ranks.run(open_receives.keep_the_order, sources)


def test_what_does_not_fit_is_refused_on_both_ends(ranks: Any) -> None:
    ranks.run(open_receives.refuse_what_does_not_fit)


def test_a_world_of_one_receives_in_part_from_itself() -> None:
    room = np.zeros((4, 2))
    work = fl.irecv(room, 0, partial=True)
    fl.isend(np.ones((3, 2)), 0).wait()
    part = work.wait()
    assert part.base is room
    assert part.tolist() == [[1, 1]] * 3
    assert work.source == 0
    with pytest.raises(ValueError, match="has one rank"):
        fl.recv(room, None)
    with pytest.raises(ValueError, match="first dimension"):
        fl.irecv(np.zeros(()), 0, partial=True)


def test_a_record_of_a_receive_from_any_says_so() -> None:
    call = {"verb": "recv", "dtype": "float64", "shape": [3], "peer": -1, "tag": 7}
    assert call_text(call) == "recv(float64 (3,), peer=any, tag=7)"


def wait_for_anybody(rank: int, size: int) -> None:
    fl.barrier()  # all begin to count now, whoever has started late
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"rank(s)? 1.*tag[= ]7"):
            fl.recv(np.zeros(3), None, tag=7)
    else:
        time.sleep(0.4)  # its own wait ends later
        with pytest.raises(DistributedError):
            fl.send(np.zeros(20_000), 0, tag=5)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gloo", "hierarchical", "mpi")]


@pytest.mark.parametrize("name", ["shm", *SLOW])
def test_nobody_sends_in_time(name: str) -> None:
    """It ends by the timeout, and says whom it waited for and what is sent instead."""
    sizes, made = BACKENDS[name]
    params = {**made.get("params", {}), "TIMEOUT": 1}
    run_ranks(wait_for_anybody, sizes[0], **{**made, "params": params})


def lose_a_sender(rank: int, size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerLostError):
        fl.recv(np.zeros(3), None)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("name", ["gloo", "shm", "hierarchical"])
def test_a_rank_that_is_gone_ends_a_receive_from_any(name: str) -> None:
    """It may have been the one."""
    made = BACKENDS[name][1]
    outcomes = run_outcomes(lose_a_sender, 4 if name == "hierarchical" else 3, **made)
    assert outcomes[1].signal == signal.SIGKILL
    assert all(outcome.ok for rank, outcome in enumerate(outcomes) if rank != 1), outcomes
