"""One checkpoint, and any number of ranks that go on from it, with or without sharding."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel import fully_sharded
from flashlight_py.parallel.gathered_shards import Flat, shard_by_gathering
from tests.distributed.conformance import on_ranks, ranks_in
from tests.parallel.test_sharded import Net, build, loss_of, optimizer_of, same

ranks = ranks_in(("single", 1), ("gloo", 3), ("shm", 4), ("hierarchical", 4))


def made(sharded: bool) -> tuple[Any, Any]:
    fully_sharded.SMALL_BYTES = 0
    fl.set_seed(1 + fl.get_world_rank())
    model = fl.nn.Sequential(
        fl.nn.Linear(7, 11, dtype="float64"), fl.nn.Tanh(), fl.nn.Linear(11, 3, dtype="float64")
    )
    if sharded:
        fl.fully_shard(model)
    else:
        fl.broadcast_parameters(model)
        fl.distribute_module_grads(model)
    return model, fl.optim.AdamOptimizer(model.params(), lr=0.01)


def train(model: Any, optimizer: Any, steps: range) -> None:
    """Every rank has the same samples, so that the mean is the same for any number of ranks."""
    for step in steps:
        x = np.random.default_rng(step).standard_normal((5, 7))
        optimizer.zero_grad()
        (model(fl.input(x)) * model(fl.input(x))).mean().backward()
        optimizer.step()


def arrays_of(model: Any, optimizer: Any) -> list[Any]:
    state = optimizer.state_dict()
    return [np.array(each) for each in (*model.state_dict().values(), *state["mean"])]


def save(rank: int, size: int, folder: str) -> list[Any]:
    model, optimizer = made(True)
    train(model, optimizer, range(3))
    fl.save(folder, module=model, optimizer=optimizer, step=3)
    return arrays_of(model, optimizer)


def go_on(rank: int, size: int, folder: str, sharded: bool) -> tuple[list[Any], list[Any]]:
    model, optimizer = made(sharded)
    assert fl.load(folder, module=model, optimizer=optimizer).step == 3
    loaded = arrays_of(model, optimizer)
    train(model, optimizer, range(3, 6))
    return loaded, arrays_of(model, optimizer)


@pytest.mark.parametrize(("size", "sharded"), [(1, False), (2, True), (3, False), (3, True)])
def test_any_number_of_ranks_goes_on(pool: Any, tmp_path: Path, size: int, sharded: bool) -> None:
    shm: dict[str, Any] = {"params": {"BACKEND": "shm"}}
    saved = pool(4, **shm).run(save, str(tmp_path))[0]
    found = (pool(size, **shm) if size > 1 else pool(1)).run(go_on, str(tmp_path), sharded)
    model, optimizer = made(False)
    train(model, optimizer, range(6))
    for loaded, trained in found:
        assert all(map(np.array_equal, loaded, saved))
        for array, undisturbed in zip(trained, arrays_of(model, optimizer), strict=True):
            np.testing.assert_allclose(array, undisturbed, rtol=1e-12, atol=1e-14)


@on_ranks()
def test_a_copy_is_ordinary(rank: int, size: int) -> None:
    """A copy of the module and its optimizer is ordinary, and goes on from the same state."""
    ways: list[dict[str, bool] | None] = [None, {}, {"across_hosts": True}]
    for how in ways:
        if how is None:
            model = Net("float64")
            shard_by_gathering(model)
        else:
            model = build("float64", "sharded", **how)
        optimizer = optimizer_of(model, "adam")
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        pair = model, optimizer
        for other, its in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
            assert [id(param) for param in other.params()] == [id(p) for p in its.params]
            assert all(p.placement is p.grad is p.hook is None for p in its.params)
            assert other.before_forward is None
            for name, value in its.state_dict().items():
                np.testing.assert_equal(value, state[name])
            if rank == 0:  # by itself
                its.zero_grad()
                loss_of(other, 0, 2).backward()
                its.step()
            fl.barrier()
            alone = copy.deepcopy(optimizer)
            assert alone.params[0].placement is None
            np.testing.assert_equal(alone.state_dict(), optimizer.state_dict())
            with pytest.raises(RuntimeError, match="make the optimizer afterwards"):
                copy.copy(optimizer).step()
            if rank == 0:
                ends = [param.array.copy() for param in other.params()]
        fl.barrier()
        optimizer.zero_grad()
        loss_of(model, 0, 2).backward()
        optimizer.step()
        arrays = [param.array for param in model.params()]  # collective where they are gathered
        if rank == 0:
            same(ends, arrays)
        fl.barrier()


@on_ranks(("shm", 2))
def test_a_step_gathers_nothing(rank: int, size: int) -> None:
    model = Net("float64")
    shard_by_gathering(model)
    optimizer = optimizer_of(model, "sgd")
    loss_of(model, rank, 0).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Flat, "start")
        optimizer.step()
