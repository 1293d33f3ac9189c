"""Kernels of csrc/optim and for CuPy: the results have the bits of the rules in optim/cpu.py."""

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from flashlight_py import _native, optim
from flashlight_py.autograd import param
from flashlight_py.device import to_device
from flashlight_py.optim import cpu, optimizer
from flashlight_py.optim.cpu import INVERSE, LR
from tests.cupy_stand_in import StandInCupy
from tests.optim.test_optimizers import RULES, Make
from tests.tables import for_each

MODULE = cpu.optimizer_kernels()
pytestmark = pytest.mark.skipif(MODULE is None, reason="csrc/optim was not built")

EVERY_RULE = for_each("make", RULES.values(), RULES)
SIZES = [*range(71), 2048, 5001]


def instruction_sets() -> Iterator[str]:
    """Use each instruction set that this processor supports."""
    before = MODULE.use("baseline")
    for name in ("baseline", "avx2", "avx512"):
        with contextlib.suppress(ValueError):  # not supported by this processor
            MODULE.use(name)
            yield name
    MODULE.use(before)


@contextlib.contextmanager
def in_numpy() -> Iterator[None]:
    """Disable the native module."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (optimizer, cpu):
            patch.setattr(module, "optimizer_kernels", lambda: None)
        yield


def draw(seed: int, dtype: str, sizes: list[int]) -> list[np.ndarray]:
    """Return arrays that start at any element, so that vectors are not aligned."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size + 1).astype(dtype)[1:] for size in sizes]


def bits(optimizer: Any) -> list[Any]:
    state = optimizer.state_dict()
    entries = [entry for name in state.keys() - {"lr"} for entry in state[name]]
    entries += [variable.data for variable in optimizer.params]
    return [np.asarray(to_device(entry, "cpu")).tobytes() for entry in entries]


def stepped(make: Make, dtype: str, sizes: list[int]) -> list[Any]:
    """Return all bits after three steps. In step two every fourth parameter has no gradient."""
    optimizer = make([param(array) for array in draw(0, dtype, sizes)])
    for number, scale in enumerate((1.0, 0.3, 1.0)):
        for position, (variable, grad) in enumerate(
            zip(optimizer.params, draw(number + 1, dtype, sizes), strict=True)
        ):
            variable.grad = None if number == 1 and position % 4 == 3 else grad
        optimizer.step(scale)
    return bits(optimizer)


def in_pieces(make: Make, dtype: str) -> list[Any]:
    """Return all bits after two steps, in each of which a parameter is updated in three parts."""
    optimizer = make([param(array) for array in draw(0, dtype, [5000] * 4)])
    for number in range(2):
        for position, variable in enumerate(optimizer.params):
            (grad,) = draw(10 * number + position, dtype, [5000])
            variable.grad, before = grad, grad.copy()
            arrays = variable.data, grad, *[entries[position] for entries in optimizer._states]
            cuts = [slice(0, 77), slice(77, 77), slice(77, 5000)]
            pieces = [tuple([array[cut] for array in arrays]) for cut in cuts]
            optimizer._step_pieces(position, grad, pieces, 1 / 3)
            np.testing.assert_array_equal(grad, before)
    return bits(optimizer)


@EVERY_RULE
def test_instruction_sets_have_the_bits_of_numpy(make: Make) -> None:
    for dtype in ("float32", "float64"):
        with in_numpy():
            expected = stepped(make, dtype, SIZES), in_pieces(make, dtype)
        for name in instruction_sets():
            assert (stepped(make, dtype, SIZES), in_pieces(make, dtype)) == expected, (name, dtype)


@for_each("dtype", ["float32", "float64"])
def test_sums_of_squares_have_the_bits_of_numpy(dtype: str) -> None:
    for array in draw(3, dtype, [0, 1, 15, 16, 17, 70, 65535, 65536, 65537, 200_000]):
        expected = np.square(array, dtype="float64").sum()
        for name in instruction_sets():
            total = cpu.sum_of_squares(array)
            assert total == cpu.reference_sum(array), name
            np.testing.assert_allclose(total, expected, rtol=1e-12)


class Subclass(np.ndarray):
    pass


def unusual() -> dict[str, tuple[Any, Any]]:
    """Return the array and the gradient of a parameter with an unusual property."""
    values, grad = (rows.astype("float32") for rows in np.random.default_rng(0).random((2, 4, 6)))
    shared = np.concatenate([values.ravel(), grad.ravel()])
    return {
        "float16": (values.astype("float16"), grad.astype("float16")),
        "strides": (values[:, ::2], grad[:, ::2]),
        "transposed": (values.T, grad.T),
        "a gradient of other strides": (values, np.asfortranarray(grad)),
        "a gradient of another dtype": (values, grad.astype("float64")),
        "a gradient that is broadcast": (values, np.array(0.5, "float32")),
        "a subclass": (values.view(Subclass), grad.view(Subclass)),
        "byte order": (values.astype(">f4"), grad),
        "overlapping": (shared[4:28], shared[:24]),
    }


def with_unusual_array(make: Make, case: str) -> Any:
    """Return an optimizer of a plain and an unusual parameter, both with gradients."""
    array, grad = unusual()[case]
    optimizer = make([param(np.ones(3)), param(np.ones(array.shape, array.dtype))])
    optimizer.params[0].grad, optimizer.params[1].grad = np.ones(3), grad
    optimizer.params[1].data = array
    return optimizer


@for_each("case", unusual())
@for_each("rule", ["adam", "novograd"])
def test_unsupported_arrays_use_numpy_rules(rule: str, case: str) -> None:
    one, other = (with_unusual_array(RULES[rule], case) for _ in range(2))
    one.step()
    with in_numpy():
        other.step()
    assert bits(one) == bits(other)


def test_plain_arrays_use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu, "change")
    for make in RULES.values():
        stepped(make, "float32", [3, 100])


def test_step_raises_value_error_for_read_only_parameters() -> None:
    variable = param(np.ones(3))
    variable.grad = np.ones(3)
    variable.data.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        optim.SGDOptimizer([variable], 0.1).step()


@for_each("context", [contextlib.nullcontext, in_numpy])
def test_infinite_parameters_are_kept_without_decay(context: Any) -> None:
    variable = param(np.array([np.inf, 1.0]))
    variable.grad = np.zeros(2)
    with context():
        optim.AdamOptimizer([variable], 0.1, decoupled=False).step()
    assert variable.data.tolist() == [np.inf, 1.0]


def test_options_can_change_between_steps() -> None:
    variable = param(np.ones(1))
    variable.grad = np.ones(1)
    optimizer = optim.SGDOptimizer([variable], 1.0)
    optimizer.weight_decay = 2.0
    optimizer.step()
    assert variable.data.tolist() == [-2.0]


MEMORY = np.ones(1), np.zeros(1, np.int64), None
SGD = "sgd", ((LR,), 0.0)


@for_each(
    "states source error match",
    [
        ((), (*MEMORY, ("adam", (0.0,) * 9)), ValueError, "adam expects 2 states, got 0"),
        ((), (*MEMORY, None), TypeError, "a rule is"),
        ((), (*MEMORY, ("sgd", ((5,), 0.0))), ValueError, "a field is a number or"),
        ((), (*MEMORY, ("sgd", ((LR, 1, 2, 3), 0.0))), ValueError, "a field is a number or"),
        ((), (*MEMORY, ("sgd", ((), 0.0))), ValueError, "a field is a number or"),
        ((), (*MEMORY, ("sgd", ((LR,), "0"))), TypeError, "real number"),
        ((), (*MEMORY, ("sgd", ((INVERSE, 0.5, 0.1), 0.0))), TypeError, "needs norms"),
        ((), (np.ones(2), *MEMORY[1:], SGD), TypeError, "lr, counts and norms are arrays"),
        ((), (1.0, *MEMORY[1:], SGD), TypeError, "lr, counts and norms are arrays"),
        ((), (MEMORY[0], [0], None, SGD), TypeError, "lr, counts and norms are arrays"),
        ((), (MEMORY[0], np.zeros(1), None, SGD), TypeError, "lr, counts and norms are arrays"),
        ((), (*MEMORY[:2], np.zeros(2), SGD), TypeError, "lr, counts and norms are arrays"),
        ((), (MEMORY[0], np.zeros(0, np.int64), None, SGD), IndexError, "1 parameters, got 0"),
        (([],), (*MEMORY, ("momentum", ((LR,), 0.9, 0.0, 0.0))), IndexError, "range"),
    ],
)
def test_step_checks_operands(states: Any, source: Any, error: type[Exception], match: str) -> None:
    variable = param(np.ones(1))
    variable.grad = np.ones(1)
    with pytest.raises(error, match=match):
        MODULE.step([variable], states, *source, 1.0, 1)
    for rule, piece, kind, words in (
        (("sgd", (1.0,)), (np.ones(1), np.ones(1)), ValueError, "unknown rule sgd with 1"),
        (("other", ()), (np.ones(1), np.ones(1)), ValueError, "unknown rule other"),
        (("sgd", (1.0, 0.0)), (np.ones(1),), ValueError, "a piece of sgd is"),
        (("sgd", (1.0, "0")), (np.ones(1), np.ones(1)), TypeError, "real number"),
        (("sgd",), (np.ones(1), np.ones(1)), IndexError, "range"),
    ):
        with pytest.raises(kind, match=words):
            MODULE.change(rule, piece, 1.0)
    with pytest.raises(TypeError, match="step\\(params, states"):
        MODULE.step([variable])
    with pytest.raises(AttributeError):
        MODULE.step([1], (), *MEMORY, SGD, 1.0, 1)
    assert (variable.data.tolist(), MEMORY[1].tolist()) == ([1.0], [0])


@for_each("context", [contextlib.nullcontext, in_numpy])
def test_decay_of_one_raises_before_any_change(context: Any) -> None:
    variable = param(np.ones(1))
    variable.grad = np.ones(1)
    optimizer = optim.AdamOptimizer([variable], 0.1)
    optimizer.beta1 = 1.0
    with context(), pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert variable.data.tolist() == [1.0]


@EVERY_RULE
@for_each("dtype", ["float32", "float64"])
def test_prepared_steps_have_the_bits_of_steps(make: Make, dtype: str) -> None:
    sizes = [3, 100, 1, 30]
    eager, other = (make([param(array) for array in draw(0, dtype, sizes)]) for _ in "ab")
    grads = draw(1, dtype, sizes)
    for item in (eager, other):
        for variable, grad in zip(item.params[:3], grads, strict=False):
            variable.grad = grad
        item.step()
    steps = other.prepared(0.3, *grads[:3], None)
    for number in range(5):
        for grad in grads:
            np.multiply(grad, 1 + number, out=grad)
        eager.lr = other.lr = 0.1 / (1 + number)
        eager.step(0.3)
        steps()
    assert bits(other) == bits(eager)


@for_each("case", unusual())
def test_prepared_uses_python_for_unsupported_arrays(case: str) -> None:
    eager, other = (with_unusual_array(RULES["adam"], case) for _ in range(2))
    steps = other.prepared(0.3, *(variable.grad for variable in other.params))
    assert type(steps) is partial
    assert type(other.prepared(0.3, np.ones(3), None)) is not partial
    for _ in range(3):
        eager.step(0.3)
        steps()
    assert bits(other) == bits(eager)


def test_prepared_steps_keep_their_arrays() -> None:
    variable = param(np.ones(1000))
    steps = optim.SGDOptimizer([variable], 0.5).prepared(1.0, np.ones(1000))
    array, variable.data, variable.grad = variable.data, np.zeros(0), None
    np.full(1000, 7.0)
    steps()
    assert array.tolist() == [0.5] * 1000
    with pytest.raises(TypeError, match="Steps\\(pieces"):
        cpu.optimizer_kernels().Steps([])  # type: ignore[union-attr]


def test_missing_native_module_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashlight_py._native._optim", None)
    for cached in (_native.optional, cpu.optimizer_kernels):
        cached.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "flashlight_py"):
            for _ in range(2):
                variable = param(np.ones(1))
                variable.grad = np.ones(1)
                optim.SGDOptimizer([variable], 1.0).step()
                assert variable.data.tolist() == [0.0]
    finally:
        for cached in (_native.optional, cpu.optimizer_kernels):
            cached.cache_clear()
    assert len(caplog.records) == 1
    assert "optimizers step in NumPy" in caplog.text


CUDA_SIZES = [0, 5, 1, 4096, 0, 9001, 0]


def grads(number: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    return [rng.standard_normal(size).astype(dtype) for size in CUDA_SIZES]


def steps(optimizer: Any, convert: Any, dtype: str) -> list[Any]:
    for number in (1, 2, 3):
        for position, grad in enumerate(grads(number, dtype)):
            late = number == 1 and position == 3  # its bias correction differs
            optimizer.params[position].grad = None if late else convert(grad)
        optimizer.step(0.5)
    return bits(optimizer)


FEW = ["sgd", "nesterov", "adam", "novograd"]  # the compiler needs half a second per kernel
OTHERS = pytest.param([rule for rule in RULES if rule not in FEW], marks=pytest.mark.slow)


@pytest.mark.parametrize("rules", [FEW, OTHERS])
def test_cuda_step_has_the_bits_of_the_cpu_in_one_launch(
    rules: list[str], strict: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The only number that CuPy computes in another order.
    monkeypatch.setattr(
        optim.optimizer, "sum_of_squares", lambda grad: cpu.reference_sum(to_device(grad, "cpu"))
    )
    for number, rule in enumerate(rules, 1):
        variables = [param(array) for array in grads(0, "float32")]
        expected = steps(RULES[rule](variables), np.asarray, "float32")
        optimizer = RULES[rule]([param(strict.asarray(a)) for a in grads(0, "float32")])  # type: ignore[arg-type]
        assert steps(optimizer, strict.asarray, "float32") == expected, rule
        assert sum(kernel.launches() for kernel in strict.kernels) == 3 * number, rule


@pytest.mark.parametrize("count", [20, 60])
def test_cuda_tables_may_have_any_length(strict: StandInCupy, count: int) -> None:
    """A short table is an argument of the kernel. A long table is stored on the GPU."""
    arrays = np.random.default_rng(0).standard_normal((2, count, 7)).astype("float32")
    results = []
    for convert in (np.asarray, strict.asarray):
        variables = [param(convert(array.copy())) for array in arrays[0]]  # type: ignore[arg-type]
        optimizer = RULES["adam"](variables)
        for variable, grad in zip(variables, arrays[1], strict=True):
            variable.grad = convert(grad)  # type: ignore[assignment]
        optimizer.step()
        results.append(bits(optimizer))
    assert results[0] == results[1]
    assert [kernel.launches() for kernel in strict.kernels] == [1]


def test_cuda_step_launches_once_per_dtype_and_rule(strict: StandInCupy) -> None:
    """Parameters with different step counts share one launch. Each dtype has a launch."""
    variables = [
        param(strict.asarray(np.ones(3, dtype)))  # type: ignore[arg-type]
        for dtype in ("float32", "float64", "float32")
    ]
    optimizer = RULES["adam"](variables)
    for count in (1, 3):
        for variable in variables[:count]:
            variable.grad = strict.asarray(np.ones(3, variable.dtype))  # type: ignore[assignment]
        optimizer.step()
    assert [kernel.launches() for kernel in strict.kernels] == [2, 1]


def test_strided_cuda_arrays_use_array_rules(strict: StandInCupy) -> None:
    array = strict.asarray(np.ones((3, 4), "float32"))
    variable = param(array[:, ::2])
    variable.grad = strict.asarray(np.ones((3, 2), "float32"))  # type: ignore[assignment]
    RULES["sgd"]([variable]).step()
    assert not strict.kernels
    np.testing.assert_array_equal(array.get()[:, ::2], np.full((3, 2), np.float32(0.9)))
