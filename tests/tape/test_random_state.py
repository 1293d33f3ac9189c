"""Random structures, changed at random: guards hold exactly as long as nothing differs."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from flashlight_py._native import load
from flashlight_py.tape.reach import Reach
from tests.tape.test_guards import Plain, Slotted, using

native = load("tape")
LEAVES = (0, 1, True, 1.0, -0.0, 0.0, None, "a", "b", (1, 2), (1, 2.0), b"a", 10**20)


def grow(dice: random.Random, depth: int, found: list[Any]) -> Any:
    """Return a random structure; ``found`` gets what of it can change."""
    kind = dice.choice([list, dict, deque, tuple, Plain, Slotted] if depth else [None])
    if kind is None:
        return dice.choice(LEAVES)
    inside = [grow(dice, dice.randrange(depth), found) for _ in range(dice.randrange(4))]
    if kind is tuple:
        return tuple(inside)
    made: Any
    if kind is Plain:
        made = Plain(**{f"a{i}": value for i, value in enumerate(inside)})
    elif kind is Slotted:
        made = Slotted()
        made.count = inside
    else:
        made = dict(enumerate(inside)) if kind is dict else kind(inside)
    found.append(made)
    return made


def change(dice: random.Random, one: Any) -> None:
    """Set, add or remove something in a container, or do nothing."""
    value = dice.choice(LEAVES)
    if isinstance(one, Slotted):
        one.count = value
        return
    items = vars(one) if isinstance(one, Plain) else one
    keys = list(items) if isinstance(items, dict) else list(range(len(items)))
    what = dice.randrange(3) if keys else 1
    if what == 0:
        items[dice.choice(keys)] = value
    elif what == 1 and isinstance(items, dict):
        items[f"new{dice.randrange(3)}"] = value
    elif what == 1:
        items.append(value)
    else:
        del items[dice.choice(keys)]


def state(value: Any) -> Any:
    """Return what tells one state from another: values of leaves, identities of all else."""
    if type(value) in (list, deque):
        return id(value), [state(item) for item in value]
    if type(value) is tuple:
        return tuple, [state(item) for item in value]
    if type(value) is dict:
        return id(value), [(state(key), state(item)) for key, item in value.items()]
    if isinstance(value, Plain):
        return id(value), state(dict(vars(value)))[1]
    if isinstance(value, Slotted):
        return id(value), state(value.count)
    return type(value), repr(value)


@pytest.mark.parametrize("seed", range(100))
def test_guards_hold_exactly_as_long_as_nothing_differs(seed: int) -> None:
    dice = random.Random(seed)
    found: list[Any] = []
    root = [grow(dice, 4, found) for _ in range(4)]
    found.append(root)
    guards, before = native.guards(Reach(using(root)).guards()), state(root)
    for _ in range(20):
        change(dice, dice.choice(found))
        now = state(root)
        assert native.hold(guards) == (now == before)
        if now != before:
            guards, before = native.guards(Reach(using(root)).guards()), now
