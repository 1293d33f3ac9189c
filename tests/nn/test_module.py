"""Modules and containers: search for parameters, state, files of torch, modes, dtype and device."""

import copy
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import Variable, input, param
from flashlight_py.autograd.graph import Part
from flashlight_py.device import floating
from flashlight_py.nn import Container, Dropout, Linear, Module, ReLU, Sequential, View, recompute
from flashlight_py.optim import SGDOptimizer
from flashlight_py.parallel.tree import put_buffer
from flashlight_py.random import set_seed
from flashlight_py.safetensors import pieces
from tests.nn.oracle import Oracle
from tests.parallel import trees
from tests.tables import for_each
from tests.tape.steps import compare, training


class Scale(Module):
    def __init__(self) -> None:
        self.factor = param(np.full(3, 2.0, "float32"))
        self.inner = Linear(3, 3)
        self.frozen = Variable(np.ones(3, "float32"))
        self.add_buffer("count", np.zeros(1, "int64"))
        self.add_buffer("total", np.zeros(3, "float32"))

    def forward(self, x: Variable) -> Variable:
        return self.inner(x) * self.factor


def test_named_params_returns_parameters_in_order() -> None:
    model = Sequential(Scale(), Linear(3, 2, bias=False))
    names = ["0.factor", "0.frozen", "0.inner.weight", "0.inner.bias", "1.weight"]
    assert list(model.named_params()) == names
    assert model.params() == list(model.named_params().values())
    assert list(model.buffers) == ["0.count", "0.total"]
    first, second = Linear(2, 2), Linear(2, 2)
    second.weight = first.weight  # listed once
    assert list(Sequential(first, second, first).named_params()) == ["0.weight", "0.bias", "1.bias"]


def test_eval_disables_recording_and_train_enables_it() -> None:
    model, x = Sequential(Scale(), Dropout(0.5)), input(np.ones((1, 3), "float32"))
    calls: list[Variable] = []
    factor, frozen = model[0].factor, model[0].frozen
    factor.register_grad_hook(calls.append)
    model(x).sum().backward()
    gradient = factor.grad
    assert model.eval().eval() is model
    assert not any(module.training for _, module in model.children())
    assert not any(p.calc_grad for p in model.params())
    with pytest.raises(RuntimeError, match=r"call train\(\)"):
        model(x).sum().backward()
    assert model.train() is model
    assert all(module.training for _, module in model.children())
    assert (factor.calc_grad, frozen.calc_grad) == (True, False)
    assert factor.grad is gradient
    model(x).sum().backward()
    assert calls == [factor] * 2
    model[0].eval()  # a submodule
    assert not model[0].inner.weight.calc_grad
    assert model.train()[0].inner.weight.calc_grad
    model.zero_grad()
    assert all(p.grad is None for p in model.params())


@for_each("dtype other_dtype", product(["float32", "float16", "bfloat16"], ["float64", "bfloat16"]))
def test_state_dict_shares_and_load_state_dict_copies_and_casts(
    dtype: str, other_dtype: str
) -> None:
    model, other = Scale().astype(dtype), Scale().astype(other_dtype)
    before = model.state_dict()
    assert before["factor"] is model.factor.array
    other.factor.array[...] = 7
    other.buffers["count"][...] = 5
    state = other.state_dict()
    model.load_state_dict(state)
    for name, array in model.state_dict().items():
        assert array is before[name]
        np.testing.assert_array_equal(array, state[name].astype(array.dtype))


def test_load_state_dict_names_all_problems_and_changes_nothing() -> None:
    model = Linear(2, 3)
    before = {name: array.copy() for name, array in model.state_dict().items()}
    with pytest.raises(ValueError, match="nothing was loaded") as raised:
        model.load_state_dict({"weight": np.zeros((2, 3)), "scale": np.zeros(1)})
    for part in ("missing 'bias'", "unexpected 'scale'", "'weight' has shape (2, 3)", "(3, 2)"):
        assert part in str(raised.value)
    with pytest.raises(TypeError, match="'bias' needs a dtype"):
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


def test_to_keeps_arrays_on_the_same_device() -> None:
    scale = Scale()
    array = scale.factor.array
    assert scale.to("cpu") is scale
    assert scale.factor.array is array
    with pytest.raises(ValueError, match="tpu"):
        scale.to("tpu")


class Held(Module):
    def __init__(self) -> None:
        self.layers: list[Any] = [Linear(3, 3), [ReLU(), Linear(3, 3, bias=False)]]
        self.heads = {"one": Linear(3, 1), "two": (Linear(3, 2),)}
        self.scale = param(np.full(3, 2.0, "float32"))
        self.shape, self.sizes = (3, 3), [1.0, "a", None]

    def forward(self, x: Variable, scale: Variable | None = None, head: str = "one") -> Any:
        for layer in (self.layers[0], *self.layers[1]):
            x = layer(x)
        x = x * self.scale if scale is None else x * scale
        head_module: Any = self.heads[head]
        return head_module(x) if head == "one" else head_module[0](x)


class Keeping(Held):
    def forward(self, x: Variable, *_: Any, **__: Any) -> Any:
        self.state = [super().forward(x), (x * 1, super().forward(x)), x, self.scale]
        return self.state[0]


class Free(Module):
    """A module without contents; the test sets attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def forward(self, *_: Any) -> Any:
        raise NotImplementedError


def names_of(model: Module) -> list[str]:
    return [prefix[:-1] for prefix, _ in model._walk()][1:]


class TestContainers:
    def test_modules_in_containers_are_named_as_in_torch(self, oracle: Oracle) -> None:
        model = Held()
        names = oracle(
            """
class Held(nn.Module):
    def __init__(self):
        super().__init__()
        inner = nn.ModuleList([nn.ReLU(), nn.Linear(3, 3, bias=False)])
        self.layers = nn.ModuleList([nn.Linear(3, 3), inner])
        heads = {"one": nn.Linear(3, 1), "two": nn.ModuleList([nn.Linear(3, 2)])}
        self.heads = nn.ModuleDict(heads)
        self.scale = nn.Parameter(torch.full((3,), 2.0))
y = list(dict(Held().named_parameters()))
"""
        )["y"]
        assert sorted(model.named_params()) == sorted(names)  # torch's order differs
        assert [name for name, _ in model.children()] == [
            *("layers.0", "layers.1.0", "layers.1.1", "heads.one", "heads.two.0")
        ]
        assert "layers.1.1   Linear(3, 3, bias=False)" in model.summary()
        model.layers.append(Scale())
        assert "layers.2.inner.weight" in model.named_params()
        put_buffer(model, "layers.2.count", np.ones(1, "int64"))
        assert model.buffers["layers.2.count"] == 1

    def test_variables_in_containers_are_not_parameters(self) -> None:
        model, x = Keeping(), input(np.ones((2, 3), "float32"))
        names = list(model.named_params())
        for module in (model, model.eval(), model.train()):
            module(x)
            for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert list(one.named_params()) == names
                one.load_state_dict(model.state_dict())

    def test_attribute_names_precede_container_names(self) -> None:
        one, two = Linear(1, 1), Linear(1, 1)
        assert names_of(Free(all=[one, two], l0=one, l1=two)) == ["l0", "l1"]
        assert names_of(Free(all=[one, two, one], l1=two)) == ["l1", "all.0"]
        first = Free(hidden=[two], inner=one)  # another module has this name
        assert names_of(Free(a=first, b=two)) == ["a", "a.inner", "b"]
        assert names_of(Sequential(one, one)) == ["0", "1"]

    def test_cyclic_containers_are_visited_once(self) -> None:
        child, tree = Free(leaf=Linear(1, 1)), {"children": [{"leaf": ReLU()}]}
        tree["children"][0]["parent"] = tree  # type: ignore[assignment]
        parent = Free(child=child, tree=tree)
        child.parents, child.parent = [parent], parent
        assert names_of(parent) == ["child", "child.leaf", "tree.children.0.leaf"]
        endless: list[Any] = []
        endless.append(endless)
        assert names_of(Free(endless=endless)) == []

    def test_modules_are_found_in_large_containers(self) -> None:
        words: dict[str, Any] = {f"w{n}": [n] for n in range(1000)}
        layers = [("one", ReLU()), None, ("two", ReLU())]
        model = Free(words=words, names=[*words], layers=layers, late=[*range(100), ReLU()])
        assert names_of(model) == ["layers.0.1", "layers.2.1", "late.100"]
        model.names.append(ReLU())  # type: ignore[attr-defined]
        words["w7"][0] = Linear(1, 1)
        expected = ["words.w7.0", "names.1000", "layers.0.1", "layers.2.1", "late.100"]
        assert names_of(model) == expected

    @pytest.mark.parametrize("made_again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_module_search_cache_survives_reused_ids(self, made_again: Any) -> None:
        original = Free(items=[ReLU() for _ in range(101)])
        for _ in range(105):
            assert names_of(Free(items=["word"] * 101)) == []
            assert len(names_of(made_again(original))) == 101

    @for_each(
        "items name",
        [
            ({1: ReLU(), "1": ReLU()}, "of.1"),
            ({"a.b": ReLU(), "a": {"b": ReLU()}}, "of.a.b"),
            ({"a.b": ReLU(), "a": Free(b=ReLU())}, "of.a.b"),
            ({"a": Free(b=ReLU()), "a.b": ReLU()}, "of.a.b"),
        ],
    )
    def test_duplicate_module_names_raise_value_error(self, items: Any, name: str) -> None:
        for call in (Module.params, Module.named_params, Module.state_dict):
            with pytest.raises(ValueError, match=f"Free: two modules have the name '{name}'"):
                call(Free(of=items))

    def test_modes_state_and_dtype_reach_modules_in_containers(self) -> None:
        model, other = Held(), Held()
        assert not any(p.calc_grad for p in model.eval().params())
        assert all(p.calc_grad for p in model.train().params())
        other.load_state_dict(model.state_dict())
        model.scale.register_grad_hook(lambda _: None)  # copies have no hooks
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.clone()
        for duplicate in (other, *copies):
            for name, array in duplicate.state_dict().items():
                np.testing.assert_array_equal(array, model.state_dict()[name])
                assert not np.shares_memory(array, model.state_dict()[name])
        assert {p.dtype.name for p in model.astype("float64").params()} == {"float64"}

    def test_captured_step_notices_appended_modules(self) -> None:
        def make() -> Any:
            set_seed(0)
            model = Held()
            optimizer = SGDOptimizer(model.params(), 0.1)
            loss_of = lambda x: model(input(x), scale=input(x[:1]), head="two").sum()  # noqa: E731
            return training(optimizer, loss_of), model

        def change(number: int, model: Held) -> None:
            if number == 3:
                set_seed(1)
                model.layers[1].append(Linear(3, 3))

        compare(make, [np.full((2, 3), n, "float32") for n in range(6)], change, eager=3)


def test_call_passes_options_to_forward() -> None:
    model, x = Held(), input(np.ones((2, 3), "float32"))
    calls: list[Module] = []
    model.before_forward = calls.append
    assert model(x, head="two").shape == (2, 2)
    assert model(x, scale=x, head="one").shape == (2, 1)
    assert calls == [model, model]
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        model(x, mask=x)


@for_each("bias", [True, False])
def test_sequential_fuses_linear_and_relu_with_the_same_bits(bias: bool) -> None:
    set_seed(0)
    model = Sequential(ReLU(), Linear(3, 4, bias), ReLU(), ReLU(), Linear(4, 4), Linear(4, 2, bias))
    model.add(ReLU())
    assert len(model) == 7
    array = np.random.default_rng(0).standard_normal((5, 3)).astype("float32")

    def run(forward: Any) -> list[Any]:
        model.zero_grad()
        x = param(array)
        result = forward(x)
        result.backward(np.ones(result.shape, "float32"))
        return [result.array, x.grad, *(param.grad for param in model.params())]

    def one_by_one(x: Variable) -> Variable:
        for position in range(len(model)):
            x = model[position](x)
        return x

    for together, alone in zip(run(model), run(one_by_one), strict=True):
        assert together.tobytes() == alone.tobytes()


@for_each("position", [0, 1])
@for_each("override", ["before_forward", "recompute", "forward"])
def test_sequential_does_not_fuse_overridden_layers(position: int, override: str) -> None:
    model, called = Sequential(Linear(2, 2), ReLU()), []
    module = model[position]
    if override == "before_forward":
        module.before_forward = called.append
    elif override == "recompute":
        recompute(module)
        called.append(module)  # test_recompute.py checks the passes
    else:
        forward = module.forward
        module.forward = lambda x: (called.append(module), forward(x))[1]  # type: ignore[method-assign,func-returns-value]
    x = param(np.array([[1.0, -1.0]], "float32"))
    result = model(x)
    assert isinstance(result.node, Part) == (override == "recompute" and position == 1)
    result.sum().backward()
    assert called == [module]
    np.testing.assert_array_equal(result.array, np.maximum(model[0](x).array, 0))


@for_each("kind", [list, tuple])
def test_sequential_accepts_modules_and_lists_of_modules(kind: Any) -> None:
    members = Linear(2, 3), ReLU(), View((-1,))
    for model in (Sequential(kind(members)), Sequential(*members)):
        assert tuple(model) == members
        assert list(model.named_params()) == ["0.weight", "0.bias"]
        assert repr(model) == "Sequential(Linear(2, 3, bias=True), ReLU(), View((-1,)))"
    x = input(np.ones(1))
    assert Sequential()(x) is x
    for wrong in (Linear, "Linear", None, np.ones(1), kind([Linear(2, 3), 3])):
        with pytest.raises(TypeError, match="Sequential: expected a Module"):
            Sequential(wrong)
    with pytest.raises(TypeError, match="forward"):
        type("Empty", (Module,), {})()


def test_container_lists_members_and_attributes() -> None:
    class Residual(Container):
        def __init__(self) -> None:
            super().__init__(Linear(2, 2))
            self.shortcut = Linear(2, 2, bias=False)

        def forward(self, x: Variable) -> Variable:
            return self[0](x) + self.shortcut(x)

    model = Residual()
    assert list(model.named_params()) == ["0.weight", "0.bias", "shortcut.weight"]
    x = input(np.ones((1, 2), "float32"))
    np.testing.assert_array_equal(model(x).array, model[0](x).array + model.shortcut(x).array)


def test_moving_average_follows_parameters_and_copies_buffers(tmp_path: Path) -> None:
    model = fl.nn.Sequential(fl.nn.Linear(3, 2), fl.nn.BatchNorm(2))
    average = fl.nn.ExponentialMovingAverage(model, 0.75)
    first, x = model.params()[0].array.copy(), fl.input(np.ones((4, 3), "float32"))
    np.testing.assert_array_equal(average(x).array, model.eval()(x).array)
    model.train()
    for _ in range(2):
        model.params()[0].array[...] += 1
        model[1].running_mean[...] += 1
        average.update(model)
    np.testing.assert_allclose(average.module.params()[0].array, first + 0.4375 + 0.25, rtol=1e-6)
    np.testing.assert_array_equal(average.module[1].running_mean, [2, 2])
    assert not average(x).calc_grad
    fl.save(tmp_path, module=[model, average])
    other = fl.nn.ExponentialMovingAverage(model, 0.75)
    fl.load(tmp_path, module=[model, other])
    np.testing.assert_array_equal(other(x).array, average(x).array)
    average.train()  # called by a parent module
    np.testing.assert_array_equal(other(x).array, average(x).array)
    with pytest.raises(ValueError, match="missing"):
        average.update(fl.nn.Linear(3, 2))
    with pytest.raises(ValueError, match="shape"):  # shapes are not broadcast
        fl.nn.ExponentialMovingAverage(fl.nn.Linear(3, 2)).update(fl.nn.Linear(3, 1))
    with pytest.raises(ValueError, match="decay must be 0 to 1, got 2"):
        fl.nn.ExponentialMovingAverage(model, 2)


def test_moving_average_of_half_precision_is_float32() -> None:
    model = fl.nn.Linear(1, 1).astype("float16")
    average = fl.nn.ExponentialMovingAverage(model, 0.999)
    begin = average.module.weight.array.copy()
    model.weight.array[...] += 1
    for _ in range(9):
        average.update(model)
    expected = begin + (model.weight.array - begin) * (1 - 0.999**9)
    np.testing.assert_allclose(average.module.weight.array, expected, rtol=1e-5)


def test_moving_average_is_captured() -> None:
    def make() -> Any:
        fl.set_seed(0)
        model = fl.nn.Linear(3, 2)
        average = fl.nn.ExponentialMovingAverage(model, 0.5)
        loss_of = lambda x: ((model(fl.input(x)) ** 2).mean(), average(fl.input(x)))  # noqa: E731
        optimizer = fl.optim.SGDOptimizer(model.params(), 0.1)
        return training(optimizer, loss_of, lambda: average.update(model)), model, average

    compare(make, list(np.random.default_rng(0).random((5, 4, 3)).astype("float32")))


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
    for name, parameter in cloned.named_params().items():
        copied = module.named_params()[name]
        assert parameter is not copied
        assert (parameter.grad, parameter.hook, parameter.node) == (None, None, None)
        assert np.array_equal(parameter.array, copied.array)
        assert not np.may_share_memory(parameter.array, copied.array)
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
