"""The bucket plan: a pure function."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlight_py.distributed.reducers.reducer import plan_buckets


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_a_plan_holds_every_array_once_in_order_and_within_the_limit(
    sizes: list[int], limit: int
) -> None:
    plan = plan_buckets(sizes, limit)
    assert [index for bucket in plan for index in bucket] == list(range(len(sizes)))
    for bucket in plan:
        assert bucket
        assert sum(sizes[i] for i in bucket) <= limit or len(bucket) == 1


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 60))
def test_a_bucket_is_closed_only_when_the_next_array_does_not_fit(
    sizes: list[int], limit: int
) -> None:
    plan = plan_buckets(sizes, limit)
    for bucket, after in itertools.pairwise(plan):
        assert sum(sizes[i] for i in bucket) + sizes[after[0]] > limit


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="must"):
        plan_buckets([1], 0)
