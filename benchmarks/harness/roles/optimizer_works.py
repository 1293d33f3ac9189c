"""Parameters and gradients for the steps of optimizers; every library makes the same arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CHECKED", "LR", "RULES", "WORKS", "Work", "arrays"]

LR = 1e-3
# The class of a rule in fl.optim and in torch.optim, and its options besides the rate.
RULES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "sgd": ("SGDOptimizer", "SGD", {"momentum": 0.9}, {"momentum": 0.9}),
    "adam": ("AdamOptimizer", "Adam", {}, {}),
    "adamw": ("AdamOptimizer", "AdamW", {"weight_decay": 1e-2}, {"weight_decay": 1e-2}),
    "adagrad": ("AdagradOptimizer", "Adagrad", {}, {"eps": 1e-8}),
}
# Number of elements of the first parameter that are compared between libraries.
CHECKED = 16


@dataclass(frozen=True)
class Work:
    """A set of parameters, float32."""

    title: str
    shapes: tuple[tuple[int, ...], ...]


WORKS = {
    "64MB": Work("64 MB in one array", ((1 << 24,),)),
    "small": Work("2,221 elements in 4 arrays", ((48, 32), (48,), (13, 48), (13,))),
    "many": Work("200 arrays of 4 KB", ((1 << 10,),) * 200),
}


def arrays(work: Work) -> list[tuple[Any, Any]]:
    """Return parameters and their gradients."""
    rng = np.random.default_rng(0)
    draw = rng.standard_normal
    return [(draw(shape, dtype=np.float32), draw(shape, dtype=np.float32)) for shape in work.shapes]
