"""fl.synchronize of trees with CuPy arrays."""

from typing import Any

import pytest

from tests.gpu import trees

pytestmark = pytest.mark.gpu


def test_arrays_on_gpus_become_the_roots(ranks: Any) -> None:
    ranks.run(trees.synchronize)


def test_an_array_on_a_gpu_is_not_one_on_the_cpu(ranks: Any) -> None:
    for message in ranks.run(trees.synchronize_with_the_cpu):
        assert ranks.size == 1 or "tree[0] (rank(s) 0: GPU int64 (3,); rank(s) 1" in message
