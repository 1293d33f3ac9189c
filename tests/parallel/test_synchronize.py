"""Trees on real ranks: all ranks have the root's values, or no tree has changed."""

import importlib
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.start.world import current_world
from flashlight_py.parallel.tree import plan_of
from tests.distributed.conformance import on_ranks
from tests.gpu import test_trees as gpu_trees
from tests.parallel.trees import Point, everything, model_of, optimizer_of
from tests.tables import for_each


def values(tree: Any) -> tuple[bytes, list[str]]:
    """Return all synchronized values in a form that can be compared, including NaN."""
    plan = plan_of(tree)
    numbers = [repr(number) for _, _, number in plan.numbers]
    return plan.description, [*(repr(array.tolist()) for array in plan.arrays), *numbers]


def memory(tree: Any) -> list[int]:
    return [array.ctypes.data for array in plan_of(tree).arrays]


@on_ranks(("single", 1), ("shm", 2), ("gloo", 3))
def test_synchronize_sets_all_values_of_root_in_place(rank: int, size: int) -> None:
    for root in range(size):
        tree = everything(10 * rank + 3)
        before = memory(tree)
        unsent = tree["left alone"][1], tree["classes"][0].label
        inside = {id(tree[name]) for name in tree if not isinstance(tree[name], tuple)}
        result = fl.synchronize(tree, root)
        assert result is tree
        assert values(tree) == values(everything(10 * root + 3))
        assert memory(tree) == before
        assert (tree["left alone"][1], tree["classes"][0].label) == unsent
        assert inside == {id(tree[name]) for name in tree if not isinstance(tree[name], tuple)}
        assert tree["shared"][0] is tree["shared"][1]["again"]
        assert tree["cycle"][1]["back"] is tree["cycle"]
        assert type(tree["tuples"][1]) is Point
        assert tree["classes"][2].square == tree["classes"][2].rate ** 2


@on_ranks(("shm", 2))
def test_synchronize_sends_shared_arrays_once_in_one_transfer(rank: int, size: int) -> None:
    module: Any = importlib.import_module("flashlight_py.parallel.synchronize")
    real, sizes = module.broadcast, []

    def spy(x: Any, *args: Any, **options: Any) -> Any:
        sizes.append(x.nbytes)
        return real(x, *args, **options)

    module.broadcast = spy
    shared = np.full(1000, rank, np.float64)
    try:
        fl.synchronize([shared, [shared], np.zeros(3, np.int8), {"x": shared, "y": 1.5}])
        fl.synchronize([None, "nothing to send"])
    finally:
        module.broadcast = real
    assert (shared == 0).all()
    assert sizes == [8000 + 16 + len(pickle.dumps([1.5]))]


@on_ranks(("shm", 2))
def test_synchronize_keeps_the_bits_of_numbers(rank: int, size: int) -> None:
    (number,) = struct.unpack("=d", bytes.fromhex("230100000000f8ff" if rank == 0 else "00" * 8))
    sent = struct.pack("=d", fl.synchronize({"value": number})["value"])
    assert sent.hex() == "230100000000f8ff"


def test_synchronize_sends_gpu_and_cpu_arrays(pool: Any) -> None:
    """Uses stand-ins for CuPy and NCCL; tests/gpu tests real GPUs."""
    ranks = pool(2, env={"STAND_IN": "1"})
    ranks.run(gpu_trees.synchronize)
    ranks.run(gpu_trees.synchronize_with_the_cpu)


@on_ranks(("shm", 3))
@for_each("kind distributed", [("sgd", True), ("adam", False)])
def test_synchronized_optimizers_continue_equally(
    rank: int, size: int, kind: str, distributed: bool
) -> None:
    model = model_of(rank + 1.0)
    optimizer = optimizer_of(model, kind, rank + 1)
    if distributed:
        optimizer = fl.DistributedOptimizer(optimizer)
    fl.synchronize({"model": model, "optimizer": optimizer}, root=size - 1)
    for _ in range(3):
        for param in model.params():
            param.grad = np.ones_like(param.array)
        optimizer.step()
    results = [*(param.array for param in model.params()), optimizer.lr]
    for other in fl.all_gather_object(results):
        np.testing.assert_equal(other, results)


@on_ranks(("shm", 2))
def test_synchronize_accepts_keys_in_another_order(rank: int, size: int) -> None:
    items = [("weight", np.full(2, rank)), ("bias", rank + 10), (3, [rank])]
    tree = {"model": dict(items if rank else items[::-1])}
    fl.synchronize(tree, group=current_world().group)
    results = {key: np.asarray(value).tolist() for key, value in tree["model"].items()}
    assert results == {"weight": [0, 0], "bias": 10, 3: [0]}


DIFFERENT: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "shape": (lambda r: {"w": [1, np.zeros(2 + r)]}, 'tree["w"][1]', "float64 (3,)"),
    "dtype": (lambda r: (np.zeros(2, ["f4", "f8"][r]),), "tree[0]", "float64 (2,)"),
    "parameter": (lambda r: fl.nn.Linear(2, 3 + r), "tree.weight", "float32 (4, 2)"),
    "state": (lambda r: optimizer_of(model_of(0), ["sgd", "adam"][r], 1), "tree", "AdamOptimizer"),
}


@on_ranks(("shm", 3))
@for_each("case", DIFFERENT)
def test_synchronize_raises_mismatch_error_if_trees_differ(rank: int, size: int, case: str) -> None:
    make, path, kind = DIFFERENT[case]
    tree = {"first": np.full(3, rank), "number": rank, "rest": make(min(rank, 1))}
    with pytest.raises(fl.errors.MismatchError) as caught:
        fl.synchronize(tree)
    assert (tree["first"] == rank).all()
    assert tree["number"] == rank
    again = fl.synchronize([rank])  # the group remains usable
    assert again == [0]
    message = str(caught.value)
    words = "expected the same structure on every rank, got a difference at "
    assert message.startswith(f"[synchronize] rank {rank} of 3: {words}")
    where = path.replace("tree", 'tree["rest"]', 1)
    assert f" {where} (rank(s) 0: " in message
    assert f"; rank(s) 1, 2: {kind}). Nothing was changed" in message


class Failing(fl.nn.Module):
    def forward(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        raise ArithmeticError("on purpose")


BROKEN = {
    "read-only": (np.broadcast_to(np.zeros(1), 3), ValueError, "got a read-only array"),
    "objects": (np.array([None, {}]), TypeError, "with Python objects"),
    "failing": (Failing(), fl.errors.DistributedError, "on purpose"),
}


@on_ranks(("shm", 2))
@for_each("case", BROKEN)
def test_synchronize_raises_on_all_ranks_for_an_invalid_value(
    rank: int, size: int, case: str
) -> None:
    value, kind, words = BROKEN[case]
    tree = {"first": np.full(3, rank), "second": value if rank == 1 else np.zeros(3)}
    for root in range(size):
        with pytest.raises(kind, match=words) as caught:
            fl.synchronize(tree, root)
        assert str(caught.value).startswith("[synchronize] rank 1 of 2: ")
        assert case == "failing" or 'tree["second"]' in str(caught.value)
    assert (tree["first"] == rank).all()
    assert fl.synchronize(rank, 1) == 1


@on_ranks(("shm", 2))
def test_synchronize_raises_mismatch_error_if_roots_differ(rank: int, size: int) -> None:
    tree = [np.full(3, rank)]
    words = r"same root on every rank, got rank\(s\) 0: 0; rank\(s\) 1: 1\."
    with pytest.raises(fl.errors.MismatchError, match=words):
        fl.synchronize(tree, root=rank)
    assert (tree[0] == rank).all()


def test_synchronize_checks_trees_in_a_world_of_one() -> None:
    with pytest.raises(ValueError, match=r"rank 0 of 1: tree\[0\]: .* got a read-only array"):
        fl.synchronize([np.broadcast_to(np.zeros(1), 3)])
    model = model_of(2.0)
    assert fl.synchronize(model) is model
