"""Communication hooks: the same bits on every rank, close to the sum, nothing lost on the way."""

import itertools
import os
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
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

ranks = ranks_in(
    *(("single", 1), ("shm", 2), ("shm", 3), ("gloo", 2), ("gloo", 3), ("hierarchical", 3))
)
DTYPES = ("float32", "float64")


def test_every_rank_has_the_same_bits_in_every_step(ranks: Any) -> None:
    for case in itertools.product(HOOKS, DTYPES):
        reports = ranks.run(hook_steps.steps, *case, 4, {})
        for step in range(4):
            assert len({flat(results[step]).tobytes() for results, _, _ in reports}) == 1, case
        assert len({nbytes for _, _, nbytes in reports}) == 1, case


def variables(rank: int, size: int) -> list[str]:
    return list(os.environ)


def test_casting_rounds_each_value_once_and_the_sum_once_per_level(ranks: Any) -> None:
    hooks = {"Float16Compression": 11, "Bfloat16Compression": 8}
    for (name, bits), dtype in itertools.product(hooks.items(), DTYPES):
        results, _, _ = ranks.run(hook_steps.steps, name, dtype, 1, {})[0]
        magnitudes = flat([abs(a) for a in gradients(0, 0, dtype)]).astype(np.float64)
        for rank in range(1, ranks.size):
            magnitudes += flat([abs(a) for a in gradients(rank, 0, dtype)])
        exact = flat(sums(ranks.size, 0, dtype))
        # Half of the last place of each value and of the sum, also that of a host; and what float32
        # adds to that.
        hosts = magnitudes if "FLASHLIGHT_MEMORY_DOMAIN" in ranks.run(variables)[0] else 0
        bound = (magnitudes + hosts + abs(exact)) * (1.001 * 2.0**-bits) + 2.0**-23
        assert np.all(abs(flat(results[0]) - exact) <= bound), (name, dtype)
        assert np.any(flat(results[0]) != exact), (name, dtype)


def test_what_was_sent_and_what_is_left_is_the_sum_of_the_gradients(ranks: Any) -> None:
    count = 12
    total = sum(flat(sums(ranks.size, step, "float64")) for step in range(count))
    reports = ranks.run(hook_steps.steps, "PowerSGDCompression", "float64", count, {})
    sent = sum(flat(result) for result in reports[0][0])
    left = sum(residuals(state) for _, state, _ in reports)
    assert np.linalg.norm(left) > 1  # there is something to lose
    np.testing.assert_allclose(sent + left, total, rtol=0, atol=1e-10)


def low_rank(rank: int, size: int, dtype: str) -> list[Any]:
    """A matrix and a kernel of rank 1 on each rank, so that the sums' rank is the world's size."""
    random = np.random.default_rng(rank)
    arrays = [
        np.outer(random.standard_normal(60), random.standard_normal(40)),
        np.outer(random.standard_normal(16), random.standard_normal(75)).reshape(16, 3, 5, 5),
        random.standard_normal(9),
    ]
    results = [array.astype(dtype) for array in arrays]
    return reduce(fl.PowerSGDCompression(rank=size), results, scale=0.5)


def test_power_sgd_is_exact_for_matrices_of_low_rank(ranks: Any) -> None:
    alone = [low_rank(rank, 1, "float64") for rank in range(ranks.size)]
    for dtype, error in zip(DTYPES, (1e-5, 1e-13), strict=True):
        for number, got in enumerate(ranks.run(low_rank, dtype)[-1]):
            exact = np.sum([arrays[number] for arrays in alone], axis=0)
            most = error * abs(exact).max()
            np.testing.assert_allclose(got, exact, rtol=0, atol=most, err_msg=dtype)


@on_ranks(("shm", 2))
def test_feedback_makes_up_for_what_single_steps_lack(rank: int, size: int) -> None:
    """The mean of 40 results is closer to the sum than the first one."""
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
def test_a_loaded_state_has_the_same_next_step(rank: int, size: int, name: str, dtype: str) -> None:
    """Three steps, then one more with the same hook and with a new one that has its state."""
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
def test_power_sgd_begins_with_its_start_step(rank: int, size: int) -> None:
    hook = fl.PowerSGDCompression(start_step=3)
    for step in range(5):
        got = flat(reduce(hook, gradients(rank, step, "float32"), 0.25))
        plain = flat(reduce(None, gradients(rank, step, "float32"), 0.25))
        assert (got.tobytes() == plain.tobytes()) == (step < 3)


def test_bytes_per_step(pool: Any) -> None:
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
def test_what_is_not_finite_is_seen_everywhere_and_forgotten(
    rank: int, size: int, name: str, value: float
) -> None:
    """One bad value on rank 0, then a good step."""
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
def test_gradients_of_zeros_stop_nothing(rank: int, size: int) -> None:
    """Matrices of zeros, then ones: no direction is lost for ever."""
    hook = make("PowerSGDCompression")
    for _ in range(2):
        zeros = [np.zeros(shape) for shape in SHAPES]
        assert not flat(reduce(hook, zeros)).any()
    exact = sum(flat(sums(size, step, "float64")) for step in range(30))
    got = sum(flat(reduce(hook, gradients(rank, step, "float64"))) for step in range(30))
    assert np.linalg.norm(got - exact) < np.linalg.norm(exact)


@on_ranks(("shm", 2))
def test_power_sgd_of_tiny_gradients(rank: int, size: int) -> None:
    """Gradients whose squares are nothing in float32."""
    exact = np.outer(np.arange(60.0), np.arange(40.0)) * 1e-30
    got = reduce(fl.PowerSGDCompression(rank=1), [exact.astype(np.float32)], 1 / size)[0]
    assert abs(got - exact).max() < 1e-5 * exact.max()
