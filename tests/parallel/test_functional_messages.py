"""Differentiable messages: gradients come back from where the values went."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.parallel import gradcheck_over_ranks

BACKENDS = ["gloo", "shm"]
D = fl.functional

over_worlds = pytest.mark.parametrize(
    ("size", "backend"), [(n, b) for n in (2, 3) for b in BACKENDS]
)


def world(pool: Any, size: int, backend: str) -> Any:
    return pool(size, params={"BACKEND": backend})


def numbers(*seed_and_shape: int) -> Any:
    return np.random.default_rng(seed_and_shape).standard_normal(seed_and_shape[1:])


def place() -> tuple[int, int]:
    return fl.get_world_rank(), fl.get_world_size()


def chain(x: Any) -> Any:
    """Each rank goes on with what the one before has sent; the last has the loss."""
    rank, size = place()
    h = x if rank == 0 else F.tanh(D.recv(x, rank - 1)) * x
    return h * 1.0 if rank == size - 1 else D.send(F.exp(h), rank + 1)


def there_and_back(x: Any) -> Any:
    """What rank 0 has sent comes back to it, so its gradients go there and back too."""
    rank, _ = place()
    if rank > 1:
        return x * 2.0
    if rank == 1:
        return D.send(F.sin(D.recv(x, 0, 5)) * x, 0, 7)
    token = D.send(x * x, 1, 5)
    answer = F.sum(D.recv(x, 1, 7) * x)
    return token + answer


def back_and_there(x: Any) -> Any:
    """The same, named in another order."""
    if place()[0]:
        return there_and_back(x)
    token = D.send(x * x, 1, 5)
    answer = F.sum(D.recv(x, 1, 7) * x)
    return answer + token


def ring(x: Any) -> Any:
    """Everyone sends to the right; rank 0 begins, for a send ends when it has been received."""
    rank, size = place()
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        token = D.send(F.exp(x), right)
        return F.sum(D.recv(x, left) * x) + token
    received = D.recv(x, left)
    return D.send(F.exp(x), right) + F.sum(received * x)


def used_here_too(x: Any) -> Any:
    rank, size = place()
    if rank == 0:
        h = F.exp(x)
        tokens = [D.send(h, peer, tag=peer) for peer in range(1, size)]
        return sum(tokens, F.sum(h * h))
    return D.recv((x.shape, x.dtype), 0, rank) * x


def between_collectives(x: Any) -> Any:
    rank, _ = place()
    y = D.all_reduce(F.sin(x)) * x
    if rank == 0:
        token = D.send(y, 1)
    elif rank == 1:
        y = D.recv(y, 0) * y
    z = D.all_gather(y)
    return F.sum(z * z) + token if rank == 0 else F.sum(z)


CASES: dict[str, Callable[..., Any]] = {
    "chain": chain,
    "there and back": there_and_back,
    "back and there": back_and_there,
    "ring": ring,
    "used here too": used_here_too,
    "between collectives": between_collectives,
}


def check_gradient(rank: int, size: int, name: str) -> None:
    gradcheck_over_ranks(CASES[name], [numbers(rank, 2, 2)])


@over_worlds
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_all_ranks_losses(
    pool: Any, size: int, backend: str, name: str
) -> None:
    world(pool, size, backend).run(check_gradient, name)


def stages() -> tuple[Any, Any]:
    fl.set_seed(0)
    first = fl.nn.Sequential(fl.nn.Linear(5, 6), fl.nn.Tanh()).astype(np.float64)
    second = fl.nn.Sequential(fl.nn.Linear(6, 4), fl.nn.Tanh(), fl.nn.Linear(4, 2))
    return first, second.astype(np.float64)


def sgd(module: Any) -> Any:
    return fl.optim.SGDOptimizer(module.params(), 0.1, momentum=0.9)


def parts_of_batch(step: int) -> list[tuple[Any, Any]]:
    return [(numbers(step, part, 4, 5)[0], numbers(step, part, 4, 2)[0]) for part in (1, 2, 3)]


def one_process() -> list[list[Any]]:
    both = stages()
    optimizers = [sgd(stage) for stage in both]
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, y in parts_of_batch(step):
            fl.nn.MeanSquaredError()(both[1](both[0](fl.input(x))), fl.no_grad(y)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [[param.array for param in stage.params()] for stage in both]


def pipeline(rank: int, size: int, in_order: bool) -> list[Any]:
    """Rank 0 has the first stage, rank 1 the second; parts of a batch follow each other."""
    stage = stages()[rank]
    optimizer = sgd(stage)
    for step in range(6):
        optimizer.zero_grad()
        ends = []
        for x, y in parts_of_batch(step):
            if rank == 0:
                ends.append(D.send(stage(fl.input(x)), 1))
            else:
                prediction = stage(D.recv(((4, 6), np.float64), 0))
                ends.append(fl.nn.MeanSquaredError()(prediction, fl.no_grad(y)))
        for end in ends if in_order else reversed(ends):
            end.backward()
        optimizer.step()
    return [param.array for param in stage.params()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_pipeline_trains_as_one_process(pool: Any, backend: str, in_order: bool) -> None:
    results = world(pool, 2, backend).run(pipeline, in_order)
    for stage, expected in zip(results, one_process(), strict=True):
        for got, want in zip(stage, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def whole_numbers(rank: int, size: int) -> Any:
    if rank == 0:
        token = D.send(fl.input(np.arange(3)), 1)
        tag = np.int64(1)
        constant = D.send(fl.input(np.ones((2, 2), np.float32)), 1, tag)  # type: ignore[arg-type]
        return token.calc_grad, token.dtype, constant.calc_grad, constant.dtype, constant.shape
    received = D.recv(np.zeros(3, int), 0)
    ones = D.recv(((2, 2), "float32"), 0, 1)
    return received.array.tolist(), received.calc_grad, ones.array.tolist(), ones.calc_grad


def test_without_a_gradient_values_travel_all_the_same(pool: Any) -> None:
    first, second = pool(2).run(whole_numbers)
    assert first == (False, np.float32, False, np.float32, ())
    assert second == ([0, 1, 2], False, [[1, 1], [1, 1]], True)


def test_arguments() -> None:
    v = fl.param(np.ones(3))
    with pytest.raises(TypeError, match=r"functional\.send takes a flash"):
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
