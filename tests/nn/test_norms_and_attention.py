"""Normalization and attention layers: running statistics, states of torch, training modes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from tests.distributed.conformance import on_ranks
from tests.nn.oracle import Oracle, weights_of
from tests.nn.oracle import compare as compare_with_torch
from tests.tables import for_each
from tests.tape.steps import compare, training

RANDOM = np.random.default_rng(0)
BATCHES = RANDOM.standard_normal((3, 5, 4, 3, 2)) * 2 + 3
X, MEMORY = RANDOM.standard_normal((2, 6, 8)), RANDOM.standard_normal((2, 9, 8))


def test_running_statistics_equal_torch(oracle: Oracle) -> None:
    layer = fl.nn.BatchNorm(4, 0.2).astype("float64")
    buffers = layer.buffers
    for batch in BATCHES:
        layer(fl.input(batch))
    assert buffers["running_mean"] is layer.running_mean  # updated in place
    in_evaluation = layer.eval()(fl.input(BATCHES[0]))
    code = "layer = nn.BatchNorm2d(4, momentum=0.2).double()\nfor x in a: layer(x)\n"
    code += "more.update(layer.state_dict())\ny = layer.eval()(a[0])"
    expected = oracle(code, a=BATCHES)
    np.testing.assert_allclose(in_evaluation.array, expected["y"], rtol=1e-12)
    assert list(layer.state_dict()) == ["weight", "bias", "running_mean", "running_var"]
    for name, array in layer.state_dict().items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-12)
    before = layer.running_mean.copy()
    layer(fl.input(BATCHES[1]))
    np.testing.assert_array_equal(layer.running_mean, before)


def test_batch_norm_without_statistics_uses_the_batch() -> None:
    layer = fl.nn.BatchNorm(4, affine=False, track_statistics=False)
    assert not layer.state_dict()
    x = fl.input(BATCHES[0])
    np.testing.assert_array_equal(layer(x).array, layer.eval()(x).array)


@for_each("kind", ["self", "masked", "cross", "cross_masked", "memory"])
def test_multihead_attention_equals_torch(kind: str, oracle: Oracle) -> None:
    fl.set_seed(1)
    layer = fl.nn.MultiheadAttention(8, 2).astype("float64")
    layer.in_proj_bias.data[:] = RANDOM.standard_normal(24)
    q, k = fl.param(X), fl.param(MEMORY)
    cross = kind in ("cross", "cross_masked", "memory")
    keys = 9 if cross else 6
    may = np.arange(6 * keys).reshape(6, keys) % 3 > 0
    inputs: list[Any] = [q] if not cross else [q, k, k if kind == "memory" else k * 2]
    result = layer(*inputs, *([may] if "masked" in kind else []))
    code = "layer = nn.MultiheadAttention(8, 2, batch_first=True).double()\n"
    code += "own = {n: p for n, p in zip(dict(layer.named_parameters()), (w, b, ow, ob))}\n"
    arguments = "q, q, q" if not cross else ("q, k, k" if kind == "memory" else "q, k, k * 2")
    code += f"y = torch.func.functional_call(layer, own, ({arguments}), dict(need_weights=False"
    code += f"{', attn_mask=~may' if 'masked' in kind else ''}))[0]"
    leaves = dict(zip(("w", "b", "ow", "ob", "q", "k"), (*layer.params(), q, k), strict=True))
    compare_with_torch(oracle, code, result, leaves, 1e-9, 1e-11, may=may)


def test_torch_states_load_by_name(oracle: Oracle) -> None:
    code = """
torch.manual_seed(0)
one = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
net = nn.TransformerEncoder(one, 2, enable_nested_tensor=False).double()
more.update(net.state_dict())
y = net(a, mask=nn.Transformer.generate_square_subsequent_mask(6).double(), is_causal=True)"""
    other = oracle(code, a=X)
    net = fl.nn.Transformer(8, 2, layers=2, causal=True).astype("float64")
    expected = other.pop("y")
    net.load_state_dict(other)
    np.testing.assert_allclose(net(fl.input(X)).array, expected, rtol=1e-10, atol=1e-12)


def test_causal_attention_ignores_later_positions() -> None:
    net = fl.nn.Transformer(8, 2, layers=2, causal=True).eval()
    changed = X.copy()
    changed[:, 4:] += 1
    one, other = (net(fl.input(x.astype("float32"))).array for x in (X, changed))
    np.testing.assert_array_equal(one[:, :4], other[:, :4])
    assert (one[:, 4:] != other[:, 4:]).any()


MODELS: dict[str, tuple[Callable[[], fl.nn.Module], np.ndarray]] = {
    "transformer": (
        lambda: fl.nn.Transformer(8, 2, layers=2, dropout=0.3, causal=True),
        X.astype("float32"),
    ),
    "batch_norm": (
        lambda: fl.nn.Sequential(fl.nn.BatchNorm(4), fl.nn.Tanh(), fl.nn.GroupNorm(2, 4)),
        BATCHES[0].astype("float32"),
    ),
    "positions": (lambda: fl.nn.PositionEmbedding(7, 8), X.astype("float32")),
}


@for_each("name", MODELS)
def test_captured_and_recomputed_steps_have_the_same_bits(name: str) -> None:
    def make(change: Callable[[Any], Any] = lambda module: module) -> Any:
        fl.set_seed(3)
        module = change(MODELS[name][0]())
        optimizer = fl.optim.SGDOptimizer(module.params(), 0.01)
        return training(optimizer, lambda x: F.sum(F.sin(module(fl.input(x))))), module

    batches = [MODELS[name][1] * np.float32(1 + k / 10) for k in range(5)]
    compare(make, batches)
    results = []
    for change in (lambda module: module, fl.recompute):
        step, module = make(change)
        fl.set_seed(5)
        results.append([*[step(x) for x in batches], module.state_dict()])
    for name_, array in results[0][-1].items():
        np.testing.assert_array_equal(array, results[1][-1][name_])


def test_sinusoidal_embedding_adds_sines() -> None:
    layer = fl.nn.SinusoidalPositionEmbedding(7, 8)
    added = layer(fl.input(np.zeros((1, 7, 8), "float32"))).array[0]
    angles = np.arange(7)[:, None] / 10_000 ** (np.arange(4) / 4)
    np.testing.assert_allclose(added[:, ::2], np.sin(angles), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(added[:, 1::2], np.cos(angles), rtol=1e-5, atol=1e-6)


@on_ranks(("shm", 2))
def test_batch_norm_raises_value_error_for_one_value_over_ranks(rank: int, size: int) -> None:
    layer = fl.nn.BatchNorm(4, sync=True)
    with pytest.raises(ValueError, match="expected more than one value per channel"):
        layer(fl.input(np.ones((int(rank == 0), 4), np.float32)))
    assert fl.all_reduce(layer.running_var)[0] == size


@pytest.mark.parametrize("first", [0, 1, 2])
@on_ranks(("shm", 2))
def test_batch_norm_uses_the_global_batch(rank: int, size: int, first: int) -> None:
    rows, results = slice(first, 5) if rank else slice(0, first), []
    for sync in (False, True):
        layer = fl.nn.BatchNorm(4, sync=sync).astype("float64")
        selected = rows if sync else slice(None)
        x = fl.param(BATCHES[0][selected])
        y = layer(x)
        y.backward(weights_of(BATCHES[0])[selected])
        grads = [fl.all_reduce(v.grad) if sync else v.grad for v in layer.params()]
        parts = (y.array, x.grad) if sync else (y.array[rows], x.grad[rows])
        results.append([*parts, *grads, layer.running_mean, layer.running_var])
    for alone, together in zip(*results, strict=True):
        np.testing.assert_allclose(together, alone, rtol=1e-10, atol=1e-12)
