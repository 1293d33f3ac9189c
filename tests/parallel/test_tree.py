"""Walks, packing and changes of trees."""

import copy
import dataclasses
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import flashlight_py as fl
from flashlight_py.parallel.agreement import by_rank, differences, digest
from flashlight_py.parallel.synchronize import _buffers_for, _kept, _plans, give_state
from flashlight_py.parallel.tree import TreeBuffers, kinds_by_path, plan_of, put_numbers
from tests.parallel.tree_strategies import trees
from tests.parallel.trees import Box, Frozen, Point, Tensor, everything


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
