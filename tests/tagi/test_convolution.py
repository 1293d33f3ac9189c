"""Layers of images and normalization: moments, deltas, running statistics and kernels."""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import tagi
from flashlight_py.tagi import nn, normalization
from flashlight_py.tagi import windows as module
from flashlight_py.tagi.states import BaseHiddenStates
from flashlight_py.tagi.windows import Windows
from tests.distributed.conformance import on_ranks
from tests.tables import for_each
from tests.tagi.helpers import channels_first, equal, in_numpy, needs_kernels, numbers, observe
from tests.tagi.oracle import run_both

F = np.float32


def direct(layer: Any, x: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute a convolution by its definition in float64."""
    w, s = (a.astype(float) for a in (layer.weight.mean, layer.weight.variance))
    k, step = layer.kernel_size, layer.stride
    around = (layer.padding if layer.padding_type == 1 else 0, layer.padding)
    x, v = (np.pad(a, ((0, 0), (0, 0), around, around)) for a in (x, v))
    out = np.empty((2, len(x), len(w), layer.out_height, layer.out_width))
    for b, o, i, j in np.ndindex(*out.shape[1:]):
        rows, columns = slice(i * step, i * step + k), slice(j * step, j * step + k)
        m, mv = x[b, :, rows, columns], v[b, :, rows, columns]
        out[:, b, o, i, j] = (m * w[o]).sum(), (mv * (w[o] ** 2 + s[o]) + m**2 * s[o]).sum()
    out[0] += layer.biases.mean[:, None, None]
    out[1] += layer.biases.variance[:, None, None]
    return out[0], out[1]


# kernel, stride, padding, padding type, height, width
GEOMETRIES = [
    (3, 1, 0, 1, 5, 8),
    (3, 1, 1, 1, 7, 4),
    (3, 2, 1, 1, 7, 5),
    (3, 2, 1, 2, 6, 10),
    (1, 3, 0, 0, 7, 10),
    (4, 1, 3, 1, 2, 5),
    (2, 4, 1, 1, 4, 8),
]


@for_each("geometry", GEOMETRIES)
def test_convolution_matches_definition_for_any_geometry(geometry: tuple[int, ...]) -> None:
    kernel, stride, padding, kind, *size = geometry
    rng = np.random.default_rng(0)
    layer = nn.Conv2d(2, 3, kernel, True, stride, padding, kind)
    x, v = rng.standard_normal((4, 2, *size)), rng.uniform(0, 1, (4, 2, *size))
    equal(nn.Sequential(layer)(x, v), direct(layer, x, v), rtol=1e-5, atol=1e-5)


@for_each("geometry", GEOMETRIES[:6])
def test_conv_transpose2d_is_the_adjoint_of_conv2d(geometry: tuple[int, ...]) -> None:
    """<conv(x), y> == <x, transpose(y)> with the same weights and without biases."""
    kernel, stride, padding, kind, *size = geometry
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 2, *size))
    conv = nn.Conv2d(2, 3, kernel, False, stride, padding, kind)
    z, _ = nn.Sequential(conv)(x)
    y = rng.standard_normal(z.shape)
    transpose = nn.ConvTranspose2d(3, 2, kernel, False, stride, padding, kind)
    transpose.mu_w = conv.mu_w
    back, _ = nn.Sequential(transpose)(y)
    assert back.shape == x.shape
    equal((z * y).sum(), (x * back).sum(), rtol=1e-4, atol=1e-4)


def outputs(kind: Any, w: np.ndarray, b: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Return the outputs of a layer of plain numbers for each draw."""
    if kind is nn.Linear:
        return np.einsum("noi,ni->no", w.reshape(-1, 2, 3), units) + b
    w = w.reshape(-1, 2, 2, 2, 2)
    z = np.zeros((len(w), 2, 1, 2) if kind is nn.Conv2d else (len(w), 2, 3, 4))
    for row, column in np.ndindex(2, 2):
        part = w[:, :, :, row, column]
        if kind is nn.Conv2d:
            window = units[:, :, row : row + 1, column : column + 2]
            z += np.einsum("noi,nihw->nohw", part, window)
        else:
            spread = np.einsum("nio,nihw->nohw", part, units)
            z[:, :, row : row + 2, column : column + 3] += spread
    return z + b[:, :, None, None]


@for_each("kind", [nn.Linear, nn.Conv2d, nn.ConvTranspose2d])
def test_convolution_moments_and_deltas_match_random_draws(kind: Any) -> None:
    tagi.manual_seed(3)
    layer, shape = (kind(3, 2), (3,)) if kind is nn.Linear else (kind(2, 2, 2, stride=1), (2, 2, 3))
    net = nn.Sequential(layer)
    net.input_state_update = True
    rng = np.random.default_rng(0)
    x, v = rng.standard_normal((1, *shape)), rng.uniform(0.1, 0.5, (1, *shape))
    mean, variance = net(x, v)
    draws = 200_000
    w = rng.normal(layer.mu_w, np.sqrt(layer.var_w), (draws, layer.mu_w.size))
    b = rng.normal(layer.mu_b, np.sqrt(layer.var_b), (draws, 2))
    units = rng.normal(x[0], np.sqrt(v[0]), (draws, *shape))
    z = outputs(kind, w, b, units)
    equal(mean[0], z.mean(0), atol=0.02)
    equal(variance[0], z.var(0), rtol=0.02)
    # Posteriors from covariances with the outputs, one output at a time.
    y, error = rng.standard_normal(mean.shape), 0.1
    observe(net, y, error)
    z = (z - z.mean(0)).reshape(draws, -1)
    gain, surprise = 1 / (variance.ravel() + error), (y - mean).ravel()
    for samples, (d, e) in (
        (w, (layer.delta_mu_w, layer.delta_var_w)),
        (b, (layer.delta_mu_b, layer.delta_var_b)),
        (units.reshape(draws, -1), _of_input(net, v)),
    ):
        covariance = (samples - samples.mean(0)).T @ z / draws
        equal(d, covariance @ (gain * surprise), rtol=0.05, atol=0.02)
        equal(e, -(covariance**2) @ gain, rtol=0.05, atol=0.01)


def _of_input(net: nn.Sequential, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes of the means and variances of the input."""
    d, e = net.get_input_states()
    return v.ravel() * d, v.ravel() ** 2 * e


def test_convolution_accepts_any_memory_order() -> None:
    """Channel-first, reversed, and with a step of two columns."""
    rng = np.random.default_rng(2)
    layer = nn.Conv2d(2, 3, 3, padding=1)
    layer.connect((2, 6, 5))
    x, v, d, e = (rng.standard_normal((4, c, 6, 5)).astype(F) for c in (2, 2, 3, 3))

    def lie(array: np.ndarray, order: int) -> np.ndarray:
        if order == 0:
            return array.copy()
        if order == 1:
            return channels_first(array)[0]
        if order == 2:
            return array[::-1, :, :, ::-1].copy()[::-1, :, :, ::-1]
        if order == 3:
            return np.repeat(np.repeat(array, 2, 0), 3, 1)[::2, ::3]
        return np.asfortranarray(array)

    def run(orders: tuple[int, ...]) -> list[np.ndarray]:
        inputs = [lie(a, order) for a, order in zip((x, v * v, v), orders, strict=False)]
        z = layer.forward(BaseHiddenStates(*inputs))
        back = layer.backward(lie(d, orders[3]), lie(e, orders[4]), True)
        assert back is not None
        return [z.mean, z.variance, layer.delta_mu_w, layer.delta_var_w, layer.delta_mu_b, *back]

    expected = run((0, 0, 0, 0, 0))
    for orders in ("11111", "01231", "20102", "33320", "43043"):
        equal(run(tuple(map(int, orders))), expected, rtol=1e-5, atol=1e-5)


def test_convolution_accepts_changing_batches_and_image_shapes() -> None:
    """Includes a shape of the same size, and steps between batches of other sizes."""
    rng = np.random.default_rng(6)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2))
    for count, height, width in ((2, 4, 6), (5, 6, 4), (1, 2, 12), (9, 8, 8), (9, 4, 6), (2, 4, 6)):
        x = rng.standard_normal((count, 2, height, width))
        mean, _ = net(x)
        fresh = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2))
        fresh.load_state_dict(net.state_dict())
        equal(mean, fresh(x)[0])
        observe(net, np.zeros((count, mean.size // count)))
    with pytest.raises(ValueError, match="for a height of 3"):
        net(np.zeros((2, 2, 3, 16)))
    equal(net(x.reshape(2, 48))[0], mean)  # flat samples have the last shape


def test_convolution_divides_large_images_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashlight_py.tagi.linear.COLUMNS", 1)
    rng = np.random.default_rng(5)
    for kind in (nn.Conv2d, nn.ConvTranspose2d):
        layer = kind(2, 3, 3, padding=1)
        layer.connect((2, 9, 7))
        x = rng.standard_normal((3, 2, 9, 7)).astype(F)
        d = rng.standard_normal((3, *layer.output_shape)).astype(F)
        results = []
        for memory in (1, 2000, 5000, 1 << 20):
            monkeypatch.setattr("flashlight_py.tagi.linear.CACHED", memory)
            z = layer.forward(BaseHiddenStates(x, np.abs(x)))
            back = layer.backward(d, d, True)
            results.append([z.mean, z.variance, layer.delta_mu_w, layer.delta_var_w, *back])
        for result in results[:-1]:
            equal(result, results[-1], rtol=1e-5, atol=1e-5)


@for_each(
    "text expected",
    [
        ("Conv2d(1, 16, 4, padding=1, in_width=28, in_height=28)", "Conv2d(1,16,27,27,4)"),
        ("Conv2d(1, 16, 4)", "Conv2d(1,16,0,0,4)"),
        ("Conv2d(1, 16, 3, in_width=9, in_height=5)", "Conv2d(1,16,7,3,3)"),
        (
            "ConvTranspose2d(2, 3, 3, True, 2, 1, 2, in_width=4, in_height=4)",
            "ConvTranspose2d(2,3,8,8,3)",
        ),
    ],
)
def test_image_layers_have_the_info_of_pytagi(text: str, expected: str) -> None:
    layer = eval(text, dict(vars(nn)))
    if layer.input_shape is not None:
        nn.Sequential(layer)
    assert layer.get_layer_info() == expected


def inputs(height: int, width: int) -> tuple[np.ndarray, ...]:
    """Return means, variances and slopes."""
    rng = np.random.default_rng(0)
    drawn = rng.uniform(0.1, 1, (3, 4, 2, height, width)).astype(F)
    drawn[0] -= 0.5
    return tuple(drawn)


# kernel, stride, padding, padding type, height, width
POOLED = [(2, 2, 0, 0, 4, 6), (3, 1, 1, 1, 5, 4), (2, 2, 1, 1, 4, 6), (3, 2, 1, 2, 6, 8)]


@for_each("geometry", POOLED)
@for_each("kind", [nn.AvgPool2d, nn.MaxPool2d])
@for_each("channel_first", [False, True])
def test_pools_match_definition(kind: Any, geometry: tuple[int, ...], channel_first: bool) -> None:
    """Includes adjacent windows with padding, for which pytagi reads out of bounds."""
    *arguments, height, width = geometry
    layer = kind(*arguments)
    channels, out_height, out_width = layer.connect((2, height, width))
    states = inputs(height, width)
    if channel_first:
        states = channels_first(*states)
    z = layer.forward(BaseHiddenStates(*states))
    rng = np.random.default_rng(1)
    d, e = rng.standard_normal((2, *z.mean.shape)).astype(F)
    mean, variance = np.empty((2, *z.mean.shape))
    back, back_e = np.zeros((2, *states[0].shape))
    count, stride = layer.kernel_size**2, layer.stride
    before = layer.padding if layer.padding_type == 1 else 0
    m, v, slope = states
    for at in np.ndindex(4, channels, out_height, out_width):
        top, left = (at[2] * stride - before, at[3] * stride - before)
        rows = slice(max(0, top), top + layer.kernel_size)
        where = (*at[:2], rows, slice(max(0, left), left + layer.kernel_size))
        if kind is nn.AvgPool2d:
            mean[at], variance[at] = m[where].sum() / count, v[where].sum() / count**2
            back[where] += d[at] / count
            back_e[where] += e[at] / count**2
        else:
            best = np.unravel_index(m[where].argmax(), m[where].shape)
            mean[at], variance[at] = m[where][best], v[where][best]
            back[where][best] += d[at]
            back_e[where][best] += e[at]
    actual = (z.mean, z.variance, *layer.backward(d, e, True))
    expected = (mean, variance, back * slope, back_e * slope**2)
    equal(actual, expected, rtol=1e-5, atol=1e-6)


@for_each("kernel", [1, 2, 4, 8])
def test_avg_pool2d_stride_defaults_to_kernel_size(kernel: int) -> None:
    """pytagi ends the process, unless the window covers the image."""
    layer = nn.AvgPool2d(kernel)
    assert layer.connect((3, 8, 8)) == (3, 8 // kernel, 8 // kernel)
    assert layer.stride == kernel


def test_max_pool2d_returns_nan_only_if_all_elements_are_nan() -> None:
    x = np.full((1, 1, 2, 4), np.nan)
    x[0, 0, 1, 1] = -3
    equal(nn.Sequential(nn.MaxPool2d(2, 2))(x)[0], [[[[-3, np.nan]]]])


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
