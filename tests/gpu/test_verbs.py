"""Every verb on CuPy arrays through NCCL, next to NumPy."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.gpu import verbs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce_multiple_mixes_arrays(ranks: Any, contiguous: bool, async_op: bool) -> None:
    ranks.run(verbs.all_reduce_multiple_mixed, contiguous, async_op)


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex128"])
def test_broadcast_and_all_gather_return_correct_arrays(ranks: Any, dtype: str) -> None:
    for count in (0, 1, 1000, 300_000):
        ranks.run(verbs.broadcast_from_each, dtype, count)
        ranks.run(verbs.all_gather_unequal, dtype, count)


@pytest.mark.parametrize("dtype", ["float32", "uint16", "complex64"])
def test_reduce_scatter_returns_the_part_of_the_rank(ranks: Any, dtype: str) -> None:
    for rows in (0, 1, 100, 150_000):
        ranks.run(verbs.reduce_scatter_parts, dtype, rows)
    for layout in verbs.LAYOUTS:
        ranks.run(verbs.by_meaning, dtype, layout)


def test_verbs_of_several_ranks_return_correct_arrays(ranks: Any) -> None:
    if ranks.size == 1:
        pytest.skip("a world of one has nobody to send to")
    for count in (0, 1, 1_000_000):
        ranks.run(verbs.ring_of_messages, count)
    for dtype in ("float32", "int16"):
        ranks.run(verbs.composed_verbs, dtype)
    ranks.run(verbs.refuse_bits_and_open_receives)


def test_verbs_raise_on_every_rank_if_shapes_differ(ranks: Any) -> None:
    if ranks.size == 1:
        pytest.skip("a world of one has nobody to differ from")
    for text in ranks.run(verbs.message_of_another_shape)[:2]:
        assert "rank 0 called send(cupy float64 (3,), tag=" in text
        assert "rank 1 called recv(cupy float64 (4,), tag=" in text
    for text in ranks.run(verbs.all_gather_of_different_shapes):
        assert "rank 0 called all_gather(cupy float64 (2, 3)) at " in text
        assert "rank 1 called all_gather(cupy float64 (2, 4)) at " in text


def test_group_sends_numpy_and_cupy_arrays_with_different_backends(ranks: Any) -> None:
    kinds = ["SINGLE", "SINGLE"] if ranks.size == 1 else ["SHM", "NCCL"]
    assert ranks.run(verbs.side_by_side) == [kinds] * ranks.size


def test_operation_completes_if_its_work_and_array_are_deleted(ranks: Any) -> None:
    ranks.run(verbs.dropped_work_is_safe)


@pytest.mark.parametrize("dtype", verbs.DTYPES)
def test_all_reduce_supports_every_dtype_layout_and_op(ranks: Any, dtype: str) -> None:
    for layout in verbs.LAYOUTS:
        ranks.run(verbs.all_reduce_every_op, dtype, layout)


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
