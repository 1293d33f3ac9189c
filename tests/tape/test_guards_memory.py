"""Guards leak nothing, go with what they guard, and refuse what they cannot guard."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest

from flashlight_py._native import load
from flashlight_py.tape.reach import Reach
from tests.tape.test_guards import Plain, Watch, using

native = load("tape")


def test_nothing_is_leaked_by_many_checks() -> None:
    values: list[Any] = [object(), 1.5, "text"]
    one = Plain(values=values, rate=1.5)
    watch = Watch(using(one))
    before = [sys.getrefcount(value) for value in (one, values, vars(one), *values)]
    for number in range(100_000):
        one.rate = 1.0 + 0.5  # a new object every now and then
        if number % 1000 == 0:
            one.rate = float("1.5")
        assert native.hold(watch.guards)
    one.rate = values[1]
    assert native.hold(watch.guards)
    assert [sys.getrefcount(value) for value in (one, values, vars(one), *values)] == before
    del watch
    gc.collect()
    assert sys.getrefcount(values[0]) < before[3]


def test_a_class_that_was_met_can_go() -> None:
    class Short:
        __slots__ = ("__weakref__", "value")

    one = Short()
    native.guards(Reach(using(one)).guards())
    gone = weakref.ref(Short)
    del one, Short
    gc.collect()
    assert gone() is None


def test_guards_that_hold_themselves_are_collected() -> None:
    one = Plain()
    one.guards = native.guards(Reach(using(one)).guards())  # type: ignore[attr-defined]
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "entry",
    [
        (),
        ("other", [], ()),
        ("list", [1], (0,), (1,)),
        ("list", [1], (0, 1), (1,), 1),
        ("list", [1], (5,), (1,), 1),
        ("list", {}, (0,), (1,), 1),
        ("list", [1], [0], (1,), 1),
        ("whole", None, [], (), ()),
        ("slots", 1, ("a",), (1,)),
    ],
)
def test_bad_entries_are_refused(entry: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError, SystemError)):
        native.guards([entry])


def test_other_objects_are_no_guards() -> None:
    with pytest.raises(TypeError, match="guards_new"):
        native.hold([])
