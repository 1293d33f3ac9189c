"""What is a copy, and of what: networks of networks, kept inputs of what was passed."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from flashlight_py import tagi
from flashlight_py.tagi import nn
from tests.tagi.helpers import equal, learn, observe
from tests.tagi.test_sequential import X, Y, network


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.BatchNorm2d(2), lambda: nn.LayerNorm((2, 4, 4))],
)
def test_inputs_that_are_one_sample_repeated(layer: Any) -> None:
    image = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)
    repeated = np.broadcast_to(image, (5, 2, 4, 4))  # strides of 0
    learnt = []
    for x in (repeated, repeated.copy()):
        tagi.manual_seed(0)
        net = nn.Sequential(layer())
        net.input_state_update = True
        mean, _ = net(x, np.abs(x))
        net.set_delta_z(mean, -np.abs(mean))
        net.backward()
        learnt.append((mean, *net.get_input_states(), net.layers[0].delta_mu_w))
    equal(*learnt)


def test_the_input_is_the_caller_s_again_after_the_forward_pass() -> None:
    net, other = network(), network()
    x = X.copy()
    net(x)
    x[...] = 100  # such as the next batch, read into the same memory
    observe(net, Y)
    net.step()
    learn(other, X, Y)
    equal(net.layers[0].mu_w, other.layers[0].mu_w)


def test_a_network_may_be_evaluated_by_several_threads() -> None:
    net = network(nn.BatchNorm2d(8))
    net.eval()
    inputs = [X + number for number in range(4)]
    expected = [net(x)[0] for x in inputs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda number: net(inputs[number % 4])[0], range(4000)))
    finally:
        sys.setswitchinterval(interval)
    for number, mean in enumerate(got):
        equal(mean, expected[number % 4])


def test_layers_learn_in_the_last_network_made_of_them() -> None:
    net = network()
    part = nn.Sequential(*net.layers[:2])
    with pytest.raises(RuntimeError, match="another network was made of the same layers"):
        learn(net, X, Y)
    before = net.layers[0].mu_w
    learn(part, X, np.ones((6, 8)))
    assert not np.array_equal(net.layers[0].mu_w, before)
