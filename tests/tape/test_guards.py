"""Guards hold as long as what a step function can reach is as it was, and no longer."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py._native import load
from flashlight_py.tape.reach import Reach

native = load("tape")
SCALE = 2.0
settings = types.ModuleType("settings")


class Watch:
    """Guards of what ``function`` reaches, and what has changed in words."""

    def __init__(self, function: Callable[..., Any], live: Any = ()) -> None:
        self.reach = Reach(function)
        self.live = live
        self.guards = native.guards(self.reach.guards(live))
        assert self.holds()

    def holds(self) -> bool:
        held: bool = native.hold(self.guards)
        changed = self.reach.changed(self.live)
        assert not (held and changed), changed
        return held


def using(value: Any) -> Callable[[], Any]:
    """Return a step that closes over ``value``."""
    return lambda: value


class Plain:
    """What a user might write."""

    rate = 0.5
    history: list[int] = []  # noqa: RUF012 - shared on purpose

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def step(self) -> Any:
        return self.factor(), self.history

    def set_count(self) -> None:
        for _ in range(100):  # until Python has made a faster instruction of it
            self.count = 2

    def factor(self) -> float:
        return self.rate


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self) -> None:
        self.count = 1


class Alike(Slotted):
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def model() -> fl.nn.Sequential:
    return fl.nn.Sequential(fl.nn.Linear(3, 4), fl.nn.ReLU(), fl.nn.Linear(4, 1))


def _set(index: Any, value: Any) -> Callable[[Any], None]:
    return lambda container: container.__setitem__(index, value)


def _attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda one: setattr(one, name, value)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1, 2], _set(0, 3)),
        (lambda: [1, 2], lambda x: x.append(3)),
        (lambda: [1, 2], lambda x: x.reverse()),
        (lambda: [1, 1.0], _set(0, 1.0)),
        (lambda: [0.0], _set(0, -0.0)),
        (lambda: [1], _set(0, True)),
        (lambda: [(1, 2)], _set(0, (1, 2.0))),
        (lambda: [slice(1)], _set(0, slice(2))),
        (lambda: [range(0, 3, 2)], _set(0, range(0, 4, 2))),
        (lambda: [np.float64(0.0)], _set(0, np.float64(-0.0))),
        (lambda: [np.dtype("f4")], _set(0, np.dtype("f8"))),
        (lambda: [Colour.RED], _set(0, Colour.BLUE)),
        (lambda: [object()], _set(0, object())),
        (lambda: [np.zeros(2)], _set(0, np.zeros(2))),
        (lambda: {"a": 1}, _set("a", 2)),
        (lambda: {"a": 1}, _set("b", 2)),
        (lambda: {"a": 1, "b": 2}, lambda x: x.pop("b")),
        (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
        (lambda: {"a": 1}, lambda x: x.update(a=2)),
        (lambda: {"a": 1}, lambda x: x.setdefault("b", 1)),
        (lambda: {"a": 1}, lambda x: x.popitem()),
        (lambda: {"a": 1}, lambda x: x.clear()),
        (lambda: {"a": 1}, lambda x: x.__ior__({"a": 2})),
        (lambda: {"a": 1}, lambda x: exec("a = 2", x)),
        (lambda: {"a": 1}, lambda x: x.__init__({"a": 2})),
        (lambda: {}, _set("a", 1)),
        (lambda: [1, 2], lambda x: x.sort(reverse=True)),
        (lambda: [1, 2], lambda x: x.__init__([1, 3])),
        (lambda: [1, 2], _set(slice(None), [2, 2])),
        (lambda: [1, 2], lambda x: x.extend(range(100))),
        (lambda: OrderedDict(a=1, b=1), lambda x: x.move_to_end("a")),
        (lambda: {1, 2}, lambda x: x.add(3)),
        (lambda: deque([1, 2]), lambda x: x.rotate()),
        (lambda: ([1],), lambda x: x[0].append(1)),
        (lambda: {"a": [{"b": 1}]}, lambda x: _set("b", 2)(x["a"][0])),
        (lambda: list(range(2000)), lambda x: x.append(1)),
        (lambda: dict.fromkeys(range(2000)), _set(2001, 1)),
        (lambda: set(range(2000)), lambda x: x.add(2001)),
        (lambda: Plain(count=1), _attribute("count", 2)),
        (lambda: Plain(count=1), _attribute("rate", 0.5)),
        (lambda: Plain(count=1), lambda x: delattr(x, "count")),
        (lambda: Plain(count=1), lambda x: x.set_count()),
        (lambda: Plain(a=1), lambda x: setattr(x, "__dict__", {"a": 1})),
        (lambda: Plain(a=1), lambda x: setattr(x, "__class__", type("Other", (Plain,), {}))),
        (lambda: Plain(inner=Plain(count=1)), lambda x: _attribute("count", 2)(x.inner)),
        (Slotted, _attribute("count", 2)),
        (Slotted, _attribute("unset", 2)),
        (Slotted, lambda x: delattr(x, "count")),
        (Slotted, lambda x: setattr(x, "__class__", Alike)),
        (lambda: SimpleNamespace(rate=1.0), _attribute("rate", 2.0)),
        (lambda: functools.partial(print, [1]), lambda x: x.args[0].append(2)),
        (lambda: functools.partial(print, a=1), lambda x: _set("a", 2)(x.keywords)),
        (lambda: Plain(a=[1]).step, lambda x: x.__self__.a.append(2)),
    ],
)
def test_a_change_is_noticed(make: Callable[[], Any], change: Callable[[Any], object]) -> None:
    value = make()
    watch = Watch(using(value))
    change(value)
    assert not watch.holds()


@pytest.mark.parametrize(
    ("value", "equal"),
    [
        (1000, 500 + 500),
        (1.5, float("1.5")),
        (float("nan"), float("nan")),
        (1 + 2j, complex("1+2j")),
        ("some text", "".join(["some ", "text"])),
        (b"ab", bytes([97, 98])),
        ((1000, (2.5, None)), (int("1000"), (float("2.5"), None))),
        (slice(1000), slice(int("1000"))),
        (range(1000), range(int("1000"))),
        (np.dtype("f4"), np.dtype("f4").newbyteorder("=")),
        (np.float32(1.5), np.float32(1.5)),
    ],
)
def test_another_object_of_the_same_value_is_no_change(value: Any, equal: Any) -> None:
    step = using(value)
    holder = Plain(value=value, inner=[value], by_name={"a": value})
    watch = Watch(lambda: (step(), holder))
    cell = step.__closure__[0]  # type: ignore[index]
    cell.cell_contents = equal
    holder.value = holder.inner[0] = holder.by_name["a"] = equal
    assert watch.holds()
    assert watch.holds()
    holder.inner[0] = "other"
    assert not watch.holds()


def test_a_variable_of_an_outer_function() -> None:
    count = 1

    def step() -> int:
        return count

    watch = Watch(step)
    count = 2
    assert not watch.holds()
    count = 1
    assert watch.holds()


def test_a_global_that_the_step_names(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    watch = Watch(lambda x: [SCALE * element for element in x])
    monkeypatch.setattr(here, "unrelated", 1, raising=False)
    assert watch.holds()
    monkeypatch.setattr(here, "SCALE", 3.0)
    assert not watch.holds()
    monkeypatch.setattr(here, "SCALE", 2.0)
    monkeypatch.delattr(here, "settings")
    assert watch.holds()
    monkeypatch.delattr(here, "SCALE")
    assert not watch.holds()


def test_a_global_that_hides_a_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(lambda x: abs(x))  # noqa: PLW0108 - the step names it
    monkeypatch.setattr(sys.modules[__name__], "abs", round, raising=False)
    assert not watch.holds()


def test_an_attribute_named_as_a_global_is_not_the_global(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(lambda x: x.SCALE)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert watch.holds()


def test_a_module_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "rate", 0.1, raising=False)
    monkeypatch.setattr(settings, "other", 0.1, raising=False)
    watch = Watch(lambda: settings.rate)
    settings.other = 0.2  # type: ignore[attr-defined]
    assert watch.holds()
    settings.rate = 0.2  # type: ignore[attr-defined]
    assert not watch.holds()


def test_a_global_that_a_function_sets() -> None:
    watch = Watch(lambda: SCALE)
    before = SCALE

    def set_it(to: float) -> None:
        global SCALE  # noqa: PLW0603 - as a user's code does
        for _ in range(100):  # until Python has made a faster instruction of it
            SCALE = to

    for _ in range(3):
        set_it(before + 1)
        assert not watch.holds()
        set_it(before)
        assert watch.holds()


def scaled(x: float, by: float = 1.0, *, plus: float = 0.0) -> float:
    return x * by + plus


def test_a_function_that_the_step_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(lambda x: scaled(x))  # noqa: PLW0108 - the step names it
    for name, value in {
        "__defaults__": (2.0,),
        "__kwdefaults__": {"plus": 1.0},
        "__code__": (lambda x, by=1, *, plus=0: x).__code__,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(scaled, name, value)
            assert not watch.holds()
        assert watch.holds()
    scaled.calls = 1  # type: ignore[attr-defined]
    assert not watch.holds()
    del scaled.calls  # type: ignore[attr-defined]
    assert watch.holds()
    monkeypatch.setattr(sys.modules[__name__], "scaled", print)
    assert not watch.holds()


def test_what_a_class_has_and_its_methods_name(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Plain()
    watch = Watch(one.step)
    with monkeypatch.context() as patch:
        patch.setattr(Plain, "rate", 0.25)
        assert not watch.holds()
    assert watch.holds()
    with monkeypatch.context() as patch:
        patch.setattr(Plain, "factor", lambda self: None)
        assert not watch.holds()
    assert watch.holds()
    Plain.history.append(1)
    assert not watch.holds()
    Plain.history.clear()
    assert watch.holds()


def test_forward_of_a_users_module_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(fl.nn.Module):
        def __init__(self) -> None:
            self.linear = fl.nn.Linear(3, 4)

        def forward(self, x: Any) -> Any:
            return self.linear(x) * SCALE

    watch = Watch(using(Net()))
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert not watch.holds()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.eval(),
        lambda net: net.add(fl.nn.ReLU()),
        lambda net: setattr(net[0].weight, "calc_grad", False),
        lambda net: setattr(net[0].weight, "array", net[0].weight.array.copy()),
        lambda net: setattr(net[0].weight, "grad", np.zeros((4, 3), np.float32)),
        lambda net: setattr(net[0].weight, "grad_buffer", np.zeros((4, 3), np.float32)),
        lambda net: net[2].bias.register_grad_hook(print),
        lambda net: setattr(net[0], "before_forward", print),
        lambda net: setattr(net[0], "weight", fl.param(net[0].weight.array)),
        lambda net: net.add_buffer("mean", np.zeros(3)),
    ],
)
def test_a_module_that_changes(change: Callable[[Any], object]) -> None:
    net = model()
    watch = Watch(using(net))
    change(net)
    assert not watch.holds()


@pytest.fixture
def world() -> Iterator[None]:
    fl.distributed_init()
    yield
    fl.distributed_shutdown()


@pytest.mark.usefixtures("world")
def test_no_sync_is_noticed() -> None:
    net = model()
    fl.distribute_module_grads(net, scale=1.0)
    watch = Watch(using(net))
    with fl.no_sync(net):
        assert not watch.holds()
    assert watch.holds()


def test_what_is_live_is_left_out() -> None:
    inner = [1]
    one = Plain(count=1, other=2, inner=inner)
    names = {"a": 1, "b": 2}
    row = [1, 2]
    live = {id(inner), (id(one), "count"), (id(names), "a"), (id(row), 0)}
    watch = Watch(lambda: (one, names, row), live)
    inner.append(2)
    one.count = names["a"] = row[0] = 5
    assert watch.holds()
    one.other = 3
    assert not watch.holds()
    one.other = 2
    row[1] = 3
    assert not watch.holds()


def test_guards_follow_what_was_set_before_they_were_made() -> None:
    one = Plain(count=1)
    reach = Reach(using(one))
    one.count = 2
    guards = native.guards(reach.guards())
    assert native.hold(guards)
    assert reach.changed() == ["value.count: 1 -> 2"]
