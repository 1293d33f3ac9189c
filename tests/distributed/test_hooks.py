"""Reducers and communication hooks: equal bits on every rank, results close to the sum."""

import itertools
import os
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlight_py as fl
from flashlight_py.distributed.reducers.hook import from_half, orthonormal, outer_sum, to_half
from flashlight_py.distributed.reducers.reducer import plan_buckets
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.work import Done, Then
from tests.distributed import hook_steps
from tests.distributed.conformance import on_ranks, ranks_in
from tests.distributed.hook_steps import (
    HOOKS,
    SHAPES,
    flat,
    gradients,
    make,
    reduce,
    residuals,
    sums,
)

ranks = ranks_in(*(("single", 1), ("shm", 3), ("gloo", 2)), slow=[("hierarchical", 3)])
LARGEST = 65504.0  # the largest float16
DTYPES = ("float32", "float64")


def test_hooks_give_the_same_bits_on_every_rank_in_every_step(ranks: Any) -> None:
    for case in itertools.product(HOOKS, DTYPES):
        reports = ranks.run(hook_steps.steps, *case, 4, {})
        for step in range(4):
            assert len({flat(results[step]).tobytes() for results, _, _ in reports}) == 1, case
        assert len({nbytes for _, _, nbytes in reports}) == 1, case


def variables(rank: int, size: int) -> list[str]:
    return list(os.environ)


def test_half_compression_rounds_each_value_once_and_the_sum_once_per_level(ranks: Any) -> None:
    hooks = {"Float16Compression": 11, "Bfloat16Compression": 8}
    for (name, bits), dtype in itertools.product(hooks.items(), DTYPES):
        results, _, _ = ranks.run(hook_steps.steps, name, dtype, 1, {})[0]
        magnitudes = flat([abs(a) for a in gradients(0, 0, dtype)]).astype(np.float64)
        for rank in range(1, ranks.size):
            magnitudes += flat([abs(a) for a in gradients(rank, 0, dtype)])
        exact = flat(sums(ranks.size, 0, dtype))
        # Half a unit in the last place of each value and of the sum (per host), and the error of
        # float32.
        hosts = magnitudes if "FLASHLIGHT_MEMORY_DOMAIN" in ranks.run(variables)[0] else 0
        bound = (magnitudes + hosts + abs(exact)) * (1.001 * 2.0**-bits) + 2.0**-23
        assert np.all(abs(flat(results[0]) - exact) <= bound), (name, dtype)
        assert np.any(flat(results[0]) != exact), (name, dtype)


def test_power_sgd_sent_values_plus_residuals_equal_the_gradients(ranks: Any) -> None:
    count = 12
    total = sum(flat(sums(ranks.size, step, "float64")) for step in range(count))
    reports = ranks.run(hook_steps.steps, "PowerSGDCompression", "float64", count, {})
    sent = sum(flat(result) for result in reports[0][0])
    left = sum(residuals(state) for _, state, _ in reports)
    assert np.linalg.norm(left) > 1  # the residuals matter
    np.testing.assert_allclose(sent + left, total, rtol=0, atol=1e-10)


def low_rank(rank: int, size: int, dtype: str) -> list[Any]:
    """Return a matrix and a kernel of rank 1. The rank of their sums is the world size."""
    random = np.random.default_rng(rank)
    arrays = [
        np.outer(random.standard_normal(60), random.standard_normal(40)),
        np.outer(random.standard_normal(16), random.standard_normal(75)).reshape(16, 3, 5, 5),
        random.standard_normal(9),
    ]
    results = [array.astype(dtype) for array in arrays]
    return reduce(fl.PowerSGDCompression(rank=size), results, scale=0.5)


def test_power_sgd_is_exact_for_low_rank_matrices(ranks: Any) -> None:
    alone = [low_rank(rank, 1, "float64") for rank in range(ranks.size)]
    for dtype, error in zip(DTYPES, (1e-5, 1e-13), strict=True):
        for number, got in enumerate(ranks.run(low_rank, dtype)[-1]):
            exact = np.sum([arrays[number] for arrays in alone], axis=0)
            most = error * abs(exact).max()
            np.testing.assert_allclose(got, exact, rtol=0, atol=most, err_msg=dtype)


@on_ranks(("shm", 2))
def test_power_sgd_feedback_reduces_the_error_over_several_steps(rank: int, size: int) -> None:
    """The mean of 40 results is closer to the sum than the first result."""
    hook = make("PowerSGDCompression")
    exact = flat(sums(size, 0, "float64"))
    results = [flat(reduce(hook, gradients(rank, 0, "float64"))) for _ in range(40)]
    norm = np.linalg.norm(exact)
    first = np.linalg.norm(results[0] - exact) / norm
    assert 0.3 < first < 1.0
    assert np.linalg.norm(np.mean(results, axis=0) - exact) / norm < first / 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HOOKS)
@on_ranks(("shm", 2))
def test_loaded_state_repeats_the_next_step(rank: int, size: int, name: str, dtype: str) -> None:
    """Three steps, then a step with the same hook and with a new hook that has its state."""
    hook = make(name)
    for step in range(3):
        reduce(hook, gradients(rank, step, dtype))
    state = hook.state_dict()
    saved = {key: array.copy() for key, array in state.items()}
    expected = flat(reduce(hook, gradients(rank, 3, dtype)))
    for key, array in saved.items():
        assert np.array_equal(state[key], array), "what was saved changes with the next step"
    other = make(name)
    other.load_state_dict(state)
    got = flat(reduce(other, gradients(rank, 3, dtype)))
    assert got.tobytes() == expected.tobytes()
    for key, array in hook.state_dict().items():
        assert np.array_equal(array, other.state_dict()[key])


@on_ranks(("shm", 2))
def test_power_sgd_compresses_from_its_start_step_on(rank: int, size: int) -> None:
    hook = fl.PowerSGDCompression(start_step=3)
    for step in range(5):
        got = flat(reduce(hook, gradients(rank, step, "float32"), 0.25))
        plain = flat(reduce(None, gradients(rank, step, "float32"), 0.25))
        assert (got.tobytes() == plain.tobytes()) == (step < 3)


def test_hooks_report_the_bytes_of_each_step(pool: Any) -> None:
    elements = sum(int(np.prod(shape)) for shape in SHAPES)
    reports = {n: pool(2).run(hook_steps.steps, n, "float32", 2, {})[0][2] for n in HOOKS}
    assert reports["Float16Compression"] == reports["Bfloat16Compression"] == 2 * elements
    matrices = {(60, 40), (16, 75), (30, 50)}
    thin = 2 * sum(rows + columns for rows, columns in matrices)
    rest = elements - sum(rows * columns for rows, columns in matrices)
    assert reports["PowerSGDCompression"] == 4 * (thin + rest)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", HOOKS)
@on_ranks(("shm", 2))
def test_hooks_pass_nonfinite_values_to_all(rank: int, size: int, name: str, value: float) -> None:
    """One nonfinite value on rank 0, then a good step."""
    hook = make(name)
    arrays = gradients(rank, 0, "float32")
    if rank == 0:
        arrays[0][3, 4] = value
        arrays[1][5] = value
    reduce(hook, arrays)
    assert not np.isfinite([arrays[0][3, 4], arrays[1][5]]).any()
    assert np.isfinite(flat(reduce(hook, gradients(rank, 1, "float32")))).all()
    state = [array for array in hook.state_dict().values() if array.dtype.kind == "f"]
    assert all(np.isfinite(array).all() for array in state)


@on_ranks(("shm", 2))
def test_power_sgd_reduces_zero_and_tiny_gradients(rank: int, size: int) -> None:
    """Matrices of zeros, then of ones: no direction is lost permanently. Then squares underflow."""
    hook = make("PowerSGDCompression")
    for _ in range(2):
        zeros = [np.zeros(shape) for shape in SHAPES]
        assert not flat(reduce(hook, zeros)).any()
    exact = sum(flat(sums(size, step, "float64")) for step in range(20))
    got = sum(flat(reduce(hook, gradients(rank, step, "float64"))) for step in range(20))
    assert np.linalg.norm(got - exact) < np.linalg.norm(exact)
    exact = np.outer(np.arange(60.0), np.arange(40.0)) * 1e-30
    got = reduce(fl.PowerSGDCompression(rank=1), [exact.astype(np.float32)], 1 / size)[0]
    assert abs(got - exact).max() < 1e-5 * exact.max()


def plain(bucket: Any) -> Any:
    return bucket.all_reduce(bucket.flat)


class Looking:
    """A hook that reduces exactly and records its buckets."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.ended: list[int] = []

    def __call__(self, bucket: Any) -> Any:
        shapes = [part.shape for part in bucket.parts]
        assert all(np.shares_memory(part, bucket.flat) for part in bucket.parts if part.size)
        assert bucket.flat.flags.c_contiguous
        assert bucket.flat.shape == (sum(part.size for part in bucket.parts),)
        self.seen.append((bucket.index, shapes, str(bucket.flat.dtype), bucket.scale))
        return Then(bucket.all_reduce(bucket.flat), lambda _: self.ended.append(bucket.index))


@pytest.mark.parametrize(
    "options", [{}, {"async_op": False}, {"bucket_bytes": 1}, {"bucket_bytes": 1 << 20}]
)
@on_ranks(("single", 1), ("shm", 2))
def test_reducer_accepts_a_function_as_hook(rank: int, size: int, options: dict[str, Any]) -> None:
    """A plain function works for every array layout, and gives the same bits as no hook."""
    with_hook, without = gradients(rank, 0, "float32"), gradients(rank, 0, "float32")
    for arrays in (with_hook, without):
        arrays[0] = np.asfortranarray(arrays[0])
        arrays[3] = arrays[3][:, :, ::-1]
        arrays[6] = arrays[6].astype(">f4")
    reduce(plain, with_hook, 1 / 3, **options)
    reduce(None, without, 1 / 3, **options)
    assert flat(with_hook).tobytes() == flat(without).tobytes()


@on_ranks(("shm", 2))
def test_bucket_indices_are_equal_in_every_step(rank: int, size: int) -> None:
    hook = Looking()
    reducer = fl.CoalescingReducer(0.5, bucket_bytes=1000, hook=hook)
    for step in range(2):
        arrays: list[Any] = [np.ones((10, 20), np.float32), np.ones(30, np.float32)]  # 800 + 120
        arrays += [np.ones(5), np.ones((2, 3), np.float32), np.ones(2, np.float32)]
        for array in arrays:
            reducer.add(array)
        # The bucket of another dtype has started the first one before finalize.
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
def test_bucket_indices_restart_after_an_abandoned_step(rank: int, size: int) -> None:
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
def test_reducer_raises_if_ranks_have_different_hooks(rank: int, size: int, hooks: Any) -> None:
    name, options = hooks[rank]
    with pytest.raises(fl.errors.MismatchError, match=r"(?s)rank 0 called.*rank 1 called"):
        reduce(make(name, **options), gradients(rank, 0, "float32"), bucket_bytes=1 << 20)
    assert np.all(fl.all_reduce(np.ones(2)) == size)


def test_reducer_rejects_invalid_hooks() -> None:
    for hook in (fl.Float16Compression, "float16", 16):
        with pytest.raises(TypeError, match=r"such as fl\.Float16Compression\(\)"):
            fl.CoalescingReducer(1.0, hook=hook)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        fl.CoalescingReducer(1.0, contiguous=False, hook=plain)
    reducer = fl.CoalescingReducer(1.0, hook=lambda bucket: bucket.flat)  # type: ignore[arg-type,return-value]
    reducer.add(np.ones(3))
    with pytest.raises(TypeError, match=r"rank 0 of 1: .* must return a Work.*got ndarray"):
        reducer.finalize()


@pytest.mark.parametrize("name", HOOKS)
def test_hook_rejects_unsupported_dtypes_and_states(name: str) -> None:
    reducer, hook = fl.CoalescingReducer(1.0, hook=make(name)), make(name)
    for dtype in ("int32", "float16", "complex64"):
        why = f"{name}: the dtype must be float32 or float64, got {dtype}"
        with pytest.raises(TypeError, match=why):
            reducer.add(np.ones(3, dtype))
    with pytest.raises(ValueError, match=r"nothing was loaded: .* got 'velocity\.0'"):
        hook.load_state_dict({"velocity.0": np.ones(3)})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rank": 0}, ValueError, "rank must be at least 1, got 0"),
        ({"rank": 1.0}, TypeError, "rank must be an integer, got float"),
        ({"start_step": -1}, ValueError, "start_step must be at least 0"),
        ({"seed": "x"}, TypeError, "seed must be an integer, got str"),
        ({"min_compression": 0.5}, ValueError, "finite and at least 1"),
        ({"min_compression": None}, TypeError, "must be a number"),
    ],
)
def test_power_sgd_rejects_invalid_arguments(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fl.PowerSGDCompression(**options)


def test_power_sgd_rejects_a_state_of_other_arrays() -> None:
    hook, other = make("PowerSGDCompression"), make("PowerSGDCompression")
    with pytest.raises(TypeError, match=r"'residual\.0' must be an array, got list"):
        hook.load_state_dict({"residual.0": [1.0]})
    assert hook.state_dict() == {}
    hook.load_state_dict({"residual.0": np.ones(7)})
    with pytest.raises(ValueError, match=r"residual\.0 must be .* this bucket, got float64 \(7,\)"):
        reduce(hook, [np.ones((30, 40))])
    reduce(other, [np.ones((30, 40))])
    with pytest.raises(ValueError, match="use one hook for each reducer"):
        reduce(other, [np.ones((31, 40))])


def test_bfloat16_compression_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r"pip install 'flashlight-py\[bfloat16\]'"):
        fl.Bfloat16Compression()


@on_ranks(("shm", 2))
def test_bucket_reports_whether_work_is_still_running(rank: int, size: int) -> None:
    for inline_bytes, blocking, is_left in (
        (24, False, False),
        (23, False, True),
        (0, True, False),
    ):
        array = np.ones(3)
        bucket = fl.distributed.Bucket(0, array, [array], 1.0, current_world().group, inline_bytes)
        work = bucket.all_reduce(array, blocking=blocking)
        assert isinstance(work, Done) is not bucket.in_background
        work.wait()
        assert np.all(array == size)
        assert bucket.in_background == is_left
        assert bucket.all_gather(np.array([rank])).wait().tolist() == list(range(size))


@on_ranks(("shm", 2))
def test_hooks_accept_foreign_byte_order_and_empty_buckets(rank: int, size: int) -> None:
    for name in HOOKS:
        native, swapped = gradients(0, 0, "float32")[:1], gradients(0, 0, ">f4")[:1]
        reduce(make(name), native)
        reduce(make(name), swapped)
        assert np.array_equal(native[0], swapped[0])
        assert swapped[0].dtype == ">f4"
        arrays = [np.empty((0, 3)), np.empty(0)]
        reduce(make(name), arrays)
        assert [array.shape for array in arrays] == [(0, 3), (0,)]


@pytest.mark.parametrize("name", ["Float16Compression", "PowerSGDCompression"])
def test_hooks_compute_in_the_library_of_their_arrays(strict: Any, name: str) -> None:
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


def test_to_half_matches_numpy_for_all_kinds_of_numbers() -> None:
    """Every 4001st float32: normal, subnormal, zero. Too large values become the largest number.

    Also ties, which round to even: half of the last place, for subnormals and two magnitudes.
    """
    numbers = np.arange(0, 1 << 32, 4001, dtype=np.uint32).view(np.float32)
    steps = np.arange(0.0, 40.0)
    ties = [2.0**-25 * steps, 2.0**-14 * (2048 + steps), 2048 + steps]
    numbers = np.concatenate([numbers, *(tie.astype(np.float32) for tie in ties)])
    with np.errstate(all="ignore"):
        expected = numbers.astype(np.float16)
    expected[np.isfinite(numbers) & (numbers > LARGEST)] = LARGEST
    expected[np.isfinite(numbers) & (numbers < -LARGEST)] = -LARGEST
    got, nan = to_half(numbers), np.isnan(numbers)
    assert np.array_equal(got[~nan].view(np.uint16), expected[~nan].view(np.uint16))
    assert np.isnan(got[nan]).all()
    of_float64 = to_half(np.array([1e300, -1e39, np.inf, -np.inf, 1e-300, -0.0]))
    assert of_float64.tolist() == [LARGEST, -LARGEST, np.inf, -np.inf, 0.0, 0.0]
    assert np.signbit(of_float64[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_half_converts_every_value(dtype: str) -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    out = np.empty(half.shape, dtype)
    from_half(half, out)
    assert np.array_equal(out, half.astype(dtype), equal_nan=True)


def matrix(kind: str, dtype: str) -> Any:
    columns = np.random.default_rng(0).standard_normal((50, 4))
    if kind == "dependent":
        columns[:, 2] = 3 * columns[:, 0] - columns[:, 1]
    if kind == "zero":
        columns[...] = 0
    if kind == "nearly dependent":
        columns[:, 1:] = columns[:, :1] + 1e-5 * columns[:, 1:]
    if kind == "tiny":
        columns *= 1e-30
    return columns.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["any", "dependent", "zero", "nearly dependent", "tiny"])
def test_orthonormalize_keeps_the_span_of_the_columns(kind: str, dtype: str) -> None:
    columns = matrix(kind, dtype)
    before, got = columns.copy(), orthonormal(columns)
    epsilon = np.finfo(dtype).eps
    assert got.dtype == dtype
    assert np.array_equal(columns, before)
    np.testing.assert_allclose(got.T @ got, np.eye(4), atol=20 * epsilon)
    error = 50 * epsilon * abs(columns).max()
    np.testing.assert_allclose(got @ (got.T @ columns), columns, rtol=0, atol=error)
    assert np.array_equal(orthonormal(columns), got)  # also the missing directions


def test_orthonormalize_keeps_nonfinite_values_visible() -> None:
    columns = matrix("any", "float32")
    columns[3, 1] = np.inf
    assert np.isnan(orthonormal(columns)).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 70_000), (300, 200)])
def test_outer_sum_equals_the_matrix_product(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((extent, 3)) for extent in shape)
    out = np.empty(shape)
    outer_sum(left, right, out)
    np.testing.assert_allclose(out, left @ right.T, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [
        None,  # an InlineReducer
        *({}, {"async_op": False}, {"contiguous": False}),
        *({"bucket_bytes": 1}, {"bucket_bytes": 20_000}),
        {"bucket_bytes": 20_000, "async_op": False, "contiguous": False},
    ],
)
@on_ranks(("single", 1), ("shm", 2), ("shm", 3))
def test_reducers_return_scaled_sums(rank: int, size: int, options: dict[str, Any] | None) -> None:
    reducer: Any = fl.InlineReducer(1 / size)
    if options is not None:
        reducer = fl.CoalescingReducer(1 / size, **options)
    for _ in range(3):  # a reducer is reused after finalize
        shapes = [(10,), (200, 30), (), (0,), (5000,), (3, 4)] * 3
        dtypes = [np.float32, np.float64] * 9
        arrays = [
            np.full(s, float(rank + i), d)
            for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        arrays[1] = np.asfortranarray(arrays[1])
        for array in arrays:
            reducer.add(array)
        reducer.finalize()
        for i, array in enumerate(arrays):
            np.testing.assert_allclose(array, i + (size - 1) / 2)


@on_ranks(("shm", 2))
def test_abandoned_and_rejected_arrays_are_not_sent(rank: int, size: int) -> None:
    for reducer in (fl.InlineReducer(1.0), fl.CoalescingReducer(1.0)):
        with pytest.raises(TypeError, match="list"):
            reducer.add([1.0])
    x = np.ones(3)
    reducer.add(x)
    reducer.abandon()
    reducer.finalize()
    assert np.all(x == 1)


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_plan_buckets_is_complete_and_minimal(sizes: list[int], limit: int) -> None:
    plan = plan_buckets(sizes, limit)
    assert [index for bucket in plan for index in bucket] == list(range(len(sizes)))
    for bucket in plan:
        assert bucket
        assert sum(sizes[i] for i in bucket) <= limit or len(bucket) == 1
    for bucket, after in itertools.pairwise(plan):  # closed because the next array does not fit
        assert sum(sizes[i] for i in bucket) + sizes[after[0]] > limit
    with pytest.raises(ValueError, match="must"):
        plan_buckets([1], 0)
