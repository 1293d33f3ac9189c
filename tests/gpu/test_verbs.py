"""Every verb on CuPy arrays through NCCL, next to NumPy."""

from typing import Any

import pytest

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
