"""The models of examples/ with common parameters and batches for all libraries."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["LR", "WORKS", "Work", "batches", "peak_of"]

LR = 1e-5  # so small that losses stay comparable
BATCHES = 4
COMPARED = 3  # number of first losses that are compared
WIDTH, HEADS, LAYERS, BLOCK, TOKENS = 128, 4, 4, 64, 94


class Work(NamedTuple):
    """A model by its example, the shape of a batch's inputs, and the number of classes."""

    title: str
    inputs: tuple[int, ...]
    classes: int


WORKS = {
    "tiny_gpt": Work("a step of tiny_gpt", (12, BLOCK), TOKENS),
    "digits_cnn": Work("a step of digits_cnn", (64, 1, 8, 8), 10),
    "cifar_resnet": Work("a step of cifar_resnet", (32, 3, 32, 32), 10),
}


def batches(name: str, rank: int, size: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return this rank's shares of the batches: inputs and labels, or tokens and next tokens."""
    work, random = WORKS[name], np.random.default_rng(1)
    arrays = []
    for _ in range(BATCHES):
        if name == "tiny_gpt":
            x: NDArray[Any] = random.integers(work.classes, size=work.inputs)
            y = (x * 7 + 3) % work.classes
        else:
            x = random.normal(size=work.inputs).astype(np.float32)
            y = random.integers(work.classes, size=len(x))
        arrays.append((x[rank::size].copy(), y[rank::size].copy()))
    return arrays


def peak_of(step: Any) -> int:
    """Return the peak growth of the process in bytes during the first calls of ``step``."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the present memory
    before = _status("VmRSS")
    for _ in range(3):
        step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
