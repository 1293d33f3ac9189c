"""Sequential networks and blocks: inputs, outputs, errors, state and copies."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import tagi
from flashlight_py.errors import BackendUnavailableError
from flashlight_py.tagi import nn
from flashlight_py.tagi.network import FOUR
from flashlight_py.tagi.states import BaseHiddenStates
from tests.tables import for_each
from tests.tagi.helpers import equal, learn, numbers, observe

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((6, 2)).astype(np.float32)


def network(*middle: nn.BaseLayer, seed: int = 1) -> nn.Sequential:
    tagi.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), *middle, nn.Linear(8, 2))


def test_outputs_are_flat_if_inputs_are_flat() -> None:
    net = network()
    shaped, flat = net(X), net(X.ravel())
    assert shaped[0].shape == shaped[1].shape == (6, 2)
    assert flat[0].shape == flat[1].shape == (12,)
    assert shaped[0].dtype == shaped[1].dtype == np.float32
    equal(shaped[0].ravel(), flat[0])
    equal(net(X.reshape(6, 2, 2))[0], shaped[0])
    equal(net.get_outputs()[0], flat[0])
    equal(net.output_to_host(), flat[0])


def test_network_shares_no_memory_with_inputs_and_results() -> None:
    net, other, x = network(), network(), X.copy()
    mean, variance = net(x)
    expected = mean.copy()
    for array in (mean, variance, *(a for entry in net.state_dict().values() for a in entry)):
        array[...] = 7
    equal(net.get_outputs()[0], expected.ravel())
    equal(net(x)[0], expected)
    equal(x, X)
    x[...] = 100  # for example the next batch in the same memory
    observe(net, Y)
    net.step()
    learn(other, X, Y)
    equal(net.parameters(), other.parameters())


def test_forward_accepts_changing_batch_sizes() -> None:
    """In pytagi, a batch larger than the first one ends the process."""
    net = network()
    for size in (2, 6, 1, 300, 3):
        x, y = np.tile(X, (50, 1))[:size], np.tile(Y, (50, 1))[:size]
        alone = network()
        alone.params_from(net)
        learn(net, x, y)
        learn(alone, x, y)
        equal(net.parameters(), alone.parameters())


def changed(name: str, number: int, values: Any) -> dict[str, Any]:
    """Return the parameters of another network, with other values in one array."""
    entries = {key: [*entry] for key, entry in network(seed=2).state_dict().items()}
    entries[name][number] = values
    return entries


ENTRY = network(seed=2).state_dict()["Linear.0"]
STATES: list[tuple[dict[str, Any], str]] = [
    ({"Linear.0": ENTRY, "Linear.2": ENTRY}, r"'Linear.2': expected arrays of .* got \[32, 32"),
    ({"Linear.0": ENTRY, "Linear.3": ENTRY}, r"missing 'Linear.2'; unexpected 'Linear.3'"),
    (changed("Linear.2", 3, ["a", "b"]), "could not convert"),
    (changed("Linear.2", 3, [0.1, -0.1]), r"'Linear.2': var_b has negative variances"),
    (changed("Linear.2", 3, [0.1, np.inf]), r"'Linear.2': var_b is not finite"),
    (changed("Linear.0", 0, np.full(32, np.nan)), r"'Linear.0': mu_w is not finite"),
    (changed("Linear.0", 0, np.ma.array(np.ones(32), mask=np.eye(32)[0])),
        r"'Linear.0': expected no masked elements, got 1 of 32"),
]  # fmt: skip


@for_each("state message", STATES)
def test_load_state_dict_rejects_invalid_states_without_changes(state: Any, message: str) -> None:
    net = network()
    before = net.state_dict()
    with pytest.raises(ValueError, match=message):
        net.load_state_dict(state)
    equal(net.state_dict(), before)
    net.load_state_dict({name: [a.tolist() for a in entry] for name, entry in before.items()})
    equal(net.state_dict(), before)


MASKED = np.ma.array(X, mask=X > 0)
KIND, FIRST = "expected real numbers, got an array of", r"Linear\(4,8\)"
# Inputs, their variances, and the error.
INPUTS: list[tuple[Any, Any, type[Exception], str]] = [
    (np.zeros((6, 5)), None, ValueError, rf"layer 0, {FIRST}, after the input: expected 4 feat"),
    (np.zeros(10), None, ValueError, f"{FIRST}: expected a multiple of 4 elements, got 10"),
    (np.zeros((2, 0)), None, ValueError, rf"{FIRST}: expected a batch of samples, got \(2, 0\)"),
    (3.0, None, ValueError, rf"{FIRST}: expected a batch of samples, got \(\)"),
    (MASKED, None, ValueError, r"mu_x: expected no masked elements, got .* of 24"),
    ([*MASKED], None, ValueError, r"mu_x: expected no masked elements, got .* of 24"),
    (X, np.full((6, 3), 0.1), ValueError, r"var_x: expected shape \(6, 4\), .* got \(6, 3\)"),
    (X, np.full((4, 6), 0.1), ValueError, r"var_x: expected shape \(6, 4\), .* got \(4, 6\)"),
    (X, np.ma.masked_less(np.arange(24.0), 1), ValueError, "var_x: expected no masked .* 1 of 24"),
    (X, np.full((6, 4), -0.1), ValueError, "var_x: variances must be at least 0"),
    (X, np.full((6, 4), np.nan), ValueError, "var_x: variances must be at least 0, got nan"),
    (None, None, TypeError, f"mu_x: {KIND}"),
    *[row for x in (np.zeros((6, 4), complex), [["a"] * 4] * 6, [None] * 4)
        for row in ((x, None, TypeError, f"mu_x: {KIND}"), (X, x, TypeError, f"var_x: {KIND}"))],
]  # fmt: skip


@for_each("x var_x error message", INPUTS)
def test_forward_rejects_invalid_inputs_and_changes_nothing(
    x: Any, var_x: Any, error: type[Exception], message: str
) -> None:
    net = network()
    expected = net(np.ma.array(X))[0]
    with pytest.raises(error, match=message):
        net(x, var_x)
    equal(net(X)[0], expected)
    with pytest.raises(ValueError, match=r"delta_mu: expected no masked elements, got .* of 12"):
        net.set_delta_z(np.ma.array(Y, mask=Y > 0), Y)


def test_backward_raises_runtime_error_without_new_deltas() -> None:
    net = network()
    with pytest.raises(RuntimeError, match="no deltas since the last forward pass"):
        net.backward()
    learn(net, X, Y)
    with pytest.raises(RuntimeError, match="no deltas since the last forward pass"):
        net.backward()  # a second time
    net(X)
    with pytest.raises(RuntimeError, match="no deltas since the last forward pass"):
        net.backward()
    net.input_delta_z_buffer.mean = net.input_delta_z_buffer.variance = np.zeros((3, 2), np.float32)
    with pytest.raises(ValueError, match=r"deltas: expected shape \(6, 2\), .* got \(3, 2\)"):
        net.backward()


def test_backward_raises_runtime_error_after_evaluation() -> None:
    net = network()
    learn(net, X, Y)
    net.eval()
    net(X)
    net.train()  # too late
    nn.OutputUpdater().update(net.output_z_buffer, Y, 0.1, net.input_delta_z_buffer)
    with pytest.raises(RuntimeError, match="the last forward pass ran in evaluation"):
        net.backward()
    net(X)
    net.eval()  # no error
    observe(net, Y)


def test_set_delta_z_sets_deltas_of_the_outputs() -> None:
    one, other = network(), network()
    one(X)
    buffer = one.input_delta_z_buffer
    nn.OutputUpdater("cpu").update(one.output_z_buffer, Y, 0.1, buffer)
    other(X)
    other.set_delta_z(buffer.delta_mu, buffer.delta_var.tolist())
    equal(other.delta_z_to_host(), buffer.delta_mu)
    one.backward()
    one.step()
    other.backward()
    other.step()
    equal(other.layers[0].mu_w, one.layers[0].mu_w)
    with pytest.raises(ValueError, match=r"delta_mu: expected shape \(6, 2\), .* got \(3,\)"):
        other.set_delta_z([1, 2, 3], [1, 2, 3])
    with pytest.raises(ValueError, match=r"delta_var: expected shape \(6, 2\), .* got \(2, 6\)"):
        other.set_delta_z(np.zeros(12), np.zeros((2, 6)))
    other.set_delta_z(Y, Y)
    other.input_delta_z_buffer.variance = np.zeros((2, 6), np.float32)
    with pytest.raises(ValueError, match=r"deltas: expected shape \(6, 2\), .* got \(2, 6\)"):
        other.backward()


def test_params_from_copies_parameters_of_another_network() -> None:
    net, other = network(), network(seed=2)
    learn(net, X, Y)
    assert not np.allclose(net(X)[0], other(X)[0])
    other.params_from(net)
    equal(net(X)[0], other(X)[0])
    learn(net, X, Y)  # the networks are independent afterwards
    assert not np.array_equal(net(X)[0], other(X)[0])
    with pytest.raises(ValueError, match=r"nothing was loaded: missing 'Linear.3'"):
        network(nn.ReLU()).params_from(net)


# Attributes of Linear(4, 8), and values that are rejected.
ATTRIBUTES: list[tuple[str, Any, type[Exception], str]] = [
    ("mu_w", np.zeros(3), ValueError, r"Linear\(4,8\): weight: expected 32 elements, got 3"),
    ("delta_mu_w", np.zeros(32), AttributeError, "is read-only: a backward pass"),
    *[(which, np.full(size, one), ValueError, r"^Linear\(4,8\): \w+: .* must be finite")
        for which, size, one in (
            ("mu_w", 32, np.nan), ("mu_b", 8, -np.inf), ("var_w", 32, np.inf), ("var_b", 8, np.nan),
        )],
    ("var_w", -np.ones(32), ValueError, "variances must be at least 0, got -1"),
    ("var_w", np.ma.masked_less(np.arange(32), 1), ValueError, "weight: .* masked .* got 1 of 32"),
]  # fmt: skip


@for_each("which values error message", ATTRIBUTES)
def test_layer_attributes_reject_invalid_values(
    which: str, values: Any, error: type[Exception], message: str
) -> None:
    layer = network().layers[0]
    before = [layer.mu_w, layer.var_w]
    with pytest.raises(error, match=message):
        setattr(layer, which, values)
    equal([layer.mu_w, layer.var_w], before)


def test_layer_attributes_set_parameters() -> None:
    net = network()
    net.layers[0].mu_w = np.arange(32.0).reshape(8, 4)
    equal(net.state_dict()["Linear.0"][0], np.arange(32))
    without = nn.Sequential(nn.Linear(4, 2, bias=False))
    assert [array.size for array in without.state_dict()["Linear.0"]] == [8, 8, 0, 0]
    learn(without, X, Y)
    assert without.layers[0].delta_mu_b.size == 0


def test_input_state_update_returns_deltas_of_the_input() -> None:
    net = network()
    learn(net, X, Y)
    with pytest.raises(RuntimeError, match="input_state_update = True"):
        net.get_input_states()
    net.input_state_update = True
    learn(net, X, Y)
    d, e = net.get_input_states()
    assert d.shape == e.shape == (24,)
    assert (e <= 0).all()


def chain(seed: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the two halves of an autoencoder."""
    tagi.manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU())
    return encoder, nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4))


@for_each("flat", [False, True])
def test_chain_of_two_networks_equals_one_network(flat: bool) -> None:
    encoder, decoder = chain(3)
    tagi.manual_seed(3)
    single = nn.Sequential(
        *(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU()),
        *(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4)),
    )
    x = X.ravel() if flat else X
    updater = nn.OutputUpdater()
    for _ in range(3):
        encoder(x)
        decoder(encoder.output_z_buffer)
        updater.update(decoder.output_z_buffer, X, 0.1, decoder.input_delta_z_buffer)
        decoder.backward()
        decoder.step()
        encoder.input_delta_z_buffer.copy_from(decoder.output_delta_z_buffer, 18)
        encoder.backward()
        encoder.step()
        learn(single, X, X)
    halves = encoder.parameters() + decoder.parameters()
    equal(halves, single.parameters())


def test_copy_from_raises_value_error_without_deltas() -> None:
    encoder, decoder = chain(3)
    with pytest.raises(ValueError, match="expected a source with deltas"):
        encoder.input_delta_z_buffer.copy_from(decoder.output_delta_z_buffer)
    decoder(X[:, :3])
    decoder.set_delta_z(X, X)
    with pytest.raises(ValueError, match="num_data must be at most 24, got 99"):
        encoder.input_delta_z_buffer.copy_from(decoder.input_delta_z_buffer, 99)
    decoder.input_delta_z_buffer.reset_zeros()
    assert not decoder.input_delta_z_buffer.delta_mu.any()


def test_network_has_info_and_repr() -> None:
    net = network()
    assert repr(net) == "Sequential(Linear(4,8), ReLU(), Linear(8,2))"
    assert net.get_layer_stack_info() == "0: Linear(4,8)\n1: ReLU()\n2: Linear(8,2)"
    assert set(net.get_neg_var_w_counter().values()) == {0}
    assert net.device == "cpu"
    net.to_device("cpu")
    net.set_threads(4)
    net.preinit_layer()
    net.params_to_device()
    net.params_to_host()
    with pytest.raises(ValueError, match="device must be"):
        net.to_device("tpu")


def test_to_device_raises_error_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # the import fails even if CuPy is installed
    with pytest.raises(BackendUnavailableError, match=r"device 'cuda:1' needs CuPy, .* Install"):
        network().to_device("cuda:1")


def test_network_rejects_a_layer_that_occurs_twice() -> None:
    layer, relu = nn.Linear(3, 3), nn.ReLU()
    with pytest.raises(ValueError, match=r"Linear\.0 and Linear\.2 are the same object"):
        nn.Sequential(layer, relu, layer)
    # A layer that keeps no inputs may occur twice.
    net = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu)
    assert net(np.ones((2, 3)))[0].shape == (2, 3)


@for_each(
    "layer",
    [lambda: nn.Conv2d(2, 3, 3), lambda: nn.BatchNorm2d(2), lambda: nn.LayerNorm((2, 4, 4))],
)
def test_broadcast_inputs_equal_their_copies(layer: Any) -> None:
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


def test_network_can_be_evaluated_by_several_threads() -> None:
    net = network(nn.BatchNorm2d(8))
    net.eval()
    inputs = [X + number for number in range(4)]
    expected = [net(x)[0] for x in inputs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda number: net(inputs[number % 4])[0], range(400)))
    finally:
        sys.setswitchinterval(interval)
    for number, mean in enumerate(got):
        equal(mean, expected[number % 4])


def test_step_raises_runtime_error_if_layers_moved_to_another_network() -> None:
    net = network()
    part = nn.Sequential(*net.layers[:2])
    with pytest.raises(RuntimeError, match="another network was created with the same layers"):
        learn(net, X, Y)
    before = net.layers[0].mu_w
    learn(part, X, np.ones((6, 8)))
    assert not np.array_equal(net.layers[0].mu_w, before)


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
