"""Modules that recompute their results in the backward pass, alone and on several ranks."""

import copy
import itertools
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import nn
from flashlight_py.autograd import functions as F
from flashlight_py.parallel import fully_sharded
from flashlight_py.parallel.gathered_shards import shard_by_gathering
from tests.distributed.conformance import on_ranks, ranks_in
from tests.tables import for_each

WIDTH = 6


class Block(nn.Module):
    """A block with branches, dropout, a residual and a running statistic in the result."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.add_buffer("seen", np.zeros(1, np.float32))
        self.add_buffer("mean", np.zeros(WIDTH, np.float32))
        self.calls = 0

    def forward(self, x: fl.Variable) -> fl.Variable:
        self.calls += 1
        if self.training:
            self.seen[0] += 1
            self.mean = 0.9 * self.mean + 0.1 * x.array.mean(0)
        h = self.drop(F.tanh(self.first(x)))
        return x + h * F.sigmoid(self.second(x)) + h + fl.no_grad(self.mean * self.seen)


class Parts(nn.Module):
    """A module with several inputs and results. One input is returned unchanged."""

    def __init__(self) -> None:
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: fl.Variable, y: fl.Variable, factor: float) -> dict[str, Any]:
        h = self.inner(x)
        return {"both": (h, h * y), "x": x, "only y": [F.exp(y) * factor], "count": 3}


class Net(nn.Module):
    def __init__(self, again: Callable[[Any], Any]) -> None:
        self.twice = again(Block())
        self.chain = again(nn.Sequential(nn.Linear(WIDTH, WIDTH), again(Block()), nn.ReLU()))
        self.parts = again(Parts())
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: fl.Variable) -> fl.Variable:
        h = self.twice(self.chain(self.twice(x)))
        parts = self.parts(h, x, 0.5)
        plain, product = parts["both"]
        assert parts["x"] is h
        return self.last(plain + product + parts["only y"][0]).sum()


def trained(again: Callable[[Any], Any], steps: int = 3) -> dict[str, Any]:
    """Return all values that training changes."""
    fl.set_seed(7)
    net = Net(again)
    rng = np.random.default_rng(1)
    names = {param: name for name, param in net.named_params().items()}
    optimizer = fl.optim.AdamOptimizer(net.params(), 0.01)
    grads: list[Any] = []
    for param in net.params():
        param.register_grad_hook(lambda p: grads.append((names[p], p.grad.copy())))
    flat = np.zeros(net.last.weight.size, np.float32)
    net.last.weight.grad_buffer = flat.reshape(net.last.weight.shape)
    for _ in range(steps):
        optimizer.zero_grad()
        x = fl.param(rng.standard_normal((4, WIDTH)).astype(np.float32))
        for _ in range(2):  # the second pass accumulates
            net(x).backward()
        grads.append(("x", x.grad))
        optimizer.step()
    assert net.last.weight.grad.base is not None
    drawn = fl.random.generator().random(3)
    return {"grads": grads, "state": net.state_dict(), "next": drawn, "calls": net.twice.calls}


def as_bits(result: Any) -> Any:
    if isinstance(result, np.ndarray):
        return result.tobytes()
    if isinstance(result, (list, tuple)):
        return [as_bits(entry) for entry in result]
    return {k: as_bits(v) for k, v in result.items()} if isinstance(result, dict) else result


def test_recompute_training_has_the_same_bits() -> None:
    plain, again = trained(lambda module: module), trained(fl.recompute)
    assert [name for name, _ in again["grads"]] == [name for name, _ in plain["grads"]]  # hooks
    assert plain.pop("calls") * 2 == again.pop("calls")
    assert as_bits(again) == as_bits(plain)
    assert plain["state"]["twice.seen"] == [12]


def test_recompute_computes_once_without_gradients() -> None:
    block = fl.recompute(Block()).eval()
    x = fl.input(np.ones((2, WIDTH), np.float32))
    assert not block(x).calc_grad
    y = fl.param(x.array)
    block(y).sum().backward()  # only the input's gradient
    assert y.grad is not None
    assert block.calls == 3
    assert all(param.grad is None for param in block.train().params())


def test_recompute_supports_retain_graph() -> None:
    def gradient(again: Callable[[Any], Any]) -> Any:
        fl.set_seed(1)
        x = fl.param(np.ones((2, WIDTH), np.float32))
        loss = again(Block())(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="freed"):
            loss.backward()
        return x.grad

    np.testing.assert_array_equal(gradient(fl.recompute), gradient(lambda module: module))


class Reused(nn.Module):
    """A module that returns an intermediate value twice, with the results computed from it."""

    def forward(self, x: fl.Variable) -> list[fl.Variable]:
        h = F.tanh(x)
        return [h, F.exp(h), F.sin(h), h]


def test_recompute_sums_results_used_inside_in_order() -> None:
    """The float32 sum of three or more addends depends on their order."""

    def gradient(again: Callable[[Any], Any], order: list[int]) -> Any:
        x = fl.param(np.random.default_rng(2).standard_normal((40, 40)).astype(np.float32))
        results = again(Reused())(x)
        assert results[0] is results[3]
        terms = [F.sin(results[k] * (n + 0.3)) for n, k in enumerate(order)]
        loss = terms[0]
        for term in terms[1:]:
            loss = loss * term + loss
        loss.sum().backward()
        return x.grad

    for order in itertools.permutations([0, 0, 1, 2, 3], 5):
        plain, again = gradient(lambda module: module, [*order]), gradient(fl.recompute, [*order])
        np.testing.assert_array_equal(again, plain)


class Branches(nn.Module):
    def forward(self, x: fl.Variable) -> tuple[fl.Variable, fl.Variable]:
        return F.exp(x), F.tanh(x)


class Residual(nn.Module):
    def run(self, x: fl.Variable) -> fl.Variable:  # a method name of the user
        return F.sin(F.tanh(x)) + x

    def forward(self, x: fl.Variable) -> fl.Variable:
        return self.run(x)


@for_each("order", [1, -1])
def test_recompute_supports_results_of_recomputed_modules(order: int) -> None:
    results = []
    for wrap in (lambda module: module, nn.recompute):
        branches, first, second = wrap(Branches()), wrap(Residual()), wrap(Residual())
        x = fl.param(np.array([0.3, 0.4]))
        h, g = branches(x)
        factors = [first(g), second(h), h][::order]
        (factors[0] * factors[1] * factors[2]).sum().backward()
        results.append(x.grad)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-14)


def test_recompute_supports_unused_results() -> None:
    def gradients(again: Callable[[Any], Any]) -> list[Any]:
        fl.set_seed(3)
        x, y = (fl.param(np.full((2, WIDTH), k, np.float32)) for k in (1, 2))
        parts = again(Parts())
        upstream = F.tanh(y)  # the first pass does not reach this node
        result = parts(x, upstream, 2.0)
        calls: list[int] = []
        y.register_grad_hook(lambda _: calls.append(1))
        (result["both"][0].sum() + y.sum()).backward()
        assert calls == [1]
        result["only y"][0].sum().backward()
        assert calls == [1, 1]
        return [x.grad, y.grad, parts.inner.weight.grad]

    assert as_bits(gradients(fl.recompute)) == as_bits(gradients(lambda module: module))


def test_recompute_keeps_names_copies_and_pickles() -> None:
    plain, block = Block(), fl.recompute(Block())
    assert list(block.state_dict()) == list(plain.state_dict())
    block.load_state_dict(plain.state_dict())
    with pytest.raises(TypeError, match="expected a Module"):
        fl.recompute(block.first.weight)  # type: ignore[type-var]
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        other(fl.input(np.ones((1, WIDTH), np.float32))).sum().backward()
        assert other.calls == 2


class Keeper(nn.Module):
    """A module that stores a variable in an attribute."""

    def __init__(self) -> None:
        self.scale, self.kept = fl.param(np.ones(2)), [fl.input(np.ones(2))]
        self.unsteady = 0

    def forward(self, x: fl.Variable) -> fl.Variable:
        self.kept[0] = x * self.scale
        self.unsteady += 1
        return self.kept[0] * 2 if self.unsteady % 2 else x * 2


class WithLeaf(nn.Module):
    """A module that creates a leaf in each pass and reads its result."""

    def forward(self, x: fl.Variable) -> fl.Variable:
        y = x * fl.param(np.full(2, 3.0))
        assert y.has_history
        return y * y


def test_recompute_supports_leaves_created_in_forward() -> None:
    x = fl.param(np.ones(2))
    fl.recompute(WithLeaf())(x).sum().backward()
    assert x.grad.tolist() == [18, 18]


def test_recompute_raises_for_unsupported_modules() -> None:
    x = fl.param(np.ones(2))
    keeper = fl.recompute(Keeper())
    keeper(x)
    with pytest.raises(RuntimeError, match="Return the variable from the module"):
        keeper.kept[0].sum().backward()
    with pytest.raises(RuntimeError, match="Return the variable from the module"):
        (keeper.kept[0] * x).sum().backward()
    keeper.unsteady = 0
    with pytest.raises(RuntimeError, match="repeat its operations"):
        keeper(x).sum().backward()
    block = fl.recompute(Block())
    loss = block(fl.input(np.ones((1, WIDTH), np.float32))).sum()
    block.eval()
    with pytest.raises(RuntimeError, match="after its forward"):
        loss.backward()


def test_recompute_works_with_another_array_library(strict: Any) -> None:
    def gradients(again: Callable[[Any], Any]) -> list[Any]:
        fl.set_seed(5)
        block = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        net = nn.Sequential(again(block), nn.Linear(WIDTH, 2))
        for param in net.params():
            param.data = strict.asarray(param.data)
        net(fl.input(strict.asarray(np.ones((3, WIDTH), np.float32)))).sum().backward()
        return [param.grad.get() for param in net.params()]

    assert as_bits(gradients(fl.recompute)) == as_bits(gradients(lambda module: module))


def test_recompute_stores_only_inputs_of_blocks() -> None:
    def peak(again: Callable[[Any], Any]) -> int:
        blocks = [
            again(nn.Sequential(*[layer for _ in range(8) for layer in (nn.Tanh(), nn.Sigmoid())]))
            for _ in range(8)
        ]
        x = fl.param(np.ones((64, 1024), np.float32))
        net = nn.Sequential(*blocks)
        tracemalloc.start()
        net(x).sum().backward()
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result // x.array.nbytes

    assert peak(lambda module: module) >= 64  # Sigmoid's derivative needs only its input
    assert peak(fl.recompute) <= 8 + 16 + 4  # inputs, one block, gradients


ranks = ranks_in(("shm", 2), slow=[("gloo", 3)])


class Mixed(nn.Module):
    """A collective between two layers, one of which is shared with another block."""

    def __init__(self, shared: Any) -> None:
        self.own, self.shared = nn.Linear(4, 4), shared

    def forward(self, x: Any) -> Any:
        return self.shared(fl.functional.all_reduce(self.own(x), op="avg"))


def trained_on_ranks(rank: int, again: Callable[[Any], Any], bucket_bytes: int) -> list[bytes]:
    fl.set_seed(1)
    shared = nn.Linear(4, 4)
    net = nn.Sequential(again(Mixed(shared)), nn.Dropout(0.2), again(Mixed(shared)))
    fl.distribute_module_grads(net, bucket_bytes=bucket_bytes)
    optimizer = fl.optim.SGDOptimizer(net.params(), 0.1, momentum=0.9)
    rng = np.random.default_rng(rank)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            x = fl.param(rng.standard_normal((3, 4)).astype(np.float32))
            if step and not part:
                with fl.no_sync(net):
                    net(x).sum().backward()
            else:
                net(x).sum().backward()
        optimizer.step()
    return [array.tobytes() for array in (*net.state_dict().values(), x.grad)]


SHARDED: dict[str, Callable[[Any], Any]] = {
    "in shared memory": fl.fully_shard,
    "by gathering": shard_by_gathering,
}


def sharded(rank: int, again: Callable[[Any], Any], kind: str) -> list[bytes]:
    """Train a model whose parameters change, or are freed, as soon as possible."""
    fl.set_seed(1)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh())
    net = nn.Sequential(again(block), again(nn.Linear(4, 4)), again(block), nn.Linear(4, 2))
    SHARDED[kind](net)
    optimizer = fl.optim.AdamOptimizer(net.params(), 0.1)
    rng = np.random.default_rng(rank)
    for _ in range(3):
        optimizer.zero_grad()
        x = fl.param(rng.standard_normal((3, 4)).astype(np.float32))
        net(x).sum().backward()
        optimizer.step()
    return [array.tobytes() for array in (*net.state_dict().values(), x.grad)]


def by_leaves(again: Callable[[Any], Any]) -> list[bytes]:
    fl.set_seed(1)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh())
    net = nn.Sequential(again(block), again(block), nn.Linear(4, 2))
    fl.distribute_module_grads(net, leaves=8)
    optimizer = fl.optim.SGDOptimizer(net.params(), 0.1, momentum=0.9)
    rows = np.random.default_rng(3).standard_normal((21, 4)).astype(np.float32)
    for _ in range(2):
        optimizer.zero_grad()
        for x in fl.leaves(net, rows):
            net(fl.input(x)).mean().backward()
        optimizer.step()
    return [array.tobytes() for array in net.state_dict().values()]


@on_ranks()
def test_recompute_replays_random_numbers_of_leaves(rank: int, size: int) -> None:
    plain = by_leaves(lambda module: module)
    assert by_leaves(fl.recompute) == plain
    assert fl.all_gather_object(plain) == [plain] * size


@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(("shm", 2))
def test_recompute_keeps_training_of_a_sharded_model(rank: int, size: int, kind: str) -> None:
    with mock.patch.object(fully_sharded, "SMALL_BYTES", 0):
        assert sharded(rank, fl.recompute, kind) == sharded(rank, lambda module: module, kind)


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 64])
@on_ranks()
def test_recompute_keeps_bucket_order_of_gradients(rank: int, size: int, bucket_bytes: int) -> None:
    plain = trained_on_ranks(rank, lambda module: module, bucket_bytes)
    assert trained_on_ranks(rank, fl.recompute, bucket_bytes) == plain
    assert fl.all_gather_object(plain[:-1]) == [plain[:-1]] * size
