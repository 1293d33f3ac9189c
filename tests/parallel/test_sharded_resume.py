"""One checkpoint from which any number of ranks continues, with or without sharding."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel.gathered_shards import Flat, shard_by_gathering
from tests.distributed.conformance import on_ranks, ranks_in
from tests.parallel import test_sharded
from tests.parallel.test_sharded import build, loss_of, optimizer_of
from tests.parallel.test_ways import WAYS, Net, one_pass, same

ranks = ranks_in(("shm", 3), slow=[("gloo", 3), ("hierarchical", 4)])


def train(
    rank: int, size: int, kind: str, steps: range, loaded: str = "", saved: str = ""
) -> tuple[list[Any], list[Any]]:
    """Return the loaded state and the final state; all ranks have equal samples."""
    model = Net(seed=1 + rank if loaded else 0)
    WAYS[kind](model)
    optimizer = fl.optim.AdamOptimizer(model.params(), lr=0.01)
    if loaded:
        assert fl.load(loaded, module=model, optimizer=optimizer).step == steps.start
    first = arrays_of(model, optimizer)
    for step in steps:
        optimizer.zero_grad()
        one_pass(model, step, 0)
        optimizer.step()
    last = arrays_of(model, optimizer)
    if saved:
        fl.save(saved, module=model, optimizer=optimizer, step=steps.stop)
    return first, last


def arrays_of(model: Any, optimizer: Any) -> list[Any]:
    state = optimizer.state_dict()
    return [np.array(entry) for entry in (*model.state_dict().values(), *state["mean"])]


SHM = {"params": {"BACKEND": "shm"}}
SHARDED = "sharded", "sharded across hosts", "gathered"
OTHERS = "sharded across hosts", "in buckets"


@pytest.mark.parametrize(
    "saver",
    ["sharded", "gathered", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def test_sharded_run_resumes_on_any_number_of_ranks(pool: Any, tmp_path: Path, saver: str) -> None:
    _, undisturbed = train(0, 1, "one by one", range(6))
    file = str(tmp_path)
    _, saved = pool(4, **SHM).run(train, saver, range(3), "", file)[0]
    results = [train(0, 1, "one by one", range(3, 6), file)]
    sizes = (1, 3) if saver in SHARDED[:2] else (3, 1)
    for method, size in zip((*SHARDED, "in buckets"), 2 * sizes, strict=True):
        results += pool(size, **(SHM if size > 1 else {})).run(train, method, range(3, 6), file)
    for loaded, trained in results:
        assert all(map(np.array_equal, loaded, saved))
        same(trained, undisturbed)


@on_ranks()
def test_copy_of_a_sharded_module_is_not_sharded(rank: int, size: int) -> None:
    ways: list[dict[str, bool] | None] = [None, {}, {"across_hosts": True}]
    for kind in ways:
        if kind is None:
            model = test_sharded.Net("float64")
            shard_by_gathering(model)
        else:
            model = build("float64", "sharded", **kind)
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
            if rank == 0:  # not distributed
                its.zero_grad()
                loss_of(other, 0, 2).backward()
                its.step()
            fl.barrier()
            alone = copy.deepcopy(optimizer)
            assert alone.params[0].placement is None
            np.testing.assert_equal(alone.state_dict(), optimizer.state_dict())
            with pytest.raises(RuntimeError, match="Create the optimizer after sharding"):
                copy.copy(optimizer).step()
            if rank == 0:
                ends = [param.array.copy() for param in other.params()]
        fl.barrier()
        optimizer.zero_grad()
        loss_of(model, 0, 2).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(Flat, "start")  # so that nothing can be gathered
            optimizer.step()
        arrays = [param.array for param in model.params()]  # collective if parameters are gathered
        if rank == 0:
            same(ends, arrays)
        fl.barrier()
