"""Convolutions beside draws, and beside their definition."""

from typing import Any

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from flashlight_py.tagi.states import BaseHiddenStates
from tests.tagi.helpers import channels_first, equal, observe

F = np.float32


def direct(layer: Any, x: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what a convolution is by definition, in float64."""
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


# kernel, stride, padding, its type, height, width
GEOMETRIES = [
    (3, 1, 0, 1, 5, 8),
    (3, 1, 1, 1, 7, 4),
    (3, 2, 1, 1, 7, 5),
    (3, 2, 1, 2, 6, 10),
    (1, 3, 0, 0, 7, 10),
    (4, 1, 3, 1, 2, 5),
    (2, 4, 1, 1, 4, 8),
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_images_may_be_rectangular_and_strides_anything(geometry: tuple[int, ...]) -> None:
    kernel, stride, padding, kind, *size = geometry
    rng = np.random.default_rng(0)
    layer = nn.Conv2d(2, 3, kernel, True, stride, padding, kind)
    x, v = rng.standard_normal((4, 2, *size)), rng.uniform(0, 1, (4, 2, *size))
    equal(nn.Sequential(layer)(x, v), direct(layer, x, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("geometry", GEOMETRIES[:6])
def test_the_transpose_is_the_adjoint(geometry: tuple[int, ...]) -> None:
    """<conv(x), y> == <x, transpose(y)> with the same weights; no biases."""
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


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_moments_and_deltas_are_those_of_draws(kind: Any) -> None:
    """The outputs are exactly what draws have; the deltas exactly their covariances'."""
    tagi.manual_seed(3)
    layer = kind(2, 2, 2, stride=1)
    net = nn.Sequential(layer)
    net.input_state_update = True
    rng = np.random.default_rng(0)
    x, v = rng.standard_normal((1, 2, 2, 3)), rng.uniform(0.1, 0.5, (1, 2, 2, 3))
    mean, variance = net(x, v)
    draws = 200_000
    w = rng.normal(layer.mu_w, np.sqrt(layer.var_w), (draws, 16)).reshape(draws, 2, 2, 2, 2)
    b = rng.normal(layer.mu_b, np.sqrt(layer.var_b), (draws, 2))
    units = rng.normal(x[0], np.sqrt(v[0]), (draws, 2, 2, 3))
    z = np.zeros((draws, *mean.shape[1:])) + b[:, :, None, None]
    for y_, x_ in np.ndindex(2, 2):
        if kind is nn.Conv2d:
            window = units[:, :, y_ : y_ + 1, x_ : x_ + 2]
            z += np.einsum("noi,nihw->nohw", w[:, :, :, y_, x_], window)
        else:
            spread = np.einsum("nio,nihw->nohw", w[:, :, :, y_, x_], units)
            z[:, :, y_ : y_ + 2, x_ : x_ + 3] += spread
    equal(mean[0], z.mean(0), atol=0.02)
    equal(variance[0], z.var(0), rtol=0.02)
    # The posteriors by covariances with the outputs, each of which teaches by itself.
    y, error = rng.standard_normal(mean.shape), 0.1
    observe(net, y, error)
    z = (z - z.mean(0)).reshape(draws, -1)
    gain, surprise = 1 / (variance.ravel() + error), (y - mean).ravel()
    for own, (d, e) in (
        (w.reshape(draws, -1), (layer.delta_mu_w, layer.delta_var_w)),
        (b, (layer.delta_mu_b, layer.delta_var_b)),
        (units.reshape(draws, -1), _of_input(net, v)),
    ):
        covariance = (own - own.mean(0)).T @ z / draws
        equal(d, covariance @ (gain * surprise), rtol=0.05, atol=0.02)
        equal(e, -(covariance**2) @ gain, rtol=0.05, atol=0.01)


def _of_input(net: nn.Sequential, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the changes of the input's means and variances."""
    d, e = net.get_input_states()
    return v.ravel() * d, v.ravel() ** 2 * e


def test_memory_may_lie_in_any_order() -> None:
    """Channel by channel, in reverse, each second column: the same results."""
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


def test_batches_may_grow_and_shrink() -> None:
    rng = np.random.default_rng(4)
    net = nn.Sequential(nn.Conv2d(1, 2, 3, in_width=5, in_height=4), nn.Linear(12, 2))
    x = rng.standard_normal((9, 1, 4, 5))
    all_at_once = net(x)[0]
    for size in (1, 4, 9, 2):
        equal(net(x[:size])[0], all_at_once[:size], rtol=1e-5, atol=1e-6)
        observe(net, np.zeros((size, 2)))
    flat, _ = net(x.ravel())
    equal(flat, all_at_once.ravel())


def test_images_may_change_their_shape_between_batches() -> None:
    """Also to one of as many elements, which is no other way to read the same image."""
    rng = np.random.default_rng(6)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2))
    for height, width in ((4, 6), (6, 4), (2, 12), (8, 8), (4, 6)):
        x = rng.standard_normal((2, 2, height, width))
        mean, _ = net(x)
        fresh = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2))
        fresh.load_state_dict(net.state_dict())
        equal(mean, fresh(x)[0])
    with pytest.raises(ValueError, match="do not cover a height of 3"):
        net(np.zeros((2, 2, 3, 16)))
    equal(net(x.reshape(2, 48))[0], mean)  # flat samples, of the last shape


def test_large_images_are_divided_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts, which a cache holds, make no difference."""
    monkeypatch.setattr("flashlight_py.tagi.convolution.COLUMNS", 1)
    rng = np.random.default_rng(5)
    for kind in (nn.Conv2d, nn.ConvTranspose2d):
        layer = kind(2, 3, 3, padding=1)
        layer.connect((2, 9, 7))
        x = rng.standard_normal((3, 2, 9, 7)).astype(F)
        d = rng.standard_normal((3, *layer.output_shape)).astype(F)
        results = []
        for memory in (1, 2000, 5000, 1 << 20):
            monkeypatch.setattr("flashlight_py.tagi.convolution.CACHED", memory)
            z = layer.forward(BaseHiddenStates(x, np.abs(x)))
            back = layer.backward(d, d, True)
            results.append([z.mean, z.variance, layer.delta_mu_w, layer.delta_var_w, *back])
        for each in results[:-1]:
            equal(each, results[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_a_layer_describes_itself_as_pytagi_s(text: str, expected: str) -> None:
    layer = eval(text, dict(vars(nn)))
    if layer.input_shape is not None:
        nn.Sequential(layer)
    assert layer.get_layer_info() == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2d(0, 1, 3), "numbers of channels must be at least 1, got 0, 1"),
        (lambda: nn.Conv2d(1, 1, 0), "kernel_size and stride must be at least 1"),
        (lambda: nn.Conv2d(1, 1, 3, padding_type=3), "padding_type must be 0, 1 or 2, got 3"),
        (lambda: nn.Conv2d(1, 1, 3, padding=1, padding_type=0), "padding_type 0 is no padding"),
        (lambda: nn.Conv2d(1, 1, 3, in_width=4), "in_width and in_height are both sizes"),
        (lambda: nn.Conv2d(1, 1, 3, init_method="Glorot"), "init_method must be one of"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 1, 2, stride=2, in_width=4, in_height=5)),
            r"layer 0, Conv2d\(1,1,0,0,2\), after the input: windows of 2, 2 apart, do not cover a "
            "height of 5",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 1, 5, in_width=4, in_height=4)),
            "do not cover a height of 4",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 1, 3))(np.zeros(16)),
            "pass an array with the batch first",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 1, 3))(np.zeros((1, 16))),
            "expected images .channels, height, width., got samples of shape .16,.; pass an array",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(2, 1, 3))(np.zeros((1, 3, 5, 5))),
            "expected 2 channels, got images of shape",
        ),
        (
            lambda: nn.Sequential(
                nn.Conv2d(1, 2, 3, in_width=6, in_height=5),
                nn.Conv2d(2, 1, 2, in_width=3, in_height=4),
            ),
            r"in_height and in_width are \(4, 3\), got images of \(2, 3, 4\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(5, 7), nn.Conv2d(1, 1, 3, in_width=4, in_height=4)),
            r"expected 16 elements a sample, images of \(1, 4, 4\), got \(7,\)",
        ),
        (
            lambda: nn.Sequential(nn.ConvTranspose2d(1, 1, 2, padding=2, in_width=2, in_height=2)),
            "nothing is left of images",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
