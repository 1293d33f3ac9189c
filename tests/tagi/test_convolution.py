"""Convolutions and pools, compared with random draws and definitions, and window kernels."""

from typing import Any

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from flashlight_py.tagi import windows as module
from flashlight_py.tagi.states import BaseHiddenStates
from flashlight_py.tagi.windows import Windows
from tests.tables import for_each
from tests.tagi.helpers import channels_first, equal, in_numpy, needs_kernels, observe

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
