"""The LSTM of Gaussian units, and the Rauch-Tung-Striebel smoother of a series.

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

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.device import Array, array_module, to_device
from flashlight_py.tagi import layer
from flashlight_py.tagi.layer import BaseLayer, Deltas, Parameter, Shape, times_slope
from flashlight_py.tagi.linear import Linear
from flashlight_py.tagi.states import REAL, BaseHiddenStates, as_real, floats, host_copy, native_for

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
        slopes: See :func:`cell_forward`, ``[steps, rows, 6, no]``.
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
        moments = self.weight.mean, self.weight.variance
        matrix, variances = (moment.reshape(4 * no, n) for moment in moments)
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
        joined, slopes, _ = memory
        kernels: Any = native_for(joined)
        rows, steps, n = joined.shape
        no = slopes.shape[3]
        dz, ez = np.empty((2, rows * steps, 4 * no), REAL)
        deltas: Any = np.empty((2, rows, steps * (n - no)), REAL) if needs_input else (None, None)
        self._call(kernels, "backward", rows, self.weight.mean, slopes, d, e, dz, ez, *deltas)
        return dz, ez, (deltas[0], deltas[1]) if needs_input else None

    def _call(self, kernels: Any, name: str, rows: int, *arrays: Array | None) -> None:
        no, n = self.weight.mean.shape[1:]
        call = getattr(kernels.lib, f"fl_tagi_lstm_{name}")
        sizes = (rows, self.steps, n - no, no)
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


Window: TypeAlias = Literal["recurrent", "independent"]

WINDOWS = ("recurrent", "independent")


class LSTM(BaseLayer):
    r"""A long short-term memory (LSTM) of Gaussian units.

    It maps ``[batch, seq_len * input_size]`` to ``[batch, seq_len * output_size]``. The time steps
    of a sample are consecutive. The gates f, i, g and o are functions of linear layers of x_t
    joined to h_{t-1}: g is a tanh, f, i and o are sigmoids, all linearised at their means. Then
    ``c_t = f c_{t-1} + i g`` and ``h_t = o tanh(c_t)``. Moments of products include the covariances
    of the factors. Source: Vuong, Nguyen and Goulet, Coupling LSTM neural networks and state-space
    models through analytically tractable inference, International Journal of Forecasting, 2025.

    **Over a window.** h and c start at 0. Each time step passes their prior moments to the next
    step. In the backward pass, let (d_y, e_y) be the deltas of a unit y. As in every layer, the
    deltas of a unit u are the sums of ``k d_y`` and of ``k**2 e_y`` over all units y computed from
    u, with ``k = cov(u, y) / var(u)``. These units y are:

    - Of h_t: the output at t and, through the gates of the next step, c_{t+1} and h_{t+1}.
    - Of c_t: h_t, with ``k = o / cosh(c_t)**2``, and c_{t+1}, with ``k = f_{t+1}``.
    - Of x_t: c_t, through the gates f, i and g, and h_t, through all four gates. In ``k``, the
      contributions of these gates are added before squaring.

    The deltas of the means are the gradient of the linearised network. The deltas of the variances
    treat contributions of h_t and c_{t+1} as independent, like two outputs of a linear layer.

    **From call to call.** With ``seq_len=1`` and a batch of one sample, a call starts with h and c
    of the previous call. After a backward pass, h and c have posterior moments. Other calls start
    with 0. A batch of several samples clears the carried states.

    Args:
        input_size, output_size: Units of one time step, at least 1.
        seq_len: Time steps of a sample, at least 1.
        bias: Whether the gates have biases.
        gain_weight, gain_bias: Factors of the initial standard deviations of the parameters.
        init_method: ``"He"``: means from N(0, 1 / n), n = input_size + output_size. ``"Xavier"``:
            from N(0, 2 / (n + output_size)). Initial variances: the variance of N times gain^2.
        window: ``"recurrent"``: see above. ``"independent"``: every time step starts with h = c =
            0, as in pytagi 0.2.1, which treats the window as a batch.

    Weights and biases have the order f, i, g, o. Each weight has the shape ``[output_size,
    input_size + output_size]``.

    Raises:
        ValueError: If a size is below 1, or ``init_method`` or ``window`` is unknown.
    """

    def __init__(
        self, input_size: int, output_size: int, seq_len: int, bias: bool = True,
        gain_weight: float = 1.0, gain_bias: float = 1.0, init_method: str = "He", *,
        window: Window = "recurrent",
    ) -> None:  # fmt: skip
        super().__init__()
        if min(input_size, output_size, seq_len) < 1:
            name, got = self.get_layer_name(), f"{input_size}, {output_size} and {seq_len}"
            raise ValueError(f"{name}: sizes and seq_len must be at least 1, got {got}")
        if window not in WINDOWS:
            raise ValueError(f"window must be one of {', '.join(WINDOWS)}, got {window!r}")
        self.seq_len, self.window = seq_len, window
        self._independent = window == "independent"
        self._inputs, self._outputs = input_size, output_size  # numbers of units of one time step
        self.input_shape, self.output_shape = (seq_len * input_size,), (seq_len * output_size,)
        width = input_size + output_size
        deviation = layer.spread(init_method, width, output_size)
        self.weight: Parameter = layer.gaussian((4, output_size, width), deviation, gain_weight)
        self.biases = layer.gaussian((4, output_size), deviation, gain_bias) if bias else None
        self._carried: States | None = None  # initial states, each [1, output_size]; None: 0
        self._x = BaseHiddenStates(np.empty((0, self.input_size)))
        empty = np.empty((0, 0, input_size + output_size))
        self._pass = Pass(empty, empty[..., None], False)  # arrays of the last forward pass

    def connect(self, shape: Shape) -> Shape:
        """Return the output shape. A sample must have ``seq_len * input_size`` elements."""
        if int(np.prod(shape)) != self.input_size:
            sizes = f"{self.seq_len} time steps of {self._inputs}, got shape {shape}"
            raise ValueError(f"expected {self.input_size} elements per sample, {sizes}")
        return (self.output_size,)

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        x = x.shaped((self.input_size,))
        batch = len(x.mean)
        carry = self.carries_states and batch == 1
        # Independent time steps are computed like samples.
        rows, steps = (batch * self.seq_len, 1) if self._independent else (batch, self.seq_len)
        x_variance = None if x.variance is None else x.variance.reshape(rows, -1)
        start, gates = self._carried if carry else None, Gates(self.weight, self.biases, steps)
        x_mean = x.mean.reshape(rows, -1)
        mean, variance, self._carried, arrays = gates.forward(x_mean, x_variance, start, carry)
        if self.training:
            self._x, self._pass = x, arrays
        return BaseHiddenStates(mean.reshape(batch, -1), variance.reshape(batch, -1))

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Sum the gates' parameter deltas over batch and time; return the input's deltas."""
        joined, slopes, _ = self._pass
        xp = array_module(joined)
        width = self._outputs if self._independent else self.output_size
        d, e = d.reshape(-1, width), e.reshape(-1, width)
        if self._carried is not None:  # change the states to the posterior
            h, v_h, c, v_c = self._carried
            t = v_c * slopes[0, :, 4]  # cov(h, c)
            h, v_h = h + v_h * d, xp.maximum(v_h + v_h * v_h * e, 0)
            self._carried = States(h, v_h, c + t * d, xp.maximum(v_c + t * t * e, 0))
        gates = Gates(self.weight, self.biases, 1 if self._independent else self.seq_len)
        dz, ez, deltas = gates.backward(self._pass, d, e, needs_input)
        joined, shape = joined.reshape(-1, joined.shape[2]), (dz.shape[1], -1)
        xp.matmul(dz.T, joined, out=self.weight.mean_sum.reshape(shape))
        xp.matmul(ez.T, joined * joined, out=self.weight.variance_sum.reshape(shape))
        self._sum_biases(dz.reshape(-1, 4, self._outputs), ez.reshape(-1, 4, self._outputs), 0)
        if deltas is None:
            return None
        d, e = (delta.reshape(self._x.mean.shape) for delta in deltas)
        return times_slope(d, e, self._x.slope)

    @property
    def carries_states(self) -> bool:
        """Whether a call with one sample starts with h and c of the previous call."""
        return self.seq_len == 1

    def get_states(self) -> States:
        """Return the initial states of the next call: four flat copies on the CPU."""
        if self._carried is None:
            return States(*(np.zeros(self._outputs, REAL) for _ in States._fields))
        return States(*(host_copy(state).reshape(-1) for state in self._carried))

    def set_states(self, states: Sequence[Any] | None) -> None:
        """Set the next call's initial states: four arrays of ``output_size`` elements. None: 0.

        Raises:
            TypeError, ValueError: If the states are not real numbers, or masked.
        """
        if states is None:
            self._carried = None
            return
        copies = (as_real(f"{self}: states", s, "cpu", copy=True).reshape(1, -1) for s in states)
        self._carried = States(*map(array_module(self.weight.mean).asarray, copies))

    def to_device(self, device: str) -> None:
        if self._carried is not None:
            self._carried = States(*(to_device(state, device) for state in self._carried))

    def _sizes(self) -> Sequence[int]:
        return self._inputs, self._outputs


class TimeStep(NamedTuple):
    """The data of one time step for the smoother.

    Attributes:
        prior, posterior: Means and variances of h, then of c, each ``[n]``.
        cell: Covariance of each c with the previous c of the same unit, ``[n]``.
        hidden: Covariances of the previous h (rows) with h (columns), ``[n, n]``.
    """

    prior: States
    posterior: States
    cell: Array
    hidden: Array


class SLSTM(LSTM):
    """An :class:`LSTM` that stores time steps of a series for ``Sequential.smoother()``.

    Each call computes one time step, and each backward pass stores a step: at most the
    ``num_samples`` of the network. The smoother goes back in time. With ``G = cov(step, next) /
    prior_variance(next)``, it adds ``G (smoothed_mean(next) - prior_mean(next))`` to a step's
    posterior mean, and ``G**2 (smoothed_variance(next) - prior_variance(next))`` to its posterior
    variance. G is a vector for the cell state, a matrix for the hidden state; G**2 is elementwise.

    Args:
        input_size, output_size, bias, gain_weight, gain_bias, init_method: See :class:`LSTM`.
        seq_len: Must be 1.

    Raises:
        ValueError: If ``seq_len`` is not 1, or :class:`LSTM` raises it.
    """

    def __init__(
        self, input_size: int, output_size: int, seq_len: int, bias: bool = True,
        gain_weight: float = 1.0, gain_bias: float = 1.0, init_method: str = "He",
    ) -> None:  # fmt: skip
        super().__init__(
            input_size, output_size, seq_len, bias, gain_weight, gain_bias, init_method
        )
        if seq_len != 1:
            raise ValueError(f"SLSTM: seq_len must be 1, one time step per call, got {seq_len}")
        self.num_samples = 0  # number of time steps to keep; 0: none
        self.time_steps: list[TimeStep] = []
        self.smoothed: States | None = None  # ``[time steps, n]`` each
        self._previous: States | None = None  # initial states of the last forward pass

    def forward(self, x: BaseHiddenStates) -> BaseHiddenStates:
        """Return moments of the next time step of the series, ``[1, output_size]``.

        Raises:
            ValueError: If the batch does not have exactly one sample.
        """
        if len(x.mean) != 1:
            expected = f"{self}: expected one sample, the next time step of a series"
            raise ValueError(f"{expected}, got {len(x.mean)}")
        self._previous = self._carried
        return super().forward(x)

    def backward(self, d: Array, e: Array, needs_input: bool) -> Deltas | None:
        """Run the backward pass of :class:`LSTM` and keep the time step.

        Raises:
            RuntimeError: If ``num_samples`` time steps are kept already.
        """
        if self.num_samples == 0 or self._carried is None:
            return super().backward(d, e, needs_input)
        if len(self.time_steps) == self.num_samples:
            raise RuntimeError(
                f"{self}: expected at most {self.num_samples} time steps (net.num_samples), got "
                "one more. Call smoother() or reset_lstm_states() first"
            )
        prior, (cell, hidden) = self._carried, self._covariances()
        deltas = super().backward(d, e, needs_input)
        both = prior, self._carried
        prior, posterior = (States(*(array[0] for array in states)) for states in both)
        self.time_steps.append(TimeStep(prior, posterior, cell, hidden))
        return deltas

    def _covariances(self) -> tuple[Array, Array]:
        """Return ``cell`` and ``hidden`` of a :class:`TimeStep` for the last forward pass."""
        k, no = self._pass.slopes[0, 0], self._outputs
        xp = array_module(k)
        if self._previous is None:
            return xp.zeros(no, k.dtype), xp.zeros((no, no), k.dtype)
        gates = k[:4].copy()  # slopes of h with respect to the gate inputs
        gates[:3] *= k[4]
        effect = (gates[:, :, None] * self.weight.mean[:, :, self._inputs :]).sum(axis=0)
        return self._previous[3][0] * k[5], self._previous[1][0][:, None] * effect.T

    def smooth(self) -> BaseHiddenStates:
        """Return moments of the smoothed h, ``[time steps, output_size]``; start a new series.

        Raises:
            RuntimeError: If no time step was kept.
        """
        if not self.time_steps:
            raise RuntimeError(
                f"smoother: {self} has no time steps. Set net.num_samples to their number, and run "
                "forward and backward for each time step"
            )
        after = self.time_steps[-1].posterior
        smoothed = [after]
        for now, step in zip(self.time_steps[-2::-1], self.time_steps[:0:-1], strict=True):
            after = States(
                *_smoothed(step.hidden, now.posterior[:2], step.prior[:2], after[:2]),
                *_smoothed(step.cell, now.posterior[2:], step.prior[2:], after[2:]),
            )
            smoothed.append(after)
        stack = array_module(after[0]).stack
        self.smoothed = States(*(stack(array[::-1]) for array in zip(*smoothed, strict=True)))
        self.set_states(None)
        return BaseHiddenStates(*self.smoothed[:2])

    def set_states(self, states: Sequence[Any] | None) -> None:
        """Set the states like ``LSTM.set_states``. None also starts a new time series."""
        super().set_states(states)
        if states is None:
            self.time_steps = []

    def to_device(self, device: str) -> None:
        """Move the carried states to ``device``, and start a new time series."""
        super().to_device(device)
        self.time_steps, self.smoothed = [], None


def _smoothed(
    covariance: Array, posterior: tuple[Array, ...], prior: tuple[Array, ...],
    after: tuple[Array, ...],
) -> tuple[Array, Array]:  # fmt: skip
    """Return smoothed moments of a time step from its ``posterior`` moments and the next step.

    ``covariance`` with the next step: ``[n]`` for c, ``[n, n]`` for h. ``prior`` and ``after``:
    prior and smoothed moments of the next step.
    """
    xp = array_module(covariance)
    gain = covariance / xp.where(prior[1] > 0, prior[1], layer.FLOOR)
    mean, variance = after[0] - prior[0], after[1] - prior[1]
    if gain.ndim == 2:
        mean, variance = gain @ mean, (gain * gain) @ variance
    else:
        mean, variance = gain * mean, gain * gain * variance
    mean, variance = posterior[0] + mean, posterior[1] + variance
    return mean, xp.where(variance < 0, layer.FLOOR, variance)


class SLinear(Linear):
    """A :class:`Linear` for use after an :class:`SLSTM`. ``smoother()`` computes its outputs."""

    def smooth(self, hidden: BaseHiddenStates) -> BaseHiddenStates:
        """Return the outputs for smoothed ``hidden``, ``[time steps, output_size]``.

        It uses the current parameters. Data kept for a backward pass is unchanged.
        """
        training, self.training = self.training, False
        try:
            return self.forward(hidden)
        finally:
            self.training = training
