"""Linear layers divided among ranks: results and state dicts equal undivided layers."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import nn
from flashlight_py.distributed.calls import journal
from tests.distributed.conformance import on_ranks, ranks_in

ranks = ranks_in(("shm", 2), ("gloo", 3), slow=[("hierarchical", 4), ("mpi", 3)])
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def network() -> Any:
    """Return a network that is equal on every rank."""
    fl.set_seed(2)
    wide = nn.Sequential(
        nn.Linear(5, 7, dtype="float64"), nn.Tanh(), nn.Linear(7, 5, dtype="float64")
    )
    first = nn.Linear(4, 5, dtype="float64")
    last = nn.Linear(5, 2, bias=False, dtype="float64")
    return nn.Sequential(first, wide, nn.Tanh(), last)


def cut(net: Any, uneven: bool = False) -> Any:
    """Divide two layers; with unequal sizes, the last rank gets nothing."""
    size = fl.get_world_size()
    sizes = [9 - size, *[1] * (size - 2), 0] if uneven and size > 1 else None
    assert fl.parallel.shard_linear(net[1][0], "column", sizes=sizes) is net[1][0]
    fl.parallel.shard_linear(net[1][2], "row", sizes=sizes)
    return net


def data(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape)


def train(net: Any, optimizer: Any, steps: int = 3) -> list[Any]:
    """Return the inputs' gradients and the losses."""
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        x = fl.param(data(3, 4) if step % 2 else data(2, 3, 4))
        loss = (net(x) * net(x)).mean()
        loss.backward()
        norm = fl.optim.clip_grad_norm(net.params(), 0.1)
        optimizer.step()
        results += [x.grad, loss.array, norm]
    return results


def assert_close(result: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(result[name], value)
    elif isinstance(expected, list):
        for one, other in zip(result, expected, strict=True):
            assert_close(one, other)
    else:
        np.testing.assert_allclose(result, expected, **EXACT)


def equals_the_whole(rank: int, size: int, folder: str) -> None:
    plain = network()
    whole_optimizer = fl.optim.AdamOptimizer(plain.params(), 0.01)
    expected = train(plain, whole_optimizer)
    for uneven in (False, True):
        net = cut(network(), uneven)
        assert net[1][0].weight.size < 35 or size == 1 or uneven
        if uneven:
            fl.recompute(net[1])  # repeats its collectives
        optimizer = fl.optim.AdamOptimizer(net.params(), 0.01)
        assert_close(train(net, optimizer), expected)
        assert_close(net.state_dict(), plain.state_dict())
        assert_close(optimizer.state_dict(), whole_optimizer.state_dict())
        assert_close([p.grad for p in net[0].params()], [p.grad for p in plain[0].params()])
    continues(net, optimizer, plain, folder if rank == 0 else f"{folder}/nowhere")


def continues(net: Any, optimizer: Any, plain: Any, folder: str) -> None:
    """Continue an undivided network from a checkpoint of a divided one, and vice versa."""
    fl.save(folder, module=net, optimizer=optimizer, step=3)
    undivided, other = network(), cut(network())
    for one in (undivided, other):
        again = fl.optim.AdamOptimizer(one.params(), 0.5)
        loaded = fl.load(folder, module=one, optimizer=again)
        assert loaded is not None
        assert loaded.step == 3
        train(one, again)
    assert_close(other.state_dict(), undivided.state_dict())
    other.load_state_dict(plain.state_dict())
    assert_close(other.state_dict(), plain.state_dict())
    with pytest.raises(ValueError, match="full array"):
        other.load_state_dict({**plain.state_dict(), "1.0.weight": np.ones((1, 5))})
    assert_close(copy.deepcopy(other).state_dict(), plain.state_dict())


def test_training_and_checkpoints_equal_the_undivided_layers(ranks: Any, tmp_path: Path) -> None:
    ranks.run(equals_the_whole, str(tmp_path))


def calls_of_the_world() -> int:
    return int(journal.groups()["world"]["calls"])  # a group of another test may have more


@on_ranks()
def test_inference_needs_one_all_reduce(rank: int, size: int) -> None:
    net, plain = cut(network()).eval(), network().eval()
    for shape in ((1, 4), (2, 3, 4), (0, 4)):
        x = fl.input(data(*shape))
        before = calls_of_the_world()
        y = net(x)
        assert calls_of_the_world() - before == 1  # one all_reduce for both layers
        assert not y.has_history
        assert_close(y.array, plain(x).array)


@on_ranks()
def test_shard_linear_raises_for_invalid_use(rank: int, size: int) -> None:
    layer, row, shard = drawn(0, 4, 6), drawn(0, 6, 4), fl.parallel.shard_linear
    with pytest.raises(fl.errors.MismatchError, match="expected the same values"):
        shard(drawn(rank, 4, 6), "row")
    with pytest.raises(fl.errors.MismatchError, match=r"sizes \(rank\(s\) 0: "):
        shard(layer, "column", sizes=[rank, 6 - rank, *[0] * (size - 2)])
    shard(layer, "column")
    shard(row, "row")
    part = np.ones((1, row.weight.shape[1]), np.float32)  # a Linear also accepts an array
    assert row(part).shape == (1, 4)
    with pytest.raises(ValueError, match="expected this rank's part"):
        row(fl.input(np.ones((1, 6), np.float32)))
    with pytest.raises(fl.errors.MismatchError, match=r"0 to \d of 6"):
        fl.distribute_module_grads(layer)
    with pytest.raises(ValueError, match="a part that shard_linear has cut"):
        fl.broadcast_parameters(layer)
    assert "cut by column: [" in repr(layer)


def drawn(seed: int, *shape: int) -> Any:
    fl.set_seed(seed)
    return nn.Linear(*shape)


def test_shard_linear_works_without_init(tmp_path: Path) -> None:
    equals_the_whole(0, 1, str(tmp_path))
    shard, layer = fl.parallel.shard_linear, nn.Linear(2, 3)
    with pytest.raises(ValueError, match="'column' or 'row'"):
        shard(layer, "rows")  # type: ignore[arg-type]
    for sizes in ([1, 2], [2], [3.5]):
        with pytest.raises(ValueError, match="one per rank, that sum to 3"):
            shard(layer, "column", sizes=sizes)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is divided already"):
        shard(shard(layer, "column"), "column")
    with pytest.raises(TypeError, match="got Sequential"):
        shard(nn.Sequential(), "row")  # type: ignore[arg-type]


def test_shard_linear_works_with_another_array_library(strict: Any) -> None:
    net = network()
    expected = train(network(), fl.optim.SGDOptimizer(net.params(), 0.0), 1)[1]
    for variable in net.params():
        variable.data = strict.asarray(variable.data)
    cut(net)
    optimizer = fl.optim.AdamOptimizer(net.params(), 0.01)
    x = fl.param(strict.asarray(data(2, 3, 4)))
    loss = (net(x) * net(x)).mean()
    loss.backward()
    optimizer.step()
    assert_close(loss.numpy(), expected)
    state = net.state_dict()
    assert {name: type(array) for name, array in state.items()} == dict.fromkeys(
        state, strict.ndarray
    )
    net.load_state_dict(state)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.slow
@on_ranks(("shm", 4))
def test_divided_layers_can_be_trained_data_parallel(rank: int, size: int) -> None:
    """Two ranks share a network, and two such pairs train on different data."""
    pair, twins = fl.split(rank // 2), fl.split(rank % 2)
    net = network()
    fl.parallel.shard_linear(net[1][0], "column", group=pair)
    fl.parallel.shard_linear(net[1][2], "row", group=pair)
    fl.distribute_module_grads(net, group=twins)
    x = data(8, 4)
    net(fl.input(x[4 * twins.rank : 4 * twins.rank + 4])).mean().backward()
    plain = network()
    plain(fl.input(x)).mean().backward()
    for variable, reference in zip(net.params(), plain.params(), strict=True):
        grad = variable.grad
        if variable.placement is not None:
            grad = variable.placement.full_state(grad)
        assert_close(grad, reference.grad)
