"""Fused CuPy kernels: one launch instead of several, because each launch takes some microseconds.

CuPy compiles each kernel at its first use. Types narrower than float32 are computed in float32.
"""

import functools
from typing import Any

import numpy as np

from flashlight_py.device import Array


def _polynomial(*numbers: float) -> str:
    text = f"{numbers[-1]}f"
    for number in reversed(numbers[:-1]):
        text = f"({text} * a + {number}f)"
    return text


_ABOVE = _polynomial(1.25331406, 0.5594689599, 0.1323146197, 0.01466118099)
_BELOW = _polynomial(
    1.0, 2.04215612, 1.864438885, 0.9872392362, 0.3270594715, 0.06597974371, 0.007334719276
)
# By kernel: inputs, outputs, and code for one element. R is the type of the computation.
_ELEMENTWISE = {
    "capped_step": (
        "float32 mean_sum, float32 variance_sum, float32 inverse_cap",
        "float32 mean, float32 variance",
        """
        const float s = variance;
        const float bound = sqrt(s) * inverse_cap;
        const float d = s * mean_sum;
        const float e = s * s * variance_sum;
        mean += min(max(d, -bound), bound);
        const float next = s + min(max(e, -bound), bound);
        variance = next > 0 ? next : 1e-5f;
        """,
    ),
    "mixture_relu": (
        "float32 mean, float32 variance",
        "float32 mean_out, float32 variance_out, float32 slope_out",
        f"""
        const float m = mean, v = variance < 1.17549435e-38f ? 1.17549435e-38f : variance;
        const float s = sqrt(v);
        const float size = m < 0 ? -m : m;
        const float a = size / s > 10 ? 10 : size / s;
        const double half_square = (double)m * m / (2. * v);
        const float p = 0.39894228f * (float)exp(half_square < 52 ? -half_square : -52.);
        const float big_h = {_ABOVE} / {_BELOW};
        const float big_g = (1 - a * big_h) / (1 + a * a);
        const float q = p * (big_h + a * big_g);
        const float g = p * big_g;
        const float h = p * big_h - g * g;
        const float moment = (m > 0 ? m : 0) + s * g;
        const float spread = v * ((m > 0 ? 1 - 2 * q : 0) + h);
        mean_out = moment < 1e-6f ? 1e-6f : moment;
        variance_out = spread < 1e-6f ? 1e-6f : spread;
        slope_out = m > 0 ? 1 - q : q;
        """,
    ),
    # ``grad`` is loaded before ``out`` is compared, so that both loads overlap.
    "relu_slope": ("G grad, T out", "G slope", "const G g = grad; slope = out > T(0) ? g : G(0);"),
    # Each thread computes four rows, because one row does not use the full memory bandwidth.
    "bias_relu": (
        "raw T bias, int64 columns, int64 stride, int64 total",
        "raw T out",
        """
        const bool fits = stride < 4294967296LL;  // so that the division takes a third as long
        const T b = bias[fits ? (unsigned int)i % (unsigned int)columns : i % columns];
        T sums[4];
        for (int k = 0; k < 4; ++k) if (i + k * stride < total) sums[k] = out[i + k * stride] + b;
        for (int k = 0; k < 4; ++k) {
          if (i + k * stride < total) out[i + k * stride] = sums[k] < T(0) ? T(0) : sums[k];
        }
        """,  # keeps nan
    ),
    "scaled_difference": (
        "T a, T b, G factor, R scale",
        "T result",
        "result = T((R(a) - R(b)) * (R(factor) * scale));",
    ),
    "add_moments": (
        "T mean, float64 squares, float64 weight, float64 count",
        "raw float64 sums",
        """
        const double before = sums[0], more = weight * count, total = before + more;
        const double delta = double(mean) - sums[2];
        sums[3] += weight * squares + delta * delta * before * more / total;
        sums[2] += delta * more / total;
        sums[1] += weight * weight * count;
        sums[0] = total;
        """,
    ),
}
_C_NAMES = {"float32": "float", "float64": "double"}


@functools.cache
def _elementwise(name: str, real: str = "float32") -> Any:
    import cupy

    inputs, outputs, body = _ELEMENTWISE[name]
    body = f"typedef {_C_NAMES[real]} R;{body}"
    inputs = inputs.replace("R ", f"{real} ")
    return cupy.ElementwiseKernel(inputs, outputs, body, f"flashlight_{name}")


def capped_step(
    mean: Array, variance: Array, mean_sum: Array, variance_sum: Array, inverse_cap: float
) -> None:
    """Change float32 arrays of one shape in place, as ``tagi.layer.step_in_numpy`` does."""
    _elementwise("capped_step")(mean_sum, variance_sum, inverse_cap, mean, variance)


def mixture_relu(mean: Array, variance: Array) -> tuple[Array, Array, Array]:
    """Return means, variances and slopes of max(z, 0) for normal z with ``mean`` and ``variance``.

    All arrays are float32 and have the same shape. The formula is in ``csrc/tagi/activations.inc``.
    """
    import cupy

    moments = cupy.empty_like(mean), cupy.empty_like(mean), cupy.empty_like(mean)
    _elementwise("mixture_relu")(mean, variance, *moments)
    return moments


def relu_slope(grad: Array, out: Array) -> Array:
    """Return a new array: ``grad`` for elements whose ``out`` (same shape) is above 0, else 0."""
    return _elementwise("relu_slope")(grad, out)  # type: ignore[no-any-return]


def add_bias_relu(product: Array, bias: Array) -> None:
    """Replace ``product`` [..., n] by ``max(product + bias, 0)``; ``bias`` [n] has its dtype."""
    columns = bias.size
    stride = -(-product.size // (4 * columns)) * columns if columns else 0
    if stride:
        _elementwise("bias_relu")(bias, columns, stride, product.size, product, size=stride)


def mean_square_error(prediction: Array, target: Array) -> Array:
    """Return the mean of ``(prediction - target) ** 2`` as an array without dimensions.

    Both arrays have the same shape and dtype. Dtypes narrower than float32 are summed in float32.
    """
    import cupy

    size, dtype, real = prediction.size, prediction.dtype.name, _computed_in(prediction)
    if size <= _ONE_BLOCK:
        difference = f"({_C_NAMES[real]}(p) - {_C_NAMES[real]}(t))"
        squares = f"{dtype} p, {dtype} t", f"{difference} * {difference}"
        mean = _reduction(*squares, "a / _in_ind.size()", dtype, real)
        return mean(prediction, target)  # type: ignore[no-any-return]
    pair = map(cupy.ascontiguousarray, (prediction, target))
    blocks = min(_BLOCKS, -(-size // (4 * _THREADS)))
    parts = cupy.empty(blocks, real)
    _squares(dtype, real)((blocks,), (_THREADS,), (*pair, np.int64(size), parts))
    return _reduction(f"{real} part", "part", "a", dtype, real)(parts)  # type: ignore[no-any-return]


# CuPy reduces an array in one thread block. Arrays of more than _ONE_BLOCK elements are first
# reduced by _BLOCKS blocks at most, as many as a large GPU runs at a time. Sums have a fixed order.
_ONE_BLOCK, _THREADS, _BLOCKS = 1 << 14, 256, 1024
_SQUARES = """
{head}
typedef {element} T;
typedef {real} R;

extern "C" __global__ void flashlight_squares(
    const T *__restrict__ p, const T *__restrict__ t, long long size, R *parts) {{
  __shared__ R sums[{threads}];
  R sum = 0;
  const long long step = (long long)gridDim.x * {threads};
  #pragma unroll 4
  for (long long i = (long long)blockIdx.x * {threads} + threadIdx.x; i < size; i += step) {{
    const R difference = R(p[i]) - R(t[i]);
    sum += difference * difference;
  }}
  sums[threadIdx.x] = sum;
  for (int half = {threads} / 2; half > 0; half /= 2) {{
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }}
  if (threadIdx.x == 0) parts[blockIdx.x] = sums[0] / R(size);
}}
"""


@functools.cache
def _squares(dtype: str, real: str) -> Any:
    import cupy

    half = dtype == "float16"
    text = _SQUARES.format(
        head="#include <cuda_fp16.h>" if half else "",
        element="__half" if half else _C_NAMES[dtype],
        real=_C_NAMES[real],
        threads=_THREADS,
    )
    return cupy.RawKernel(text, "flashlight_squares", options=("-std=c++17",))


@functools.cache
def _reduction(inputs: str, mapped: str, end: str, dtype: str, real: str) -> Any:
    import cupy

    end = f"mean = {_C_NAMES.get(dtype, dtype)}({end})"
    return cupy.ReductionKernel(
        *(inputs, f"{dtype} mean", mapped, "a + b", end, "0", "flashlight_mean_square_error"),
        reduce_type=_C_NAMES[real],
    )


def scaled_difference(a: Array, b: Array, factor: Array, scale: float) -> Array:
    """Return a new array ``(a - b) * (factor * scale)``.

    ``a`` and ``b`` have the same shape and dtype. ``factor`` has no dimensions and is on their
    device.
    """
    return _elementwise("scaled_difference", _computed_in(a))(a, b, factor, scale)  # type: ignore[no-any-return]


def add_moments(sums: Array, mean: Array, squares: Any, weight: float, count: int) -> None:
    """Add ``count`` values of equal ``weight`` to ``sums``, the sums of an AverageValueMeter.

    ``mean`` is an array with the values' mean. ``squares`` is the sum of their squared deviations:
    a number, or a float64 array without dimensions.
    """
    _elementwise("add_moments")(mean, squares, weight, count, sums)


def _computed_in(array: Array) -> str:
    return "float64" if array.dtype.itemsize == 8 else "float32"
