"""The bounded step in native code, NumPy and the real pytagi."""

from collections.abc import Sequence

import numpy as np
import pytest

from flashlight_py.tagi.layer import Parameter, ParameterBucket, cap_factor, step_in_numpy
from tests.tables import for_each
from tests.tagi.helpers import equal, needs_kernels
from tests.tagi.oracle import compare


@for_each("batch cap", [(0, 0.1), (1, 0.1), (2, 2.0), (255, 2.0), (256, 3.0), (4096, 3.0)])
def test_cap_factor_depends_on_the_batch_size(batch: int, cap: float) -> None:
    assert cap_factor(batch) == cap


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 255, 256])
def test_bounded_steps_equal_pytagi(batch: int) -> None:
    rng = np.random.default_rng(batch)
    x, y = 3 * rng.standard_normal((batch, 4)), 5000 * rng.standard_normal((batch, 3))
    net = "Sequential(Linear(4, 6), ReLU(), Linear(6, 3))"
    reference, _ = compare(net, x, y, np.full(y.shape, 1e-4), rtol=1e-4, atol=2e-5)
    change = reference.after["Linear.2"][0] - reference.before["Linear.2"][0]
    bound = np.sqrt(reference.before["Linear.2"][1]) / cap_factor(batch)
    equal(np.abs(change).max(), bound.max(), rtol=1e-4)


def arrays(size: int) -> tuple[np.ndarray, ...]:
    """Return means, variances and sums, some of them at or beyond each limit."""
    rng = np.random.default_rng(size)
    mean = rng.standard_normal(size).astype(np.float32)
    variance = rng.uniform(0, 1, size).astype(np.float32) ** 4
    d = (rng.standard_normal(size) * 10.0 ** rng.integers(-4, 5, size)).astype(np.float32)
    e = (rng.standard_normal(size) * 10.0 ** rng.integers(-4, 9, size)).astype(np.float32)
    for number, (s, sum_d, sum_e) in enumerate(
        [(0, 1, 1), (1e-45, 1e30, -1e30), (1, np.nan, 0), (1, 0, np.nan), (1, np.inf, -np.inf)]
    ):
        if number < size:
            variance[number], d[number], e[number] = s, sum_d, sum_e
    return mean, variance, d, e


def step(arrays: Sequence[np.ndarray], cap: float) -> tuple[np.ndarray, ...]:
    """Return the arrays after the step of a bucket."""
    mean, variance, *sums = arrays
    bucket = ParameterBucket([Parameter(mean, variance)], "cpu")
    bucket.sums[...] = np.concatenate(sums)
    bucket.step(cap)
    return bucket.mean, bucket.variance, *np.split(bucket.sums, 2)


@needs_kernels
@for_each("size", [0, 1, 2, 15, 16, 17, 1000, 4099])
@for_each("batch", [1, 16, 256])
def test_step_kernel_has_the_bits_of_numpy(size: int, batch: int) -> None:
    ours, reference = arrays(size), arrays(size)
    with np.errstate(all="ignore"):
        step_in_numpy(*reference, 1 / cap_factor(batch))
    actual = step(ours, cap_factor(batch))
    equal(actual, reference)
    assert (actual[1] > 0).all()


@needs_kernels
@for_each("batch", [1, 16, 256])
def test_step_kernel_has_the_bits_of_numpy_at_the_bounds(batch: int) -> None:
    """Values below, at and above the bounds, in uniform and mixed blocks."""
    cap, rng = cap_factor(batch), np.random.default_rng(0)
    variance = rng.uniform(1e-4, 1, 8192).astype(np.float32)
    share = np.repeat([0.3, 0.99, 0.995, 1, 1 - 1e-7, 1 + 1e-7, 1.01, 3], 1024)  # of the bound
    share[::7] = rng.choice(share, share[::7].size)
    bound = share * np.sqrt(variance) / cap
    sums = (bound / variance).astype(np.float32), (-bound / variance**2).astype(np.float32)
    mean = rng.standard_normal(8192).astype(np.float32)
    ours, reference = ([mean.copy(), variance.copy(), *sums] for _ in range(2))
    step_in_numpy(*reference, 1 / cap)
    equal(step(ours, cap), reference)


def test_step_uses_numpy_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashlight_py.tagi.states.tagi_kernels", lambda: None)
    ours, reference = arrays(50), arrays(50)
    with np.errstate(all="ignore"):
        actual = step(ours, 2.0)
        step_in_numpy(*reference, 0.5)
    equal(actual[0], reference[0])
