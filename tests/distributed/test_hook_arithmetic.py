"""The arithmetic of the hooks by itself: rounding, orthonormal columns, products."""

from typing import Any

import numpy as np
import pytest

from flashlight_py.distributed.reducers.half import LARGEST, from_half, to_half
from flashlight_py.distributed.reducers.power_sgd import orthonormal, outer_sum


def test_half_precision_is_numpys_for_every_kind_of_number() -> None:
    """Every 997th float32: normal, small, zero; what is too large becomes the largest number."""
    numbers = np.arange(0, 1 << 32, 997, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = numbers.astype(np.float16)
    expected[np.isfinite(numbers) & (numbers > LARGEST)] = LARGEST
    expected[np.isfinite(numbers) & (numbers < -LARGEST)] = -LARGEST
    got = to_half(numbers)
    nan = np.isnan(numbers)
    assert np.array_equal(got[~nan].view(np.uint16), expected[~nan].view(np.uint16))
    assert np.isnan(got[nan]).all()


def test_ties_go_to_even_also_among_small_numbers() -> None:
    steps = np.arange(0.0, 40.0)
    for unit in (2.0**-25, 2.0**-14, 1.0):  # half of the last place at some magnitude
        numbers = (unit * (steps if unit < 1e-6 else 2048 + steps)).astype(np.float32)
        with np.errstate(under="ignore"):
            assert np.array_equal(to_half(numbers), numbers.astype(np.float16))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_half_is_decoded_as_it_was(dtype: str) -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    out = np.empty(half.shape, dtype)
    from_half(half, out)
    assert np.array_equal(out, half.astype(dtype), equal_nan=True)


def test_float64_beyond_float32_stays_finite() -> None:
    numbers = np.array([1e300, -1e39, np.inf, -np.inf, 1e-300, -0.0])
    got = to_half(numbers)
    assert got.tolist() == [LARGEST, -LARGEST, np.inf, -np.inf, 0.0, 0.0]
    assert np.signbit(got[-1])


def matrix(kind: str, dtype: str) -> Any:
    random = np.random.default_rng(0)
    columns = random.standard_normal((50, 4))
    if kind == "dependent":
        columns[:, 2] = 3 * columns[:, 0] - columns[:, 1]
    if kind == "zero":
        columns[...] = 0
    if kind == "nearly dependent":
        columns[:, 1:] = columns[:, :1] + 1e-5 * columns[:, 1:]
    if kind == "tiny":
        columns *= 1e-30
    return columns.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["any", "dependent", "zero", "nearly dependent", "tiny"])
def test_columns_become_orthonormal_and_span_what_they_spanned(kind: str, dtype: str) -> None:
    columns = matrix(kind, dtype)
    before, got = columns.copy(), orthonormal(columns)
    epsilon = np.finfo(dtype).eps
    assert got.dtype == dtype
    assert np.array_equal(columns, before)
    np.testing.assert_allclose(got.T @ got, np.eye(4), atol=20 * epsilon)
    np.testing.assert_allclose(
        got @ (got.T @ columns), columns, rtol=0, atol=50 * epsilon * abs(columns).max()
    )


def test_directions_that_are_missing_are_the_same_every_time() -> None:
    assert np.array_equal(orthonormal(np.zeros((30, 3))), orthonormal(np.zeros((30, 3))))


def test_what_is_not_finite_shows() -> None:
    columns = matrix("any", "float32")
    columns[3, 1] = np.inf
    assert np.isnan(orthonormal(columns)).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 70_000), (300, 200)])
def test_outer_sum_is_the_product(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((extent, 3)) for extent in shape)
    out = np.empty(shape)
    outer_sum(left, right, out)
    np.testing.assert_allclose(out, left @ right.T, rtol=0, atol=1e-14)
