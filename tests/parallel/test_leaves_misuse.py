"""What spoils training leaf by leaf: clear errors, and nothing is left behind."""

import contextlib
import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import random as numbers
from flashlight_py.distributed.start import blas
from flashlight_py.parallel import agreement
from tests.distributed.conformance import on_ranks
from tests.parallel.test_leaves import Net, backward, batch, optimizer_of

pytestmark = pytest.mark.usefixtures("own_numbers")


def small(leaves: int | None = 4, **how: Any) -> Any:
    fl.set_seed(0)
    model = fl.nn.Linear(12, 3)
    fl.distribute_module_grads(model, leaves=leaves, **how)
    return model


def one_step(model: Any, x: Any, y: Any) -> None:
    for part in fl.leaves(model, x, y):
        backward(model, *part)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"reducer": fl.InlineReducer(1.0)}, ValueError, "takes no reducer"),
        ({"hook": fl.Float16Compression()}, ValueError, "takes no hook"),
        ({"scale": 1.0}, ValueError, "takes no scale"),
        ({"bucket_bytes": 1}, ValueError, "takes no bucket_bytes"),
        ({"check_finite": True}, ValueError, "takes no check_finite"),
        ({"leaves": 0}, ValueError, "leaves must be at least 1"),
        ({"leaves": 2.5}, TypeError, "leaves must be"),
    ],
)
def test_what_leaves_cannot_be_combined_with(how: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        small(**how)


def test_other_ways_to_reduce_refuse_a_module_with_leaves() -> None:
    model = small()
    with pytest.raises(ValueError, match=r"no_sync: .* leaves=4.* larger global batch"):
        fl.no_sync(model).__enter__()
    with pytest.raises(ValueError, match=r"join: .* leaves=4"):
        fl.join(model).__enter__()
    with pytest.raises(ValueError, match="use one of both"):
        fl.DistributedOptimizer(optimizer_of(model, "sgd")).step()
    fl.distribute_module_grads(model)
    with pytest.raises(ValueError, match=r"leaves: call distribute_module_grads\(module, leaves=8"):
        fl.leaves(model, np.ones((4, 12)))


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ((), TypeError, "got none"),
        ((np.ones(4), np.ones(5)), ValueError, "same number of rows.* got 4, 5"),
        ((np.ones((0, 12)),), ValueError, "at least one; got 0"),
        ((np.ones(()),), TypeError, r"ndarray of shape \(\)"),
        (([1, 2],), TypeError, "of type list"),
    ],
)
def test_arrays_that_are_no_batch(arrays: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        fl.leaves(small(), *arrays)


def test_a_leaf_has_exactly_one_backward_pass() -> None:
    model, (x, y) = small(), batch(0)
    with pytest.raises(RuntimeError, match="without a backward pass for leaf 0 of 4"):
        list(fl.leaves(model, x))
    with pytest.raises(RuntimeError, match="outside of a loop over"):
        backward(model, x, y)
    loop = fl.leaves(model, x, y)
    backward(model, *next(loop))
    with pytest.raises(RuntimeError, match="a second backward pass for leaf 0 of 4"):
        backward(model, x, y)
    with pytest.raises(RuntimeError, match="a second backward pass"):  # also if that was caught
        next(loop)
    first, second = fl.leaves(model, x), fl.leaves(model, x)
    next(first)
    with pytest.raises(RuntimeError, match="is not over on this rank"):
        next(second)


def test_a_loop_that_is_left_leaves_no_gradient_and_everything_as_it_was() -> None:
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
    drawn = numbers.generator().random()  # the package's own generator again
    one_step(model, x, y)
    assert model.count == 1
    assert drawn != numbers.generator().random()


def test_a_pass_that_failed_may_be_repeated() -> None:
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
    ("what", "words"),
    [
        ("order", r"array 0 \(rank\(s\) 0: .*first and last row.*; rank\(s\) 1"),
        ("seed", r"random numbers \(rank"),
        ("rows", r"rows \(rank\(s\) 0: 37; rank\(s\) 1: 36"),
        ("step", r"step \(rank\(s\) 0: 0; rank\(s\) 1: 1"),
        ("arguments", "expected arrays with the same number of rows"),
    ],
)
@on_ranks(("shm", 2))
def test_ranks_at_different_batches(rank: int, size: int, what: str, words: str) -> None:
    model, (x, y) = small(), batch(0)
    if what == "order" and rank == 1:
        x, y = x[::-1], y[::-1]
    if what == "seed" and rank == 1:
        fl.set_seed(17)
    if what == "rows" and rank == 1:
        x, y = x[:-1], y[:-1]
    if what == "arguments" and rank == 1:
        y = y[:-1]
    if what == "step" and rank == 1:
        for _ in fl.leaves(model, x, y):
            break
    is_own = what == "arguments" and rank == 1
    with pytest.raises(ValueError if is_own else fl.errors.MismatchError, match=words):
        one_step(model, x, y)


OTHER_CORE = """
import sys
import flashlight_py as fl
fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, int(sys.argv[1]), 2, {"FILE_PATH": sys.argv[2]})
try:
    fl.distribute_module_grads(fl.nn.Linear(2, 2), leaves=8)
except fl.errors.MismatchError as error:
    print(error)
"""


@pytest.mark.slow
def test_another_core_type_of_openblas_is_found(tmp_path: Path) -> None:
    if not blas.use_one_thread()[0]:
        pytest.skip("NumPy's BLAS is no OpenBLAS")
    command = [sys.executable, "-c", OTHER_CORE]
    cores: list[dict[str, str]] = [{}, {"OPENBLAS_CORETYPE": "Nehalem"}]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meet")],
            env={**os.environ, **core},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, core in enumerate(cores)
    ]
    for process in processes:
        text, _ = process.communicate(timeout=60)
        assert re.search(r"BLAS core type differs \(rank\(s\) 0: .*; rank\(s\) 1: Nehalem on", text)


def test_a_module_that_is_gone_takes_its_rows_along() -> None:
    model = Net()
    fl.distribute_module_grads(model, leaves=4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("core", "BLAS core type differs.*Old on .*OPENBLAS_CORETYPE=Haswell"),
        ("features", "CPU features.*Old on .*NPY_DISABLE_CPU_FEATURES"),
        ("threads", "one thread.*not so on rank 1 on .*OMP_NUM_THREADS=1"),
        ("leaves", r"leaves differs.*rank\(s\) 1: 5 on "),
    ],
)
@on_ranks(("shm", 2))
def test_ranks_with_other_arithmetic(rank: int, size: int, name: str, words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and name in ("threads", "core"):
            found = (2, "") if name == "threads" else (1, "Old")
            patch.setattr(blas, "use_one_thread", lambda: found)
        elif rank == 1 and name == "features":
            patch.setattr(agreement, "_features", lambda: "Old")
        error = ValueError if name == "threads" else fl.errors.MismatchError
        with pytest.raises(error, match=words):
            small(leaves=4 + rank if name == "leaves" else 4)
