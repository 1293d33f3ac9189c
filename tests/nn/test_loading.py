"""Weights by name: state dicts of torch, safetensors files, copies and tables of modules."""

import copy
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.device import floating
from flashlight_py.safetensors import pieces
from tests.parallel import trees
from tests.tables import for_each


class Tensor:
    """The part of a torch tensor that ``load_torch`` uses."""

    def __init__(self, array: Any, dtype: str = "torch.float32") -> None:
        self.array, self.dtype = array, dtype

    def detach(self) -> "Tensor":
        return self

    cpu = detach

    def float(self) -> "Tensor":
        return Tensor(self.array)

    def numpy(self) -> Any:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


class Tied(fl.nn.Module):
    def __init__(self) -> None:
        self.one, self.other = fl.nn.Linear(2, 2), fl.nn.Linear(2, 2, bias=False)
        self.other.weight = self.one.weight
        self.add_buffer("mean", np.zeros(3, np.float32))

    def forward(self, x: fl.Variable) -> fl.Variable:
        return self.other(self.one(x))


ARRAYS = {
    "one.weight": np.arange(4.0).reshape(2, 2),
    "one.bias": np.array([1.0, 2.0]),
    "other.weight": np.arange(4.0).reshape(2, 2),
    "mean": np.array([0.5, 1.0, 1.5]),
    "norm.num_batches_tracked": np.array(7),
}
KINDS: dict[str, Any] = {
    "arrays": lambda x: x,
    "float16": lambda x: x.astype(np.float16),
    "tensors": Tensor,
    "bfloat16 tensors": lambda x: Tensor(x.astype(np.float32), "torch.bfloat16"),
    "dlpack": trees.Tensor,
}


def check(module: Any) -> None:
    assert module.one.weight is module.other.weight
    for name, array in module.state_dict().items():
        assert array.dtype == np.float32
        assert np.array_equal(array, ARRAYS[name])


@for_each("kind", KINDS)
def test_load_torch_copies_state_dicts(kind: str) -> None:
    module, make = Tied(), KINDS[kind]
    assert fl.nn.load_torch(module, {n: make(x) for n, x in ARRAYS.items()}) == ([], [])
    check(module)


@for_each("dtype", ["float32", "float16", "bfloat16"])
def test_load_torch_reads_safetensors_files(dtype: str, tmp_path: Any) -> None:
    arrays = {name: x.astype(floating(dtype, "")) for name, x in ARRAYS.items()}
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"".join(bytes(piece) for piece in pieces(arrays)))
    for source in (path, str(path)):
        module = Tied()
        fl.nn.load_torch(module, source)
        check(module)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="expected a safetensors file"):
        fl.nn.load_torch(module, path)


def test_load_torch_renames_entries() -> None:
    module = Tied()
    state = {f"model.{name}": x for name, x in ARRAYS.items()}
    fl.nn.load_torch(module, state, rename=lambda name: name.removeprefix("model."))
    check(module)


def test_load_torch_accepts_any_name_of_a_shared_parameter() -> None:
    module, state = Tied(), {n: x for n, x in ARRAYS.items() if n != "one.weight"}
    assert fl.nn.load_torch(module, state) == ([], [])
    check(module)
    assert fl.nn.load_torch(Tied(), state, strict=False) == ([], [])


@for_each("strict", [False, True])
def test_load_torch_raises_for_two_values_of_an_entry(strict: bool) -> None:
    module, other = Tied(), {**ARRAYS, "other.weight": np.zeros((2, 2))}
    before = module.one.weight.array.copy()
    with pytest.raises(ValueError, match=r"'other.weight' and 'one.weight' must have equal values"):
        fl.nn.load_torch(module, other, strict)
    assert np.array_equal(module.one.weight.array, before)
    layer, state = fl.nn.Linear(2, 2, bias=False), {"a.weight": np.eye(2), "b.weight": np.eye(2)}
    last: Any = {"rename": lambda name: name.rpartition(".")[2]}
    fl.nn.load_torch(layer, state, strict, **last)
    assert np.array_equal(layer.weight.array, np.eye(2))
    with pytest.raises(ValueError, match=r"'b.weight' and 'weight' must have equal values"):
        fl.nn.load_torch(layer, {**state, "b.weight": np.ones((2, 2))}, strict, **last)
    unused = {"a.more": np.ones(2), "b.more": np.zeros(3), **state}
    assert fl.nn.load_torch(layer, unused, False, **last) == ([], ["more"])


def test_load_torch_returns_missing_and_unexpected_names() -> None:
    module = Tied()
    state = {"one.bias": np.ones(2), "two.bias": np.ones(2)}
    before = module.one.weight.array.copy()
    with pytest.raises(ValueError, match=r"missing 'one.weight'; missing 'mean'; unexpected 'two"):
        fl.nn.load_torch(module, state)
    assert not module.one.bias.array.all() or module.one.bias.array[0] != 1  # nothing was loaded
    assert fl.nn.load_torch(module, state, strict=False) == (["one.weight", "mean"], ["two.bias"])
    assert np.array_equal(module.one.weight.array, before)
    assert module.one.bias.array.tolist() == [1, 1]


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "shape": ({**ARRAYS, "one.bias": np.ones(3)}, ValueError, r"shape \(3,\), expected \(2,\)"),
    "complex": ({**ARRAYS, "one.bias": np.ones(2, complex)}, TypeError, "complex128"),
    "no array": ({**ARRAYS, "one.bias": "ones"}, TypeError, "'one.bias' must be a tensor or array"),
    "no state": (3, TypeError, "expected a state dict or the path"),
}


@for_each("strict", [False, True])
@for_each("name", WRONG)
def test_load_torch_raises_for_invalid_states(name: str, strict: bool) -> None:
    state, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        fl.nn.load_torch(Tied(), state, strict)
    with pytest.raises(TypeError, match="expected a Module"):
        fl.nn.load_torch(state, Tied())


def test_clone_copies_arrays() -> None:
    module = fl.recompute(Tied())
    module.one.weight.register_grad_hook(lambda v: None)
    module.before_forward = lambda module: None
    module(fl.input(np.ones((1, 2), np.float32))).sum().backward()
    cloned = module.clone()
    assert type(cloned) is Tied
    assert cloned.one.weight is cloned.other.weight
    assert cloned.before_forward is None
    for name, param in cloned.named_params().items():
        copied = module.named_params()[name]
        assert param is not copied
        assert (param.grad, param.hook, param.node) == (None, None, None)
        assert np.array_equal(param.array, copied.array)
        assert not np.may_share_memory(param.array, copied.array)
    assert not np.may_share_memory(cloned.mean, module.mean)
    assert cloned.eval().clone().train().one.weight.calc_grad
    assert copy.copy(module).one is module.one


def test_summary_counts_shared_parameters_once() -> None:
    lines = Tied().summary().splitlines()
    assert [line.split() for line in lines[2:-1]] == [
        ["Tied", "mean", "[3]", "0"],
        ["one", "Linear(2,", "2,", "bias=True)", "weight", "[2,", "2],", "bias", "[2]", "6"],
        ["other", "Linear(2,", "2,", "bias=False)", "0"],
    ]
    assert lines[-1] == "6 numbers in 2 parameters, 24 bytes; 3 in buffers, 12 bytes"
    assert len({len(line) for line in lines[:-1]}) == 1
