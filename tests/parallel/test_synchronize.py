"""Trees: walks, packing and changes, and copies of the root's values on all ranks."""

import copy
import dataclasses
import importlib
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import flashlight_py as fl
from flashlight_py.distributed.start.world import current_world
from flashlight_py.parallel.agreement import by_rank, differences, digest
from flashlight_py.parallel.synchronize import _buffers_for, _kept, _plans, give_state
from flashlight_py.parallel.tree import TreeBuffers, kinds_by_path, plan_of, put_numbers
from tests.distributed.conformance import on_ranks
from tests.gpu import test_verbs as gpu_verbs
from tests.parallel.tree_strategies import trees
from tests.parallel.trees import Box, Frozen, Point, Tensor, everything, model_of, optimizer_of
from tests.tables import for_each


def kinds_of(tree: Any) -> dict[str, str]:
    return kinds_by_path(plan_of(tree).facts)


def test_plan_contains_all_arrays_numbers_and_containers() -> None:
    kinds = kinds_of(everything(7))
    assert kinds['tree["arrays"][10]'] == "float32 (2, 3)"
    assert kinds['tree["tuples"][1].y[1][0]'] == "int"
    assert kinds['tree["shared"][1]["again"]'] == 'the same object as tree["shared"][0]'
    assert kinds['tree["cycle"][1]["back"]'] == 'the same object as tree["cycle"]'
    assert kinds["tree[3][('a', 1)]"] == "int"
    assert kinds['tree["model"].0.layer.weight'] == "float32 (3, 2)"
    assert kinds['tree["adam"]._steps'].startswith("int64 (")
    assert kinds['tree["left alone"][1]'] == "no array or number"


@settings(deadline=None, max_examples=20)
@given(trees())
def test_arbitrary_trees_can_be_packed_and_changed(tree: Any) -> None:
    tree, copied = copy.deepcopy(tree), copy.deepcopy(tree)
    plan, other = plan_of(tree), plan_of(copied)
    assert other.description == plan.description  # of equal structures
    assert len(kinds_by_path(plan.facts)) == len(plan.facts)
    before = [array.tobytes() for array in plan.arrays]  # of any layout
    buffers = TreeBuffers(plan, 3)
    buffers.pack(plan, b"abc")
    for array in plan.arrays:
        array[...] = np.zeros((), array.dtype)
    assert buffers.unpack(plan) == b"abc"
    assert [array.tobytes() for array in plan.arrays] == before
    expected = [_next(number) for _, _, number in plan.numbers]
    again = plan_of(put_numbers(plan, expected))
    assert again.description == plan.description
    # Bytes are not compared: longdouble contains padding.
    assert [repr(n) for _, _, n in again.numbers] == [repr(n) for n in expected]


def _next(number: Any) -> Any:
    changed = not number if isinstance(number, (bool, np.bool_)) else number + 1
    return type(number)(changed)


def test_pack_converts_arrays_to_native_byte_order() -> None:
    swapped, native = (np.arange(4, dtype=order) for order in (">i4", "<i4"))
    plans = [plan_of([array]) for array in (swapped, native)]
    assert plans[0].description == plans[1].description
    packed = []
    for plan in plans:
        buffers = TreeBuffers(plans[0], 0)  # buffers of one plan fit the other plan
        buffers.pack(plan, b"")
        packed.append(buffers.used[0].tobytes())
    assert packed[0] == packed[1]


def test_buffers_are_reused_for_equal_descriptions() -> None:
    """Large buffers are not kept, and kept buffers do not keep arrays alive."""
    _kept.clear()
    array, number = np.zeros(3), 7
    fl.synchronize({"array": array, "number": number})
    (buffers,) = _kept.values()
    fl.synchronize({"array": np.ones(3, ">f8"), "number": 8})
    assert [*_kept.values()] == [buffers]
    assert sys.getrefcount(array) == 2
    assert _buffers_for(plan_of({"array": array}), 0) is not buffers
    fl.synchronize({"array": np.zeros(1 << 18)})
    assert [*_kept.values()] == [buffers]
    ((description, number_bytes),) = _kept
    plan = plan_of({"array": array, "number": number})
    assert plan.description == description
    assert _buffers_for(plan, number_bytes) is buffers
    assert not _kept


def test_kept_plan_is_not_used_for_other_arrays() -> None:
    tree = {"a": np.zeros(2), "b": np.ones(3)}
    plan = plan_of(dict(tree))
    assert plan.is_of(tree)
    read_only, other_shape = tree["a"][:], tree["a"][:]
    for changed in (
        {**tree, "c": np.zeros(1)},
        {**tree, "b": np.ones(3)},
        {"a": tree["a"], "c": tree["b"]},
        {"a": tree["a"]},
        {**tree, "b": 1.0},
    ):
        assert not plan.is_of(changed)
    plan = plan_of({"a": read_only, "b": other_shape})
    other_shape.shape = (2, 1)
    assert not plan.is_of({"a": read_only, "b": other_shape})
    plan = plan_of({"a": read_only})
    read_only.flags.writeable = False
    assert not plan.is_of({"a": read_only})


def test_only_plans_of_numpy_arrays_are_kept() -> None:
    module, array = fl.nn.ReLU(), np.zeros(3)
    give_state(module, {"array": array, "number": 3}, 0, None)
    assert module not in _plans
    give_state(module, {"array": array}, 0, None)
    assert _plans[module].arrays == [array]


def test_digest_depends_on_positions_and_lengths() -> None:
    words = [b"", b"\0", bytes(8), bytes(16), b"a" * 8 + b"b" * 8, b"b" * 8 + b"a" * 8]
    assert len({digest(word) for word in words}) == len(words)


def test_put_numbers_keeps_mutable_and_number_free_containers() -> None:
    inner = ["text", 1]
    still = (np.zeros(2), inner, Frozen("no number"))
    tree = {"still": still, "new": (inner, 2)}
    changed = put_numbers(plan_of(tree), [10, 20])
    assert changed is tree
    assert changed["still"] is still
    assert changed["new"] == (["text", 10], 20)
    assert changed["new"][0] is inner


def test_sorted_plan_ignores_the_order_of_keys() -> None:
    one = {"a": np.zeros(1), "b": {1: 2.0, None: 3}}
    other = {"b": {None: 3, 1: 2.0}, "a": np.zeros(1)}
    assert plan_of(one).description != plan_of(other).description
    assert plan_of(one, sort_keys=True).description == plan_of(other, sort_keys=True).description


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (np.array([None]), TypeError, "with Python objects"),
        (np.broadcast_to(np.zeros(1), 3), ValueError, "got a read-only array"),
        (Tensor(np.broadcast_to(np.zeros(1), 3)), ValueError, "got a read-only"),
        (fl.param(np.zeros(2)) * 2, ValueError, "got the result of a computation"),
    ],
)
def test_plan_raises_with_the_path_of_an_invalid_value(
    value: Any, kind: type[Exception], message: str
) -> None:
    tree = {"a": [1, {"b": Point(2, {3: Box(value)})}]}
    with pytest.raises(kind, match=rf'^tree\["a"\]\[1\]\["b"\]\.y\[3\]\.content: .*{message}'):
        plan_of(tree)


class Pair(tuple[Any, ...]):
    """A tuple whose constructor needs two arguments."""

    def __new__(cls, one: Any, other: Any) -> "Pair":
        return super().__new__(cls, (one, other))


class Row(tuple[Any, ...]):
    """A plain subclass of tuple."""


@dataclasses.dataclass(frozen=True)
class Seeded:
    """A frozen class whose constructor needs more than its fields."""

    seed: dataclasses.InitVar[int]
    value: int = 3


@dataclasses.dataclass(frozen=True)
class Counted:
    """A frozen class with a field that ``__init__`` does not take, and another attribute."""

    value: int
    count: int = dataclasses.field(default=4, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", f"value {self.value}")


IMMUTABLE = [3, (3,), Point(3), Row([3, 4]), Frozen((3, 4)), [Frozen(Point(3, Box((4,))))]]


@pytest.mark.parametrize("tree", [*IMMUTABLE, Counted(3), [Counted(3)]], ids=repr)
def test_put_numbers_creates_an_immutable_tree_again(tree: Any) -> None:
    before = repr(tree)
    plan = plan_of(copy.deepcopy(tree))
    changed = put_numbers(plan, [number + 10 for _, _, number in plan.numbers])
    assert repr(changed) == before.replace("3", "13").replace("4", "14")
    assert type(changed) is type(tree)
    assert not isinstance(changed, Counted) or changed.text == "value 13"


@pytest.mark.parametrize("value", [Pair(1, 2), Seeded(1)], ids=lambda v: type(v).__name__)
def test_plan_raises_if_an_immutable_object_cannot_be_copied(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"tree\[0\]: expected immutable objects that can be created again"
    ):
        plan_of([value])


def test_plan_raises_if_an_immutable_object_contains_itself() -> None:
    knot = Frozen([1])
    # not a cycle of immutable objects, because of the list
    assert put_numbers(plan_of(knot), [2]) == Frozen([2])
    object.__setattr__(knot, "other", (knot,))
    with pytest.raises(TypeError, match=r"tree\.other\[0\]: .* not contain itself, got Frozen"):
        plan_of(knot)


def test_plan_supports_trees_deeper_than_the_recursion_limit() -> None:
    tree: Any = 1
    for _ in range(5000):
        tree = [(tree,)]
    changed = put_numbers(plan_of(tree), [2])
    for _ in range(5000):
        ((changed,),) = changed
    assert changed == 2


def test_plan_raises_if_a_container_changes_during_the_walk() -> None:
    class Growing(fl.nn.Module):
        def forward(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            tree["grown"] = 1
            return {}

    tree: dict[str, Any] = {"a": Growing()}
    with pytest.raises(RuntimeError, match="changed size during"):
        plan_of(tree)


@pytest.mark.parametrize(
    ("one", "other", "path", "kinds"),
    [
        ({"w": np.zeros(3)}, {"w": np.zeros(4)}, 'tree["w"]', ["float64 (3,)", "float64 (4,)"]),
        ([1, 2], [1, 2, 3.0], "tree[2]", ["nothing", "float"]),
        ([1, (2,)], [1, [2]], "tree[1]", ["tuple", "list"]),
        ({"a": 1}, {"b": 1}, 'tree["a"]', ["int", "nothing"]),
        (Box(1), Box(None), "tree.content", ["int", "no array or number"]),
        (Box(1), Point(1), "tree", ["Box", "Point"]),
        (np.float32(1), 1.0, "tree", ["NumPy float32", "float"]),
        ([a := np.ones(2), a], [a, +a], "tree[1]", ["the same object as tree[0]", "float64 (2,)"]),
    ],
)
def test_mismatch_error_names_the_first_difference(
    one: Any, other: Any, path: str, kinds: list[str]
) -> None:
    results = [kinds_of(tree) for tree in (one, other, one)]
    assert differences(results)[0] == f"{path} ({by_rank([*kinds, kinds[0]])})"
    assert not differences(results[:1] * 2)


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
    ranks.run(gpu_verbs.synchronize)
    ranks.run(gpu_verbs.synchronize_with_the_cpu)


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
