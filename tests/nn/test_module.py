"""Modules: finding parameters, state, modes, dtype and device."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from flashlight_py.autograd import Variable, input, param
from flashlight_py.autograd import functions as F
from flashlight_py.device import to_device
from flashlight_py.nn import Dropout, Linear, Module, ReLU, Sequential


class Scale(Module):
    """A parameter, a submodule, a buffer, a frozen parameter."""

    def __init__(self) -> None:
        self.factor = param(np.full(3, 2.0, "float32"))
        self.inner = Linear(3, 3)
        self.frozen = Variable(np.ones(3, "float32"))
        self.add_buffer("count", np.zeros(1, "int64"))
        self.add_buffer("total", np.zeros(3, "float32"))

    def forward(self, x: Variable) -> Variable:
        return self.inner(x) * self.factor


def test_parameters_are_found_in_order_and_named() -> None:
    model = Sequential(Scale(), Linear(3, 2, bias=False))
    assert list(model.named_params()) == [
        "0.factor",
        "0.frozen",
        "0.inner.weight",
        "0.inner.bias",
        "1.weight",
    ]
    assert model.params() == list(model.named_params().values())
    assert list(model.buffers) == ["0.count", "0.total"]


def test_shared_parameter_is_named_once() -> None:
    first, second = Linear(2, 2), Linear(2, 2)
    second.weight = first.weight
    model = Sequential(first, second, first)
    assert list(model.named_params()) == ["0.weight", "0.bias", "1.bias"]


def test_calling_a_module_calls_forward() -> None:
    scale = Scale()
    x = input(np.ones((1, 3), "float32"))
    np.testing.assert_array_equal(scale(x).array, scale.inner(x).array * 2)


def test_module_without_forward_cannot_be_made() -> None:
    class Empty(Module):
        pass

    with pytest.raises(TypeError, match="forward"):
        Empty()  # type: ignore[abstract]


def test_zero_grad_drops_every_gradient() -> None:
    model = Linear(2, 1)
    model(input(np.ones((1, 2), "float32"))).backward()
    assert all(p.grad is not None for p in model.params())
    model.zero_grad()
    assert all(p.grad is None for p in model.params())


class TestModes:
    def test_eval_records_nothing_and_train_undoes_it(self) -> None:
        model = Sequential(Linear(2, 2), Dropout(0.5))
        x = input(np.ones((1, 2), "float32"))
        assert model.eval() is model
        assert not any(module.training for _, module in model.children())
        assert not model(x).calc_grad
        assert model.train() is model
        assert all(module.training for _, module in model.children())
        assert model(x).calc_grad

    def test_hooks_gradients_and_frozen_parameters_stay(self) -> None:
        scale = Scale()
        calls: list[Variable] = []
        scale.factor.register_grad_hook(calls.append)
        gradient = scale.factor.grad = np.ones(3, "float32")
        scale.eval().eval().train()
        assert scale.factor.grad is gradient
        assert not scale.frozen.calc_grad
        assert scale.factor.calc_grad
        F.sum(scale(input(np.ones((1, 3), "float32")))).backward()
        assert calls == [scale.factor]

    def test_eval_of_a_part_is_undone_by_train_of_the_whole(self) -> None:
        model = Sequential(Linear(2, 2), Linear(2, 2))
        model[0].eval()
        assert [p.calc_grad for p in model.params()] == [False, False, True, True]
        model.train()
        assert all(p.calc_grad for p in model.params())

    def test_backward_after_eval_says_what_to_do(self) -> None:
        model = Linear(2, 1).eval()
        with pytest.raises(RuntimeError, match=r"call train\(\)"):
            model(input(np.ones((1, 2), "float32"))).backward()


class TestState:
    def test_shares_and_loads_in_place(self) -> None:
        model, other = Scale(), Scale()
        before = model.state_dict()
        assert before["factor"] is model.factor.array
        other.factor.array[...] = 7
        other.buffers["count"][...] = 5
        model.load_state_dict(other.state_dict())
        for name, array in model.state_dict().items():
            assert array is before[name]
            np.testing.assert_array_equal(array, other.state_dict()[name])

    def test_floats_are_cast(self) -> None:
        model = Linear(2, 2)
        state = {name: array.astype("float64") for name, array in model.state_dict().items()}
        model.load_state_dict(state)
        assert model.weight.dtype == "float32"

    def test_all_that_is_wrong_is_named_and_nothing_changes(self) -> None:
        model = Linear(2, 3)
        before = {name: array.copy() for name, array in model.state_dict().items()}
        with pytest.raises(ValueError, match="nothing was loaded") as raised:
            model.load_state_dict({"weight": np.zeros((2, 3)), "scale": np.zeros(1)})
        for part in ("missing 'bias'", "unexpected 'scale'", "'weight' has shape (2, 3)", "(3, 2)"):
            assert part in str(raised.value)
        with pytest.raises(TypeError, match="'bias' has dtype complex128"):
            model.load_state_dict({"weight": np.zeros((3, 2)), "bias": np.zeros(3, complex)})
        for name, array in model.state_dict().items():
            np.testing.assert_array_equal(array, before[name])


def test_astype_casts_parameters_and_floating_buffers() -> None:
    scale = Scale()
    scale.factor.grad = np.ones(3, "float32")
    assert scale.astype("float64") is scale
    assert all(p.dtype == "float64" for p in scale.params())
    assert {name: str(b.dtype) for name, b in scale.buffers.items()} == {
        "count": "int64",
        "total": "float64",
    }
    assert scale.factor.grad is None
    with pytest.raises(TypeError, match="got int32"):
        scale.astype("int32")


def test_to_the_device_where_it_is_changes_nothing() -> None:
    scale = Scale()
    array = scale.factor.array
    assert scale.to("cpu") is scale
    assert scale.factor.array is array
    with pytest.raises(ValueError, match="tpu"):
        scale.to("tpu")


@pytest.mark.gpu
def test_gradients_on_a_gpu_equal_the_cpu_s() -> None:
    array = np.linspace(-1, 1, 8).reshape(2, 4)
    model = Sequential(Linear(4, 5), ReLU(), Linear(5, 1)).astype("float64")
    gradients = []
    for device in ("cpu", "cuda"):
        model.to(device)
        F.sum(model(input(to_device(array, device)))).backward()
        gradients.append([to_device(p.grad, "cpu") for p in model.params()])
    for cpu, gpu in zip(*gradients, strict=True):
        np.testing.assert_allclose(cpu, gpu, rtol=1e-12)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(duplicate: Any) -> None:
    model = Sequential(Linear(2, 2), ReLU())
    model.params()[0].register_grad_hook(lambda _: None)
    other = duplicate(model)
    for name, array in other.state_dict().items():
        np.testing.assert_array_equal(array, model.state_dict()[name])
        assert not np.shares_memory(array, model.state_dict()[name])
