"""Data parallel training in every floating dtype."""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.nn.test_dtypes import DTYPES, OPTIMIZERS, model_of, train


def training(rank: int, size: int, dtype: str, optimizer: str, sharded: bool) -> Any:
    model = model_of(dtype)
    (fl.fully_shard if sharded else fl.distribute_module_grads)(model)
    rows = slice(rank * 16 // size, (rank + 1) * 16 // size)
    train(model, OPTIMIZERS[optimizer](model.params()), 4, rows)
    return {name: array.astype(np.float64) for name, array in model.state_dict().items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_train_like_one_process_in_every_dtype(
    pool: Any, dtype: str, optimizer: str, sharded: bool
) -> None:
    first, second = pool(2).run(training, dtype, optimizer, sharded)
    alone = training(0, 1, dtype, optimizer, False)
    tolerance = {"bfloat16": 0.05, "float16": 0.01}.get(dtype, 1e-5)
    for name, array in first.items():
        assert np.array_equal(array, second[name]), name
        np.testing.assert_allclose(array, alone[name], atol=tolerance)
