"""Steps of communication hooks that tests run on every rank, always with the same arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashlight_py as fl

Array = NDArray[Any]

# Shapes: matrices, a convolution kernel, biases, an empty array, a scalar. Several buckets.
SHAPES = [(60, 40), (60,), (0, 5), (16, 3, 5, 5), (), (7,), (30, 50), (3, 4)]
BYTES = 6_000
HOOKS: dict[str, dict[str, Any]] = {
    "Float16Compression": {},
    "Bfloat16Compression": {},
    "PowerSGDCompression": {"rank": 2},
}


def make(name: str, **options: Any) -> Any:
    return getattr(fl, name)(**{**HOOKS[name], **options})


def gradients(rank: int, step: int, dtype: str) -> list[Array]:
    random = np.random.default_rng([rank, step])
    return [random.standard_normal(shape).astype(dtype) for shape in SHAPES]


def sums(size: int, step: int, dtype: str) -> list[Array]:
    ranks = [gradients(rank, step, dtype) for rank in range(size)]
    return [
        np.sum([a.astype(np.float64) for a in same], axis=0) for same in zip(*ranks, strict=True)
    ]


def reduce(hook: Any, arrays: list[Array], scale: float = 1.0, **options: Any) -> list[Array]:
    """Run one step and return the same arrays."""
    reducer = fl.CoalescingReducer(scale, hook=hook, **{"bucket_bytes": BYTES, **options})
    for array in arrays:
        reducer.add(array)
    reducer.finalize()
    return arrays


def steps(
    rank: int, size: int, name: str, dtype: str, count: int, options: dict[str, Any]
) -> tuple[list[list[Array]], dict[str, Array], int]:
    hook = make(name, **options)
    results = [reduce(hook, gradients(rank, step, dtype), 1.0) for step in range(count)]
    return results, hook.state_dict(), hook.bytes_per_step


def bucket_sizes() -> list[int]:
    """Return the number of elements of each bucket of a step."""
    sizes = []

    def record_size(bucket: Any) -> Any:
        sizes.append(bucket.flat.size)
        return bucket.all_reduce(bucket.flat)

    reduce(record_size, gradients(0, 0, "float64"))
    return sizes


def residuals(state: dict[str, Array]) -> Array:
    sizes = enumerate(bucket_sizes())
    return np.concatenate([state.get(f"residual.{index}", np.zeros(size)) for index, size in sizes])


def flat(arrays: list[Array]) -> Array:
    return np.concatenate([array.ravel() for array in arrays])
