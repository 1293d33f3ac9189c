"""Overlap of arrays that a verb writes."""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds

import flashlight_py as fl
from flashlight_py.distributed.calls import checks
from flashlight_py.distributed.calls.checks import OverlapCheck
from flashlight_py.distributed.reducers import reducer
from tests.cupy_stand_in import StandInCupy

X = np.zeros((8, 6))
OVERLAPPING: list[tuple[Any, Any]] = [
    (X, X),
    (X, X[:]),
    (X[1:3], X[2:4]),
    (X, X[3, 2:3]),
    (X[::-1], X[7]),
    (X[:, 0], X[4:, 0]),
    (X.T[1:], X[:, 5]),
    (X.view(np.int32)[:, 1], X[:, 0]),
]
APART: list[tuple[Any, Any]] = [
    (X[:4], X[4:]),
    (X[:, :3], X[:, 3:]),
    (X[::2], X[1::2]),
    (X[:0], X),
    (X, np.zeros(3)),
    (np.zeros(()), np.zeros(())),
]


@pytest.fixture(params=[False, True], ids=["natively", "by NumPy"], autouse=True)
def bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(checks, "_numpy_bounds", byte_bounds)


def add_all(arrays: Any) -> None:
    together = OverlapCheck("a verb")
    for array in arrays:
        together.add(array)


@pytest.mark.parametrize("pair", OVERLAPPING)
def test_overlap_check_rejects_overlapping_arrays_in_any_order(pair: tuple[Any, Any]) -> None:
    between = [np.zeros(2) for _ in range(20)]
    for arrays in ([*pair, *between], [*between, *pair[::-1]], [pair[0], *between, pair[1]]):
        with pytest.raises(ValueError, match=r"array \d+, which shares memory with array \d+"):
            add_all(arrays)


@pytest.mark.parametrize("pair", APART)
def test_overlap_check_accepts_disjoint_arrays(pair: tuple[Any, Any]) -> None:
    for arrays in (pair, pair[::-1]):
        add_all(arrays)


def test_overlap_check_accepts_overlapping_arrays_that_are_only_read() -> None:
    with pytest.raises(ValueError, match="array 2, which shares memory with array 1"):
        add_all([np.zeros(0), X, X[1:]])  # empty arrays count
    together = OverlapCheck("a verb")
    together.add(X, writes=False)
    together.add(X[1:], writes=False)
    with pytest.raises(ValueError, match=r"array 2, which shares memory with array [01]"):
        together.add(X[2], writes=True)


@pytest.mark.parametrize("verb", [fl.all_gather, fl.reduce_scatter])
def test_list_verbs_reject_overlapping_out_arrays(verb: Any) -> None:
    one, two, out = np.ones((1, 2)), np.full((1, 2), 2.0), np.zeros((1, 2))
    with pytest.raises(ValueError, match=r"out\[1\], which shares memory with out\[0\]"):
        verb([one, two], out=[out, out])
    with pytest.raises(ValueError, match=r"x\[1\], which shares memory with out\[0\]"):
        verb([one, two], out=[two, out])
    assert [x.tolist() for x in verb([one, two], out=[one, out])] == [[[1, 1]], [[2, 2]]]


def many(make: Callable[[], reducer.Reducer]) -> Callable[[Any, Any], None]:
    def reduce(one: Any, other: Any) -> None:
        item = make()
        for _ in range(2):  # after finalize, arrays may be added again
            item.add(one)
            item.finalize()
        item.add(one)
        item.add(other)

    return reduce


def batch(*messages: tuple[Any, Any]) -> Any:
    return fl.batch_isend_irecv([fl.P2POp(kind, x, 0) for kind, x in messages])


VERBS: dict[str, Callable[[Any, Any], Any]] = {
    "one by one": lambda a, b: fl.all_reduce_multiple([a, b]),
    "packed": lambda a, b: fl.all_reduce_multiple([a, b], contiguous=True),
    "two receives": lambda a, b: batch(("recv", a), ("recv", b)),
    "a send and a receive": lambda a, b: batch(("send", a), ("recv", b)),
    "eager": many(lambda: reducer.EagerReducer(1.0)),
    "coalescing": many(lambda: fl.CoalescingReducer(1.0)),
    "one bucket each": many(lambda: fl.CoalescingReducer(1.0, bucket_bytes=8)),
}


@pytest.mark.parametrize("name", VERBS)
def test_verbs_reject_overlapping_arrays(name: str) -> None:
    a = np.ones(4)
    with pytest.raises(ValueError, match="shares memory"):
        VERBS[name](a, a[:])
    assert np.all(a == 1)
    batch(("send", a), ("send", a[:])).wait()  # nothing is written
    batch(("recv", np.zeros(4)), ("recv", np.zeros(4)))


def test_overlap_check_compares_gpu_arrays_with_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = StandInCupy(1)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x = cupy.asarray(np.zeros((8, 6)))
    for one, other in [(x, x[3, 2:3]), (x[::2], x[::4]), (x.view(np.int32)[:, 1], x[:, 0])]:
        with pytest.raises(ValueError, match="array 1, which shares memory with array 0"):
            add_all([one, other])
    add_all([x[::2], x[1::2]])
    add_all([x[:, :3], np.zeros(3), x[:, 3:], cupy.asarray(np.zeros(3))])


def test_overlap_check_rejects_strides_at_once_if_the_search_is_too_hard() -> None:
    """Strides of NumPy's documentation, for which the search takes minutes."""
    buffer = np.zeros(192163377, np.int8)  # never accessed
    strided = np.lib.stride_tricks.as_strided
    one = strided(buffer, strides=(36674, 61119, 85569), shape=(1049, 1049, 1049))
    other = strided(buffer[64023025:], strides=(12223, 12224, 1), shape=(1049, 1049, 1))
    began = time.monotonic()
    with pytest.raises(ValueError, match="shares memory"):
        add_all([one, other])
    assert time.monotonic() - began < 10
