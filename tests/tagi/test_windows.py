"""Window kernels, compared with NumPy, and their adjoints."""

import numpy as np

from flashlight_py.tagi import windows as module
from flashlight_py.tagi.windows import Windows
from tests.tables import for_each
from tests.tagi.helpers import equal, in_numpy, needs_kernels

F = np.float32
ALL = [
    Windows(3, 1, 1, 1, 6, 7),
    Windows(3, 1, 0, 0, 5, 20),
    Windows(3, 2, 0, 1, 6, 8),
    Windows(2, 3, 1, 1, 6, 9),
    Windows(1, 2, 0, 0, 5, 7),
    Windows(5, 1, 4, 4, 2, 3),
]


def images(over: Windows, rng: np.random.Generator, first: bool) -> np.ndarray:
    """Return a batch of 5 images with 3 channels, in either memory order."""
    values = rng.standard_normal((3, 5, over.height, over.width)).astype(F)
    return values.transpose(1, 0, 2, 3) if first else values.reshape(5, 3, over.height, over.width)


@needs_kernels
@for_each("over", ALL)
@for_each("first", [False, True])
def test_patches_kernels_equal_numpy(over: Windows, first: bool) -> None:
    """Bitwise, for means only, with squares, with variances, and backward."""
    rng = np.random.default_rng(0)
    mean, back = images(over, rng, first), images(over, rng, first)
    variance = np.abs(images(over, rng, first))
    for part in over.parts(5, 2 * over.out_width):
        count = part.columns.stop - part.columns.start
        for kinds, v in ((1, None), (2, None), (3, variance)):
            columns_out, reference = np.full((2, kinds, 3 * over.kernel**2, count), np.nan, F)
            module.patches(over, part, mean, v, tuple(columns_out))
            in_numpy(module.patches, over, part, mean, v, tuple(reference))
            equal(columns_out, reference)
        columns = rng.standard_normal((3 * over.kernel**2, count)).astype(F)
        expected = back.copy()
        in_numpy(module.add_patches, over, part, columns, expected)
        module.add_patches(over, part, columns, back)
        equal(back, expected)


@for_each("over", ALL)
@for_each("columns", [1, 40, 10_000])
def test_add_patches_is_the_adjoint_of_patches(over: Windows, columns: int) -> None:
    """<patches(x), y> == <x, add_patches(y)>, over chunks that cover all windows."""
    rng = np.random.default_rng(1)
    x = rng.integers(-9, 9, (5, 3, over.height, over.width)).astype(F)
    back, left, covered = np.zeros_like(x), 0.0, 0
    for part in over.parts(5, columns):
        assert part.columns.start == covered
        covered = part.columns.stop
        columns_out = np.empty((3 * over.kernel**2, covered - part.columns.start), F)
        module.patches(over, part, x, None, (columns_out,))
        y = rng.integers(-9, 9, columns_out.shape).astype(F)
        left += (columns_out * y).sum()
        module.add_patches(over, part, y, back)
    assert covered == 5 * over.out_height * over.out_width
    assert left == (x * back).sum()


@needs_kernels
@for_each("over", ALL)
@for_each("first", [False, True])
def test_sum_windows_kernel_equals_numpy(over: Windows, first: bool) -> None:
    """Bitwise, including the adjoint."""
    rng = np.random.default_rng(2)
    x = images(over, rng, first)
    sums = module.sum_windows(over, x, 1 / 9)
    equal(sums, in_numpy(module.sum_windows, over, x, 1 / 9))
    deltas = rng.standard_normal(sums.shape).astype(F)
    spread = module.spread_windows(over, deltas, 1 / 9, x)
    expected = in_numpy(module.spread_windows, over, deltas, 1 / 9, x)
    equal(spread, expected)
    assert np.isclose((sums * deltas).sum(), (x * spread).sum(), rtol=1e-4, atol=1e-4)


@needs_kernels
@for_each("over", [over for over in ALL if over.after < over.kernel])
@for_each("first", [False, True])
def test_largest_kernel_equals_numpy(over: Windows, first: bool) -> None:
    """Includes ties and NaN; backward results differ by rounding."""
    rng = np.random.default_rng(3)
    mean = np.round(images(over, rng, first))
    mean[rng.uniform(size=mean.shape) < 0.3] = np.nan
    variance = np.abs(images(over, rng, not first))
    results = module.largest(over, mean, variance)
    expected = in_numpy(module.largest, over, mean, variance)
    equal(results, expected)
    assert module.largest(over, mean, None)[1] is None
    deltas = rng.standard_normal(results[0].shape).astype(F)
    spread = module.spread_taken(over, deltas, results[2], mean)
    expected_spread = in_numpy(module.spread_taken, over, deltas, results[2], mean)
    equal(spread, expected_spread, rtol=1e-5, atol=1e-6)
