"""Activations, and layers and functions of categories: moments, formulas, kernels and pytagi."""

import functools
import math
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import tagi
from flashlight_py.tagi import activations, nn
from flashlight_py.tagi.activations import tails
from flashlight_py.tagi.states import BaseHiddenStates
from flashlight_py.tagi.utilities import probabilities, tree_of
from tests.tables import for_each
from tests.tagi.helpers import (
    channels_first,
    equal,
    in_numpy,
    learn,
    needs_kernels,
    numbers,
    observe,
)
from tests.tagi.oracle import compare, equal_programs, oracle_step, own_step

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


NETWORK = "Sequential(Embedding(7, 3, 2, 0.5, {padding}), Linear(6, 1))"
INDICES = np.array([[0, 6], [3, 3], [6, 1], [0, 2]])


@pytest.mark.slow
@pytest.mark.parametrize("padding", [-1, 3])
def test_embedding_first_step_equals_pytagi(padding: int) -> None:
    """pytagi's deltas of variances lack a factor, and its sums are never cleared: not compared."""
    network = NETWORK.format(padding=padding)
    y, errors = np.array([[0.5], [-1.0], [2.0], [0.0]]), np.full((4, 1), 0.3)
    reference = oracle_step(network, INDICES, y, var_y=errors)
    ours = own_step(network, reference.before, INDICES, y, var_y=errors)
    equal((ours.mu, ours.var), (reference.mu, reference.var), 1e-5, 1e-6)
    for which in (0, 2):
        equal(ours.deltas["Embedding.0"][which], reference.deltas["Embedding.0"][which], 1e-4, 1e-6)
    variances = reference.before["Embedding.0"][1]
    np.testing.assert_allclose(  # the factor that pytagi lacks
        ours.deltas["Embedding.0"][1], reference.deltas["Embedding.0"][1] * variances, 1e-4, 1e-6
    )
    for which in range(4):
        equal(ours.after["Linear.1"][which], reference.after["Linear.1"][which], 1e-4, 1e-5)


def test_embedding_rows_sum_deltas_of_all_occurrences() -> None:
    """Compared with a Linear of one-hot inputs for each occurrence."""
    tagi.manual_seed(1)
    layer = nn.Embedding(5, 2, 3)
    net = nn.Sequential(layer)
    x = np.array([[0, 4, 4], [2, 0, 4]])
    mean, variance = net(x)
    equal((mean, variance), (layer.mu_w.reshape(5, 2)[x].reshape(2, 6), np.ones((2, 6))))
    rng = np.random.default_rng(0)
    for indices in (x, x[:, ::-1] // 2):  # a pass sets the sums of all rows
        d, e = rng.normal(size=(2, 2, 3, 2))
        net(indices)
        net.set_delta_z(d, e)
        net.backward()
        for sums, deltas in ((layer.delta_mu_w, d), (layer.delta_var_w, e)):
            expected = np.einsum("bpk,bpj->kj", np.eye(5)[indices], deltas)
            equal(sums.reshape(5, 2), expected, rtol=1e-5)


def test_embedding_padding_row_is_zero_and_does_not_learn() -> None:
    tagi.manual_seed(3)
    layer = nn.Embedding(4, 3, padding_idx=2)
    net = nn.Sequential(layer, nn.Linear(6, 2))
    x = np.array([[2, 1], [3, 2]])
    layer.var_w = rows = np.random.default_rng(0).uniform(0.5, 1, 12).astype(np.float32)
    before = layer.mu_w.reshape(4, 3)
    equal(before[2], 0)
    for _ in range(3):
        learn(net, x, np.ones(4))
    moments = nn.Sequential(layer)(x)
    for array in moments:
        equal(array.reshape(2, 2, 3)[[0, 1], [0, 1]], 0)
    after, variances = layer.mu_w.reshape(4, 3), layer.var_w.reshape(4, 3)
    for row in (0, 2):  # no sample has index 0
        equal((after[row], variances[row]), (before[row], rows.reshape(4, 3)[row]))
    for row in (1, 3):
        assert (after[row] != before[row]).any()


@for_each("dtype", [np.int8, np.uint64, np.float16, np.float64, bool])
def test_embedding_accepts_indices_of_any_dtype_and_strides(dtype: type) -> None:
    net = nn.Sequential(nn.Embedding(2, 3))
    x = np.array([[0, 1, 1], [1, 0, 0]])
    expected = net(x)[0]
    indices = np.asfortranarray(x.astype(dtype))
    equal(net(indices)[0], expected)
    equal(net(x.ravel().astype(dtype))[0], expected.ravel())


@for_each("wrong", [-1, 7, 1.5, np.nan, np.inf, 1e30])
def test_embedding_rejects_invalid_indices_and_variances(wrong: float, strict: Any) -> None:
    layer = nn.Embedding(7, 2, 2)
    net = nn.Sequential(layer, nn.Linear(4, 1))
    with pytest.raises(ValueError, match=r"Embedding\(7->2\): indices must be integers from 0 to"):
        net(np.array([[0, 1], [wrong, 2]]))
    net.to_device("cuda")
    with pytest.raises(ValueError, match="indices must be integers from 0 to 6"):
        net(np.array([[0, 1], [wrong, 2]]))
    with pytest.raises(ValueError, match="expected indices without variances"):
        net(np.array([[1, 2]]), np.array([[0.1, 0.1]]))


def test_embedding_takes_input_size_from_the_first_batch() -> None:
    net = nn.Sequential(nn.Embedding(3, 2), nn.Linear(8, 1))
    assert net(np.zeros((5, 4)))[0].shape == (5, 1)
    assert net(np.zeros((9, 4)))[0].shape == (9, 1)
    with pytest.raises(ValueError, match="expected 8 features"):
        net(np.zeros((5, 3)))
    net.input_state_update = True
    net(np.zeros((5, 4)))
    observe(net, np.ones(5))
    equal(net.get_input_states(), np.zeros((2, 20)))


CLASSES = [2, 3, 4, 5, 7, 8, 9, 10, 15, 16, 17, 31, 33, 100, 127, 128, 129, 1000]

TREES = """
    utils = pytagi.Utils()
    result = {}
    for n in classes:
        tree = utils.get_hierarchical_softmax(n)
        m = np.random.default_rng(n).standard_normal((3, tree.len)).astype(np.float32)
        v = np.random.default_rng(n + 1).uniform(0, 2, (3, tree.len)).astype(np.float32)
        found = utils.get_labels(m.ravel(), v.ravel(), tree, n, 3)
        y = [0, 1, 1]
        # The get_errors() of pytagi calls this with an argument too many.
        wrong, _ = (utils._cpp_backend.get_error_wrapper(m.ravel(), v.ravel(), y, n, 3)
                    if hasattr(utils, "_cpp_backend") else utils.get_errors(m, v, y, tree, n, 3))
        one = utils.obs_to_label_prob(m[1], v[1], tree, n)
        obs = utils.label_to_obs([n - 1, 0, n // 2], n)
        hot = utils.label_to_one_hot([n - 1, 0, n // 2], n)
        result[n] = (np.array(tree.obs), np.array(tree.idx), tree.num_obs, tree.len, found,
                     wrong, one, obs, hot)
"""


@pytest.mark.slow
def test_class_tree_and_probabilities_equal_pytagi() -> None:
    equal_programs(TREES, 1e-5, 1e-8, classes=CLASSES)


@for_each("n outputs", [(2, 1), (3, 3), (4, 3), (10, 11), (100, 102), (1000, 1001)])
def test_class_tree_length_is_close_to_the_number_of_classes(n: int, outputs: int) -> None:
    tree = tree_of(n)
    assert tree.len == outputs
    paths = set(map(tuple, np.stack([tree.idx, tree.obs], 1).reshape(n, -1).tolist()))
    assert len(paths) == n  # classes are distinct
    assert tree.idx.min() == 1
    assert set(tree.obs.tolist()) == {-1, 1}


def test_probabilities_match_random_draws() -> None:
    """A class is drawn if output plus error has the sign of its path at each node."""
    rng, n, draws = np.random.default_rng(0), 5, 200_000
    tree = tree_of(n)
    m, v = rng.standard_normal(tree.len), rng.uniform(0.1, 2, tree.len)
    z = rng.normal(m, np.sqrt(v + 1 / 9), (draws, tree.len))
    obs, idx = tree.obs.reshape(n, -1), tree.idx.reshape(n, -1) - 1
    shares = [np.mean((np.sign(z[:, idx[c]]) == obs[c]).all(1)) for c in range(n)]
    equal(probabilities(m, v, tree)[0], shares, atol=0.005)


def test_get_labels_returns_observed_labels() -> None:
    n, tree, utils = 10, tree_of(10), tagi.Utils()
    labels = np.arange(n)
    obs, idx, count = utils.label_to_obs(labels, n)
    outputs = np.zeros((n, tree.len))
    np.put_along_axis(outputs, idx.reshape(n, count) - 1, obs.reshape(n, count), 1)
    metric = tagi.HRCSoftmaxMetric(n)
    equal(metric.get_predicted_labels(outputs, 0.01 + 0 * outputs), labels)
    assert metric.error_rate(outputs.ravel(), 0.01 + 0 * outputs.ravel(), labels) == 0
    assert metric.error_rate(outputs, 0.01 + 0 * outputs, labels[::-1]) == 1


@for_each("labels", [[10], [-1], [0.5], [np.inf, np.nan], np.full((2, 2), 11)])
def test_label_functions_reject_labels_that_are_no_class(labels: Any) -> None:
    """pytagi reads beyond the end of the tree."""
    with pytest.raises(ValueError, match="labels must be from 0 to 9, got"):
        tagi.Utils().label_to_obs(labels, 10)
    with pytest.raises(ValueError, match="labels must be from 0 to 9, got"):
        tagi.Utils().label_to_one_hot(labels, 10)


def test_missing_labels_are_unobserved() -> None:
    utils, tree, nan = tagi.Utils(), tree_of(3), np.nan
    outputs = np.zeros((3, tree.len), np.float32)
    for labels, refusal in (
        (np.ma.array([0, 9, 2], mask=[0, 1, 0]), "labels: expected no masked elements, got 1 of 3"),
        ([0, nan, 2], "labels must be from 0 to 2, got nan"),
    ):
        obs, idx, _ = utils.label_to_obs(labels, 3)
        equal(obs, [1, 1, nan, nan, -1, 1])
        assert set(idx) <= set(range(1, tree.len + 1))
        deltas = nn.BaseDeltaStates()
        nn.OutputUpdater().update_using_indices(
            nn.BaseHiddenStates(outputs, outputs + 1), obs, 0.1, idx, deltas
        )
        equal(deltas.delta_mu.reshape(3, -1).any(axis=1), [True, False, True])
        hot = utils.label_to_one_hot(labels, 3)
        equal(hot.reshape(3, 3), [[1, 0, 0], [nan] * 3, [0, 0, 1]])
        with pytest.raises(ValueError, match=refusal):
            utils.get_errors(outputs, outputs + 1, labels, tree, 3, 3)


def test_label_functions_reject_sizes_that_differ_from_the_tree() -> None:
    utils, tree = tagi.Utils(), tree_of(10)
    m = np.zeros((2, 11))
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        tagi.HRCSoftmaxMetric(1)
    with pytest.raises(ValueError, match=r"means and .* \[batch, 11\].* \(2, 10\) and"):
        utils.get_labels(np.zeros((2, 10)), np.zeros((2, 10)), tree, 10, 2)
    with pytest.raises(ValueError, match=r"means .* \[batch, 11\].* got \(2, 11\) and \(11,\)"):
        utils.get_labels(m, m[0], tree, 10, 2)
    with pytest.raises(ValueError, match=r"\[batch, 11\].* got \(11, 2\) and \(2, 11\)"):
        utils.get_labels(m.T, m, tree, 10, 2)
    with pytest.raises(ValueError, match="expected outputs of 3 samples, got 2"):
        utils.get_labels(m, m, tree, 10, 3)
    with pytest.raises(ValueError, match="expected the tree of 9 classes"):
        utils.get_labels(m, m, tree, 9, 2)
    with pytest.raises(ValueError, match="expected the tree of 9 classes"):
        utils.obs_to_label_prob(m, m, tagi.HRCSoftmax(), 9)
    with pytest.raises(ValueError, match="expected 2 labels, got 3"):
        utils.get_errors(m, m, [1, 2, 3], tree, 10, 2)
