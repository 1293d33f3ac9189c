"""Random programs over NumPy's arrays and over variables, captured and compared bit by bit.

EXAMPLES=5000 in the environment tries as many, others in every run.
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck

import flashlight_py as fl
from tests.tape.programs import GLOBALS, State, arguments, programs
from tests.tape.steps import assert_same_bits

FEW = 150
EXAMPLES = int(os.environ.get("EXAMPLES", FEW))
LISTS = (tuple, list)


def outcome(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 (of any kind, to be compared)
        return type(error).__name__


def run(drawn: tuple[str, Any]) -> Any:
    """Run a program eagerly and captured, compare after each call, and return the captured one."""
    text, (shape, dtypes, _, seed) = drawn
    scope: dict[str, Any] = dict(GLOBALS)
    exec(text, scope)
    eager, state = (State(shape, dtypes[2], seed) for _ in range(2))
    step, captured = scope["make"](eager), fl.capture(scope["make"](state))
    results: list[Any] = []
    with np.errstate(all="ignore"):
        for call in range(8):
            given = arguments(drawn[1], call)
            other = copy.deepcopy(given)
            if call == 5 and seed % 3 == 1 and alike(given[0], eager.p):
                given[0], other[0] = eager.p, state.p
            if call in (3, 6) and seed % 3 == 2:
                for each in (eager, state):
                    each.w.grad = np.full_like(each.w.array, 0.5)
            expected, got = outcome(step, *given), outcome(captured, *other)
            assert_same_bits(expected, got)
            if isinstance(expected, str):  # what was changed before the error is not promised
                break
            assert_same_bits([given, eager.all()], [other, state.all()])
            now = leaves(expected)
            results.append((leaves(got), [np.copy(array_of(each), "K") for each in now], now))
    for each in results:  # which later calls have changed as eager ones do, or not
        for got, before, now in zip(*each, strict=True):
            assert is_same(before, np.asarray(array_of(got))) or is_same(now, got)
    return captured


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in leaves(part)] if type(value) in LISTS else [value]


def alike(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype)


def array_of(value: Any) -> Any:
    return value.array if isinstance(value, fl.Variable) else value


def is_same(expected: Any, got: Any) -> bool:
    try:
        assert_same_bits(expected, got)
    except AssertionError:
        return False
    return True


def check(examples: int, derandomize: bool) -> None:
    ways = {"replayed": 0, "eager": 0, "neither": 0}

    @hypothesis.settings(
        max_examples=examples,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )
    @hypothesis.given(programs())
    def one(drawn: tuple[str, Any]) -> None:
        captured = run(drawn)
        way = "eager" if captured.reason else "replayed" if captured.replays else "neither"
        ways[way] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one()
    assert ways["replayed"] > 0.5 * examples, ways
    assert ways["neither"] < 0.3 * examples, ways


def test_programs() -> None:
    check(EXAMPLES, EXAMPLES == FEW)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_programs() -> None:
    check(20 * FEW, derandomize=True)
