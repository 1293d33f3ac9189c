"""One time step of an LSTM, element by element: moments forward, deltas back.

Gates are in pytagi's order f, i, g, o. What a step needs of the matrices are sums over the inputs
``x_j`` of products of two gates' weights, ``sum_j W_p[k, j] W_q[k, j] var(x_j)``: for a gate with
itself it is a part of the variance, for two gates the covariance before their functions. ``PAIRS``
are these p and q, in the order in which arrays have them:

    ff ii gg oo   the variances, completed by those of the weights
    ig            for the mean and variance of i g
    fo io go      for those of o tanh(c); over the inputs of the layer alone, as pytagi has it
    fi fg         only for the way back
"""

from __future__ import annotations

from typing import NamedTuple

from flashlight_py.device import Array, array_module
from flashlight_py.tagi.states import REAL

PAIRS = [0, 1, 2, 3, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 2, 3, 3, 3, 1, 2]


class States(NamedTuple):
    """Moments of the hidden states h and of the cells c, all of one shape."""

    mean_h: Array
    variance_h: Array
    mean_c: Array
    variance_c: Array


def cell_forward(z: Array, u: Array, states: States | None, slopes: Array) -> States:
    """Return means and variances of h, then of c, ``[rows, n]`` each.

    Args:
        z: means of the inputs of the gates, ``[rows, 4, n]``.
        u: their variances and covariances, ``[rows, 8, n]``, the first eight of ``PAIRS``.
        states: those of the step before; None: 0.
        slopes: ``[rows, 6, n]``, is written: covariances with c of the inputs of f, i and g, over
            their variances; that of o with h; that of c with h; and f.
    """
    xp = array_module(z)
    # sigmoid(z) = 1/2 + tanh(z/2) / 2, so all four gates are one tanh.
    half = xp.array([[0.5], [0.5], [1], [0.5]], REAL)
    t = xp.tanh(z * half)
    gates = t * half + (1 - half)
    gates[:, 2] = t[:, 2]
    slope = (1 - t * t) * (half * half)
    variances = slope * slope * u[:, :4]
    f, i, g, o = gates[:, 0], gates[:, 1], gates[:, 2], gates[:, 3]
    v_f, v_i, v_g, v_o = variances[:, 0], variances[:, 1], variances[:, 2], variances[:, 3]

    cov = slope[:, 1] * slope[:, 2] * u[:, 4]  # of i and g
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
    dh: Array,
    eh: Array,
    dc: Array | None,
    ec: Array | None,
    slopes: Array,
    dz: Array,
    coefficients: Array,
) -> tuple[Array, Array]:
    """Write the deltas of the gates' inputs; return those of the c of the step before.

    Args:
        dh, eh: the deltas of h, from the output and from the next step, ``[rows, n]``.
        dc, ec: those of c that the next step sends; None: there is none. What h sends to c is
            added here.
        slopes: as :func:`cell_forward` has written them.
        dz: ``[rows, 4, n]``, is written: the deltas of the gates' means.
        coefficients: ``[rows, 10, n]``, is written: with the products of weights of ``PAIRS`` it
            makes the deltas of the variances of what the gates are computed from; the first four
            are those of the gates' own variances.
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
