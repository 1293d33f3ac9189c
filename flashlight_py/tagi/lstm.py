"""The time steps of an LSTM, forward and backward, in NumPy, CuPy or native code.

Samples are ``[rows, steps * width]``, one time step after the other. If the matrices are small,
native code computes one sample after the other with its own matrix loops. Otherwise BLAS computes
each time step for all samples.

The gates are f, i, g, o, in pytagi's order. In unit k, the inputs of two gates p and q have the
covariance ``sum_j W_p[k, j] W_q[k, j] var(x_j)``. If p = q, this sum is a part of the variance.
``PAIRS`` lists the pairs (p, q) in the order of the arrays:

    ff ii gg oo   variances of the gate inputs; the variances of the weights add further terms
    ig            mean and variance of i g
    fo io go      mean and variance of o tanh(c); only x counts, not h, as in pytagi
    fi fg         backward pass only
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.layer import Deltas
from flashlight_py.tagi.native import floats, native_for, tagi_kernels
from flashlight_py.tagi.parameters import Parameter
from flashlight_py.tagi.states import REAL

PAIRS = [0, 1, 2, 3, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 2, 3, 3, 3, 1, 2]


class States(NamedTuple):
    """Means and variances of hidden states h and cells c: four arrays of the same shape."""

    mean_h: Array
    variance_h: Array
    mean_c: Array
    variance_c: Array


def cell_forward(z: Array, u: Array, states: States | None, slopes: Array) -> States:
    """Return means and variances of h, then of c, each ``[rows, n]``.

    Args:
        z: Means of the gate inputs, ``[rows, 4, n]``.
        u: (Co)variances of the gate inputs, ``[rows, 8, n]``: the first eight pairs of ``PAIRS``.
        states: Result of the previous step. None: zeros.
        slopes: Output, ``[rows, 6, n]``. 0 to 2: cov(input, c) / var(input) for the inputs of the
            gates f, i and g. 3: cov(input, h) / var(input) for the input of o. 4: cov(c, h) /
            var(c). 5: mean of f.
    """
    xp = array_module(z)
    # sigmoid(z) = 1/2 + tanh(z/2) / 2, so one tanh computes all four gates.
    half = xp.array([[0.5], [0.5], [1], [0.5]], REAL)
    t = xp.tanh(z * half)
    gates = t * half + (1 - half)
    gates[:, 2] = t[:, 2]
    slope = (1 - t * t) * (half * half)
    variances = slope * slope * u[:, :4]
    f, i, g, o = gates[:, 0], gates[:, 1], gates[:, 2], gates[:, 3]
    v_f, v_i, v_g, v_o = variances[:, 0], variances[:, 1], variances[:, 2], variances[:, 3]

    cov = slope[:, 1] * slope[:, 2] * u[:, 4]  # covariance of i and g
    ig = i * g
    c = ig + cov
    v_c = v_g * (i * i) + v_i * (v_g + g * g) + cov * (cov + 2 * ig)
    if states is None:
        slopes[:, 0] = 0
    else:
        before, v_before = states.mean_c, states.variance_c
        c += f * before
        v_c += v_before * (f * f + v_f) + v_f * (before * before)
        slopes[:, 0] = slope[:, 0] * before
    slopes[:, 1] = slope[:, 1] * g
    slopes[:, 2] = slope[:, 2] * i

    a = xp.tanh(c)
    slope_a = 1 - a * a
    v_a = slope_a * slope_a * v_c
    cov = slope_a * slope[:, 3] * (slopes[:, :3] * u[:, 5:8]).sum(axis=1)  # of o and a
    oa = o * a
    h = oa + cov
    v_h = v_a * (o * o + v_o) + v_o * (a * a) + cov * (cov + 2 * oa)
    slopes[:, 3] = slope[:, 3] * a
    slopes[:, 4] = slope_a * o
    slopes[:, 5] = f
    return States(h, v_h, c, v_c)


def cell_backward(
    dh: Array, eh: Array, dc: Array | None, ec: Array | None, slopes: Array, dz: Array,
    coefficients: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Write the deltas of the gate inputs; return the deltas of c of the previous step.

    Args:
        dh, eh: Deltas of h, summed over the output and the next step, ``[rows, n]``.
        dc, ec: Deltas of c from the next step, or None without a next step. This function adds the
            deltas of c from h.
        slopes: The array that :func:`cell_forward` wrote.
        dz: Output: deltas of the means of the gate inputs, ``[rows, 4, n]``.
        coefficients: Output, ``[rows, 10, n]``. The first four are the deltas of the variances of
            the gate inputs. The product of all ten with the weight products of ``PAIRS`` gives the
            deltas of the variances of x and of the previous h.
    """
    k, k_o, r, f = slopes[:, :3], slopes[:, 3], slopes[:, 4], slopes[:, 5]
    to_c = r * dh
    of_o = k_o * eh
    shared = 2 * r * of_o
    var_c = r * r * eh
    if dc is not None and ec is not None:
        to_c += dc
        var_c += ec
    dz[:, :3] = k * to_c[:, None]
    dz[:, 3] = k_o * dh
    weighted = k * var_c[:, None]
    coefficients[:, :3] = k * weighted
    coefficients[:, 3] = k_o * of_o
    weighted *= 2
    coefficients[:, 4] = k[:, 1] * weighted[:, 2]
    coefficients[:, 5:8] = k * shared[:, None]
    coefficients[:, 8:] = k[:, :1] * weighted[:, 1:]
    return f * to_c, f * f * var_c


# Maximum number of weights for native code. In small layers, the overhead of NumPy calls would be
# five times the arithmetic. Larger matrices need the blocking of BLAS.
SMALL = 2**14


class Pass(NamedTuple):
    """Arrays of a forward pass that the backward pass needs.

    Attributes:
        joined: Means of x and of the previous h at each step, ``[steps, rows, ni + no]``.
        slopes: See :func:`flashlight_py.tagi.lstm.cell_forward`, ``[steps, rows, 6, no]``.
        by_sample: Whether native code made the arrays. Their first axes are then ``rows, steps``.
    """

    joined: Array
    slopes: Array
    by_sample: bool


class Gates(NamedTuple):
    """The gates of an LSTM for windows of ``steps`` time steps.

    ``weight`` is ``[4, no, ni + no]`` for ni elements of x and no of h. ``biases`` is ``[4, no]``.
    """

    weight: Parameter
    biases: Parameter | None
    steps: int

    def forward(
        self, x: Array, x_variance: Array | None, states: States | None, carry: bool
    ) -> tuple[Array, Array, States | None, Pass]:
        """Return means and variances of h, the final states, and the arrays for the backward pass.

        The moments of h are ``[rows, steps * no]``.

        Args:
            x, x_variance: ``[rows, steps * ni]``. None: all variances are 0.
            states: Initial states of a single row, each ``[1, no]``. None: 0.
            carry: Whether to return the final states of a single row. False: return None for them.
        """
        kernels = None if self.weight.mean.size > SMALL else native_for(x)
        if kernels is not None:
            return self._forward_natively(kernels, x, x_variance, states, carry)
        xp = array_module(x)
        no, n = self.weight.mean.shape[1:]
        rows, ni, steps = len(x), n - no, self.steps
        matrix, variances = (
            moment.reshape(4 * no, n) for moment in (self.weight.mean, self.weight.variance)
        )
        products = self._products(8)

        joined = xp.zeros((steps, rows, n), REAL)
        joined[..., :ni] = _by_step(x, steps)
        inputs = joined[..., :ni].reshape(-1, ni)
        z, moment = inputs @ matrix[:, :ni].T, inputs * inputs
        u = xp.zeros((steps * rows, 8 * no), REAL)
        if x_variance is not None:
            variance = _by_step(x_variance, steps).reshape(-1, ni)
            moment += variance
            xp.matmul(variance, products[:, :ni].T, out=u)
        u[:, : 4 * no] += moment @ variances[:, :ni].T
        if self.biases is not None:
            z += self.biases.mean.reshape(-1)
            u[:, : 4 * no] += self.biases.variance.reshape(-1)
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
        last = states if carry else None
        return _by_sample(h[0]), _by_sample(h[1]), last, Pass(joined, slopes, False)

    def backward(
        self, memory: Pass, d: Array, e: Array, needs_input: bool
    ) -> tuple[Array, Array, Deltas | None]:
        """Return deltas of the means and variances of the gate inputs, and the deltas of x.

        ``d`` and ``e`` are the deltas of h, ``[rows, steps * no]``. The first two results are
        ``[rows * steps, 4 * no]``, with the rows in the order of ``joined``. The deltas of x are
        ``[rows, steps * ni]``, or None if ``needs_input`` is False.
        """
        if memory.by_sample:
            return self._backward_natively(memory, d, e, needs_input)
        joined, slopes, _ = memory
        xp = array_module(joined)
        steps, rows, n = joined.shape
        no = slopes.shape[3]
        ni = n - no
        matrix, products = self.weight.mean.reshape(4 * no, n), self._products(10)
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
        if not needs_input:
            return dz, coefficients[:, : 4 * no], None
        dx, ex = dz @ matrix[:, :ni], coefficients @ products[:, :ni]
        dx, ex = (_by_sample(delta.reshape(steps, rows, ni)) for delta in (dx, ex))
        return dz, coefficients[:, : 4 * no], (dx, ex)

    def _forward_natively(
        self, kernels: Any, x: Array, x_variance: Array | None, states: States | None, carry: bool
    ) -> tuple[Array, Array, States | None, Pass]:
        no, n = self.weight.mean.shape[1:]
        rows, steps = len(x), self.steps
        h, v_h = np.empty((2, rows, steps * no), REAL)
        joined, slopes = np.empty((rows, steps, n), REAL), np.empty((rows, steps, 6, no), REAL)
        last = None
        if carry:
            last = np.zeros((4, 1, no), REAL) if states is None else np.stack(states)
        biases = (None, None) if self.biases is None else (self.biases.mean, self.biases.variance)
        arrays = (self.weight.mean, self.weight.variance, *biases, x, x_variance)
        self._call(kernels, "forward", rows, *arrays, h, v_h, joined, slopes, last)
        return h, v_h, (None if last is None else States(*last)), Pass(joined, slopes, True)

    def _backward_natively(
        self, memory: Pass, d: Array, e: Array, needs_input: bool
    ) -> tuple[Array, Array, Deltas | None]:
        kernels: Any = tagi_kernels()
        joined, slopes, _ = memory
        rows, steps, n = joined.shape
        no = slopes.shape[3]
        dz, ez = np.empty((2, rows * steps, 4 * no), REAL)
        deltas: Any = np.empty((2, rows, steps * (n - no)), REAL) if needs_input else (None, None)
        self._call(kernels, "backward", rows, self.weight.mean, slopes, d, e, dz, ez, *deltas)
        return dz, ez, (deltas[0], deltas[1]) if needs_input else None

    def _call(self, kernels: Any, name: str, rows: int, *arrays: Array | None) -> None:
        no, n = self.weight.mean.shape[1:]
        sizes = kernels.ffi.new("fl_tagi_lstm *", (rows, self.steps, n - no, no))
        call = getattr(kernels.lib, f"fl_tagi_lstm_{name}")
        if call(sizes, *(floats(kernels, array) for array in arrays)):
            raise MemoryError(f"LSTM.{name} needs more memory for the weights of all gates")

    def _products(self, pairs: int) -> Array:
        """Return products of weights for the first ``pairs`` pairs: ``[pairs * no, ni + no]``."""
        mean, (left, right) = self.weight.mean, (pair[:pairs] for pair in PAIRS)
        return (mean[left] * mean[right]).reshape(-1, mean.shape[2])


def _by_step(array: Array, steps: int) -> Array:
    """Convert ``[rows, steps * width]`` to ``[steps, rows, width]``."""
    return array.reshape(len(array), steps, -1).swapaxes(0, 1)


def _by_sample(array: Array) -> Array:
    """Convert ``[steps, rows, width]`` to ``[rows, steps * width]``."""
    return array.swapaxes(0, 1).reshape(array.shape[1], -1)
