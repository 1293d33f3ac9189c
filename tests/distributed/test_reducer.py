"""Reducers return the scaled sum of every added array, for any buckets."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlight_py as fl
from flashlight_py.distributed.reducers.reducer import plan_buckets
from tests.distributed.conformance import on_ranks


@pytest.mark.parametrize(
    "options",
    [
        None,  # an InlineReducer
        *({}, {"async_op": False}, {"contiguous": False}),
        *({"bucket_bytes": 1}, {"bucket_bytes": 20_000}),
        {"bucket_bytes": 20_000, "async_op": False, "contiguous": False},
    ],
)
@on_ranks(("single", 1), ("shm", 2), ("shm", 3))
def test_reducers_return_scaled_sums(rank: int, size: int, options: dict[str, Any] | None) -> None:
    reducer: Any = fl.InlineReducer(1 / size)
    if options is not None:
        reducer = fl.CoalescingReducer(1 / size, **options)
    for _ in range(3):  # a reducer is reused after finalize
        shapes = [(10,), (200, 30), (), (0,), (5000,), (3, 4)] * 3
        dtypes = [np.float32, np.float64] * 9
        arrays = [
            np.full(s, float(rank + i), d)
            for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        arrays[1] = np.asfortranarray(arrays[1])
        for array in arrays:
            reducer.add(array)
        reducer.finalize()
        for i, array in enumerate(arrays):
            np.testing.assert_allclose(array, i + (size - 1) / 2)


@on_ranks(("shm", 2))
def test_abandoned_and_rejected_arrays_are_not_sent(rank: int, size: int) -> None:
    for reducer in (fl.InlineReducer(1.0), fl.CoalescingReducer(1.0)):
        with pytest.raises(TypeError, match="list"):
            reducer.add([1.0])
    x = np.ones(3)
    reducer.add(x)
    reducer.abandon()
    reducer.finalize()
    assert np.all(x == 1)


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_plan_buckets_is_complete_and_minimal(sizes: list[int], limit: int) -> None:
    plan = plan_buckets(sizes, limit)
    assert [index for bucket in plan for index in bucket] == list(range(len(sizes)))
    for bucket in plan:
        assert bucket
        assert sum(sizes[i] for i in bucket) <= limit or len(bucket) == 1
    for bucket, after in itertools.pairwise(plan):  # closed because the next array does not fit
        assert sum(sizes[i] for i in bucket) + sizes[after[0]] > limit
    with pytest.raises(ValueError, match="must"):
        plan_buckets([1], 0)
