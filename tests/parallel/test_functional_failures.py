"""A backward pass that another rank does not run, or runs differently: an error, never a number."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from tests.distributed.conformance import on_ranks
from tests.distributed.harness import run_outcomes

D = fl.functional
by_backend = pytest.mark.parametrize("backend", ["gloo", "shm"])


def stay_away(rank: int, size: int, message: bool, fifo: Path) -> str:
    """Rank 1 has no use for its result, so it never runs a backward pass."""
    x = fl.param(np.ones(2))
    if rank == 1:
        D.recv(x, 0) if message else D.all_reduce(x)
        fifo.read_bytes()  # ends when rank 0 has given up
        for _ in range(2):  # in shared memory the first still sees what rank 0 has called
            with contextlib.suppress(fl.errors.DistributedError):
                fl.barrier()
        return ""
    y = D.send(x, 1) if message else D.all_reduce(x)
    try:
        with pytest.raises(fl.errors.CollectiveTimeoutError) as caught:
            F.sum(y).backward()
    finally:
        fifo.write_bytes(b"")
    assert x.grad is None
    return str(caught.value)


@pytest.mark.parametrize(
    ("backend", "message"),
    [pytest.param("gloo", True, marks=pytest.mark.slow), ("shm", False)],
)
def test_a_rank_without_a_backward_pass_is_named(
    backend: str, message: bool, tmp_path: Path
) -> None:
    fifo = tmp_path / "given up"
    os.mkfifo(fifo)
    params = {"BACKEND": backend, "TIMEOUT": 1}
    first, second = run_outcomes(stay_away, 2, message, fifo, params=params)
    assert first.ok, first.report()
    assert second.ok, second.report()
    assert "rank 0 of 2" in first.value
    assert "rank 1 did not" in first.value


def after_a_mismatch(run: Callable[[], Any], x: Any) -> str:
    with pytest.raises(fl.errors.MismatchError) as caught:
        run()
    assert x.grad is None
    x.zero_grad()
    F.sum(D.all_reduce(x)).backward()  # the group lives on, and all count alike
    assert x.grad.tolist() == [2, 2]
    return str(caught.value)


def skip_one(rank: int, size: int) -> str:
    """Rank 1 has no use for its second result: its first must not meet rank 0's second."""
    x = fl.param(np.ones(2))
    results = [D.all_reduce(x), D.all_reduce(x)]
    loss = F.sum(results[0] * 3.0 if rank else results[0] * results[1])
    return after_a_mismatch(loss.backward, x)


@on_ranks(("gloo", 2), ("shm", 2))
def test_a_forward_pass_is_distinguished_from_a_backward_pass(rank: int, size: int) -> None:
    """Rank 1 goes on with the next forward pass instead of a backward pass."""
    x = fl.param(np.ones(2))
    loss = F.sum(D.all_reduce(x))
    message = after_a_mismatch((lambda: D.all_reduce(x)) if rank else loss.backward, x)
    assert "rank 0 called all_reduce(int64" in message
    assert "rank 1 called all_reduce(float64" in message


def other_order(rank: int, size: int) -> str:
    """Two passes, in another order on each rank."""
    x = fl.param(np.ones(2))
    losses = [F.sum(D.all_reduce(x)), F.sum(D.all_reduce(x) * 2.0)]
    return after_a_mismatch(losses[rank].backward, x)


NUMBERS = {skip_one: (2, 1), other_order: (1, 2)}


@by_backend
@pytest.mark.parametrize("function", NUMBERS)
def test_ranks_at_different_collectives_report_which(
    pool: Any, backend: str, function: Any
) -> None:
    messages = pool(2, params={"BACKEND": backend}).run(function)
    for rank, message in enumerate(messages):
        assert f"[functional.all_reduce] rank {rank} of 2" in message
    numbers = [
        [int(text.split()[0].strip(".,")) for text in message.split("backward pass of number ")[1:]]
        for message in messages
    ]
    assert numbers[0] == numbers[1]
    first, second = NUMBERS[function]
    assert numbers[0][0] - numbers[0][1] == first - second


def crossed_messages(rank: int, size: int) -> str:
    """Each rank waits for the other message's gradient; they must not take each other's."""
    x = fl.param(np.ones(20_000))  # a send of little has ended when it returns
    ends = [(D.recv(x, 0) * 1.0 if rank else D.send(x, 1)) for _ in range(2)]
    with pytest.raises(fl.errors.DistributedError) as caught:
        F.sum(ends[rank]).backward()
    assert x.grad is None
    return str(caught.value)


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "shm"])
def test_gradients_of_two_messages_are_not_mixed_up(backend: str) -> None:
    params = {"BACKEND": backend, "TIMEOUT": 1}
    outcomes = run_outcomes(crossed_messages, 2, params=params)
    assert all(outcome.ok for outcome in outcomes), [each.report() for each in outcomes]
