"""The states that LSTMs carry from call to call, beside pytagi's and by themselves."""

from itertools import pairwise

import numpy as np
import pytest

from flashlight_py.tagi import nn
from tests.tagi.helpers import equal, network, numbers
from tests.tagi.oracle import run_both

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
def test_states_of_a_series_are_pytagi_s() -> None:
    """Carried as posteriors, or as priors where nothing was observed; reset and set, too."""
    given = {
        "x": numbers(16, 2),
        "y": numbers(16, 1, seed=1),
        "error": np.full(1, 0.3, np.float32),
    }
    equal(*run_both(SERIES, **given), 1e-4, 1e-6)


def test_states_are_carried_for_one_sample_of_one_time_step() -> None:
    net = network("LSTM(1, 3, 1), LSTM(3, 2, 1)")
    fresh = net.get_lstm_states()
    assert [sorted(fresh), [each.size for each in fresh[1]]] == [[0, 1], [2] * 4]
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
    net(np.concatenate([x, x]))  # two samples are no series: they begin with 0 ...
    equal(net(np.concatenate([x, x]))[0][:1], outputs[0])
    equal(net(x)[0], outputs[0])  # ... and clear what was carried
    window = nn.Sequential(nn.LSTM(1, 3, 2))
    assert window.get_lstm_states() == {}
    equal(window(numbers(1, 2))[0], window(numbers(1, 2))[0])


def test_posterior_variances_are_not_negative() -> None:
    net = nn.Sequential(nn.LSTM(1, 2, 1))
    net(np.ones((1, 1)))
    net.set_delta_z(np.ones(2), np.full(2, -1e9))
    net.backward()
    states = net.get_lstm_states()[0]
    assert (states[1] == 0).all()
    assert (states[3] == 0).all()


def test_states_that_do_not_fit_are_refused() -> None:
    net = nn.Sequential(nn.LSTM(1, 3, 1), nn.Linear(3, 1))
    three = [np.ones(3)] * 4
    with pytest.raises(ValueError, match=r"layer 1 is no LSTM with seq_len=1; those are 0"):
        net.set_lstm_states({0: three, 1: three})
    assert not net.get_lstm_states()[0][0].any()
    with pytest.raises(ValueError, match=r"layer 0, LSTM\(1,3\): expected means and variances"):
        net.set_lstm_states({0: [np.ones(2)] * 4})
    three[1], three[2] = -np.ones(3), np.full(3, np.nan)
    with pytest.raises(
        ValueError, match=r"layer 0, .*: mean_c is not finite; variance_h has negative"
    ):
        net.set_lstm_states({0: three})
    with pytest.raises(ValueError, match=r"layer 0: 1 of 3 elements are masked"):
        net.set_lstm_states({0: [np.ma.masked_less(np.arange(3), 1)] * 4})
    with pytest.raises(ValueError, match=r"LSTM\(1,3\): states: 1 of 3 elements are masked"):
        net.layers[0].set_states([np.ma.masked_less(np.arange(3), 1)] * 4)
    assert not net.get_lstm_states()[0][0].any()
    with pytest.raises(ValueError, match="time_step is -1 or that of one of 0 smoothed time steps"):
        net.get_lstm_states(0)


def test_wrong_sizes() -> None:
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="LSTM: sizes and seq_len must be at least 1, got"):
            nn.LSTM(*sizes)
    with pytest.raises(ValueError, match="window must be one of recurrent, independent, got 'x'"):
        nn.LSTM(1, 1, 1, window="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected 10 elements a sample, 5 time steps of 2"):
        nn.Sequential(nn.LSTM(2, 3, 5), nn.Linear(15, 1))(np.ones((4, 9)))
    with pytest.raises(ValueError, match=r"layer 1, LSTM\(2,3\), after layer 0"):
        nn.Sequential(nn.Linear(2, 3), nn.LSTM(2, 3, 5))
