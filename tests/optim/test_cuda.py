"""The kernels for CuPy arrays, compiled for the CPU: one launch, and the bits of csrc/optim."""

from typing import Any

import numpy as np
import pytest

from flashlight_py import optim
from flashlight_py.autograd import param
from flashlight_py.device import to_device
from flashlight_py.optim import cpu
from tests.cupy_stand_in import StandInCupy
from tests.optim.test_native import RULES, bits

SIZES = [0, 5, 1, 4096, 0, 9001, 0]


def grads(number: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    return [rng.standard_normal(size).astype(dtype) for size in SIZES]


def steps(optimizer: Any, convert: Any, dtype: str) -> list[Any]:
    for number in (1, 2, 3):
        for position, grad in enumerate(grads(number, dtype)):
            late = number == 1 and position == 3  # so its bias is corrected in another way
            optimizer.params[position].grad = None if late else convert(grad)
        optimizer.step(0.5)
    return bits(optimizer)


@pytest.mark.parametrize("rule", RULES)
def test_one_launch_gives_the_bits_of_the_cpu(
    rule: str, strict: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one number that CuPy computes in another order.
    monkeypatch.setattr(
        optim.optimizer, "sum_of_squares", lambda grad: cpu.reference_sum(to_device(grad, "cpu"))
    )
    expected = steps(RULES[rule]([param(a) for a in grads(0, "float32")]), np.asarray, "float32")
    optimizer = RULES[rule]([param(strict.asarray(a)) for a in grads(0, "float32")])  # type: ignore[arg-type]
    assert steps(optimizer, strict.asarray, "float32") == expected
    assert [kernel.launches() for kernel in strict.kernels] == [3]


@pytest.mark.parametrize("count", [20, 60])
def test_tables_of_any_length(strict: StandInCupy, count: int) -> None:
    """A short one is an argument of the kernel, and a long one lies on the GPU."""
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


def test_two_dtypes_and_two_rates_are_two_launches(strict: StandInCupy) -> None:
    """Parameters that are not at the same step share one; those of another dtype have another."""
    variables = [
        param(strict.asarray(np.ones(3, dtype)))  # type: ignore[arg-type]
        for dtype in ("float32", "float64", "float32")
    ]
    optimizer = RULES["adam"](variables)
    for given in (1, 3):
        for variable in variables[:given]:
            variable.grad = strict.asarray(np.ones(3, variable.dtype))  # type: ignore[assignment]
        optimizer.step()
    assert [kernel.launches() for kernel in strict.kernels] == [2, 1]


def test_strides_are_stepped_by_the_reference(strict: StandInCupy) -> None:
    whole = strict.asarray(np.ones((3, 4), "float32"))
    variable = param(whole[:, ::2])
    variable.grad = strict.asarray(np.ones((3, 2), "float32"))  # type: ignore[assignment]
    RULES["sgd"]([variable]).step()
    assert not strict.kernels
    np.testing.assert_array_equal(whole.get()[:, ::2], np.full((3, 2), np.float32(0.9)))
