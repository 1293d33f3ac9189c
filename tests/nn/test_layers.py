"""Layers, losses and initial values."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from flashlight_py import nn
from flashlight_py.autograd import input
from flashlight_py.nn import init
from flashlight_py.random import set_seed


class TestLinear:
    def test_shapes_dtype_and_value(self) -> None:
        layer = nn.Linear(3, 2)
        assert (layer.weight.shape, layer.bias.shape) == ((2, 3), (2,))
        assert layer.weight.dtype == layer.bias.dtype == "float32"
        x = np.arange(6, dtype="float32").reshape(2, 3)
        expected = x @ layer.weight.array.T + layer.bias.array
        np.testing.assert_allclose(layer(input(x)).array, expected, rtol=1e-6)

    def test_initial_values_are_flashlight_s(self) -> None:
        set_seed(0)
        layer = nn.Linear(50, 400, dtype="float64")
        for array, bound in ((layer.weight.array, math.sqrt(3 / 50)), (layer.bias.array, 50**-0.5)):
            assert np.abs(array).max() <= bound
            assert np.abs(array).max() > 0.95 * bound
            assert array.mean() == pytest.approx(0, abs=bound / 10)

    def test_seed_decides_the_parameters(self) -> None:
        arrays = []
        for seed in (5, 5, 6):
            set_seed(seed)
            arrays.append(nn.Linear(3, 3).weight.array)
        np.testing.assert_array_equal(arrays[0], arrays[1])
        assert (arrays[0] != arrays[2]).any()

    def test_without_bias(self) -> None:
        layer = nn.Linear(3, 2, bias=False)
        assert layer.bias is None
        assert list(layer.named_params()) == ["weight"]
        assert layer(input(np.ones((1, 3), "float32"))).shape == (1, 2)

    @pytest.mark.parametrize(
        ("sizes", "error"),
        [((0, 1), ValueError), ((1, -1), ValueError), ((1.0, 1), TypeError), ((1, "2"), TypeError)],
    )
    def test_wrong_sizes(self, sizes: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="_features must be"):
            nn.Linear(*sizes)


class TestDropout:
    def test_acts_while_training_only(self) -> None:
        set_seed(0)
        x = input(np.ones(1000, "float32"))
        layer = nn.Dropout(0.5)
        assert set(layer(x).array.tolist()) == {0.0, 2.0}
        assert layer.eval()(x) is x

    def test_wrong_ratio(self) -> None:
        with pytest.raises(ValueError, match="below 1, got 1"):
            nn.Dropout(1)


@pytest.mark.parametrize(
    ("draw", "std"),
    [
        (lambda n: init.uniform(n, -1, 1), math.sqrt(1 / 3)),
        (lambda n: init.normal(n, 0, 2), 2),
        (lambda n: init.kaiming_uniform(n, 25), 0.2),
        (lambda n: init.kaiming_normal(n, 25), 0.2),
        (lambda n: init.glorot_uniform(n, 20, 30), 0.2),
        (lambda n: init.glorot_normal(n, 20, 30), 0.2),
    ],
)
def test_initial_values_have_the_promised_spread(draw: Any, std: float) -> None:
    set_seed(0)
    array = draw((100, 200))
    assert array.dtype == "float32"
    assert array.shape == (100, 200)
    assert array.std() == pytest.approx(std, rel=0.03)
    assert array.mean() == pytest.approx(0, abs=std / 20)


@pytest.mark.parametrize("training", [True, False])
def test_modules_take_arrays_as_input(training: bool) -> None:
    x, labels = np.ones((4, 2), "float32"), np.array([0, 1, 1, 0])
    model = nn.Sequential(
        nn.Linear(2, 2), nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.Dropout(), nn.LogSoftmax()
    )
    model = model.train() if training else model.eval()
    for module in (model, nn.Dropout(0.5), nn.View((-1,))):
        module.training = training
        assert module(x).shape == module(input(x)).shape
    loss = nn.CategoricalCrossEntropy()(model(x), labels) + nn.MeanSquaredError()(model(x), x)
    assert loss.calc_grad == training
    with pytest.raises(TypeError, match=r"got list; convert it with numpy.asarray"):
        model([[1.0, 2.0]])


def test_all_layers_are_listed_also_before_they_are_imported() -> None:
    code = "from flashlight_py import nn; names = dir(nn)\n"
    code += "assert {*nn.__all__} <= {*names} and len({*names}) == len(names)"
    subprocess.run([sys.executable, "-c", code], check=True)
