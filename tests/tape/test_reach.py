"""What a step function can reach is found, named and can be replaced."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
import threading
import time
import types
import weakref
from collections import deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py._native import load
from flashlight_py.tape.reach import MANY, Reach
from tests.tape.test_guards import Plain, model, using

native = load("tape")
weights = np.zeros(3)
Pair = namedtuple("Pair", "first second")


def seed_step(net: Any, rate: float = 0.1) -> tuple[Callable[..., Any], Any]:
    optimizer = fl.optim.SGDOptimizer(net.params(), rate, momentum=0.9)
    criterion = fl.nn.MeanSquaredError()

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = criterion(net(fl.input(x)), fl.no_grad(y))
        loss.backward()
        optimizer.step()
        return loss

    return step, optimizer


def words(reach: Reach) -> list[str]:
    return [place.words() for place in reach.arrays]


def test_variables_are_found_once_in_order() -> None:
    net = model()
    reach = Reach(seed_step(net)[0])
    assert reach.variables == net.params()
    assert [
        *(f"net._members[{layer}].{name}.data" for layer in (0, 2) for name in ("weight", "bias")),
        *(f"optimizer._states[0][{position}]" for position in range(4)),
    ] == words(reach)


def test_what_a_step_changes_is_told() -> None:
    net = model()
    step, optimizer = seed_step(net)
    count = [0]

    def counting(x: Any, y: Any) -> Any:
        count[0] += 1
        count.append(count[0])
        return step(x, y)

    x, y = np.ones((1, 3), np.float32), np.ones((1, 1), np.float32)
    counting(x, y)
    reach = Reach(counting)
    counting(x, y)
    live = {id(variable) for variable in net.params()} | {id(optimizer._steps)}
    assert reach.changed(live) == ["count: 2 items -> 3"]
    assert "optimizer._steps[0]: 1 -> 2" in reach.changed()
    assert any(".grad: an array of shape" in line for line in reach.changed())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda one: setattr(one, "rate", 2.5), "one.rate: nothing -> 2.5"),
        (lambda one: one.names.update(b=2), "one.names['b']: nothing -> 2"),
        (lambda one: one.names.pop("a"), "one.names['a']: 1 -> nothing"),
        (lambda one: one.names.update(a=one.names), "one.names['a']: 1 -> dict of 1"),
        (lambda one: one.seen.add(2), "one.seen: 1 items -> 2"),
        (lambda one: one.many.append(2), f"number of items of one.many: {MANY + 1} -> {MANY + 2}"),
        (lambda one: setattr(one, "__class__", type("Other", (Plain,), {})), "one: Plain -> Other"),
        (lambda one: setattr(one, "text", "b" * 90), f"one.text: 'a' -> 'b{'b' * 55}..."),
        (
            lambda one: setattr(one, "array", np.zeros(2)),
            "one.array: an array of shape (3,) -> an ",
        ),
    ],
)
def test_a_change_in_words(change: Callable[[Any], object], told: str) -> None:
    one = Plain(names={"a": 1}, seen={1}, many=[0] * (MANY + 1), text="a", array=np.zeros(3))
    reach = Reach(lambda: one)
    change(one)
    (line,) = reach.changed()
    assert line.startswith(told)


def test_items_in_another_order_in_words() -> None:
    names = {"a": 1, "b": 2}
    reach = Reach(lambda: names)
    names["a"] = names.pop("a")
    assert reach.changed() == ["names: its items are in another order"]


class Keeper:
    array: ClassVar[Any] = np.zeros(1)

    def __init__(self) -> None:
        self.own = np.zeros(2)
        self.row = [np.zeros(3), (np.zeros(4),)]
        self.named = {"a": np.zeros(5)}
        self.pair = Pair(np.zeros(6), 1)
        self.recent = deque([np.zeros(7)])

    def step(self) -> Any:
        return self.array, weights


def test_arrays_can_be_replaced_where_they_were_found() -> None:
    keeper, outer = Keeper(), np.zeros(8)

    def step(given: Any = (np.zeros(9),)) -> Any:  # noqa: B008 - a default that is state
        return keeper.step(), outer, given

    old = Keeper.array, weights, outer
    reach = Reach(step)
    guards = native.guards(reach.guards())
    found = {place.words(): place for place in reach.arrays}
    assert sorted(place.get().size for place in reach.arrays) == [1, 2, 3, *range(3, 10)]
    new = {name: np.ones(place.get().size) for name, place in found.items()}
    for name, place in found.items():
        place.set(new[name])
        assert place.get() is new[name]
    assert keeper.pair.first is new["keeper.pair[0]"]
    assert type(keeper.pair) is Pair
    assert keeper.row[1] == (new["keeper.row[1][0]"],)
    assert outer is new["outer"]
    assert step()[2] == (new["step.__defaults__[0][0]"],)
    assert not native.hold(guards)
    Keeper.array = old[0]
    globals()["weights"] = old[1]


def test_nothing_of_a_user_runs() -> None:
    class Shy:
        def __init__(self) -> None:
            object.__setattr__(self, "value", 1)

        @property
        def seen(self) -> Any:
            raise AssertionError("a property was called")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"__getattr__({name!r}) was called")

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"__getattribute__({name!r}) was called")

        def __setattr__(self, name: str, value: Any) -> None:
            raise AssertionError(f"__setattr__({name!r}) was called")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("__eq__ was called")

        __hash__ = None  # type: ignore[assignment]

    shy = Shy()
    reach = Reach(lambda: (shy, shy.seen))
    guards = native.guards(reach.guards())
    object.__setattr__(shy, "value", 2)
    assert not native.hold(guards)
    assert reach.changed() == ["shy.value: 1 -> 2"]


def test_cycles_end() -> None:
    one = Plain()
    one.me = one.step  # type: ignore[attr-defined]
    row: list[Any] = [one]
    row.append(row)
    reach = Reach(lambda: (one, row))
    row.append(1)
    assert reach.changed() == ["row: 2 items -> 3"]


def test_generators_and_iterators() -> None:
    generator, count = np.random.default_rng(0), itertools.count()
    local, dice = threading.local(), random.Random(0)
    reach = Reach(lambda: (generator.random(), next(count), local, dice))
    assert reach.generators == [generator]
    assert sorted(reach.opaque) == ["count", "dice", "local"]


def test_objects_say_what_of_them_is_state() -> None:
    class Some:
        __captured_state__ = ("rate",)

        def __init__(self) -> None:
            self.rate, self.calls = 1.0, 0

    class More(Some):
        pass

    class Nothing(Some):
        __captured_state__ = ()

    some, more, nothing = Some(), More(), Nothing()
    reach = Reach(lambda: (some, more, nothing))
    guards = native.guards(reach.guards())
    some.calls = nothing.calls = nothing.rate = 1
    assert native.hold(guards)
    more.calls = 1  # the base says nothing about attributes of a subclass
    some.rate = 2.0
    assert not native.hold(guards)
    assert sorted(reach.changed()) == ["more.calls: 0 -> 1", "some.rate: 1.0 -> 2.0"]


def test_wrapped_functions_are_followed() -> None:
    rate = [1.0]

    @functools.lru_cache
    def inner() -> float:
        return rate[0]

    @functools.wraps(inner)
    def outer() -> float:
        return inner()

    reach = Reach(functools.partial(outer))
    rate[0] = 2.0
    assert reach.changed() == ["rate[0]: 1.0 -> 2.0"]


def test_a_module_that_the_step_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    config = types.ModuleType("config_of_a_user")
    config.rate = 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "config_of_a_user", config)

    def step() -> Any:
        from config_of_a_user import rate  # type: ignore[import-not-found]

        return rate

    reach = Reach(step)
    config.rate = 2.0  # type: ignore[attr-defined]
    assert reach.changed() == ["config_of_a_user.rate: 1.0 -> 2.0"]


def test_the_code_of_an_installed_library_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    text = "STATE = [1]\nRATE = 1\ndef call():\n    return STATE\n"
    (folder / "library_of_others.py").write_text(text.replace("STATE", "HIDDEN"))
    (folder / "library_on_flashlight.py").write_text(f"from flashlight_py import nn\n{text}")
    monkeypatch.syspath_prepend(str(folder))
    others = importlib.import_module("library_of_others")
    users = importlib.import_module("library_on_flashlight")
    reach = Reach(lambda: (others.call(), others.RATE, users.call()))
    others.HIDDEN.append(2)
    users.STATE.append(2)
    others.RATE = 2  # type: ignore[attr-defined]
    assert sorted(reach.changed()) == ["STATE: 1 items -> 2", "others.RATE: 1 -> 2"]


def test_what_a_weak_reference_refers_to_is_followed() -> None:
    one = Plain(count=1)
    reference = weakref.ref(one)
    reach = Reach(using(reference))
    one.count = 2  # type: ignore[attr-defined]
    assert reach.changed() == ["value.count: 1 -> 2"]


def test_a_kind_of_list_with_a_length_of_its_own() -> None:
    class Odd(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            raise AssertionError("__iter__ was called")

    odd = Odd((1, 2))
    reach = Reach(using(odd))
    guards = native.guards(reach.guards())
    assert native.hold(guards)
    odd.unit = "m"  # type: ignore[attr-defined]
    assert not native.hold(guards)
    odd.append(3)
    assert sorted(reach.changed()) == ["value.unit: nothing -> 'm'", "value: 2 items -> 3"]


def test_the_method_of_an_object_is_a_step() -> None:
    one = Plain(count=1)
    reach = Reach(one.step)
    one.count = 2  # type: ignore[attr-defined]
    assert reach.changed() == ["self.count: 1 -> 2"]


def test_data_cost_nothing() -> None:
    data = [(fl.input(np.zeros(3)), fl.no_grad(np.zeros(1))) for _ in range(2000)]
    reach = Reach(lambda i: data[i])
    assert (reach.variables, reach.arrays) == ([], [])
    params = [fl.param(np.zeros(1)) for _ in range(2000)]
    optimizer = fl.optim.SGDOptimizer(params, 0.1, momentum=0.9)
    reach = Reach(using(optimizer))
    assert len(reach.variables) == 2000
    assert len(reach.arrays) == 4000
    assert len(Reach(using(params)).variables) == 2000


def test_a_model_of_20_layers_is_walked_at_once() -> None:
    step, _ = seed_step(fl.nn.Sequential([fl.nn.Linear(4, 4) for _ in range(20)]))
    Reach(step)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        Reach(step)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.02  # ten times what it takes


@pytest.mark.parametrize("value", [1, using, print, np, fl, Plain, fl.nn.Linear, None, "text"])
def test_any_kind_of_value_can_be_met(value: Any) -> None:
    assert native.hold(native.guards(Reach(using(value)).guards()))


def test_arrays_of_gpus_end_the_capture() -> None:
    """A class in the place of CuPy's, which this machine may lack."""
    kind = type("ndarray", (), {"__module__": "cupy", "__hash__": None, "value": 1})
    held = [kind()]

    @fl.capture
    def step(x: np.ndarray) -> Any:
        held[0].value += 1
        return x * held[0].value

    with pytest.warns(RuntimeWarning, match=r"cannot be compared: held\[0\]"):
        found = [step(np.ones(2))[0] for _ in range(6)]
    assert found == [2, 3, 4, 5, 6, 7]
