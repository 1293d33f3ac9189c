"""OutputUpdater (all or selected outputs, heteroscedastic errors), and the bounded step."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flashlight_py.tagi import nn
from flashlight_py.tagi.layer import Parameter, ParameterBucket, cap_factor, step_in_numpy
from tests.tables import for_each
from tests.tagi.helpers import equal, needs_kernels
from tests.tagi.oracle import compare

RNG = np.random.default_rng(1)
X, Y = RNG.standard_normal((6, 3)), RNG.standard_normal((6, 4))
ERRORS = RNG.uniform(0.01, 0.5, Y.shape)
NET = "Sequential(Linear(3, 5), ReLU(), Linear(5, 4))"


def pairs(noise: float) -> dict[str, Any]:
    """Return parameters of Linear(3, 4) whose odd outputs, error variances, are about ``noise``."""
    weight = RNG.standard_normal((4, 3)) * [[1], [0.01], [1], [0.01]]
    entry = (weight, np.full(12, 0.1), [0.5, noise, 0.2, noise], [0.2, 0.05, 0.2, 0.05])
    return {"Linear.0": tuple(np.array(moment, np.float32).ravel() for moment in entry)}


@pytest.mark.slow
def test_update_ignores_unobserved_outputs_like_pytagi() -> None:
    y = Y.copy()
    y[1] = y[2, 3] = y[4, 0] = np.nan
    reference, _ = compare(NET, X, y, ERRORS)
    assert not reference.output_deltas[0].reshape(6, 4)[1].any()


@pytest.mark.slow
def test_update_using_indices_equals_pytagi() -> None:
    indices = np.array([[1, 3], [2, 4], [4, 1], [1, 2], [3, 4], [2, 3]])
    compare(NET, X, Y[:, :2], ERRORS[:, :2], idx=indices)
    compare(NET, X, Y[:, :2], ERRORS[:, :2], idx=indices.astype(np.float64))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_update_heteros_equals_pytagi(steps: int) -> None:
    compare("Sequential(Linear(3, 4))", X, Y[:, :2], heteros=True, params=pairs(2.0), steps=steps)


def states(batch: int = 2, outputs: int = 4) -> nn.BaseHiddenStates:
    rng = np.random.default_rng(0)
    mean = rng.standard_normal((batch, outputs)).astype(np.float32)
    return nn.BaseHiddenStates(mean, np.full_like(mean, 0.5), np.full_like(mean, 0.7))


def test_update_returns_the_gaussian_posterior() -> None:
    """The network has no activation."""
    out, deltas = states(), nn.BaseDeltaStates()
    out.slope = None
    y, error = np.ones((2, 4)), 0.25
    nn.OutputUpdater().update(out, y, error, deltas)
    gain = 0.5 / (0.5 + error)
    posterior = out.mu_a + out.var_a * deltas.delta_mu
    equal(posterior, (1 - gain) * out.mu_a + gain * 1, rtol=1e-6)
    equal(out.var_a + out.var_a**2 * deltas.delta_var, 0.5 * (1 - gain), rtol=1e-6)


def test_update_heteros_moves_variance_towards_observed_errors() -> None:
    mean = np.array([[0.0, 1.0], [0.0, 1.0]], np.float32)
    out, deltas = nn.BaseHiddenStates(mean, np.full_like(mean, 0.1)), nn.BaseDeltaStates()
    nn.OutputUpdater().update_heteros(out, [[0.0], [4.0]], deltas)
    small, large = deltas.delta_mu.reshape(2, 2)[:, 1]
    assert small < 0 < large


def test_updates_ignore_nan() -> None:
    """pytagi 0.2.1 propagates the NaN."""
    y, updater = [[0.1, np.nan], [np.nan, 0.2]], nn.OutputUpdater()
    for update, observed in (
        (lambda d: updater.update_using_indices(states(), y, 0.1, [[1, 2], [3, 4]], d), [0, 7]),
        (lambda d: updater.update_heteros(states(), y, d), [0, 1, 6, 7]),
    ):
        deltas = nn.BaseDeltaStates()
        update(deltas)
        equal(np.flatnonzero(deltas.delta_mu), observed)
        equal(np.flatnonzero(deltas.delta_var), observed)
        assert np.isfinite([deltas.delta_mu, deltas.delta_var]).all()


MASK = np.array([[False, True, False, False], [True, False, False, True]])


@for_each("dtype", ["float16", "float32", "float64", "int64", "bool"])
def test_update_ignores_masked_observations(dtype: str) -> None:
    """The values under the mask have no effect."""
    values = np.arange(8).reshape(2, 4).astype(dtype)
    masked, hole = np.ma.array(values, mask=MASK), np.where(MASK, np.nan, values)
    indices, updater = [[1, 2, 3, 4], [4, 3, 2, 1]], nn.OutputUpdater()
    for update in (
        lambda y, d: updater.update(states(), y, 0.1, d),
        lambda y, d: updater.update(states(), y, np.full((2, 4), 0.1), d),
        lambda y, d: updater.update_using_indices(states(), y, 0.1, indices, d),
        lambda y, d: updater.update_heteros(states(2, 8), y, d),
    ):
        actual, expected = nn.BaseDeltaStates(), nn.BaseDeltaStates()
        update(hole, expected)
        nested = [[row] for row in masked], tuple(list(row) for row in masked)
        for y in (masked, list(masked), masked.ravel(), *nested):
            update(y, actual)
            equal((actual.delta_mu, actual.delta_var), (expected.delta_mu, expected.delta_var))


def test_update_ignores_observations_with_masked_variance() -> None:
    """For example ``0.1 * y`` of a masked ``y``."""
    updater, actual, expected = nn.OutputUpdater(), nn.BaseDeltaStates(), nn.BaseDeltaStates()
    y, errors = np.ones((2, 4)), np.ma.array(np.full((2, 4), 0.1), mask=MASK)
    updater.update(states(), np.where(MASK, np.nan, y), 0.1, expected)
    for mu_obs in (y, np.ma.array(y, mask=MASK)):
        updater.update(states(), mu_obs, errors, actual)
        equal((actual.delta_mu, actual.delta_var), (expected.delta_mu, expected.delta_var))
    with pytest.raises(ValueError, match="selected_idx: expected no masked elements, got 1 of 2"):
        updater.update_using_indices(
            states(), y[:, :1], 0.1, np.ma.array([[1], [2]], mask=[[True], [False]]), actual
        )


def test_update_requires_the_batch_first_or_flat_arrays() -> None:
    """Arrays with samples in another dimension have the same size but another order."""
    updater, deltas, out = nn.OutputUpdater(), nn.BaseDeltaStates(), states(12, 2)
    y, indices = np.arange(24.0), np.ones((12, 2), int)
    for shape in ((12, 2), (24,), (24, 1), (12, 1, 2), (1, 12, 2), (12, 2, 1)):
        updater.update(out, y.reshape(shape), np.full(shape, y[1]), deltas)
        updater.update_using_indices(out, y.reshape(shape), 0.1, indices.reshape(shape), deltas)
        updater.update_heteros(states(12, 4), y.reshape(shape), deltas)
    images = nn.BaseHiddenStates(np.zeros((3, 2, 4, 5), np.float32))
    for shape in ((3, 2, 4, 5), (3, 40), (120,)):
        updater.update(images, np.zeros(shape), 0.1, deltas)
    updater.update(states(3, 40), np.zeros((3, 2, 4, 5)), 0.1, deltas)
    deltas = nn.BaseDeltaStates()
    for shape in ((2, 12), (4, 6), (2, 2, 6)):
        z, wrong = y.reshape(shape), indices.reshape(shape)
        for update, words in (
            (lambda: updater.update(out, z, 0.1, deltas), r"mu_obs: .* \(12, 2\)"),  # noqa: B023
            (lambda: updater.update(out, y, z, deltas), r"var_obs: .* \(12, 2\)"),  # noqa: B023
            (lambda: updater.update_using_indices(out, z, 0.1, indices, deltas), "mu_obs"),  # noqa: B023
            (lambda: updater.update_using_indices(out, y, 0.1, wrong, deltas), r"idx: .*12, k"),  # noqa: B023
            (lambda: updater.update_heteros(states(12, 4), z, deltas), "mu_obs"),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=rf"{words}.*, got \(\d"):
                update()
    with pytest.raises(ValueError, match=r"mu_obs: .* \(3, 2, 4, 5\), .*, got \(3, 4, 5, 2\)"):
        updater.update(images, np.zeros((3, 4, 5, 2)), 0.1, deltas)
    assert deltas.mean is None


@for_each("dtype", ["float16", "float32", "float64", "int64", "bool"])
def test_update_accepts_any_dtype_layout_and_shape(dtype: str) -> None:
    out, y = states(3, 4), (np.arange(12).reshape(3, 4) % 3).astype(dtype)
    updater, expected, actual = nn.OutputUpdater(), nn.BaseDeltaStates(), nn.BaseDeltaStates()
    updater.update(out, y.astype(np.float32), np.full((3, 4), 0.1, np.float32), expected)
    for values in (y, np.asfortranarray(y), np.repeat(y, 2, 1)[:, ::2], y.ravel(), y.tolist()):
        for errors in (0.1, [0.1] * 20, np.full(12, 0.1), np.full((1, 1), 0.1)):
            updater.update(out, values, errors, actual)
            equal(actual.delta_mu, expected.delta_mu, rtol=1e-6)
            equal(actual.delta_var, expected.delta_var, rtol=1e-6)


LONGER = r"var_obs: .*, or a longer array of one repeated, unmasked value, got \(10,\)"
ZERO, REAL = np.zeros((2, 4)), "expected real numbers, got an array of"
# Observations, their variances, and the error.
OBSERVATIONS: list[tuple[Any, Any, type[Exception], str]] = [
    (np.zeros((2, 3)), 0.1, ValueError, r"mu_obs: expected shape \(2, 4\), .*, got \(2, 3\)"),
    (np.zeros((3, 4)), 0.1, ValueError, r"mu_obs: expected shape \(2, 4\), .*, got \(3, 4\)"),
    (0.5, 0.1, ValueError, r"mu_obs: expected shape \(2, 4\), .*, got \(\)"),
    (np.zeros(7), 0.1, ValueError, r"mu_obs: expected shape \(2, 4\), .*, got \(7,\)"),
    (np.zeros(16), np.ones(16), ValueError, r"mu_obs: expected shape \(2, 4\), .*, got \(16,\)"),
    (np.zeros(0), np.ones(0), ValueError, r"mu_obs: expected shape \(2, 4\), .*, got \(0,\)"),
    (ZERO, np.ones(3), ValueError, r"var_obs: expected shape \(2, 4\), .*, got \(3,\)"),
    (ZERO, np.arange(9), ValueError, r"var_obs: expected shape \(2, 4\), .*, got \(9,\)"),
    (ZERO, np.ma.masked_less([0.1] * 9 + [0], 0.1), ValueError, LONGER),
    (ZERO, [0.1] * 9 + [0.2], ValueError, LONGER),
    (ZERO, -0.1, ValueError, "var_obs: variances must be at least 0, got -0.1"),
    (ZERO, np.nan, ValueError, "var_obs: variances must be at least 0, got nan"),
    *[(*pair, TypeError, f"{which}: {REAL}")
        for values in (
            np.zeros((2, 4), complex),
            [["a"] * 4] * 2,
            np.ma.array([["a"] * 4] * 2, mask=MASK),
            np.ma.array([["a"] * 4] * 2, mask=MASK).astype("S"),
            np.ma.array(np.zeros((2, 4), "m8[s]"), mask=MASK),
            None,
        )
        for pair, which in (((values, 0.1), "mu_obs"), ((ZERO, values), "var_obs"))],
]  # fmt: skip


@for_each("y errors error message", OBSERVATIONS)
def test_update_rejects_invalid_observations(
    y: Any, errors: Any, error: type[Exception], message: str
) -> None:
    deltas = nn.BaseDeltaStates()
    with pytest.raises(error, match=message):
        nn.OutputUpdater().update(states(), y, errors, deltas)
    assert deltas.mean is None


def update_selected(indices: Any) -> None:
    nn.OutputUpdater().update_using_indices(
        states(), [0.1, 0.2], 0.1, indices, nn.BaseDeltaStates()
    )


def update_heteros(outputs: int, y: np.ndarray) -> None:
    nn.OutputUpdater().update_heteros(states(2, outputs), y, nn.BaseDeltaStates())


# Other updates with invalid arguments.
UPDATES: list[tuple[Callable[[], None], str]] = [
    *[(lambda indices=indices: update_selected(indices), words)
        for indices, words in (
            ([[0], [1]], "indices must be from 1 to 4, the number of outputs, got 0 to 1"),
            ([[1], [5]], "indices must be from 1 to 4, the number of outputs, got 1 to 5"),
            ([1, 2, 3], r"expected shape \(2, k\), or the same elements flat, got \(3,\)"),
            ([[1.5], [2]], "indices must be integers"),
            ([[np.nan], [2]], "indices must be integers"),
            ([[1, 2], [2, 3]], r"mu_obs: expected shape \(2, 2\), .*got \(2,\)"),
        )],
    (lambda: update_heteros(3, np.zeros(2)), r"expected an even number of outputs .* got 3"),
    (lambda: update_heteros(4, ZERO), r"mu_obs: expected shape \(2, 2\)"),
]  # fmt: skip


@for_each("call message", UPDATES)
def test_other_updates_reject_invalid_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@for_each("name", ["variance", "slope"])
def test_update_raises_value_error_if_an_array_of_the_outputs_is_too_short(name: str) -> None:
    net = nn.Sequential(nn.Linear(3, 400), nn.ReLU())
    net(np.ones((2, 3)))
    setattr(net.output_z_buffer, name, np.ones(1, np.float32))
    with pytest.raises(ValueError, match="size 1 into shape"):
        nn.OutputUpdater().update(
            net.output_z_buffer, np.ones(800), np.ones(800), net.input_delta_z_buffer
        )


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
