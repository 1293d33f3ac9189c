"""Blocks of layers: both paths, forward and backward, at any depth."""

import numpy as np

import flashlight_py as fl
from flashlight_py.tagi.network import FOUR
from flashlight_py.tagi.states import BaseHiddenStates
from tests.tables import for_each
from tests.tagi.helpers import equal, learn, numbers

REAL = np.float32


def twin(layer: fl.tagi.Linear) -> fl.tagi.Linear:
    """Return another layer with the same parameters."""
    other = fl.tagi.Linear(layer.input_size, layer.output_size)
    for which in FOUR:
        setattr(other, which, getattr(layer, which))
    return other


def some_states(slope: bool = True) -> BaseHiddenStates:
    mean, variance = numbers(3, 4), np.square(numbers(3, 4, seed=1))
    return BaseHiddenStates(mean, variance, np.square(numbers(3, 4, seed=2)) if slope else None)


def close(actual, expected) -> None:
    equal(actual, expected, rtol=1e-5, atol=1e-6)


def test_layer_block_equals_its_layers() -> None:
    first, last = fl.tagi.Linear(4, 5), fl.tagi.Linear(5, 2)
    block = fl.tagi.LayerBlock(first, fl.tagi.ReLU(), last)
    row = fl.tagi.Sequential(twin(first), fl.tagi.ReLU(), twin(last))
    net = fl.tagi.Sequential(block)
    x, y = numbers(3, 4), numbers(3, 2, seed=3)
    for network in (net, row):
        network.input_state_update = True
        for _ in range(2):
            learn(network, x, y)
    equal((net(x), net.get_input_states()), (row(x), row.get_input_states()))
    assert list(net.state_dict()) == ["Linear.0.0", "Linear.0.2"]
    assert repr(block) == "LayerBlock(4,2)"
    assert block.get_max_num_states() == 5


@for_each("projected", [False, True])
def test_res_net_block_adds_both_paths(projected: bool) -> None:
    main, x = fl.tagi.Linear(4, 4), some_states()
    shortcut = fl.tagi.Linear(4, 4) if projected else None
    block = fl.tagi.ResNetBlock(main, shortcut)
    assert block.connect((4,)) == (4,)
    out = block.forward(x)
    main_alone = twin(main)
    expected = main_alone.forward(x)
    other = x
    if shortcut is not None:
        shortcut_alone = twin(shortcut)
        other = shortcut_alone.forward(x)
    close(out.mean, expected.mean + other.mean)
    close(out.variance, expected.variance + other.variance)
    assert out.slope is None

    d, e = numbers(3, 4, seed=4), -np.square(numbers(3, 4, seed=5))
    deltas = block.backward(d.copy(), e.copy(), True)
    back = main_alone.backward(d.copy(), e.copy(), True)
    if shortcut is None:
        more = (d * x.slope, e * x.slope**2)
    else:
        more = shortcut_alone.backward(d.copy(), e.copy(), True)
        close(shortcut.delta_mu_w, shortcut_alone.delta_mu_w)
    for actual, one, two in zip(deltas, back, more, strict=True):
        close(actual, one + two)
    close((main.delta_mu_w, main.delta_var_b), (main_alone.delta_mu_w, main_alone.delta_var_b))
    assert block.backward(d.copy(), e.copy(), False) is None


def test_res_net_block_applies_slopes_of_activations_backward() -> None:
    linear, x = fl.tagi.Linear(4, 4), some_states()
    block = fl.tagi.ResNetBlock(fl.tagi.LayerBlock(linear, fl.tagi.ReLU()), fl.tagi.ReLU())
    block.connect((4,))
    block.forward(x)
    d, e = numbers(3, 4, seed=4), -np.square(numbers(3, 4, seed=5))
    deltas = block.backward(d.copy(), e.copy(), True)
    alone = twin(linear)
    main = (alone.forward(x).mean > 0).astype(REAL)
    back = alone.backward(d * main, e * main, True)
    close(linear.delta_mu_w, alone.delta_mu_w)
    slope = (x.mean > 0) * x.slope
    close((deltas[0], deltas[1]), (back[0] + d * slope, back[1] + e * slope**2))


def test_nested_blocks_match_matrix_products() -> None:
    """The network is ((x A + x) B + x) C + (x E + x)."""
    a, b, c, e = (fl.tagi.Linear(4, 4, bias=False) for _ in range(4))
    inner = fl.tagi.ResNetBlock(a)
    middle = fl.tagi.ResNetBlock(fl.tagi.LayerBlock(inner, b))
    block = fl.tagi.ResNetBlock(fl.tagi.LayerBlock(middle, c), fl.tagi.ResNetBlock(e))
    net = fl.tagi.Sequential(fl.tagi.Linear(4, 4), block, fl.tagi.Linear(4, 4))
    net.input_state_update = True
    names = [name for name, _ in net.named_layers()]
    assert names == [
        "Linear.0",
        "Linear.main.main.main.1.0.0",
        "Linear.main.main.1.0.1",
        "Linear.main.1.1",
        "Linear.main.shortcut.1",
        "Linear.2",
    ]
    one = np.eye(4, dtype=REAL)
    first, *_, last = (layer for _, layer in net.named_layers())
    inside = ((one + a.weight.mean.T) @ b.weight.mean.T + one) @ c.weight.mean.T
    inside += one + e.weight.mean.T
    x = numbers(3, 4)
    mean, _ = net(x)
    close(
        mean,
        (x @ first.weight.mean.T + first.biases.mean) @ inside @ last.weight.mean.T
        + last.biases.mean,
    )
    d = numbers(3, 4, seed=1)
    net.set_delta_z(d, d)
    net.backward()
    back = d @ last.weight.mean @ inside.T @ first.weight.mean
    close(net.get_input_states()[0].reshape(3, 4), back)
    assert len(net.parameters()) == 6
    net.eval()
    assert not any(layer.training for _, layer in net.named_layers())
    assert (net.layers[1].main_block.layers[1], repr(block)) == (c, "ResNetBlock(4,4)")


def test_on_sums_is_called_in_bucket_order() -> None:
    net = fl.tagi.Sequential(
        fl.tagi.Linear(4, 4),
        fl.tagi.ResNetBlock(
            fl.tagi.LayerBlock(fl.tagi.Linear(4, 4), fl.tagi.Linear(4, 4)), fl.tagi.Linear(4, 4)
        ),
        fl.tagi.Linear(4, 2),
    )
    seen = []
    for name, layer in net.named_layers():
        layer.on_sums = lambda _, name=name: seen.append(name)
    net(numbers(3, 4))
    net.set_delta_z(numbers(3, 2), numbers(3, 2))
    net.backward()
    assert seen == [name for name, _ in net.named_layers()][::-1]
