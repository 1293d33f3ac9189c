"""The fused kernels, compiled by CUDA, next to NumPy."""

import math
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import kernels
from flashlight_py.autograd import functions as F
from tests.optim.test_optimizers import RULES

pytestmark = pytest.mark.gpu

TOLERANCE = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-13}
EVERY_FLOAT = pytest.mark.parametrize("dtype", list(TOLERANCE))


def rows(dtype: str, seed: int, shape: tuple[int, ...] = (7, 1001)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def both(function: Any, *arrays: np.ndarray) -> tuple[Any, Any]:
    import cupy

    return function(*arrays), function(*map(cupy.asarray, arrays)).get()


@EVERY_FLOAT
@pytest.mark.parametrize("rule", RULES)
def test_optimizer_kernels_equal_their_formulas(dtype: str, rule: str) -> None:
    """Several parameters share a launch."""

    def three_steps(*arrays: Any) -> Any:
        params = [fl.param(array.copy()) for array in arrays[:3]]
        optimizer: Any = RULES[rule](params)
        for _ in range(3):
            for variable, grad in zip(params, arrays[3:], strict=True):
                variable.grad = grad
            optimizer.step(0.5)
        xp = fl.device.array_module(arrays[0])
        return xp.concatenate([variable.array.reshape(-1) for variable in params])

    shapes = [(7, 1001), (1,), (3,)]
    arrays = [rows(dtype, seed, shape) for seed in (0, 1) for shape in shapes]
    expected, got = both(three_steps, *arrays)
    if rule == "novograd":  # sums of squares have another order
        np.testing.assert_allclose(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    else:
        np.testing.assert_array_equal(got, expected)


@EVERY_FLOAT
def test_relu_and_mean_squared_error_equal_numpy(dtype: str) -> None:
    def gradient(x: Any, target: Any) -> Any:
        variable = fl.param(x)
        F.mean_squared_error(F.relu(variable), fl.no_grad(target)).backward()
        return variable.grad

    def value(x: Any, target: Any) -> Any:
        return F.mean_squared_error(fl.no_grad(x), fl.no_grad(target)).array

    arrays = rows(dtype, 2), rows(dtype, 3)
    for function in (value, gradient):
        expected, got = both(function, *arrays)
        np.testing.assert_allclose(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@EVERY_FLOAT
@pytest.mark.parametrize("shape", [(20, 1001), (1500, 1001)])
def test_mean_squared_error_of_large_arrays_is_accurate(dtype: str, shape: tuple[int, int]) -> None:
    """Many blocks, any layout, and the same bits in each run."""
    import cupy

    x, target = rows(dtype, 2, shape), rows(dtype, 3, shape[::-1])
    arguments = fl.no_grad(cupy.asarray(x)), fl.no_grad(cupy.asarray(target).T)
    means: list[Any] = [F.mean_squared_error(*arguments).array for _ in range(2)]
    got, again = (mean.get() for mean in means)
    wide = x.astype("float64") - target.T.astype("float64")
    expected = math.fsum((wide * wide).flat) / wide.size
    # A tree of additions rounds log2(terms) times, by half an eps each. The first terms of a thread
    # and their squares take at most the other half. The mean is rounded once.
    added = np.finfo("float64" if dtype == "float64" else "float32").eps * math.log2(wide.size)
    np.testing.assert_allclose(got, expected, rtol=float(np.finfo(dtype).eps + added))
    np.testing.assert_array_equal(again, got)


@EVERY_FLOAT
def test_linear_with_relu_equals_numpy(dtype: str) -> None:
    def value_and_gradients(x: Any, weight: Any, bias: Any) -> Any:
        params = [fl.param(array) for array in (x, weight, bias)]
        out = F.linear_relu(*params)
        F.sum(out).backward()
        results: list[Any] = [out.array, *(p.grad for p in params)]
        sums = [(array * array).sum() for array in results]
        return fl.device.array_module(x).stack(sums)

    shapes = (20, 30), (40, 30), (40,)
    wide = [rows("float64", seed, shape) for seed, shape in enumerate(shapes)]
    expected, _ = both(value_and_gradients, *wide)
    _, got = both(value_and_gradients, *(array.astype(dtype) for array in wide))
    # A matrix product adds many terms in an order of the library.
    np.testing.assert_allclose(got, expected, rtol=100 * TOLERANCE[dtype])


def test_kernels_accept_any_memory_layout() -> None:
    import cupy

    grad = cupy.asarray(rows("float32", 4)).T
    out = cupy.asarray(rows("float32", 5, (1001, 7)))[::-1]
    expected = np.where(out.get() > 0, grad.get(), 0)
    slope: Any = kernels.relu_slope(grad, out)
    np.testing.assert_array_equal(slope.get(), expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "bool"])
def test_average_value_meter_adds_arrays_of_any_dtype(dtype: str) -> None:
    values = (4 * rows("float32", 0, (50,))).astype(dtype)

    def value_of(*arrays: Any) -> Any:
        meter = fl.meter.AverageValueMeter()
        meter.add(arrays[0])
        for number in range(5):
            meter.add(arrays[0][number], 0.5 + number)
        return np.array(meter.value())

    import cupy

    np.testing.assert_allclose(value_of(cupy.asarray(values)), value_of(values), rtol=1e-12)


def test_average_value_meter_adds_in_a_cuda_graph() -> None:
    """A copy to the host would end the capture with an error."""
    import cupy

    meter, loss = fl.meter.AverageValueMeter(), cupy.asarray(np.float32(2))
    meter.add(loss)  # compiles the kernel and allocates the sums
    meter.reset()
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        meter.add(loss)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
            loss += 1
        assert meter.value() == (3.0, 1.0, 3.0)
