"""Training leaf by leaf: equal bits on any number of ranks, and errors."""

import contextlib
import functools
import gc
import hashlib
import itertools
import re
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import blas
from flashlight_py import random as numbers
from flashlight_py.dataset.dataset import contiguous_share
from flashlight_py.parallel import agreement, fully_sharded
from flashlight_py.parallel.leaf_sync import additions, fold, push, reduction, rows_needed, stack_of
from tests.distributed.conformance import BACKENDS, on_ranks, ranks_in
from tests.launch.launcher import launch, write
from tests.tables import for_each

F = fl.autograd.functions
ranks = ranks_in(
    ("shm", 2), ("gloo", 3), slow=[("hierarchical", 4), ("hierarchical", 3), ("mpi", 3)]
)
BATCHES = (37, 40, 5, 1)  # rows of global batches, also fewer than leaves
STEPS = 5
pytestmark = pytest.mark.usefixtures("own_numbers")


class Net(fl.nn.Module):
    """A scalar, two layers, dropout, statistics between them, and an unused layer."""

    def __init__(self, dtype: str = "float32") -> None:
        self.shift = fl.param(np.array(0.5, dtype))
        self.first = fl.nn.Linear(12, 32, dtype=dtype)
        self.dropout = fl.nn.Dropout(0.2)
        self.last = fl.nn.Linear(32, 3, dtype=dtype)
        self.unused = fl.nn.Linear(2, 2, dtype=dtype)
        self.add_buffer("mean", np.zeros(32, dtype))
        self.add_buffer("count", np.zeros((), np.int64))
        self.add_buffer("mask", np.full(3, -np.inf, dtype))

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        if self.training:
            self.mean *= 0.9
            self.mean += 0.1 * hidden.array.mean(axis=0)
            self.count += 1
        return self.last(self.dropout(F.tanh(hidden))) + self.shift


def batch(step: int, dtype: str = "float32") -> tuple[Any, Any]:
    x = np.random.default_rng(step).standard_normal((BATCHES[step % 4], 12)).astype(dtype)
    return x, x[:, :3] ** 2


def backward(model: Any, x: Any, y: Any) -> None:
    fl.nn.MeanSquaredError()(model(fl.input(x)), fl.no_grad(y)).backward()


def optimizer_of(model: Any, kind: str) -> Any:
    if kind == "adam":
        return fl.optim.AdamOptimizer(model.params(), 1e-2)
    return fl.optim.SGDOptimizer(model.params(), 1e-2, momentum=0.9)


def digest(model: Any) -> str:
    result = hashlib.sha256()
    for array in model.state_dict().values():
        result.update(array.tobytes())
    return result.hexdigest()


def train(
    rank: int,
    size: int,
    kind: str,
    steps: int = STEPS,
    leaves: int = 8,
    folder: str = "",
    sharded: bool = False,
) -> tuple[str, int]:
    """Train; with ``folder``, continue from its checkpoint and save at the end."""
    fl.set_seed(rank)  # only rank 0's seed is used
    model = Net()
    fl.broadcast_parameters(model)
    if sharded:
        fully_sharded.SMALL_BYTES = 0
        fl.fully_shard(model)
    fl.distribute_module_grads(model, leaves=leaves)
    optimizer = optimizer_of(model, kind)
    begin = 0
    if folder:
        result = fl.load(folder, module=model, optimizer=optimizer, rng=True)
        begin = result.step if result else 0
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        for x, y in fl.leaves(model, *batch(step)):
            backward(model, x, y)
            numbers.generator().random()  # still from the leaf's generator
        fl.optim.clip_grad_norm(model.params(), 0.1)
        optimizer.step()
    if folder:
        fl.save(folder, module=model, optimizer=optimizer, rng=True, step=begin + steps)
    assert model.unused.weight.grad is None
    assert model.count == begin + steps
    fl.barrier()  # no rank changes shared memory earlier
    return digest(model), int(numbers.generator().integers(1 << 30))


@pytest.mark.parametrize(
    ("kind", "leaves", "sharded"), [("adam", 8, False), ("sgd", 5, False), ("adam", 8, True)]
)
def test_leaves_give_equal_bits_for_any_number_of_ranks(
    ranks: Any, kind: str, leaves: int, sharded: bool
) -> None:
    expected = train(0, 1, kind, leaves=leaves)
    assert set(ranks.run(train, kind, STEPS, leaves, "", sharded)) == {expected}


@functools.cache
def after_a_thousand_steps(kind: str) -> tuple[str, int]:
    return train(0, 1, kind, 1000)


WORLDS = [
    *(("shm", 2, "sgd"), ("shm", 5, "adam"), ("shm", 8, "sgd")),
    *(("gloo", 3, "adam"), ("gloo", 4, "sgd"), ("gloo", 6, "adam"), ("hierarchical", 4, "sgd")),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "size", "kind"), WORLDS)
def test_leaves_give_equal_bits_after_a_thousand_steps(
    pool: Any, backend: str, size: int, kind: str
) -> None:
    ranks = pool(size, **BACKENDS[backend][1])
    result = ranks.run(train, kind, 1000, deadline=500.0)
    assert set(result) == {after_a_thousand_steps(kind)}


def gradients(leaves: int, step: int) -> list[Any]:
    fl.set_seed(1)
    model = Net("float64")
    model.dropout.ratio = 0.0
    if leaves:
        fl.distribute_module_grads(model, leaves=leaves)
        for x, y in fl.leaves(model, *batch(step, "float64")):
            backward(model, x, y)
    else:
        backward(model, *batch(step, "float64"))
    return [None if p.grad is None else p.grad.copy() for p in model.params()]


@on_ranks()
@for_each("step", [0, 2])
def test_leaves_give_gradients_of_the_mean_over_the_batch(rank: int, size: int, step: int) -> None:
    result = gradients(8, step)
    assert [g is None for g in result] == [False] * 5 + [True] * 2
    for got, gradient in zip(result[:5], gradients(0, step)[:5], strict=True):
        np.testing.assert_allclose(got, gradient, rtol=0, atol=1e-12)


def test_resume_with_other_numbers_of_ranks_gives_equal_bits(pool: Any, tmp_path: Path) -> None:
    expected = train(0, 1, "adam", 6)
    run = str(tmp_path / "run")
    train(0, 1, "adam", 1, 8, run)  # on one rank, then on three,
    pool(3, params={"BACKEND": "gloo"}).run(train, "adam", 2, 8, run)
    pair = pool(2, params={"BACKEND": "shm"})  # then on two ranks that share the model
    assert set(pair.run(train, "adam", 3, 8, run, True)) == {expected}


@on_ranks()
def test_leaves_replace_the_gradient_pass_of_a_sharded_module(rank: int, size: int) -> None:
    fully_sharded.SMALL_BYTES = 0
    model = fl.nn.Linear(3, 2)
    fl.fully_shard(model)
    fl.distribute_module_grads(model, leaves=4)
    with pytest.raises(RuntimeError, match=r"expected backward\(\) inside of a loop over"):
        model(fl.input(np.ones((2, 3), np.float32))).mean().backward()
    fl.fully_shard(model)  # back to sums over complete passes
    model(fl.input(np.ones((2, 3), np.float32))).mean().backward()
    assert model.params()[0].grad is not None


def small(leaves: int | None = 4, **options: Any) -> Any:
    fl.set_seed(0)
    model = fl.nn.Linear(12, 3)
    fl.distribute_module_grads(model, leaves=leaves, **options)
    return model


def one_step(model: Any, x: Any, y: Any) -> None:
    for part in fl.leaves(model, x, y):
        backward(model, *part)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reducer": fl.InlineReducer(1.0)}, ValueError, "leaves without reducer, got both"),
        ({"hook": fl.Float16Compression()}, ValueError, "leaves without hook, got both"),
        ({"scale": 1.0}, ValueError, "leaves without scale, got both"),
        ({"bucket_bytes": 1}, ValueError, "leaves without bucket_bytes, got both"),
        ({"check_finite": True}, ValueError, "leaves without check_finite, got both"),
        ({"leaves": 0}, ValueError, "leaves must be at least 1"),
        ({"leaves": 2.5}, TypeError, "leaves must be"),
    ],
)
def test_leaves_raise_for_incompatible_options(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        small(**options)


def test_other_reductions_raise_for_a_module_with_leaves() -> None:
    model = small()
    with pytest.raises(ValueError, match=r"no_sync: .* leaves=4.* larger global batch"):
        fl.no_sync(model).__enter__()
    with pytest.raises(ValueError, match=r"join: .* leaves=4"):
        fl.join(model).__enter__()
    with pytest.raises(ValueError, match="Use only one of both"):
        fl.DistributedOptimizer(optimizer_of(model, "sgd")).step()
    fl.distribute_module_grads(model)
    with pytest.raises(ValueError, match=r"leaves: call distribute_module_grads\(module, leaves=8"):
        fl.leaves(model, np.ones((4, 12)))


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ((), TypeError, "got no array"),
        ((np.ones(4), np.ones(5)), ValueError, "same number of rows.* got 4, 5"),
        ((np.ones((0, 12)),), ValueError, "at least 1, got 0"),
        ((np.ones(()),), TypeError, r"ndarray of shape \(\)"),
        (([1, 2],), TypeError, "got list as array"),
    ],
)
def test_leaves_raise_for_arrays_that_are_not_a_batch(arrays: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        fl.leaves(small(), *arrays)


def test_leaf_requires_exactly_one_backward_pass() -> None:
    model, (x, y) = small(), batch(0)
    with pytest.raises(RuntimeError, match="got none for leaf 0 of 4"):
        list(fl.leaves(model, x))
    with pytest.raises(RuntimeError, match=r"expected backward\(\) inside of a loop over"):
        backward(model, x, y)
    loop = fl.leaves(model, x, y)
    backward(model, *next(loop))
    with pytest.raises(RuntimeError, match="got a second one for leaf 0 of 4"):
        backward(model, x, y)
    with pytest.raises(RuntimeError, match="got a second one"):  # also if the error was caught
        next(loop)
    first, second = fl.leaves(model, x), fl.leaves(model, x)
    next(first)
    with pytest.raises(RuntimeError, match="expected no open loop over leaves"):
        next(second)


def test_loop_that_is_left_early_restores_state_without_gradients() -> None:
    fl.set_seed(0)
    model = Net()
    fl.distribute_module_grads(model, leaves=4)
    x, y = batch(0)
    for part in fl.leaves(model, x, y):
        backward(model, *part)
        break
    assert all(param.grad is None for param in model.params())
    assert model.count == 0
    assert not model.mean.any()
    with contextlib.suppress(ZeroDivisionError):
        for _ in fl.leaves(model, x, y):
            _ = 1 / 0
    drawn = numbers.generator().random()  # from the package's own generator again
    one_step(model, x, y)
    assert model.count == 1
    assert drawn != numbers.generator().random()


def test_failed_pass_of_a_leaf_can_be_repeated() -> None:
    model, (x, y) = small(), batch(0)
    expected = None
    for fails in (False, True):
        for a, b in fl.leaves(model, x, y):
            if fails:
                loss = fl.nn.MeanSquaredError()(model(fl.input(a)), fl.no_grad(b))
                with pytest.raises(ValueError, match="shape"):
                    loss.backward(np.ones(7, np.float32))
            backward(model, a, b)
        expected = model.weight.grad.copy() if expected is None else expected
    assert expected is not None
    assert expected.tobytes() == model.weight.grad.tobytes()


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ("order", r"array 0 \(rank\(s\) 0: .*first and last row.*; rank\(s\) 1"),
        ("seed", r"random numbers \(rank"),
        ("rows", r"rows \(rank\(s\) 0: 37; rank\(s\) 1: 36"),
        ("step", r"step \(rank\(s\) 0: 0; rank\(s\) 1: 1"),
        ("arguments", "expected arrays with the same number of rows"),
    ],
)
@on_ranks(("shm", 2))
def test_leaves_raise_mismatch_error_if_batches_differ(
    rank: int, size: int, difference: str, words: str
) -> None:
    model, (x, y) = small(), batch(0)
    if difference == "order" and rank == 1:
        x, y = x[::-1], y[::-1]
    if difference == "seed" and rank == 1:
        fl.set_seed(17)
    if difference == "rows" and rank == 1:
        x, y = x[:-1], y[:-1]
    if difference == "arguments" and rank == 1:
        y = y[:-1]
    if difference == "step" and rank == 1:
        for _ in fl.leaves(model, x, y):
            break
    is_own = difference == "arguments" and rank == 1
    with pytest.raises(ValueError if is_own else fl.errors.MismatchError, match=words):
        one_step(model, x, y)


OTHER_CORE = """
import flashlight_py as fl
fl.distributed_init()
fl.distribute_module_grads(fl.nn.Linear(2, 2), leaves=8)
"""


@pytest.mark.slow
def test_check_arithmetic_detects_another_openblas_core_type(tmp_path: Path) -> None:
    if not blas.use_one_thread()[0]:
        pytest.skip("NumPy's BLAS is no OpenBLAS")
    python = f"exec {sys.executable} {write(tmp_path, OTHER_CORE)}"
    shell = f"[ $RANK = 0 ] || export OPENBLAS_CORETYPE=Nehalem; {python}"
    done = launch("-n", 2, "--no-python", "sh", "-c", shell, code=1)
    words = r"same BLAS core type .*rank\(s\) 0: .*; rank\(s\) 1: Nehalem on"
    assert re.search(words, done.stderr), done.stderr


def test_rows_are_freed_with_their_module() -> None:
    model = Net()
    fl.distribute_module_grads(model, leaves=4)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("core", "same BLAS core type.*Old on .*OPENBLAS_CORETYPE=Haswell"),
        ("features", "CPU features.*Old on .*NPY_DISABLE_CPU_FEATURES"),
        ("threads", "one thread.*several threads on rank 1 on .*OMP_NUM_THREADS=1"),
        ("leaves", r"same leaves.*rank\(s\) 1: 5 on "),
    ],
)
@on_ranks(("shm", 2))
def test_leaves_raise_if_arithmetic_differs_between_ranks(
    rank: int, size: int, name: str, words: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and name in ("threads", "core"):
            result = (2, "") if name == "threads" else (1, "Old")
            patch.setattr(blas, "use_one_thread", lambda: result)
        elif rank == 1 and name == "features":
            patch.setattr(agreement, "_features", lambda: "Old")
        error = ValueError if name == "threads" else fl.errors.MismatchError
        with pytest.raises(error, match=words):
            small(leaves=4 + rank if name == "leaves" else 4)


def in_words(leaves: range, count: int) -> list[str]:
    """Return the stack of a rank that merges whenever possible, as text."""
    stack: list[range] = []
    words: list[str] = []
    for leaf in leaves:
        words.append(str(leaf))
        for _ in range(push(stack, range(leaf, leaf + 1), count)):
            last = words.pop()
            words[-1] = f"({words[-1]}+{last})"
    return words


def test_reduction_of_eight_leaves_is_a_binary_tree() -> None:
    assert in_words(range(8), 8) == ["(((0+1)+(2+3))+((4+5)+(6+7)))"]
    assert in_words(range(6), 6) == ["(((0+1)+(2+3))+(4+5))"]
    assert in_words(range(7), 7) == ["(((0+1)+(2+3))+((4+5)+6))"]
    assert in_words(range(3, 6), 8) == ["3", "(4+5)"]


@pytest.mark.parametrize("hosts", ["one", "two", "as many as ranks"])
def test_reduction_adds_the_same_tree_for_any_number_of_ranks(hosts: str) -> None:
    for count, ranks in itertools.product(range(1, 10), range(1, 12)):
        per_host = {"one": ranks, "two": ranks // 2}.get(hosts, 1)
        if not per_host or ranks % per_host:
            continue
        stacks = []
        for rank in range(ranks):
            leaves, depth = stack_of(count, rank, ranks)
            assert [*itertools.chain(*leaves)] == [*contiguous_share(count, rank, ranks)]
            assert depth <= rows_needed(count, ranks)
            *merged, last = [*contiguous_share(count, rank, ranks)] or [None]
            stacks.append([*in_words(merged, count), *([] if last is None else [str(last)])])
            assert len(stacks[-1]) == len(leaves)
        by_host, steps = reduction(count, ranks, per_host)
        sums = []
        for host, subtrees in enumerate(by_host):
            for places, own_steps in subtrees:
                parts = [stacks[host * per_host + local_rank][row] for local_rank, row in places]
                sums.append(added(parts, own_steps))
        assert added(sums, steps) == in_words(range(count), count)[0], (count, ranks)


def added(sums: list[str], steps: Sequence[tuple[int, int]]) -> str:
    for a, b in steps:
        sums[a] = f"({sums[a]}+{sums[b]})"
    return sums[0]


def test_rows_needed_is_small() -> None:
    assert [rows_needed(8, ranks) for ranks in (1, 2, 3, 4, 5, 8, 9)] == [4, 3, 3, 2, 2, 1, 1]
    assert additions([range(2), range(2, 3), range(3, 4)], 4) == [(1, 2), (0, 1)]


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_fold_adds_in_the_order_of_steps_into_all_targets(scale: float) -> None:
    random = np.random.default_rng(0)
    a, b, c = random.standard_normal((3, 40_000), dtype=np.float32)
    expected = (a + (b + c)) * np.float32(scale)
    other = np.zeros_like(a)
    fold([a, b, c], [(1, 2), (0, 1)], scale, [a, other])
    assert a.tobytes() == other.tobytes() == expected.tobytes()
