"""Data parallel training in every floating dtype."""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.nn.test_dtypes import DTYPES, OPTIMIZERS, model_of


def training(rank: int, size: int, dtype: str, optimizer: str, sharded: bool) -> Any:
    model = model_of(dtype)
    if sharded:
        fl.fully_shard(model)
    else:
        fl.distribute_module_grads(model)
    steps = OPTIMIZERS[optimizer](model.params())
    x = np.random.default_rng(0).standard_normal((16, 6)).astype(model.params()[0].dtype)
    labels = np.arange(16) % 3
    for _ in range(4):
        steps.zero_grad()
        mine = slice(rank * 16 // size, (rank + 1) * 16 // size)
        found = model(fl.input(x[mine]))
        criterion = fl.nn.CategoricalCrossEntropy()
        criterion(found, fl.input(labels[mine])).backward()
        steps.step()
    return {name: array.astype(np.float64) for name, array in model.state_dict().items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_learn_what_one_learns(
    pool: Any, dtype: str, optimizer: str, sharded: bool
) -> None:
    first, second = pool(2).run(training, dtype, optimizer, sharded)
    alone = training(0, 1, dtype, optimizer, False)
    tolerance = {"bfloat16": 0.05, "float16": 0.01}.get(dtype, 1e-5)
    for name, array in first.items():
        assert np.array_equal(array, second[name]), name
        np.testing.assert_allclose(array, alone[name], atol=tolerance)
