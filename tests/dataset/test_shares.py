"""Shares of positions: none twice, none left out, balanced; and the same steps for any number."""

from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlight_py.dataset.shares import (
    batch_positions,
    contiguous_share,
    count_batches,
    strided_share,
    weight_of_part,
)

N = st.integers(0, 400)
SHARES = st.integers(1, 12)
BATCH = st.integers(1, 50)


@given(N, SHARES)
def test_contiguous_shares_follow_each_other_and_are_balanced(n: int, shares: int) -> None:
    parts = [contiguous_share(n, share, shares) for share in range(shares)]
    assert list(chain(*parts)) == list(range(n))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(N, SHARES, st.booleans())
def test_strided_shares_have_every_position_once(n: int, shares: int, drop_last: bool) -> None:
    parts = [strided_share(n, share, shares, drop_last) for share in range(shares)]
    stop = n - n % shares if drop_last else n
    assert sorted(chain(*parts)) == list(range(stop))
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= (0 if drop_last else 1)


@given(N, SHARES, st.integers(1, 10), st.booleans())
def test_a_step_covers_the_same_positions_for_any_number_of_shares(
    n: int, shares: int, local_batch: int, drop_last: bool
) -> None:
    """The point of strides. With drop_last only what is no whole batch depends on the number."""
    parts = [strided_share(n, share, shares, drop_last) for share in range(shares)]
    batch = shares * local_batch
    for step in range(count_batches(n, batch, drop_last)):
        taken = slice(step * local_batch, (step + 1) * local_batch)
        covered = sorted(chain.from_iterable(part[taken] for part in parts))
        assert covered == list(batch_positions(step, n, batch))


def test_contiguous_shares_do_not_have_that_property() -> None:
    firsts = [[contiguous_share(8, r, size)[0] for r in range(size)] for size in (2, 4)]
    assert firsts == [[0, 4], [0, 2, 4, 6]]


@given(N, BATCH, SHARES, st.booleans())
def test_parts_of_batches_make_the_batches(
    n: int, batch_size: int, shares: int, drop_last: bool
) -> None:
    batches = [
        batch_positions(index, n, batch_size)
        for index in range(count_batches(n, batch_size, drop_last))
    ]
    stop = n // batch_size * batch_size if drop_last else n
    assert list(chain(*batches)) == list(range(stop))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert all(batches)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=60), SHARES)
def test_weighted_means_of_parts_average_to_the_mean(values: list[int], shares: int) -> None:
    total = Fraction(0)
    for share in range(shares):
        part = [values[i] for i in contiguous_share(len(values), share, shares)]
        if part:
            weight = Fraction(len(part) * shares, len(values))
            assert weight_of_part(len(part), len(values), shares) == float(weight)
            total += weight * Fraction(sum(part), len(part))
    assert total / shares == Fraction(sum(values), len(values))


@pytest.mark.parametrize(
    ("n", "drop_last", "expected"), [(7, False, 3), (7, True, 2), (6, True, 2)]
)
def test_the_number_of_batches(n: int, drop_last: bool, expected: int) -> None:
    assert count_batches(n, 3, drop_last) == expected
