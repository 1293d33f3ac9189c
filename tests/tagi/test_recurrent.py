"""LSTM layers and the smoother: steps, carried states, kernels, and smoothed series."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import lstm, nn
from tests.tables import for_each, pairs
from tests.tagi.helpers import equal, needs_kernels, network, numbers, observe
from tests.tagi.oracle import compare, run_both


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def exact_step(
    w: np.ndarray, b: np.ndarray, x: np.ndarray, h: np.ndarray, c: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return h and c of an LSTM of plain numbers; ``w``: [..., 4, no, ni + no]."""
    z = np.einsum("...qkj,...j->...qk", w, np.concatenate([x, h], -1)) + b
    f, i, g, o = np.moveaxis(z, -2, 0)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


@pytest.mark.slow
@for_each("batch window certain steps", pairs([1, 5], [1, 4], [True, False], [1, 3]))
def test_lstm_steps_equal_pytagi(batch: int, window: int, certain: bool, steps: int) -> None:
    """Only one sample of one time step carries states between steps."""
    x, y = numbers(batch, window), numbers(batch, 1)
    plain = f"Sequential(LSTM(1, 8, {window}), LSTM(8, 5, {window}), Linear({5 * window}, 1))"
    independent = plain.replace(f" {window})", f" {window}, window='independent')", 2)
    var_x = None if certain else np.full(x.shape, 0.2)
    compare(plain, x, y, np.full(y.shape, 0.3), var_x=var_x, own_network=independent, steps=steps)


@for_each("uncertain", ["weights and cells", "inputs"])
def test_lstm_moments_of_a_step_match_random_draws(uncertain: str) -> None:
    """To first order: variances are small compared with the curvature of the gates.

    The covariance of f with i g through their inputs is ignored here and in pytagi. So either
    parameters and c are random, which the gates do not share, or the inputs with c = 0.
    """
    tagi.manual_seed(4)
    weights = uncertain != "inputs"
    layer = nn.LSTM(2, 3, 1, *(True, 0.1, 0.1) if weights else (True, 1e-4, 1e-4))
    layer.mu_w = 2 * layer.mu_w
    net = nn.Sequential(layer)
    rng = np.random.default_rng(1)
    h, c, none = rng.normal(size=3), rng.normal(size=3), np.zeros(3)
    states = (h, none, c, np.full(3, 0.01)) if weights else (h, none, none, none)
    net.set_lstm_states({0: states})
    x, var_x = np.array([[0.8, -1.2]]), np.full((1, 2), 0 if weights else 0.01)
    mean, variance = net(x, var_x)
    draws = 50_000
    w = rng.normal(layer.mu_w, np.sqrt(layer.var_w), (draws, 60)).reshape(draws, 4, 3, 5)
    b = rng.normal(layer.mu_b, np.sqrt(layer.var_b), (draws, 12)).reshape(draws, 4, 3)
    h, c = (rng.normal(m, np.sqrt(v), (draws, 3)) for m, v in (states[:2], states[2:]))
    h, c = exact_step(w, b, rng.normal(x, np.sqrt(var_x), (draws, 2)), h, c)
    states = net.get_lstm_states()[0]
    equal(states[2], c.mean(0), atol=0.004)
    equal(states[3], c.var(0), rtol=0.06)
    equal(mean[0], h.mean(0), atol=0.004)
    equal(variance[0], h.var(0), rtol=0.06)


@for_each("certain", [True, False])
def test_lstm_window_equals_calls_that_carry_priors(certain: bool) -> None:
    window = network("LSTM(2, 4, 6), LSTM(4, 3, 6)")
    single = nn.Sequential(nn.LSTM(2, 4, 1), nn.LSTM(4, 3, 1))
    single.load_state_dict(window.state_dict())
    x, var_x = numbers(3, 12), None if certain else np.abs(numbers(3, 12, seed=1))
    mean, variance = window(x, var_x)
    for sample in range(3):
        single.reset_lstm_states()
        for t in range(6):
            now = slice(2 * t, 2 * t + 2)
            one = single(x[sample, now], None if var_x is None else var_x[sample, now])
            out = slice(3 * t, 3 * t + 3)
            equal(one[0], mean[sample, out], 1e-5, 1e-6)
            equal(one[1], variance[sample, out], 1e-5, 1e-7)


def test_lstm_accepts_any_shape_and_batch_size() -> None:
    net = nn.Sequential(nn.LSTM(3, 2, 4), nn.Linear(8, 1))
    x = numbers(7, 4, 3)
    mean, variance = net(x)
    for variant in (x.reshape(7, 12), np.asfortranarray(x), x.astype(np.float64)[::1]):
        equal(net(variant), (mean, variance))
    equal(net(x.ravel())[0], mean.ravel())
    equal(net(x[2:3])[0], mean[2:3], 1e-5, 1e-6)


def exact(w: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return h of all time steps of ``x`` [T, ni], flat, with h = c = 0 at the start."""
    h = c = np.zeros(w.shape[1])
    outputs = []
    for now in x:
        h, c = exact_step(w, b, now, h, c)
        outputs.append(h)
    return np.concatenate(outputs)


def certain_lstm(ni: int, no: int, steps: int) -> tuple[nn.Sequential, np.ndarray, np.ndarray]:
    """Return a network with almost exact parameters, its weights and its biases."""
    net = nn.Sequential(nn.LSTM(ni, no, steps, gain_weight=1e-4, gain_bias=1e-4))
    net.input_state_update = True
    layer = net.layers[0]
    w = layer.mu_w.astype(np.float64).reshape(4, no, ni + no)
    return net, 2 * w, layer.mu_b.astype(np.float64).reshape(4, no)


def difference(function, at: np.ndarray, step: float = 1e-5) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Return numeric derivatives of ``function(at)``, one row per element of ``at``."""
    rows = []
    for index in np.ndindex(at.shape):
        shifted = [at.astype(np.float64), at.astype(np.float64)]
        shifted[0][index] += step
        shifted[1][index] -= step
        rows.append((function(shifted[0]) - function(shifted[1])) / (2 * step))
    return np.array(rows)


def test_lstm_deltas_of_means_are_the_gradient_through_time() -> None:
    tagi.manual_seed(5)
    net, w, b = certain_lstm(2, 3, 4)
    layer = net.layers[0]
    layer.mu_w = w
    x, d = numbers(2, 8), numbers(2, 12, seed=1)
    mean, _ = net(x)
    equal(mean, [exact(w, b, sequence.reshape(4, 2)) for sequence in x], 1e-4, 1e-5)
    net.set_delta_z(d, np.zeros_like(d))
    net.backward()

    def score(w: np.ndarray, b: np.ndarray, x: np.ndarray) -> float:
        return sum(d[n] @ exact(w, b, x[n].reshape(4, 2)) for n in range(2))

    tolerance = {"rtol": 1e-3, "atol": 1e-4}
    of_w = difference(lambda at: score(at, b, x), w)
    np.testing.assert_allclose(layer.weight.mean_sum.ravel(), of_w, **tolerance)
    of_b = difference(lambda at: score(w, at, x), b)
    np.testing.assert_allclose(layer.biases.mean_sum.ravel(), of_b, **tolerance)
    of_x = difference(lambda at: score(w, b, at), x)
    np.testing.assert_allclose(net.get_input_states()[0], of_x, **tolerance)


def test_lstm_input_deltas_include_the_slope_of_the_activation() -> None:
    """pytagi omits the slope."""
    net = network("ReLU(), LSTM(2, 3, 2)")
    net.input_state_update = True
    net(np.array([[1.0, -2.0, -3.0, 4.0]]), np.ones((1, 4)))
    observe(net, np.ones(6))
    for deltas in net.get_input_states():
        equal(deltas != 0, [True, False, False, True])


SERIES = """
net = Sequential(LSTM(2, 4, 1), LSTM(4, 3, 1), Linear(3, 1))
if {load}:
    net.load_state_dict(parameters)
net.set_threads(1)
parameters = net.state_dict()
updater, states, outputs = OutputUpdater("cpu"), [], []
for number, (now, target) in enumerate(zip(x, y)):
    if number == 7:
        net.reset_lstm_states()
    if number == 12:
        net.set_lstm_states(states[4])
    outputs.append([np.array(each) for each in net(now)])
    if number not in (5, 9):
        updater.update(net.output_z_buffer, target, error, net.input_delta_z_buffer)
        net.backward()
        net.step()
    states.append({{k: [np.array(a) for a in v] for k, v in net.get_lstm_states().items()}})
result = parameters, outputs, states
"""


@pytest.mark.slow
def test_lstm_states_of_a_series_equal_pytagi() -> None:
    """Carried as posteriors, or as priors without observation; also reset and set."""
    arrays = {
        "x": numbers(16, 2),
        "y": numbers(16, 1, seed=1),
        "error": np.full(1, 0.3, np.float32),
    }
    equal(*run_both(SERIES, **arrays), 1e-4, 1e-6)


def test_lstm_carries_states_for_one_sample_of_one_step() -> None:
    net = network("LSTM(1, 3, 1), LSTM(3, 2, 1)")
    fresh = net.get_lstm_states()
    assert [sorted(fresh), [state.size for state in fresh[1]]] == [[0, 1], [2] * 4]
    assert not any(array.any() for states in fresh.values() for array in states)
    x = numbers(1, 1)
    outputs = [net(x)[0] for _ in range(3)]
    assert all((a != b).any() for a, b in pairwise(outputs))
    after = net.get_lstm_states()
    equal(after[1][0], outputs[-1][0])
    ahead = net(x)[0]
    net.set_lstm_states(after)
    equal(net(x)[0], ahead)
    net.reset_lstm_states()
    equal(net(x)[0], outputs[0])
    net(np.concatenate([x, x]))  # two samples are no series: they start with 0 ...
    equal(net(np.concatenate([x, x]))[0][:1], outputs[0])
    equal(net(x)[0], outputs[0])  # ... and clear the carried states
    window = nn.Sequential(nn.LSTM(1, 3, 2))
    assert window.get_lstm_states() == {}
    equal(window(numbers(1, 2))[0], window(numbers(1, 2))[0])


def test_lstm_posterior_variances_are_not_negative() -> None:
    net = nn.Sequential(nn.LSTM(1, 2, 1))
    net(np.ones((1, 1)))
    net.set_delta_z(np.ones(2), np.full(2, -1e9))
    net.backward()
    states = net.get_lstm_states()[0]
    assert (states[1] == 0).all()
    assert (states[3] == 0).all()


def test_set_lstm_states_rejects_invalid_states() -> None:
    net = nn.Sequential(nn.LSTM(1, 3, 1), nn.Linear(3, 1))
    three = [np.ones(3)] * 4
    with pytest.raises(ValueError, match=r"keys of LSTMs with seq_len=1 \(0\), got 1"):
        net.set_lstm_states({0: three, 1: three})
    assert not net.get_lstm_states()[0][0].any()
    with pytest.raises(ValueError, match=r"layer 0, LSTM\(1,3\): expected means and variances"):
        net.set_lstm_states({0: [np.ones(2)] * 4})
    three[1], three[2] = -np.ones(3), np.full(3, np.nan)
    with pytest.raises(
        ValueError, match=r"layer 0, .*: mean_c is not finite; variance_h has negative"
    ):
        net.set_lstm_states({0: three})
    with pytest.raises(ValueError, match=r"layer 0: expected no masked elements, got 1 of 3"):
        net.set_lstm_states({0: [np.ma.masked_less(np.arange(3), 1)] * 4})
    with pytest.raises(ValueError, match=r"LSTM\(1,3\): states: .* masked .* got 1 of 3"):
        net.layers[0].set_states([np.ma.masked_less(np.arange(3), 1)] * 4)
    assert not net.get_lstm_states()[0][0].any()
    with pytest.raises(ValueError, match="time_step must be -1, or from 0 and below 0"):
        net.get_lstm_states(0)


def passes(layer: nn.LSTM, x: np.ndarray, variance: np.ndarray | None) -> list[np.ndarray]:
    """Return all results of three passes, and the states between them."""
    net = nn.Sequential(layer)
    net.input_state_update = True
    rng = np.random.default_rng(1)
    made: list[np.ndarray] = []
    for _ in range(3):
        made += net(x, variance)
        d = rng.standard_normal(made[-1].size).astype(np.float32)
        net.set_delta_z(d, -d * d)
        net.backward()
        made += [layer.delta_mu_w, layer.delta_var_w, layer.delta_mu_b, layer.delta_var_b]
        made += [*net.get_input_states(), *(a for s in net.get_lstm_states().values() for a in s)]
    return made


@needs_kernels
@for_each("certain", [True, False])
@for_each(
    "rows steps inputs outputs bias",
    [(1, 1, 1, 1, True), (1, 1, 3, 17, False), (4, 7, 2, 5, True), (3, 2, 9, 16, False)],
)
def test_lstm_kernel_equals_numpy(
    rows: int, steps: int, inputs: int, outputs: int, bias: bool, certain: bool
) -> None:
    rng = np.random.default_rng(0)
    # Closed, open and partly open gates.
    x = rng.standard_normal((rows, steps * inputs)) * rng.choice([0.1, 1, 30], (rows, 1))
    variance = None if certain else rng.uniform(0, 0.3, x.shape)

    def made() -> list[np.ndarray]:
        tagi.manual_seed(2)
        return passes(nn.LSTM(inputs, outputs, steps, bias), x, variance)

    numpy_net = made()
    with mock.patch("flashlight_py.tagi.states.tagi_kernels", return_value=None):
        reference = made()
    for number, (array, expected) in enumerate(zip(numpy_net, reference, strict=True)):
        largest = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(array, expected, 1e-4, 2e-6 * largest, err_msg=str(number))


@needs_kernels
def test_lstm_uses_blas_above_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare both implementations at the same size."""
    monkeypatch.setattr(lstm, "SMALL", 4 * 6 * 8)
    small = network("LSTM(2, 6, 3)")
    x = np.ones((2, 6))
    expected = small(x)
    assert small.layers[0]._pass.by_sample
    monkeypatch.setattr(lstm, "SMALL", 4 * 6 * 8 - 1)
    equal(small(x), expected, 1e-5)
    assert not small.layers[0]._pass.by_sample


@needs_kernels
def test_lstm_tanh_is_exact_and_propagates_nan() -> None:
    """With open gates i and o, c = i g is tanh(x), and h = tanh(tanh(x))."""
    x = np.concatenate([np.linspace(-12, 12, 4001), [1e-8, -1e-30, 0, 88, -1e15, np.nan]])
    net = nn.Sequential(nn.LSTM(1, 1, 1))
    net.load_state_dict({"LSTM.0": ([0, 0, 0, 0, 1, 0, 0, 0], [0] * 8, [0, 60, 0, 60], [0] * 4)})
    mean, variance = net(x[:, None].astype(np.float32))
    exact = np.tanh(np.tanh(x.astype(np.float32).astype(float)))
    equal(mean[:, 0], exact, 3e-7, 1e-14)
    assert not variance[:-1].any()
    assert np.isnan(variance[-1])


STEPS = 9

SMOOTHED = """
net = Sequential(SLSTM(2, 5, 1), SLSTM(5, 4, 1), SLinear(4, 1))
net.num_samples = len(x)
if {load}:
    net.load_state_dict(parameters)
net.set_threads(1)
net.input_state_update = True
parameters = net.state_dict()
updater, outputs, smoothed = OutputUpdater("cpu"), [], []
for epoch in range(2):
    for now, target in zip(x, y):
        outputs.append([np.array(each) for each in net(now)])
        updater.update(net.output_z_buffer, target, error, net.input_delta_z_buffer)
        net.backward()
        net.step()
    smoothed.append([np.array(each) for each in net.smoother()])
smoothed.append([np.array(each) for each in net.get_outputs_smoother()])
states = [
    {{k: [np.array(a) for a in v] for k, v in net.get_lstm_states(t).items()}}
    for t in range(-1, len(x))
]
result = parameters, outputs, smoothed, states
"""


def series() -> dict[str, np.ndarray]:
    """Return inputs, partly missing targets, and the variance of an observation."""
    rng = np.random.default_rng(0)
    t = np.arange(STEPS)
    x = np.stack([np.sin(t), np.cos(0.5 * t)], 1).astype(np.float32)
    y = (np.sin(t + 1) + 0.1 * rng.standard_normal(STEPS)).astype(np.float32).reshape(-1, 1)
    y[[0, 1, 5]] = np.nan
    return {"x": x, "y": y, "error": np.full(1, 0.2, np.float32)}


@pytest.mark.slow
def test_smoother_equals_pytagi() -> None:
    equal(*run_both(SMOOTHED, **series()), 1e-4, 1e-5)


def run(net: nn.Sequential, y: np.ndarray) -> Iterator[None]:
    """Observe a series, and yield after each backward pass, before the step."""
    updater = nn.OutputUpdater(net.device)
    for now, target in zip(series()["x"], y, strict=False):
        net(now)
        updater.update(net.output_z_buffer, target, 0.2, net.input_delta_z_buffer)
        net.backward()
        yield


def test_smoothed_states_match_formulas() -> None:
    """Float64 formulas per time step, from the states of the forward passes."""
    net = network("SLSTM(2, 3, 1), SLinear(3, 2)", 2)
    net.num_samples = STEPS
    layer = net.layers[0]
    y = np.random.default_rng(1).standard_normal((STEPS, 2))
    for _ in run(net, y):
        net.step()
    steps = layer.time_steps
    kept = [[np.asarray(item, np.float64) for item in [*s.prior, *s.posterior]] for s in steps]
    cells, hidden = (
        [np.asarray(value, np.float64) for value in covariances]
        for covariances in ([s.cell for s in steps], [s.hidden for s in steps])
    )
    h, c = (kept[-1][4], kept[-1][5]), (kept[-1][6], kept[-1][7])
    expected = [(*h, *c)]
    for t in range(STEPS - 2, -1, -1):
        now, after = kept[t], kept[t + 1]
        sums = np.zeros((2, 3))
        for j in range(3):
            for k in range(3):
                gain = hidden[t + 1][j, k] / after[1][k]
                sums[:, j] += gain * (h[0][k] - after[0][k]), gain**2 * (h[1][k] - after[1][k])
        gain = cells[t + 1] / after[3]
        h = now[4] + sums[0], now[5] + sums[1]
        c = now[6] + gain * (c[0] - after[2]), now[7] + gain**2 * (c[1] - after[3])
        expected.append((*h, *c))
    mean, variance = net.smoother()
    for t, moments in enumerate(reversed(expected)):
        equal(net.get_lstm_states(t)[0], moments, 1e-4, 1e-6)
    # Outputs of all time steps, from the last parameters.
    linear = nn.Sequential(nn.Linear(3, 2))
    linear.load_state_dict({"Linear.0": net.state_dict()["SLinear.1"]})
    states = [net.get_lstm_states(t)[0] for t in range(STEPS)]
    for state, array in zip(
        (mean, variance),
        linear(np.stack([s[0] for s in states]), np.stack([s[1] for s in states])),
        strict=True,
    ):
        equal(state.reshape(STEPS, 2), array, 1e-5)


def test_smoother_uses_later_observations() -> None:
    """Later observations fill a gap and reduce its variance."""
    results = []
    for last in (-2.0, 2.0, np.nan):
        net = network("SLSTM(2, 4, 1), SLinear(4, 1)")
        net.num_samples = STEPS
        y = np.full((STEPS, 1), np.nan)
        y[-1] = last
        for _ in run(net, y):
            pass
        results.append(net.smoother())
    low, high, nothing = results
    assert (low[0][-3:] < nothing[0][-3:]).all()
    assert (high[0][-3:] > nothing[0][-3:]).all()
    assert (low[1][-3:] < nothing[1][-3:]).all()


def test_reset_lstm_states_starts_a_new_series() -> None:
    net = network("SLSTM(2, 4, 1), SLinear(4, 1)")
    net.num_samples = STEPS
    assert net.num_samples == STEPS
    y = series()["y"]
    for _ in run(net, y[:4]):
        pass
    first = net.smoother()
    assert [array.shape for array in first] == [(4,), (4,)]  # the number of time steps
    equal(net.get_lstm_states()[0], np.zeros((4, 4)))
    for _ in run(net, y[:2]):
        pass
    net.reset_lstm_states()
    for _ in run(net, y[:4]):
        states = net.get_lstm_states()
        net(np.ones(2))  # a forecast is not kept
        net.set_lstm_states(states)
    equal(net.smoother(), first)


def test_smoother_checks_the_number_of_time_steps() -> None:
    net = nn.Sequential(nn.SLSTM(2, 4, 1), nn.SLinear(4, 1))
    for _ in run(net, np.ones((3, 1))):  # a network without smoothing
        pass
    with pytest.raises(RuntimeError, match=r"SLSTM\(2,4\) has no time steps\. Set net.num_sam"):
        net.smoother()
    with pytest.raises(RuntimeError, match="Call smoother"):
        net.get_outputs_smoother()
    net.num_samples = 3
    with pytest.raises(RuntimeError, match=r"SLSTM\(2,4\): expected at most 3 time steps \(net"):
        for _ in run(net, np.ones((4, 1))):
            pass
    net.smoother()
    for step in (-2, 3):
        with pytest.raises(ValueError, match=f"below 3, the number of .*, got {step}"):
            net.get_lstm_states(step)


def test_smoother_rejects_networks_with_other_layers() -> None:
    with pytest.raises(ValueError, match="expected a network with an SLSTM"):
        nn.Sequential(nn.LSTM(2, 4, 1), nn.SLinear(4, 1)).smoother()
    net = nn.Sequential(nn.SLSTM(2, 4, 1), nn.Linear(4, 1))
    net.num_samples = STEPS
    for _ in run(net, np.ones((2, 1))):
        pass
    with pytest.raises(ValueError, match=r"expected only SLSTM and SLinear, got 'Linear\.1'"):
        net.smoother()


def test_smoother_works_on_a_gpu(strict: Any) -> None:
    """A stand-in for CuPy represents the GPU."""
    actual = []
    for device in ("cpu", "cuda"):
        net = network("SLSTM(2, 4, 1), SLSTM(4, 3, 1), SLinear(3, 1)", 3)
        net(np.ones(2))
        net.to_device(device)  # including carried states
        net.num_samples = 4
        for _ in run(net, series()["y"][:4]):
            net.set_lstm_states(net.get_lstm_states())
        actual.append([*net.smoother(), *net.get_lstm_states(2)[1]])
    for result, expected in zip(*actual, strict=True):
        assert isinstance(result, np.ndarray)
        equal(result, expected, 1e-4, 1e-6)
