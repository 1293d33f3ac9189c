"""Normalisation over the batch and over samples: moments, deltas and statistics."""

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.tagi import nn, normalization
from flashlight_py.tagi.states import BaseHiddenStates
from tests.distributed.conformance import on_ranks
from tests.tables import for_each
from tests.tagi.helpers import channels_first, equal, in_numpy, needs_kernels, numbers
from tests.tagi.oracle import run_both

REAL = np.float32
IMAGES = (6, 3, 4, 5)  # rectangular
FLAT = (6, 3)


def states(*shape: int, slope: bool = True) -> BaseHiddenStates:
    return BaseHiddenStates(
        3 + 2 * numbers(*shape),
        np.square(numbers(*shape, seed=1)),
        np.square(numbers(*shape, seed=2)) if slope else None,
    )


def drawn(layer: fl.tagi.BaseLayer) -> fl.tagi.BaseLayer:
    """Set random parameters of ``layer``."""
    n = layer.num_weights
    layer.mu_w, layer.var_w = numbers(n, seed=10), np.square(numbers(n, seed=11))
    if layer.bias:
        layer.mu_b, layer.var_b = numbers(n, seed=12), np.square(numbers(n, seed=13))
    return layer


def close(actual, expected) -> None:
    equal(actual, expected, rtol=2e-5, atol=2e-5)


def expected_of(layer, x, over, features, d, e):
    """Compute the float64 formulas: statistics over axes ``over``, weights along ``features``."""
    m, v, j = (np.asarray(a, np.float64) for a in (x.mean, x.variance, x.slope))
    n = np.prod([m.shape[axis] for axis in over])
    mean = m.mean(over, keepdims=True)
    variance = (((m - mean) ** 2).sum(over, keepdims=True) + v.sum(over, keepdims=True)) / (n - 1)
    r = 1 / np.sqrt(variance + layer.eps)
    shape = [-1 if axis == features else 1 for axis in range(m.ndim)]
    w, s, b, sb = (
        np.asarray(a, np.float64).reshape(shape) if a.size else 0
        for a in (layer.mu_w, layer.var_w, layer.mu_b, layer.var_b)
    )
    t = (m - mean) * r
    rest = tuple(axis for axis in range(m.ndim) if axis != features)
    moments = (t * w + b, r * r * v * (w * w + s) + s * t * t + sb)
    sums = [a.sum(rest) for a in (d * t, e * t * t, d, e)]
    return moments, (d * r * w * j, e * (r * w * j) ** 2), sums, (mean, variance)


CASES = {
    "batch, images": (lambda **o: fl.tagi.BatchNorm2d(3, **o), IMAGES, (0, 2, 3), 1),
    "batch, flat": (lambda **o: fl.tagi.BatchNorm2d(3, **o), FLAT, (0,), 1),
    "layer, images": (lambda **o: fl.tagi.LayerNorm((3, 5, 4), **o), IMAGES, (1, 2, 3), 1),
    "layer, flat": (lambda **o: fl.tagi.LayerNorm(3, **o), FLAT, (1,), 1),
}


@for_each("bias", [True, False])
@for_each("case", CASES)
def test_normalization_matches_formulas(case: str, bias: bool) -> None:
    make, shape, over, features = CASES[case]
    layer = drawn(make(bias=bias))
    assert layer.connect(shape[1:]) == shape[1:]
    x = states(*shape)
    d, e = numbers(*shape, seed=3), -np.square(numbers(*shape, seed=4))
    moments, back, sums, _ = expected_of(layer, x, over, features, d, e)
    out = layer.forward(x)
    close((out.mean, out.variance), moments)
    assert out.slope is None
    actual = layer.backward(d.reshape(len(d), -1), e.reshape(len(e), -1), True)
    close(actual, back)
    close((layer.weight.mean_sum, layer.weight.variance_sum), sums[:2])
    if bias:
        close((layer.biases.mean_sum, layer.biases.variance_sum), sums[2:])
    assert layer.backward(d, e, False) is None


@needs_kernels
@for_each("positions", [8, 16, 21, 40])
def test_normalization_kernels_equal_numpy(positions: int) -> None:
    """Row lengths with and without a remainder; contiguous, transposed, and with gaps."""
    shape = (5, 3, positions)
    m, d = 2 + numbers(*shape), numbers(*shape, seed=1)
    v, e, slope = (np.square(numbers(*shape, seed=seed)) for seed in (2, 3, 4))
    across = channels_first(m, v, d, e, slope)
    gaps = tuple(np.repeat(a, 2, axis=0)[::2] for a in (m, v, d, e, slope))
    weight, biases = drawn(fl.tagi.BatchNorm2d(3)).parameters_in_use
    for center in (numbers(3), numbers(5, 1)):
        scale = np.exp(center)
        wide = (m, v.astype(np.float64), d, *across[3:])
        for arrays in ((m, v, d, e, slope), across, gaps, (m, *across[1:]), wide):
            for bias, variance, j in ((biases, arrays[1], arrays[4]), (None, None, None)):
                for centers in (None, center):
                    expected = in_numpy(normalization.row_sums, arrays[0], centers)
                    close(normalization.row_sums(arrays[0], centers), expected)
                arguments = (arrays[0], variance, center, scale, weight, bias)
                actual = normalization.standardize(*arguments)
                expected = in_numpy(normalization.standardize, *arguments)
                equal(actual, expected, rtol=1e-6, atol=1e-6)
                for has_deltas in (True, False):
                    arguments = (actual[0], *arrays[2:4], j, scale, has_deltas)
                    sums, deltas = normalization.standardize_back(*arguments)
                    sums_2, deltas_2 = in_numpy(normalization.standardize_back, *arguments)
                    close(sums, sums_2)
                    assert (deltas is None) == (deltas_2 is None) == (not has_deltas)
                    equal(deltas or (), deltas_2 or (), rtol=1e-6, atol=1e-6)


def test_normalization_of_exact_inputs_omits_their_variance() -> None:
    for make, shape, _, _ in CASES.values():
        layer, other = make(), make()
        for norm in (layer, other):
            norm.connect(shape[1:])
        mean = numbers(*shape)
        out = layer.forward(BaseHiddenStates(mean))
        expected = other.forward(BaseHiddenStates(mean, np.zeros_like(mean)))
        close((out.mean, out.variance), (expected.mean, expected.variance))


@for_each("shape", [IMAGES, FLAT])
def test_batch_norm2d_updates_and_uses_running_statistics(shape) -> None:
    layer = drawn(fl.tagi.BatchNorm2d(3, momentum=0.75))
    layer.connect(shape[1:])
    x = states(*shape)
    over = tuple(axis for axis in range(len(shape)) if axis != 1)
    d = numbers(*shape)
    *_, (mean, variance) = expected_of(layer, x, over, 1, d, d)
    for _ in range(2):
        layer.forward(x)
    ra_mean, ra_variance = layer.statistics()
    close(ra_mean, (1 - 0.75**2) * mean.ravel())
    close(ra_variance, 0.75**2 + (1 - 0.75**2) * variance.ravel())
    layer.set_training(False)
    out = layer.forward(x)
    close(ra_mean, (1 - 0.75**2) * mean.ravel())  # evaluation does not change them
    column = [1, 3] + [1] * (len(shape) - 2)
    r = 1 / np.sqrt(ra_variance.reshape(column) + layer.eps)
    w, s, b, sb = (a.reshape(column) for a in (layer.mu_w, layer.var_w, layer.mu_b, layer.var_b))
    t = (x.mean - ra_mean.reshape(column)) * r
    close((out.mean, out.variance), (t * w + b, r * r * x.variance * (w * w + s) + s * t * t + sb))


def test_batch_norm2d_statistics_are_accurate_for_large_means() -> None:
    x = 1000 + numbers(64, 2, 8, 8)
    layer = fl.tagi.BatchNorm2d(2)
    layer.connect(x.shape[1:])
    layer.forward(BaseHiddenStates(x))
    wide = x.astype(np.float64)
    equal(layer.batch_mean, wide.mean((0, 2, 3)), rtol=1e-6)
    equal(layer.batch_variance, wide.var((0, 2, 3), ddof=1), rtol=1e-5)


@pytest.mark.parametrize("offset", [0, 300])
@on_ranks(("shm", 2))
def test_batch_norm2d_adds_up_over_processes(rank: int, size: int, offset: int) -> None:
    """Batches of different sizes; one call of add_up per pass."""
    shape, calls = (10, 3, 4, 5), []
    x = states(*shape)
    x.mean += REAL(offset)
    d, e = numbers(*shape, seed=3), -np.square(numbers(*shape, seed=4))
    single, layer = (drawn(fl.tagi.BatchNorm2d(3)) for _ in range(2))
    for net in (single, layer):
        net.connect(shape[1:])
    expected = single.forward(x)
    expected_deltas = expected.mean, expected.variance, *single.backward(d, e, True)

    def add_up(sums: np.ndarray) -> None:
        calls.append((sums.dtype, sums.shape))
        fl.all_reduce(sums)

    layer.add_up = add_up
    rows = slice(7, 10) if rank else slice(0, 7)
    out = layer.forward(BaseHiddenStates(x.mean[rows], x.variance[rows], x.slope[rows]))
    actual = out.mean, out.variance, *layer.backward(d[rows], e[rows], True)
    equal(actual, [item[rows] for item in expected_deltas], rtol=3e-6, atol=3e-6)
    equal(layer.statistics(), single.statistics(), rtol=1e-6)
    equal(fl.broadcast(layer.batch_mean.copy(), 0), layer.batch_mean)
    for sums in ("mean_sum", "variance_sum"):
        close(fl.all_reduce(getattr(layer.weight, sums).copy()), getattr(single.weight, sums))
    layer.set_training(False)
    layer.forward(x)  # no call of add_up
    assert calls == [(np.float64, (1 + 3 * 3,))]


def test_normalization_of_one_unit_uses_its_variance() -> None:
    layer = fl.tagi.BatchNorm2d(2)
    layer.connect((2,))
    out = layer.forward(BaseHiddenStates(numbers(1, 2), np.full((1, 2), 4, REAL)))
    close((layer.batch_variance, out.mean), ([4, 4], np.zeros((1, 2))))
    assert np.isfinite(out.variance).all()


def test_state_dict_includes_running_statistics() -> None:
    def make() -> fl.tagi.Sequential:
        return fl.tagi.Sequential(
            fl.tagi.Linear(4, 3),
            fl.tagi.BatchNorm2d(3, bias=False),
            fl.tagi.ReLU(),
            fl.tagi.ResNetBlock(
                fl.tagi.LayerBlock(fl.tagi.Linear(3, 3), fl.tagi.BatchNorm2d(3)),
                fl.tagi.LayerNorm((3,)),
            ),
        )

    net, other = make(), make()
    for step in range(3):
        net(numbers(5, 4, seed=step))
    state = net.state_dict()
    assert [array.size for array in state["BatchNorm2d.1"]] == [3, 3, 0, 0, 3, 3]
    assert [array.size for array in state["LayerNorm.shortcut.3"]] == [3, 3, 3, 3]
    other.load_state_dict(state)
    statistics = net.get_norm_mean_var()
    assert list(statistics) == ["BatchNorm2d()_1", "ResNetBlock(3,3)_3"]
    inner = net.layers[3].main_block.layers[1]
    for array, one in zip(
        statistics["ResNetBlock(3,3)_3"], (*inner.statistics(), inner.batch_mean), strict=False
    ):
        equal(array[0], one)
    for item in (net, other):
        item.eval()
    x = numbers(7, 4, seed=9)
    equal(net(x), other(x))


EVALUATED = """
net = Sequential(Linear(4, 3), BatchNorm2d(3), Linear(3, 2))
if {load}:
    net.load_state_dict(parameters)
net.set_threads(2)
parameters = net.state_dict()
for x in batches:
    net(x.ravel())
statistics = {{k: [np.ravel(a) for a in t] for k, t in net.get_norm_mean_var().items()}}
net.eval()
result = parameters, *map(np.array, net(batches[0].ravel())), statistics
"""


@pytest.mark.slow
def test_batch_norm2d_evaluation_equals_pytagi() -> None:
    """pytagi uses two threads: with one, its first batch replaces the running statistics."""
    close(*run_both(EVALUATED, batches=numbers(3, 8, 4)))


@for_each("images", [False, True])
def test_frozen_batch_norm2d_uses_the_statistics_of_its_forward_pass(images: bool) -> None:
    """The rest of the network trains, and other batches run in between."""
    layer = nn.BatchNorm2d(3)
    before = nn.Conv2d(2, 3, 1, in_width=4, in_height=4) if images else nn.Linear(6, 3)
    net = nn.Sequential(before, layer, nn.Linear(48 if images else 3, 2))
    x = np.random.default_rng(0).standard_normal((2, 5, 2, 4, 4) if images else (2, 5, 6))
    updater = nn.OutputUpdater()
    sums = []
    for batches in ([x[0], x[1][:3]], [x[1][:3]]):
        layer.training = True
        state = net.state_dict()
        for number, batch in enumerate(batches):
            layer.training = len(batches) == 2 and number == 0
            if not layer.training:
                net.load_state_dict(state)
            net(batch)
            updater.update(
                net.output_z_buffer, np.ones((len(batch), 2)), 1, net.input_delta_z_buffer
            )
            net.backward()
        sums.append([bucket.sums.copy() for bucket in net.buckets])
    equal(*sums)
