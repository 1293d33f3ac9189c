"""SLSTM, SLinear and the smoother, compared with pytagi and formulas."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flashlight_py.tagi import nn
from tests.tagi.helpers import equal, network
from tests.tagi.oracle import run_both

STEPS = 9

SERIES = """
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
    equal(*run_both(SERIES, **series()), 1e-4, 1e-5)


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
