"""Who gets which samples: nobody's twice, and the same number of batches for all."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlight_py.dataset import partition_by_round_robin


def dealt(*arguments: int, **options: bool) -> list[list[int]]:
    n, partitions, batch_size = arguments
    return [
        partition_by_round_robin(n, i, partitions, batch_size, **options).tolist()
        for i in range(partitions)
    ]


@pytest.mark.parametrize(
    ("n", "partitions", "batch_size", "expected"),
    [
        (8, 2, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (7, 2, 1, [[0, 2, 4], [1, 3, 5]]),
        (7, 2, 2, [[0, 1, 4, 5], [2, 3, 6]]),
        (11, 2, 4, [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10]]),
        (9, 2, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 3, 4, [[], [], []]),
        (0, 2, 1, [[], []]),
    ],
)
def test_batches_are_dealt_in_turn(
    n: int, partitions: int, batch_size: int, expected: list[list[int]]
) -> None:
    assert dealt(n, partitions, batch_size) == expected


def test_allow_empty_drops_nothing() -> None:
    assert dealt(9, 2, 4, allow_empty=True) == [[0, 1, 2, 3, 8], [4, 5, 6, 7]]
    assert dealt(2, 3, 4, allow_empty=True) == [[0], [1], []]
    assert dealt(7, 2, 1, allow_empty=True) == [[0, 2, 4, 6], [1, 3, 5]]


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 9))
def test_each_sample_at_most_once_and_equally_many_batches(
    n: int, partitions: int, batch_size: int
) -> None:
    parts = dealt(n, partitions, batch_size)
    samples = sorted(chain(*parts))
    assert samples == list(range(len(samples)))
    assert n - len(samples) < partitions
    assert len({-(-len(part) // batch_size) for part in parts}) == 1
    assert all(part == sorted(part) for part in parts)


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 9))
def test_with_allow_empty_each_sample_exactly_once(
    n: int, partitions: int, batch_size: int
) -> None:
    assert sorted(chain(*dealt(n, partitions, batch_size, allow_empty=True))) == list(range(n))


@pytest.mark.parametrize(
    "arguments", [(-1, 0, 1, 1), (5, 2, 2, 1), (5, -1, 2, 1), (5, 0, 2, 0), (5, 0, 0, 1)]
)
def test_senseless_arguments_are_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"got n={arguments[0]}, partition={arguments[1]}"):
        partition_by_round_robin(*arguments)
