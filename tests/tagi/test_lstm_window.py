"""Windows of LSTMs: native code computes what NumPy does."""

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import lstm, nn
from tests.tagi.helpers import equal, needs_kernels, network

pytestmark = needs_kernels


def passes(layer: nn.LSTM, x: np.ndarray, variance: np.ndarray | None) -> list[np.ndarray]:
    """Return everything that three passes make, and the states that go from one to the next."""
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


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize(
    ("rows", "steps", "inputs", "outputs", "bias"),
    [(1, 1, 1, 1, True), (1, 1, 3, 17, False), (4, 7, 2, 5, True), (3, 2, 9, 16, False)],
)
def test_native_code_does_what_numpy_does(
    monkeypatch: pytest.MonkeyPatch, rows: int, steps: int, inputs: int, outputs: int, bias: bool,
    certain: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(0)
    # With some gates that are closed, some that are open, and some in between.
    x = rng.standard_normal((rows, steps * inputs)) * rng.choice([0.1, 1, 30], (rows, 1))
    variance = None if certain else rng.uniform(0, 0.3, x.shape)

    def made() -> list[np.ndarray]:
        tagi.manual_seed(2)
        return passes(nn.LSTM(inputs, outputs, steps, bias), x, variance)

    own = made()
    monkeypatch.setattr("flashlight_py.tagi.native.native", lambda: None)
    for number, (array, expected) in enumerate(zip(own, made(), strict=True)):
        largest = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(array, expected, 1e-4, 2e-6 * largest, err_msg=str(number))


def test_large_ones_are_computed_with_the_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are open to a layer of one size, and meet."""
    monkeypatch.setattr(lstm, "SMALL", 4 * 6 * 8)
    small = network("LSTM(2, 6, 3)")
    x = np.ones((2, 6))
    expected = small(x)
    assert small.layers[0]._kept.by_sample
    monkeypatch.setattr(lstm, "SMALL", 4 * 6 * 8 - 1)
    equal(small(x), expected, 1e-5)
    assert not small.layers[0]._kept.by_sample


def test_tanh_is_exact_and_nan_stays_nan() -> None:
    """c = i g with open gates i and o is tanh(x), and h = tanh(tanh(x))."""
    x = np.concatenate([np.linspace(-12, 12, 4001), [1e-8, -1e-30, 0, 88, -1e15, np.nan]])
    net = nn.Sequential(nn.LSTM(1, 1, 1))
    net.load_state_dict({"LSTM.0": ([0, 0, 0, 0, 1, 0, 0, 0], [0] * 8, [0, 60, 0, 60], [0] * 4)})
    mean, variance = net(x[:, None].astype(np.float32))
    exact = np.tanh(np.tanh(x.astype(np.float32).astype(float)))
    equal(mean[:, 0], exact, 3e-7, 1e-14)
    assert not variance[:-1].any()
    assert np.isnan(variance[-1])
