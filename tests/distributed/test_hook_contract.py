"""What a hook is given, when it is called, and what is refused."""

import sys
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.work import Done, Then
from tests.distributed.conformance import on_ranks
from tests.distributed.hook_steps import HOOKS, flat, gradients, make, reduce


def plain(bucket: Any) -> Any:
    return bucket.all_reduce(bucket.flat)


class Looking:
    """A hook that reduces exactly and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.ended: list[int] = []

    def __call__(self, bucket: Any) -> Any:
        shapes = [part.shape for part in bucket.parts]
        assert all(np.shares_memory(part, bucket.flat) for part in bucket.parts if part.size)
        assert bucket.flat.flags.c_contiguous
        assert bucket.flat.shape == (sum(part.size for part in bucket.parts),)
        self.seen.append((bucket.index, shapes, str(bucket.flat.dtype), bucket.scale))
        work = bucket.all_reduce(bucket.flat)
        return Then(work, lambda _: self.ended.append(bucket.index))


@pytest.mark.parametrize(
    "options", [{}, {"async_op": False}, {"bucket_bytes": 1}, {"bucket_bytes": 1 << 20}]
)
@on_ranks(("single", 1), ("shm", 2))
def test_a_function_is_a_hook(rank: int, size: int, options: dict[str, Any]) -> None:
    """A plain function is a hook, in any layout of the arrays; it gives the bits of no hook."""
    with_hook, without = gradients(rank, 0, "float32"), gradients(rank, 0, "float32")
    for arrays in (with_hook, without):
        arrays[0] = np.asfortranarray(arrays[0])
        arrays[3] = arrays[3][:, :, ::-1]
        arrays[6] = arrays[6].astype(">f4")
    reduce(plain, with_hook, 1 / 3, **options)
    reduce(None, without, 1 / 3, **options)
    assert flat(with_hook).tobytes() == flat(without).tobytes()


@on_ranks(("shm", 2))
def test_buckets_are_numbered_alike_in_every_step(rank: int, size: int) -> None:
    hook = Looking()
    reducer = fl.CoalescingReducer(0.5, bucket_bytes=1000, hook=hook)
    for step in range(2):
        arrays: list[Any] = [np.ones((10, 20), np.float32), np.ones(30, np.float32)]  # 800 + 120
        arrays += [np.ones(5), np.ones((2, 3), np.float32), np.ones(2, np.float32)]
        for array in arrays:
            reducer.add(array)
        # The bucket of another dtype has pushed the first one out before finalize.
        assert len(hook.seen) == 3 * step + 2
        reducer.finalize()
        assert len(hook.ended) == 3 * step + 3
        assert all(np.all(array == size / 2) for array in arrays)
    assert hook.ended == [0, 1, 2] * 2
    assert hook.seen == 2 * [
        (0, [(10, 20), (30,)], "float32", 0.5),
        (1, [(5,)], "float64", 0.5),
        (2, [(2, 3), (2,)], "float32", 0.5),
    ]


@on_ranks(("shm", 2))
def test_numbers_begin_anew_after_a_step_that_was_abandoned(rank: int, size: int) -> None:
    hook = Looking()
    reducer = fl.CoalescingReducer(1.0, bucket_bytes=8, hook=hook)
    reducer.add(np.ones(4))
    reducer.abandon()
    reducer.add(np.ones(4))
    reducer.finalize()
    assert [index for index, *_ in hook.seen] == [0, 0]


@pytest.mark.parametrize(
    "hooks",
    [
        [("Float16Compression", {}), ("Bfloat16Compression", {})],
        [("PowerSGDCompression", {"rank": 1}), ("PowerSGDCompression", {"rank": 2})],
        [("PowerSGDCompression", {}), ("PowerSGDCompression", {"start_step": 1})],
    ],
    ids=["cast", "rank", "start"],
)
@on_ranks(("shm", 2), ("gloo", 2))
def test_ranks_with_different_hooks_raise(rank: int, size: int, hooks: Any) -> None:
    name, options = hooks[rank]
    with pytest.raises(fl.errors.MismatchError, match=r"(?s)rank 0 called.*rank 1 called"):
        reduce(make(name, **options), gradients(rank, 0, "float32"), bucket_bytes=1 << 20)
    assert np.all(fl.all_reduce(np.ones(2)) == size)


@pytest.mark.parametrize("hook", [fl.Float16Compression, "float16", 16])
def test_what_is_no_hook_is_refused(hook: Any) -> None:
    with pytest.raises(TypeError, match=r"such as fl\.Float16Compression\(\)"):
        fl.CoalescingReducer(1.0, hook=hook)


def test_a_hook_needs_contiguous_buckets() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        fl.CoalescingReducer(1.0, contiguous=False, hook=plain)


def test_a_hook_must_return_a_work() -> None:
    reducer = fl.CoalescingReducer(1.0, hook=lambda bucket: bucket.flat)  # type: ignore[arg-type,return-value]
    reducer.add(np.ones(3))
    with pytest.raises(TypeError, match=r"rank 0 of 1: .* must return a Work.*got ndarray"):
        reducer.finalize()


@pytest.mark.parametrize("dtype", ["int32", "float16", "complex64"])
@pytest.mark.parametrize("name", HOOKS)
def test_other_dtypes_are_refused_when_they_are_added(name: str, dtype: str) -> None:
    reducer = fl.CoalescingReducer(1.0, hook=make(name))
    with pytest.raises(TypeError, match=f"{name} compresses float32 and float64, got {dtype}"):
        reducer.add(np.ones(3, dtype))


@pytest.mark.parametrize(
    ("name", "options", "error", "text"),
    [
        ("PowerSGDCompression", {"rank": 0}, ValueError, "rank must be at least 1, got 0"),
        ("PowerSGDCompression", {"rank": 1.0}, TypeError, "rank must be an integer, got float"),
        ("PowerSGDCompression", {"start_step": -1}, ValueError, "start_step must be at least 0"),
        ("PowerSGDCompression", {"seed": "x"}, TypeError, "seed must be an integer, got str"),
        ("PowerSGDCompression", {"min_compression": 0.5}, ValueError, "finite and at least 1"),
        ("PowerSGDCompression", {"min_compression": None}, TypeError, "must be a number"),
    ],
)
def test_arguments_that_make_no_sense(
    name: str, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make(name, **options)


@pytest.mark.parametrize("name", HOOKS)
def test_a_state_of_another_kind_is_not_loaded(name: str) -> None:
    hook = make(name)
    with pytest.raises(ValueError, match=r"nothing was loaded: .* got 'velocity\.0'"):
        hook.load_state_dict({"velocity.0": np.ones(3)})
    if hook.state_dict() != {} or name != "PowerSGDCompression":
        return
    with pytest.raises(TypeError, match=r"'residual\.0' is no array but list"):
        hook.load_state_dict({"residual.0": [1.0]})
    assert hook.state_dict() == {}


def test_a_state_of_other_arrays_is_refused_by_the_next_step() -> None:
    hook = make("PowerSGDCompression")
    hook.load_state_dict({"residual.0": np.ones(7)})
    with pytest.raises(ValueError, match=r"residual\.0 is float64 \(7,\) and the bucket needs"):
        reduce(hook, [np.ones((30, 40))])


def test_one_hook_for_two_reducers_is_refused_where_their_arrays_differ() -> None:
    hook = make("PowerSGDCompression")
    reduce(hook, [np.ones((30, 40))])
    with pytest.raises(ValueError, match="serves two reducers"):
        reduce(hook, [np.ones((31, 40))])


def test_bfloat16_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r"pip install 'flashlight-py\[bfloat16\]'"):
        fl.Bfloat16Compression()


@on_ranks(("shm", 2))
def test_a_bucket_knows_whether_something_was_left_to_run(rank: int, size: int) -> None:
    for inline_bytes, blocking, is_left in (
        (24, False, False),
        (23, False, True),
        (0, True, False),
    ):
        array = np.ones(3)
        group = current_world().group
        bucket = fl.distributed.Bucket(0, array, [array], 1.0, group, inline_bytes)
        work = bucket.all_reduce(array, blocking=blocking)
        assert isinstance(work, Done) is not bucket.in_background
        work.wait()
        assert np.all(array == size)
        assert bucket.in_background == is_left
        assert bucket.all_gather(np.array([rank])).wait().tolist() == list(range(size))


@pytest.mark.parametrize("name", HOOKS)
def test_bytes_in_another_order_are_brought_in_order(name: str) -> None:
    native, swapped = gradients(0, 0, "float32")[:1], gradients(0, 0, "float32")[:1]
    swapped[0] = swapped[0].astype(">f4")
    reduce(make(name), native)
    reduce(make(name), swapped)
    assert np.array_equal(native[0], swapped[0])
    assert swapped[0].dtype == ">f4"


@on_ranks(("shm", 2))
def test_nothing_at_all_is_a_bucket_too(rank: int, size: int) -> None:
    for name in HOOKS:
        arrays = [np.empty((0, 3)), np.empty(0)]
        reduce(make(name), arrays)
        assert [array.shape for array in arrays] == [(0, 3), (0,)]


@pytest.mark.parametrize("name", ["Float16Compression", "PowerSGDCompression"])
def test_hooks_stay_in_the_library_of_their_arrays(strict: Any, name: str) -> None:
    hooks = [make(name), make(name)]
    for step in range(4):
        arrays = gradients(0, step, "float64")
        arrays[1][3] = [1.0, 1e7, np.nan, 2.0][step]
        others = [strict.asarray(array.copy()) for array in arrays]
        reduce(hooks[0], arrays)
        reduce(hooks[1], others)
        got = flat([other.get() for other in others])
        np.testing.assert_allclose(got, flat(arrays), rtol=1e-12, atol=1e-12)
        hooks[1].load_state_dict(hooks[1].state_dict())
