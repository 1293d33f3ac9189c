"""All time steps of an LSTM, forward and back through time: in NumPy or CuPy, or natively.

Both take samples ``[rows, steps * width]``, time steps one after the other. Native code computes
sample by sample, with loops of its own for matrices, where they are small; otherwise the time steps
of all samples are computed together, one after the other, and matrices are the BLAS's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.tagi.lstm_cell import PAIRS, States, cell_backward, cell_forward
from flashlight_py.tagi.native import native
from flashlight_py.tagi.parameters import Parameter
from flashlight_py.tagi.states import REAL

# Up to how many weights native loops are faster than a BLAS that is called for each time step.
SMALL = 2**14


class Pass(NamedTuple):
    """What a forward pass keeps for the way back.

    Attributes:
        joined: means of each time step's inputs and of h before it, ``[steps, rows, ni + no]``;
            ``[rows, steps, ...]`` where native code has computed them.
        slopes: as of :func:`flashlight_py.tagi.lstm_cell.cell_forward`, ``[steps, rows, 6, no]``.
        by_sample: whether it was native code.
    """

    joined: Array
    slopes: Array
    by_sample: bool


class Back(NamedTuple):
    """What comes back: deltas of the gates' inputs, ``[rows * steps, 4 * no]`` in the order of
    ``joined``, and of the layer's, ``[rows, steps * ni]``, if wanted.
    """

    dz: Array
    ez: Array
    dx: Array | None
    ex: Array | None


def window_forward(
    weight: Parameter,
    biases: Parameter | None,
    x: Array,
    x_variance: Array | None,
    steps: int,
    states: States | None,
    carry: bool,
) -> tuple[Array, Array, States | None, Pass]:
    """Return means and variances of h at all time steps, ``[rows, steps * no]``, the last states,
    and what to keep.

    Args:
        weight: ``[4, no, ni + no]``.
        biases: ``[4, no]``.
        x, x_variance: ``[rows, steps * ni]``; None: all variances are 0.
        steps: how many time steps a sample has.
        states: what to begin with, ``[1, no]`` each, of one row; None: 0.
        carry: whether to return the last states, of one row.
    """
    kernels = None if is_cupy(x) or weight.mean.size > SMALL else native()
    if kernels is None:
        *moments, last, kept = forward_in_numpy(weight, biases, x, x_variance, steps, states)
        return moments[0], moments[1], last if carry else None, kept
    return _forward_natively(kernels, weight, biases, x, x_variance, steps, states, carry)


def window_backward(weight: Parameter, kept: Pass, d: Array, e: Array, wanted: bool) -> Back:
    """Return what the deltas of h, ``[rows, steps * no]``, send back."""
    if kept.by_sample:
        return _backward_natively(weight, kept, d, e, wanted)
    return backward_in_numpy(weight, kept, d, e, wanted)


def forward_in_numpy(
    weight: Parameter,
    biases: Parameter | None,
    x: Array,
    x_variance: Array | None,
    steps: int,
    states: States | None,
) -> tuple[Array, Array, States, Pass]:
    """As :func:`window_forward`, step by step for all rows; always returns the last states."""
    xp = array_module(x)
    no, n = weight.mean.shape[1:]
    rows, ni = len(x), n - no
    matrix, variances = (each.reshape(4 * no, n) for each in (weight.mean, weight.variance))
    products = _products(weight, 8)

    # What the inputs contribute to all gates of all time steps.
    joined = xp.zeros((steps, rows, n), REAL)
    joined[..., :ni] = _by_step(x, steps)
    own = joined[..., :ni].reshape(-1, ni)
    z, moment = own @ matrix[:, :ni].T, own * own
    u = xp.zeros((steps * rows, 8 * no), REAL)
    if x_variance is not None:
        variance = _by_step(x_variance, steps).reshape(-1, ni)
        moment += variance
        xp.matmul(variance, products[:, :ni].T, out=u)
    u[:, : 4 * no] += moment @ variances[:, :ni].T
    if biases is not None:
        z += biases.mean.reshape(-1)
        u[:, : 4 * no] += biases.variance.reshape(-1)
    z, u = z.reshape(steps, rows, 4 * no), u.reshape(steps, rows, 8 * no)

    h = xp.empty((2, steps, rows, no), REAL)
    slopes = xp.empty((steps, rows, 6, no), REAL)
    for t in range(steps):
        if states is not None:
            mean, variance = states.mean_h, states.variance_h
            joined[t, :, ni:] = mean
            z[t] += mean @ matrix[:, ni:].T
            u[t, :, : 5 * no] += variance @ products[: 5 * no, ni:].T
            u[t, :, : 4 * no] += (variance + mean * mean) @ variances[:, ni:].T
        states = cell_forward(
            z[t].reshape(rows, 4, no), u[t].reshape(rows, 8, no), states, slopes[t]
        )
        h[0, t], h[1, t] = states.mean_h, states.variance_h
    assert states is not None
    return _by_sample(h[0]), _by_sample(h[1]), states, Pass(joined, slopes, False)


def backward_in_numpy(weight: Parameter, kept: Pass, d: Array, e: Array, wanted: bool) -> Back:
    """As :func:`window_backward`."""
    joined, slopes, _ = kept
    xp = array_module(joined)
    steps, rows, n = joined.shape
    no = slopes.shape[3]
    ni = n - no
    matrix, products = weight.mean.reshape(4 * no, n), _products(weight, 10)
    d, e = _by_step(d, steps), _by_step(e, steps)
    dz = xp.empty((steps, rows, 4, no), REAL)
    coefficients = xp.empty((steps, rows, 10, no), REAL)
    dh, eh, dc, ec = d[-1], e[-1], None, None
    for t in range(steps - 1, -1, -1):
        dc, ec = cell_backward(dh, eh, dc, ec, slopes[t], dz[t], coefficients[t])
        if t:
            dh = d[t - 1] + dz[t].reshape(rows, -1) @ matrix[:, ni:]
            eh = e[t - 1] + coefficients[t].reshape(rows, -1) @ products[:, ni:]
    dz, coefficients = dz.reshape(-1, 4 * no), coefficients.reshape(-1, 10 * no)
    dx = ex = None
    if wanted:
        dx = _by_sample((dz @ matrix[:, :ni]).reshape(steps, rows, ni))
        ex = _by_sample((coefficients @ products[:, :ni]).reshape(steps, rows, ni))
    return Back(dz, coefficients[:, : 4 * no], dx, ex)


def _forward_natively(
    kernels: Any,
    weight: Parameter,
    biases: Parameter | None,
    x: Array,
    x_variance: Array | None,
    steps: int,
    states: States | None,
    carry: bool,
) -> tuple[Array, Array, States | None, Pass]:
    no, n = weight.mean.shape[1:]
    rows = len(x)
    h, v_h = np.empty((2, rows, steps * no), REAL)
    joined, slopes = np.empty((rows, steps, n), REAL), np.empty((rows, steps, 6, no), REAL)
    last = None
    if carry:
        last = np.zeros((4, 1, no), REAL) if states is None else np.stack(states)
    known = (None, None) if biases is None else (biases.mean, biases.variance)
    arrays = (weight.mean, weight.variance, *known, x, x_variance)
    kernels.lib.fl_tagi_lstm_forward(
        kernels.ffi.new("fl_tagi_lstm *", (rows, steps, n - no, no)),
        *(_pointer(kernels.ffi, each) for each in (*arrays, h, v_h, joined, slopes, last)),
    )
    after = None if last is None else States(*last)
    return h, v_h, after, Pass(joined, slopes, True)


def _backward_natively(weight: Parameter, kept: Pass, d: Array, e: Array, wanted: bool) -> Back:
    kernels: Any = native()
    joined, slopes, _ = kept
    rows, steps, n = joined.shape
    no = slopes.shape[3]
    dz, ez = np.empty((2, rows * steps, 4 * no), REAL)
    dx = ex = None
    if wanted:
        dx, ex = np.empty((2, rows, steps * (n - no)), REAL)
    kernels.lib.fl_tagi_lstm_backward(
        kernels.ffi.new("fl_tagi_lstm *", (rows, steps, n - no, no)),
        *(_pointer(kernels.ffi, a) for a in (weight.mean, slopes, d, e, dz, ez, dx, ex)),
    )
    return Back(dz, ez, dx, ex)


def _pointer(ffi: Any, array: Array | None) -> Any:
    """Return where a float32 array is; of one that is not contiguous, where a copy is."""
    if array is None:
        return ffi.NULL
    return ffi.from_buffer("float[]", np.ascontiguousarray(array, REAL))


def _products(weight: Parameter, pairs: int) -> Array:
    """Return products of the weights of two gates, the first of ``PAIRS``, one below another."""
    left, right = (each[:pairs] for each in PAIRS)
    return (weight.mean[left] * weight.mean[right]).reshape(-1, weight.mean.shape[2])


def _by_step(array: Array, steps: int) -> Array:
    """Return ``[steps, rows, width]`` of ``[rows, steps * width]``."""
    return array.reshape(len(array), steps, -1).swapaxes(0, 1)


def _by_sample(array: Array) -> Array:
    """Return ``[rows, steps * width]`` of ``[steps, rows, width]``."""
    return array.swapaxes(0, 1).reshape(array.shape[1], -1)
