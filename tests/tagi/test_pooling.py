"""Pools beside draws, and beside their definition."""

from typing import Any

import numpy as np
import pytest

from flashlight_py.tagi import nn
from flashlight_py.tagi.states import BaseHiddenStates
from tests.tagi.helpers import channels_first, equal

F = np.float32


def inputs(height: int, width: int) -> tuple[np.ndarray, ...]:
    """Return means, variances and slopes."""
    rng = np.random.default_rng(0)
    drawn = rng.uniform(0.1, 1, (3, 4, 2, height, width)).astype(F)
    drawn[0] -= 0.5
    return tuple(drawn)


# kernel, stride, padding, its type, height, width
GEOMETRIES = [(2, 2, 0, 0, 4, 6), (3, 1, 1, 1, 5, 4), (2, 2, 1, 1, 4, 6), (3, 2, 1, 2, 6, 8)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kind", [nn.AvgPool2d, nn.MaxPool2d])
@pytest.mark.parametrize("channel_first", [False, True])
def test_a_pool_is_its_definition(
    kind: Any, geometry: tuple[int, ...], channel_first: bool
) -> None:
    """Also where pytagi reads past its windows: padding with windows that touch."""
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
    found = (z.mean, z.variance, *layer.backward(d, e, True))
    expected = (mean, variance, back * slope, back_e * slope**2)
    equal(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [1, 2, 4, 8])
def test_the_mean_of_windows_that_touch_is_the_default(kernel: int) -> None:
    """Pytagi ends the process, unless the window is the whole image."""
    layer = nn.AvgPool2d(kernel)
    assert layer.connect((3, 8, 8)) == (3, 8 // kernel, 8 // kernel)
    assert layer.stride == kernel


def test_moments_of_means_are_those_of_draws() -> None:
    m, v, _ = inputs(4, 6)
    mean, variance = nn.Sequential(nn.AvgPool2d(2))(m, v)
    rng = np.random.default_rng(0)
    draws = rng.normal(m, np.sqrt(v), (20_000, *m.shape))
    pooled = draws.reshape(20_000, 4, 2, 2, 2, 3, 2).mean((4, 6))
    equal(mean, pooled.mean(0), atol=0.02)
    equal(variance, pooled.var(0), rtol=0.06)


def test_the_largest_of_exact_inputs_is_exact() -> None:
    mean, variance = nn.Sequential(nn.MaxPool2d(2, 2))(np.arange(16.0).reshape(1, 1, 4, 4))
    equal((mean, variance), ([[[[5, 7], [13, 15]]]], np.zeros((1, 1, 2, 2))))


def test_what_is_no_number_is_largest_only_alone() -> None:
    x = np.full((1, 1, 2, 4), np.nan)
    x[0, 0, 1, 1] = -3
    equal(nn.Sequential(nn.MaxPool2d(2, 2))(x)[0], [[[[-3, np.nan]]]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.AvgPool2d(0), "AvgPool2d: kernel_size and stride must be at least 1"),
        (lambda: nn.AvgPool2d(2, 0), "kernel_size and stride must be at least 1"),
        (lambda: nn.AvgPool2d(2, 2, 1), "padding_type 0 is no padding, got padding=1"),
        (lambda: nn.MaxPool2d(2, 2, 2, 1), "MaxPool2d: a window of 2 that lies in a padding of 2"),
        (lambda: nn.Sequential(nn.AvgPool2d(2))(np.zeros((1, 1, 5, 4))), "a height of 5"),
        (lambda: nn.Sequential(nn.AvgPool2d(2))(np.zeros((1, 1, 4, 5))), "a width of 5"),
        (lambda: nn.Sequential(nn.Linear(2, 4), nn.AvgPool2d(2)), "expected images"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
