"""Differentiable collectives and messages: gradients of the sum of all ranks' losses; errors."""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.parallel import gradcheck_over_ranks
from tests.distributed.conformance import on_ranks
from tests.distributed.harness import run_outcomes
from tests.tables import for_each

D = fl.functional

SEVERAL = [("gloo", 2), ("shm", 3)]
WORLDS = [("single", 1), *SEVERAL]


def numbers(rank: int, *shape: int) -> Any:
    return np.random.default_rng([rank, *shape]).standard_normal(shape)


def position() -> tuple[int, int]:
    return fl.get_world_rank(), fl.get_world_size()


def parts(rank: int, size: int) -> list[int]:
    """Return the number of rows that each rank gets from ``rank``; some ranks get zero rows."""
    return [(rank + other) % 3 for other in range(size)]


def two_in_one_graph(x: Any) -> Any:
    """Use two independent collectives, which the graphs of ranks contain in another order."""
    total, gathered = D.all_reduce(F.sin(x)), D.all_gather(x * x)
    parts = [F.sum(total * x), F.sum(gathered) * F.sum(gathered)]
    first, second = parts if fl.get_world_rank() % 2 else reversed(parts)
    return first + second


def one_after_the_other(x: Any) -> Any:
    y = F.tanh(D.all_reduce(x, 3.0, op="avg"))
    return D.reduce_scatter(D.all_gather(F.exp(y * x)) * y[0, 0])


Shape = tuple[int, ...] | Callable[[int, int], tuple[int, ...]]
# Computation of each rank, and the shape of its array (per rank if shapes differ).
CASES: dict[str, tuple[Callable[..., Any], Shape]] = {
    "all_reduce sum": (D.all_reduce, (2, 3)),
    "all_reduce avg": (lambda x: F.exp(D.all_reduce(x, 0.7, op="avg")) * x, (2, 3)),
    "all_reduce scalar": (lambda x: D.all_reduce(F.sum(x)), (4,)),
    "all_gather": (lambda x: F.exp(D.all_gather(x)), (2, 2)),
    "all_gather uneven": (lambda x: F.exp(D.all_gather(x)), lambda r, n: (2 * r + 1, 2)),
    "all_gather of nothing on rank 0": (lambda x: F.exp(D.all_gather(x)), lambda r, n: (r, 2)),
    "all_gather scalar": (lambda x: D.all_gather(F.sum(x * x)), (3,)),
    "all_gather transposed": (lambda x: D.all_gather(F.transpose(x)) * 2.0, (3, 2)),
    "reduce_scatter sum": (
        lambda x: F.exp(D.reduce_scatter(x, scale=0.5)), lambda r, n: (2 * n, 2)),
    "reduce_scatter avg": (lambda x: D.reduce_scatter(x, op="avg"), lambda r, n: (n,)),
    "broadcast": (lambda x: F.exp(D.broadcast(x)) * x, (3,)),
    "broadcast from the last": (
        lambda x: F.sin(D.broadcast(x, fl.get_world_size() - 1)), (2, 2)),
    "all_to_all": (lambda x: F.exp(D.all_to_all(x)), lambda r, n: (2 * n, 2)),
    "all_to_all uneven": (
        lambda x: F.exp(D.all_to_all(x, rows=parts(*position()))) * float(position()[0] + 1),
        lambda r, n: (sum(parts(r, n)), 2)),
    "two in one graph": (two_in_one_graph, (2, 2)),
    "one after the other": (one_after_the_other, (2, 2)),
    "twice the same": (lambda x: D.all_reduce(x) * D.all_reduce(x * x), (3,)),
}  # fmt: skip


@on_ranks(*WORLDS)
@for_each("name", CASES)
def test_collectives_differentiate_the_losses_of_all_ranks(rank: int, size: int, name: str) -> None:
    function, shape = CASES[name]
    shape = shape(rank, size) if callable(shape) else shape
    gradcheck_over_ranks(function, [numbers(rank, *shape)])


@on_ranks(*WORLDS)
def test_collectives_return_the_results_of_the_verbs(rank: int, size: int) -> None:
    x = np.arange(6.0).reshape(3, 2) + rank
    v = fl.input(x)
    everyone = [np.arange(6.0).reshape(3, 2) + r for r in range(size)]
    results = {
        "sum": (D.all_reduce(v), np.sum(everyone, axis=0)),
        "avg": (D.all_reduce(v, 2.0, op="avg"), 2 * np.mean(everyone, axis=0)),
        "gathered": (D.all_gather(v), np.concatenate(everyone)),
        "part": (
            D.reduce_scatter(fl.input(np.repeat(x[:1], size, 0))),
            np.sum(everyone, axis=0)[:1],
        ),
        "broadcast": (D.broadcast(v, size - 1), everyone[-1]),
        "exchanged": (
            D.all_to_all(fl.input(np.repeat(x[:1], size, 0))),
            np.stack([other[0] for other in everyone]),
        ),
        "whole numbers": (D.all_reduce(fl.input(np.array(rank))), np.array(sum(range(size)))),
    }
    for got, expected in results.values():
        np.testing.assert_allclose(got.array, expected, rtol=1e-15)
        assert got.dtype == expected.dtype
        assert not got.calc_grad
    assert x[0, 0] == rank, "works out of place"


@on_ranks(("shm", 3))
def test_ranks_without_gradient_join_the_backward_pass(rank: int, size: int) -> None:
    """Only rank 1's input is trained, but the losses of the other ranks depend on it."""
    x = fl.Variable(np.array([2.0, 3.0]), calc_grad=rank == 1)
    y = D.broadcast(D.all_reduce(x * float(rank)), 0)
    assert y.calc_grad, "rank 1 waits for the gradients of all"
    F.sum(y * float(rank + 1)).backward()
    assert x.grad.tolist() == [6, 6] if rank == 1 else x.grad is None


@on_ranks(("shm", 2))
def test_graph_with_read_only_gradients_can_be_used_twice(rank: int, size: int) -> None:
    x = fl.param(np.broadcast_to(np.ones(1), (2, 3)))
    loss = F.sum(D.all_gather(x))  # the gradient of a sum is a read-only view
    loss.backward(retain_graph=True)
    loss.backward()
    F.sum(D.reduce_scatter(D.all_gather(x))).backward()
    assert x.grad.tolist() == [[6, 6, 6], [6, 6, 6]]


def chain(x: Any) -> Any:
    """Each rank continues with the message of the previous rank; the last rank has the loss."""
    rank, size = position()
    h = x if rank == 0 else F.tanh(D.recv(x, rank - 1)) * x
    return h * 1.0 if rank == size - 1 else D.send(F.exp(h), rank + 1)


def there_and_back(x: Any, answer_first: bool = False) -> Any:
    """Rank 0 receives its own message back, so gradients go there and back as well."""
    rank, _ = position()
    if rank > 1:
        return x * 2.0
    if rank == 1:
        return D.send(F.sin(D.recv(x, 0, 5)) * x, 0, 7)
    token = D.send(x * x, 1, 5)
    answer = F.sum(D.recv(x, 1, 7) * x)
    return answer + token if answer_first else token + answer


def ring(x: Any) -> Any:
    """Every rank sends to its right; rank 0 begins, because a send ends when it is received."""
    rank, size = position()
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        token = D.send(F.exp(x), right)
        return F.sum(D.recv(x, left) * x) + token
    received = D.recv(x, left)
    return D.send(F.exp(x), right) + F.sum(received * x)


def used_here_too(x: Any) -> Any:
    rank, size = position()
    if rank == 0:
        h = F.exp(x)
        tokens = [D.send(h, peer, tag=peer) for peer in range(1, size)]
        return sum(tokens, F.sum(h * h))
    return D.recv((x.shape, x.dtype), 0, rank) * x


def between_collectives(x: Any) -> Any:
    rank, _ = position()
    y = D.all_reduce(F.sin(x)) * x
    if rank == 0:
        token = D.send(y, 1)
    elif rank == 1:
        y = D.recv(y, 0) * y
    z = D.all_gather(y)
    return F.sum(z * z) + token if rank == 0 else F.sum(z)


MESSAGES: dict[str, Callable[..., Any]] = {
    "chain": chain,
    "there and back": there_and_back,
    "back and there": lambda x: there_and_back(x, answer_first=True),
    "ring": ring,
    "used here too": used_here_too,
    "between collectives": between_collectives,
}


@on_ranks(*SEVERAL)
@for_each("name", MESSAGES)
def test_messages_differentiate_the_losses_of_all_ranks(rank: int, size: int, name: str) -> None:
    gradcheck_over_ranks(MESSAGES[name], [numbers(rank, 2, 2)])


def stages() -> tuple[Any, Any]:
    fl.set_seed(0)
    first = fl.nn.Sequential(fl.nn.Linear(5, 6), fl.nn.Tanh()).astype(np.float64)
    second = fl.nn.Sequential(fl.nn.Linear(6, 4), fl.nn.Tanh(), fl.nn.Linear(4, 2))
    return first, second.astype(np.float64)


@on_ranks(("gloo", 2), ("shm", 2))
@for_each("in_order", [True, False])
def test_pipeline_of_two_ranks_has_the_gradients_of_one_process(
    rank: int, size: int, in_order: bool
) -> None:
    """Rank 0 has the first stage and rank 1 the second; micro-batches follow each other."""
    stage, both, criterion = stages()[rank], stages(), fl.nn.MeanSquaredError()
    ends = []
    for part in (1, 2, 3):
        x, y = numbers(part, 4, 5), numbers(part, 4, 2)
        criterion(both[1](both[0](fl.input(x))), fl.no_grad(y)).backward()
        if rank == 0:
            ends.append(D.send(stage(fl.input(x)), 1))
        else:
            ends.append(criterion(stage(D.recv(((4, 6), np.float64), 0)), fl.no_grad(y)))
    for end in ends if in_order else reversed(ends):
        end.backward()
    for param, expected in zip(stage.params(), both[rank].params(), strict=True):
        np.testing.assert_allclose(param.grad, expected.grad, rtol=0, atol=1e-12)


@on_ranks(("shm", 2))
def test_messages_send_values_without_gradient(rank: int, size: int) -> None:
    if rank == 0:
        tag: Any = np.int64(1)
        for value, arguments in ((np.arange(3), ()), (np.ones((2, 2), np.float32), (tag,))):
            token = D.send(fl.input(value), 1, *arguments)
            assert (token.calc_grad, token.dtype, token.shape) == (False, np.float32, ())
        return
    received = D.recv(np.zeros(3, int), 0)
    ones = D.recv(((2, 2), "float32"), 0, 1)
    assert (received.array.tolist(), received.calc_grad) == ([0, 1, 2], False)
    assert (ones.array.tolist(), ones.calc_grad) == ([[1, 1], [1, 1]], True)


def test_messages_and_collectives_raise_for_invalid_arguments() -> None:
    v = fl.param(np.ones(3))
    with pytest.raises(TypeError, match=r"functional\.send: expected a flash"):
        D.send(np.ones(3), 1)  # type: ignore[arg-type]
    for wrong in (-1, 1 << 15, "0"):
        with pytest.raises(ValueError, match="tag must be an integer from 0 to 32767"):
            D.send(v, 1, wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tag must be an integer from 0 to 32767"):
            D.recv(v, 1, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tuple"):
        D.recv(3, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dst"):
        D.send(v, 1)
    with pytest.raises(ValueError, match="src"):
        D.recv(v, 1)
    for verb in (D.all_reduce, D.all_gather, D.reduce_scatter, D.broadcast, D.all_to_all):
        with pytest.raises(TypeError, match=f"functional.{verb.__name__}: expected a .*Variable"):
            verb(np.ones(3))  # type: ignore[arg-type]
    for reduction in (D.all_reduce, D.reduce_scatter):
        with pytest.raises(ValueError, match="'sum' or 'avg', got 'max'"):
            reduction(v, op="max")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="real number"):
            reduction(v, scale="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="root must be a rank"):
        D.broadcast(v, 1)
    with pytest.raises(ValueError, match="first dimension"):
        D.reduce_scatter(fl.param(np.array(1.0)))


@on_ranks(("shm", 2))
def test_gradcheck_raises_on_every_rank_for_a_wrong_gradient(rank: int, size: int) -> None:
    def halved(x: Any) -> Any:
        y = D.all_reduce(x)
        return y if rank else y * fl.no_grad(y.array)

    with pytest.raises(AssertionError) as caught:
        gradcheck_over_ranks(halved, [np.ones(2)])
    for number in (0, 1):
        words = f"rank {number}: input 0, element 0: expected"
        assert words in str(caught.value)
    with pytest.raises(TypeError, match="float64"):
        gradcheck_over_ranks(lambda x: x, [np.ones(1, np.float32)])


def stay_away(rank: int, size: int, message: bool, fifo: Path) -> str:
    """Rank 1 does not use its result, so it runs no backward pass."""
    x = fl.param(np.ones(2))
    if rank == 1:
        D.recv(x, 0) if message else D.all_reduce(x)
        fifo.read_bytes()  # ends when rank 0 has given up
        for _ in range(2):  # in shared memory the first call still matches a call of rank 0
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
    ("backend", "message"), [pytest.param("gloo", True, marks=pytest.mark.slow), ("shm", False)]
)
def test_timeout_error_names_a_rank_without_backward_pass(
    backend: str, message: bool, tmp_path: Path
) -> None:
    fifo = tmp_path / "given up"
    os.mkfifo(fifo)
    params = {"BACKEND": backend, "TIMEOUT": 0.5}
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
    F.sum(D.all_reduce(x)).backward()  # the group remains usable, and the ranks' counts are equal
    assert x.grad.tolist() == [2, 2]
    return str(caught.value)


@on_ranks(("gloo", 2), ("shm", 2))
def test_mismatch_error_separates_forward_and_backward_pass(rank: int, size: int) -> None:
    x = fl.param(np.ones(2))
    loss = F.sum(D.all_reduce(x))
    message = after_a_mismatch((lambda: D.all_reduce(x)) if rank else loss.backward, x)
    assert "rank 0 called all_reduce(int64" in message
    assert "rank 1 called all_reduce(float64" in message


@on_ranks(("gloo", 2), ("shm", 2))
@for_each("uses_all", [True, False])
def test_mismatch_error_reports_the_collective_of_each_rank(
    rank: int, size: int, uses_all: bool
) -> None:
    """The ranks run two passes in another order, or rank 1 does not use its second result."""
    x = fl.param(np.ones(2))
    first, second = D.all_reduce(x), D.all_reduce(x)
    losses = (first, second * 2.0) if uses_all else (first * second, first * 3.0)
    message = after_a_mismatch(F.sum(losses[rank]).backward, x)
    assert f"[functional.all_reduce] rank {rank} of 2" in message
    calls = [int(call) for call in re.findall(r"call (\d+) in the backward pass", message)]
    assert fl.all_gather_object(calls) == [calls] * 2
    assert calls[0] - calls[1] == (-1 if uses_all else 1)


def crossed_messages(rank: int, size: int) -> str:
    """Each rank waits for the gradient of the other message; they must not be exchanged."""
    x = fl.param(np.ones(20_000))  # large, because a small send returns before it is received
    ends = [(D.recv(x, 0) * 1.0 if rank else D.send(x, 1)) for _ in range(2)]
    with pytest.raises(fl.errors.DistributedError) as caught:
        F.sum(ends[rank]).backward()
    assert x.grad is None
    return str(caught.value)


def test_gradients_of_two_messages_are_kept_apart() -> None:
    outcomes = run_outcomes(crossed_messages, 2, params={"BACKEND": "shm", "TIMEOUT": 0.5})
    assert all(outcome.ok for outcome in outcomes), [outcome.report() for outcome in outcomes]
