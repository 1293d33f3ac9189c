"""A tree of many small arrays from rank 0 to all ranks, next to one array of the same size."""

from collections.abc import Mapping
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.role import Call, Prepared, RankSetup
from harness.roles.flashlight import RankRole


class Tree(RankRole):
    """Kinds of calls: "tree" synchronizes, "each" broadcasts every array, "one" the large array."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        count, length = task["arrays"], task["nbytes"] // (4 * task["arrays"])
        if task["kind"] == "one":
            count, length = 1, count * length
        tree = {f"layer{number}.weight": self._array(number, length) for number in range(count)}
        call: Call = {
            "tree": lambda: fl.synchronize(tree),
            "each": lambda: [fl.broadcast(array) for array in tree.values()],
            "one": lambda: fl.broadcast(tree["layer0.weight"]),
        }[task["kind"]]
        call()
        _check(tree)
        return Prepared(call, check=lambda: _check(tree))

    def _array(self, number: int, length: int) -> Any:
        return np.full(length, self.rank * 1e6 + number, np.float32)


def _check(tree: Mapping[str, Any]) -> None:
    for number, array in enumerate(tree.values()):
        if not (array == number).all():
            raise RuntimeError(f"array {number} does not have rank 0's values")


def join(setup: RankSetup) -> Tree:
    """Connect to the other ranks."""
    return Tree(setup)
