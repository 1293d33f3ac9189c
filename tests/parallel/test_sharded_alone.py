"""Sharded modules in a single process: counters, errors, memory and protection."""

import contextlib
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel import fully_sharded
from tests.launch.launcher import launch, write
from tests.parallel.test_sharded import Net, loss_of, optimizer_of


@pytest.fixture(autouse=True)
def _shards_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fully_sharded, "SMALL_BYTES", 0)


@pytest.fixture
def sharded() -> tuple[Net, Any]:
    model = Net("float32")
    fl.fully_shard(model)
    return model, optimizer_of(model, "sgd")


def test_incomplete_step_raises_torn_state_error(sharded: Any) -> None:
    model, optimizer = sharded
    state = {name: array.copy() for name, array in model.state_dict().items()}
    with contextlib.suppress(KeyboardInterrupt), optimizer._shards[0].changing("a step"):
        raise KeyboardInterrupt
    for use in (
        lambda: model(fl.input(np.zeros((1, 30), np.float32))),
        model.state_dict,
        optimizer.step,
        lambda: fl.fully_shard(model),
    ):
        with pytest.raises(fl.errors.TornStateError, match="checkpoint"):
            use()
    model.load_state_dict(state)
    model(fl.input(np.zeros((1, 30), np.float32)))


def test_step_changes_all_parameters_in_one_change(
    sharded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the optimizer has a parameter of this process alone."""
    model, plain = sharded[0], fl.param(np.ones(2, np.float32))
    optimizer = fl.optim.SGDOptimizer([*model.params(), plain], 0.5)
    (shards,), calls = optimizer._shards, []
    changing = shards.changing
    monkeypatch.setattr(shards, "changing", lambda label: calls.append(label) or changing(label))
    loss_of(model, 0, 0).backward()
    plain.grad = np.ones(2, np.float32)
    optimizer.step()
    assert (calls, plain.array.tolist()) == (["SGDOptimizer.step"], [0.5, 0.5])


def test_load_state_dict_raises_for_another_shape(sharded: Any) -> None:
    _, optimizer = sharded
    state = optimizer.state_dict()
    state["velocity"][0] = state["velocity"][0].reshape(-1)
    words = r"expected 'velocity' of parameter 0 with shape \(40, 30\), got \(1200,\)"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(state)


def test_other_thread_waits_for_a_step_and_same_thread_raises(sharded: Any) -> None:
    (model, optimizer), x = sharded, fl.input(np.zeros((1, 30), np.float32))
    model.eval()
    with ThreadPoolExecutor(1) as pool, optimizer._shards[0].changing("a step"):
        result = pool.submit(model, x)
        with pytest.raises(TimeoutError):
            result.result(0.1)
        for use in (lambda: model(x), model.state_dict, optimizer.step):
            with pytest.raises(RuntimeError, match="inside of a step, which is changing"):
                use()
    assert result.result(20).shape == (1, 5)


def test_step_with_unfrozen_parameters_raises_and_changes_nothing(sharded: Any) -> None:
    """So the advice of the error works: shard the module again."""
    model, optimizer = sharded
    for param in model.frozen.params():
        param.calc_grad = True
    before = [param.array.copy() for param in model.params()]
    loss_of(model, 0, 0).backward()
    with pytest.raises(ValueError, match="Call fully_shard again"):
        optimizer.step()
    assert all(map(np.array_equal, [param.array for param in model.params()], before))
    fl.fully_shard(model)
    optimizer = optimizer_of(model, "sgd")
    loss_of(model, 0, 0).backward()
    optimizer.step()
    assert not np.array_equal(model.frozen.weight.array, before[-2])


def test_optimizer_raises_after_another_fully_shard(
    sharded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is in the old memory, of which each rank would step everything."""
    model, optimizer = sharded
    monkeypatch.undo()
    fl.fully_shard(model)
    assert model.first.weight.placement is None  # a small module is not sharded
    loss_of(model, 0, 0).backward()
    before = model.first.weight.array.copy()
    with pytest.raises(RuntimeError, match="Create the optimizer after sharding"):
        optimizer.step()
    assert np.array_equal(model.first.weight.array, before)


def test_second_fully_shard_frees_the_old_memory() -> None:
    """The memory may be most of the host's, and the garbage collector would be too late."""
    model = Net("float32")
    fl.fully_shard(model)
    optimizer = optimizer_of(model, "sgd")  # no fixture keeps a reference
    loss_of(model, 0, 0).backward()
    optimizer.step()
    old = weakref.ref(model.first.weight.placement.shards.memory)
    gc.disable()
    try:
        del optimizer
        fl.fully_shard(model)
        assert old() is None
    finally:
        gc.enable()


def test_write_to_a_protected_parameter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLIGHT_DEBUG_SHARED", "1")
    model = Net("float32")
    fl.fully_shard(model)
    optimizer = optimizer_of(model, "sgd")
    with pytest.raises(ValueError, match="read-only"):
        model.first.weight.data[0, 0] = 1.0
    loss_of(model, 0, 0).backward()
    before = model.first.weight.array.copy()
    optimizer.step()
    assert not np.array_equal(before, model.first.weight.array)
    model.load_state_dict({name: array.copy() for name, array in model.state_dict().items()})


def test_frozen_parameter_can_be_bfloat16() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    model = fl.nn.Linear(3, 2)
    model.table = fl.Variable(np.arange(3).astype(bfloat16))
    fl.fully_shard(model)
    assert model.table.placement is not None
    assert model.table.dtype == bfloat16
    assert model.table.array.tolist() == [0, 1, 2]


def test_step_of_an_older_optimizer_raises_and_changes_nothing() -> None:
    model = Net("float32")
    optimizer = optimizer_of(model, "sgd")
    fl.fully_shard(model)
    loss = loss_of(model, 0, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="was sharded after the optimizer was created"):
        optimizer.step()
    loss.backward()


_TRAIN = """
import numpy as np
import flashlight_py as fl

fl.distributed_init()
model = fl.nn.Sequential(*(fl.nn.Linear(2048, 2048) for _ in range(4)))  # 64 MB
fl.fully_shard(model)
optimizer = fl.optim.AdamOptimizer(model.params(), 0.001)
for _ in range(3):
    optimizer.zero_grad()
    model(fl.input(np.ones((32, 2048), np.float32))).mean().backward()
    optimizer.step()
fl.barrier()
with open("/proc/self/smaps_rollup") as file:
    kilobytes = int(file.read().split("Pss:")[1].split()[0])
kilobytes = fl.all_reduce(kilobytes)
if fl.is_main_process():
    print(kilobytes)
"""


@pytest.mark.slow
def test_four_ranks_use_memory_of_one_plus_35_mb_each(tmp_path: Path) -> None:
    """Measures proportional set sizes; weights, gradients and moments have 256 MB."""
    file = write(tmp_path, _TRAIN)
    texts = (launch("-n", size, file, timeout=60).stdout for size in (1, 4))
    alone, together = (int(text.removeprefix("[0] ")) for text in texts)
    assert together <= 1.25 * alone + 4 * 35 * 1024
