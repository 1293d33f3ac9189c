"""Activations, compared with float64 formulas and the real pytagi."""

import functools
import math
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.tagi import activations
from flashlight_py.tagi.activations import tails
from flashlight_py.tagi.states import BaseHiddenStates
from tests.tables import for_each
from tests.tagi.helpers import channels_first, equal, in_numpy, needs_kernels, numbers
from tests.tagi.oracle import compare

REAL = np.float32
MEANS = [0, 1e-8, 1e-3, 0.1, 0.5, 0.99, 1, 1.01, 2, 3, 5, 8, 13, 40, 1e3, 1e6, 1e30]
VARIANCES = [0, 1e-30, 1e-12, 1e-8, 1e-6, 1e-4, 0.01, 0.1, 0.5, 1, 2, 10, 100, 1e4, 1e8]
GRID = tuple(
    grid.ravel().astype(REAL) for grid in np.meshgrid([*MEANS, *(-m for m in MEANS)], VARIANCES)
)


def cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def pdf(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if abs(x) < 38 else 0.0


def mixture_relu(m: float, v: float) -> tuple[float, float, float]:
    """Compute pytagi's formula, which is accurate above the floor."""
    s = math.sqrt(max(v, 1e-38))
    p, d = cdf(m / s), pdf(m / s)
    mean = m * p + s * d
    variance = -mean * mean + 2 * mean * m - m * s * d + (v - m * m) * p
    return max(mean, 1e-6), max(variance, 1e-6), p


def mixture_tanh(m: float, v: float) -> tuple[float, float, float]:
    s = math.sqrt(max(v, 1e-38))
    lower, upper = (1 + m) / s, (1 - m) / s
    pl, pu, dl, du = cdf(lower), cdf(upper), pdf(lower), pdf(upper)
    mean = (m + 1) * pl + (m - 1) * pu + s * (dl - du) - m
    variance = (
        pl * (v - m * m - 2 * m - 1)
        + pu * (v - m * m + 2 * m - 1)
        + s * (du * (m - 1) - dl * (m + 1))
        - mean * mean + 2 * mean * m + m * m - v + 2
    )  # fmt: skip
    return mean, max(variance, 1e-6), pl + pu - 1


def mixture_sigmoid(m: float, v: float) -> tuple[float, float, float]:
    mean, variance, slope = mixture_tanh(m, v)
    return mean / 2 + 0.5, max(variance / 4, 1e-6), slope / 2


SHARES = {
    "softmax": activations.Softmax,
    "remax": activations.Remax,
    "closed_form_softmax": activations.ClosedFormSoftmax,
}
EXACT = {
    "mixture_relu": activations.relu_moments,
    "mixture_relu_in_numpy": functools.partial(in_numpy, activations.relu_moments),
    "mixture_tanh": activations.tanh_moments,
    "mixture_sigmoid": functools.partial(activations.tanh_moments, share=0.5, shift=0.5),
}


@for_each("name", EXACT)
def test_mixture_activations_have_exact_moments(name: str) -> None:
    """Only inputs for which the plain float64 formula is more accurate than float32."""
    m, v = GRID
    usable = (np.square(m, dtype=np.float64) < 1e9) & (v < 1e5)
    m, v = m[usable], v[usable]
    actual = EXACT[name](m, v)
    plain = globals()[name.removesuffix("_in_numpy")]
    expected = np.array([plain(float(a), float(b)) for a, b in zip(m, v, strict=True)])
    for number, moment in enumerate(actual):
        assert moment.dtype == REAL
        equal(moment, expected[:, number], rtol=1e-6, atol=2e-9)


@for_each("name", EXACT)
def test_mixture_activations_are_accurate_in_the_tails(name: str) -> None:
    m, v = GRID
    mean, variance, slope = EXACT[name](m, v)
    assert np.isfinite([mean, variance, slope]).all()
    assert (variance >= 1e-6).all()
    assert (slope >= 0).all()
    assert (slope <= 1).all()
    bounds = {"mixture_relu": (0, np.inf), "mixture_tanh": (-1, 1), "mixture_sigmoid": (0, 1)}
    low, high = bounds[name.removesuffix("_in_numpy")]
    assert (mean >= low).all()
    assert (mean <= high).all()
    # Truncation does not increase the variance.
    assert (variance <= np.maximum(v * REAL(1 + 1e-6), REAL(1e-6))).all()


@for_each("name", EXACT)
def test_mixture_activations_propagate_nan(name: str) -> None:
    moments = EXACT[name]
    nan, one = np.array([np.nan], REAL), np.ones(1, REAL)
    assert np.isnan(moments(nan, one)).all()
    assert np.isnan(moments(one, nan)).all()


@needs_kernels
@for_each("name", ["mixture_relu", "mixture_tanh", "mixture_sigmoid"])
def test_mixture_kernels_equal_numpy(name: str) -> None:
    """Includes channel-first images, views and empty arrays."""
    moments = EXACT[name]
    rng = np.random.default_rng(0)
    m = (3 * rng.standard_normal((40, 30, 7, 11))).astype(REAL)
    v = np.exp(2 * rng.standard_normal(m.shape)).astype(REAL)
    swapped = channels_first(m, v)
    wide = (m.astype(np.float64), v.astype(np.float64))
    cases = [(m, v), wide, swapped, (m, swapped[1]), (m[::2, :, 1:5], v[::2, :, 1:5])]
    for mean, variance in [*cases, (m[:0], v[:0])]:
        actual, expected = moments(mean, variance), in_numpy(moments, mean, variance)
        for one, other in zip(actual, expected, strict=True):
            assert one.shape == mean.shape
            assert one.dtype == REAL
            equal(one, other, rtol=1e-6, atol=1e-12)
    assert moments(*swapped)[0].strides == swapped[0].strides


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


FIRST_ORDER = {
    "ReLU": (lambda m: max(m, 0), lambda m: float(m > 0)),
    "LeakyReLU": (lambda m: max(m, 0.1 * m), lambda m: 1 if m > 0 else 0.1),
    "Sigmoid": (logistic, lambda m: logistic(m) * logistic(-m)),
    "Tanh": (math.tanh, lambda m: 4 * logistic(2 * m) * logistic(-2 * m)),
    "Softplus": (lambda m: math.log1p(math.exp(-abs(m))) + max(m, 0), logistic),
}


@for_each("name", FIRST_ORDER)
def test_activation_is_linearised_at_the_mean(name: str) -> None:
    value, slope_of = FIRST_ORDER[name]
    m, v = GRID
    mean, variance, slope = getattr(activations, name)()._moments(m, v)
    slopes = np.array([slope_of(float(item)) for item in m])
    for actual, expected in (
        (mean, np.array([value(float(element)) for element in m])),
        (variance, slopes**2 * v),
        (slope, slopes),
    ):
        assert actual.dtype == REAL
        equal(actual, expected, rtol=1e-6, atol=2e-7)


def test_even_exp_is_finite_for_large_inputs() -> None:
    m, v = GRID
    actual = activations.exponential(m, v)
    assert np.isfinite(actual).all()
    inside = (abs(m) + v) < 40
    wide, spread = m[inside].astype(np.float64), v[inside].astype(np.float64)
    mean = np.exp(wide + spread / 2)
    equal(actual[0][inside], mean, rtol=1e-6)
    equal(actual[1][inside], mean**2 * np.expm1(spread), rtol=1e-6, atol=1e-44)


def test_tails_match_series_and_erfc() -> None:
    """Above 6, where differences lose all digits, by the asymptotic series; below by math.erfc."""
    for a in (0.0, 0.3, 0.66, 0.67, 2.0, 5.6, 5.7):
        q, g, h = (float(tail[0]) for tail in tails(np.array([a])))
        assert math.isclose(q, cdf(-a), rel_tol=1e-14)
        assert math.isclose(g, pdf(a) - a * cdf(-a), rel_tol=1e-12)
        assert math.isclose(h, (a * a + 1) * cdf(-a) - a * pdf(a) - g * g, rel_tol=1e-10)
    for a in (12.0, 30.0):
        q, g, h = (float(item[0]) for item in tails(np.array([a])))
        x = 1 / a**2
        assert math.isclose(g, pdf(a) * x * (1 - 3 * x + 15 * x**2 - 105 * x**3), rel_tol=1e-3)
        assert math.isclose(h, 2 * pdf(a) * x / a * (1 - 6 * x + 45 * x**2), rel_tol=1e-2)


def plain_remax(m: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    parts = np.array([mixture_relu(float(a), float(b)) for a, b in zip(m, v, strict=True)]).T
    total, total_v = parts[0].sum(), parts[1].sum()
    lam, lam_t = np.log(1 + parts[1] / parts[0] ** 2), math.log(1 + total_v / total**2)
    kap, kap_t = np.log(parts[0]) - lam / 2, math.log(total) - lam_t / 2
    c = np.log(1 + parts[1] / (parts[0] * total))
    w = lam + lam_t - 2 * c
    a = np.maximum(1e-6, np.exp(kap - kap_t + w / 2))
    a /= a.sum()
    variance = (np.exp(w) - 1) * a**2
    covariance = (np.exp(lam - c) - 1) * a * parts[0] / parts[2]
    return a, variance, np.minimum(np.sqrt(variance * v), covariance) / v


def plain_closed_form(m: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    e, s = np.exp(m + v / 2), np.exp(2 * m + v) * (np.exp(v) - 1)
    lam = math.log(1 + s.sum() / e.sum() ** 2)
    kap = math.log(e.sum()) - lam / 2
    c = np.log(1 + s / (e * e.sum()))
    w = v + lam - 2 * c
    a = np.exp(m - kap + w / 2)
    return a, (np.exp(w) - 1) * a**2, a * (v - c) / v


def plain_softmax(m: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    p = np.exp(m) / np.exp(m).sum()
    slope = p * (1 - p)
    return p, slope**2 * (v + v[m.argmax()]), slope


@for_each("name", ["softmax", "remax", "closed_form_softmax"])
def test_softmax_activations_match_formulas(name: str) -> None:
    plain = {"softmax": plain_softmax, "remax": plain_remax}.get(name, plain_closed_form)
    m, v = 2 * numbers(7, 5), 0.05 + np.square(numbers(7, 5, seed=1))
    actual = SHARES[name]()._moments(m, v)
    for row in range(len(m)):
        expected = plain(m[row].astype(np.float64), v[row].astype(np.float64))
        for item, one in zip(actual, expected, strict=True):
            equal(item[row], one, rtol=2e-5, atol=1e-7)


# Means and variances of units; then shares and slopes, computed with 50 digits.
EXACT_SHARES = [
    ([3, -3], [0.5, 0.5], [
        [0.999999000001, 9.99999483339e-07],
        [1.05262856599e-07, 2.61047880746e-07],
        [1.7657874996e-07, 0.000722561943014]]),
    ([1, -1], [0.0625, 0.0625], [
        [0.999998783219, 1.21678056219e-06],
        [9.41171360862e-07, 2.02624135284e-07],
        [1.68118465859e-06, 0.00180055162785]]),
    ([0.5, 0.25, -8], [2**-10, 2**-10, 4], [
        [0.667236933711, 0.332754186692, 8.87959687821e-06],
        [0.000973903413303, 0.000956648572683, 1.03283634172e-06],
        [0.443686162847, 0.882755354888, 0.000508142780554]]),
]  # fmt: skip


@for_each("m v expected", EXACT_SHARES)
def test_softmax_is_accurate_if_one_class_dominates(m: Any, v: Any, expected: Any) -> None:
    """The first two variances vanish in float32: pytagi's are wrong by 126 and by 1 %."""
    actual = activations.Remax()._moments(np.array([m], REAL), np.array([v], REAL))
    equal(np.concatenate(actual), expected, rtol=2e-6)


@for_each("name", ["softmax", "remax", "closed_form_softmax"])
def test_softmax_activations_are_finite_for_extreme_inputs(name: str) -> None:
    """Distant units, and zero or large variances, for which e^z overflows float32."""
    m = np.array([[0, 0, 0], [1e3, -1e3, 0], [-1e4, -1e4, -1e4], [1e4, 1e4, 0], [3, 2, 1]], REAL)
    for v in (0, 1e-20, 1, 50, 1e4):
        mean, variance, slope = SHARES[name]()._moments(m, np.full_like(m, v))
        assert np.isfinite([mean, variance, slope]).all(), v
        assert (variance >= 0).all()
        assert (mean >= 0).all()
        if name != "closed_form_softmax":
            equal(mean.sum(axis=1), 1, rtol=1e-5)
    slope = SHARES[name]()._moments(m[:1], np.full((1, 3), 1e-6, REAL))[2]
    if name == "closed_form_softmax":  # the limit of the softmax
        equal(slope, 1 / 3 * 2 / 3, rtol=1e-3)


ALL = ["ReLU", "LeakyReLU", "Sigmoid", "Tanh", "Softplus", "MixtureReLU", "MixtureSigmoid",
       "MixtureTanh", "Softmax", "Remax", "ClosedFormSoftmax", "EvenExp"]  # fmt: skip


@for_each("name", ALL)
def test_activation_accepts_any_shape_and_multiplies_slopes(name: str) -> None:
    layer = getattr(fl.tagi, name)()
    assert repr(layer) == f"{name}()"
    assert not layer.has_state
    assert layer.connect((2, 3, 4)) == (2, 3, 4)
    m, v, slope = numbers(5, 2, 3, 4), np.square(numbers(5, 2, 3, 4, seed=1)), numbers(5, 2, 3, 4)
    once = layer.forward(BaseHiddenStates(m, v))
    again = layer.forward(BaseHiddenStates(m, v, slope))
    equal(again.slope, once.slope * slope)
    other = layer.forward(BaseHiddenStates(*channels_first(m, v)))
    for which in ("mean", "variance", "slope"):
        array = getattr(once, which)
        assert array.dtype == REAL
        assert array.shape == m.shape
        equal(getattr(other, which), array, rtol=1e-6)
    exact = layer.forward(BaseHiddenStates(m))
    zero = layer.forward(BaseHiddenStates(m, np.zeros_like(m)))
    equal(exact.mean, zero.mean)
    assert np.isfinite([exact.mean, exact.variance, exact.slope]).all()
    equal(m, numbers(5, 2, 3, 4))  # unchanged


def test_even_exp_transforms_every_second_unit() -> None:
    layer, old = fl.tagi.EvenExp(), fl.tagi.EvenExp(slope_times_variance=True)
    x = BaseHiddenStates(numbers(4, 6), np.square(numbers(4, 6, seed=1)))
    out, before = layer.forward(x), old.forward(x)
    for actual, kept in ((out.mean, x.mean), (out.variance, x.variance)):
        equal(actual[:, ::2], kept[:, ::2])
    assert (out.slope[:, ::2] == 1).all()
    equal(out.slope[:, 1::2], out.mean[:, 1::2])
    equal(before.slope[:, 1::2], x.variance[:, 1::2] * out.mean[:, 1::2], rtol=1e-6)


@pytest.mark.slow
def test_random_networks_with_softmax_activations_match_pytagi() -> None:
    """Tolerances of pytagi's float32, which is inaccurate if one class dominates."""
    for seed in range(24):
        rng = np.random.default_rng(seed)
        inputs, width, classes, batch = rng.integers((1, 1, 2, 1), (9, 33, 13, 17))
        scale, gain = np.exp(rng.uniform(np.log(0.1), np.log((5, 3))))
        gains = f"gain_weight={gain}, gain_bias={gain}"
        middle = rng.choice(["ReLU", "MixtureReLU", "Tanh"])
        network = (
            f"Linear({inputs}, {width}, {gains}), {middle}(), Linear({width}, {classes}, {gains})"
        )
        y = np.eye(classes)[rng.integers(0, classes, batch)]
        x, errors = scale * rng.standard_normal((batch, inputs)), rng.choice([0.01, 0.1, 1])
        arguments = x, y, np.full_like(y, errors)
        compare(f"Sequential({network}, Remax())", *arguments, seed=seed, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_even_exp_equals_pytagi() -> None:
    network = "Sequential(Linear(4, 8), ReLU(), Linear(8, 6), EvenExp({}))"
    own_network = network.format("slope_times_variance=True")
    x, y = numbers(7, 4), numbers(7, 3, seed=1)
    compare(network.format(""), x, y, heteros=True, own_network=own_network, rtol=1e-4)
