"""fl.synchronize of trees with CuPy arrays."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.gpu import verbs

pytestmark = pytest.mark.gpu

KINDS = [(name, layout) for name in verbs.DTYPES for layout in ("contiguous", "strided", "fortran")]


def tree_of(value: int) -> dict[str, Any]:
    arrays = [
        verbs.on_gpu(np.full((2, 3), value, name), layout)
        for name, layout in [*KINDS, ("float32", "reversed")]
    ]
    scalar = verbs.on_gpu(np.array(value, np.float16))
    return {
        "gpu": [*arrays, scalar, verbs.on_gpu(np.zeros((0, 2)))],
        "again": arrays[0],
        "variable": fl.Variable(verbs.on_gpu(np.full(3, float(value)))),
        "cpu": (np.full(5, value), value),
    }


def on_host(tree: dict[str, Any]) -> list[Any]:
    arrays = [*tree["gpu"], tree["again"], tree["variable"].array]
    return [*(array.get().tolist() for array in arrays), tree["cpu"][0].tolist(), tree["cpu"][1]]


def synchronize(rank: int, size: int) -> None:
    for root in range(size):
        tree = tree_of(10 * rank + 1)
        before = [array.data.ptr for array in tree["gpu"]]
        assert fl.synchronize(tree, root) is tree
        assert on_host(tree) == on_host(tree_of(10 * root + 1))
        assert [array.data.ptr for array in tree["gpu"]] == before


def synchronize_with_the_cpu(rank: int, size: int) -> None:
    """Synchronize a tree that rank 0 has on its GPU, and the other ranks in NumPy."""
    array = verbs.on_gpu(np.full(3, rank)) if rank == 0 else np.full(3, rank)
    where = r"tree\[0\] \(rank\(s\) 0: GPU int64 \(3,\); rank\(s\) 1"
    with pytest.raises(fl.errors.MismatchError, match=where) if size > 1 else nullcontext():
        fl.synchronize([array])


@pytest.mark.parametrize("kind", [synchronize, synchronize_with_the_cpu])
def test_synchronize_sends_gpu_arrays_if_all_ranks_have_gpu_arrays(ranks: Any, kind: Any) -> None:
    ranks.run(kind)
