"""The layers that are measured, with their names in both libraries and the shapes of their inputs.

Images have the shapes of ResNet18 on CIFAR-10 with batch 32, sequences the shapes of a small GPT.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["WORKS", "Work", "fill", "input_of", "sample", "weights_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """``ours`` and ``torch_layer`` are expressions that construct the layer in ``fl.nn`` and
    ``torch.nn``.

    ``most``: the input is integers below it. ``is_first``: the input needs no gradient.
    ``is_alike``:
    both layers have the same parameters in the same order, so their results are compared.
    """

    title: str
    ours: str
    torch_layer: str
    shape: Shape
    most: int = 0
    is_first: bool = False
    is_alike: bool = True


def _conv(channels: int, out: int, size: int, kernel: int = 3, stride: int = 1) -> Work:
    title = f"conv {channels} to {out}, {kernel} x {kernel}, stride {stride}, {size} x {size}"
    arguments = f"{channels}, {out}, {kernel}, {stride}, {kernel // 2}"
    shape = 32, channels, size, size
    ours, torch_layer = f"nn.Conv2D({arguments})", f"nn.Conv2d({arguments})"
    return Work(title, ours, torch_layer, shape, is_first=channels == 3)


def _images(channels: int, size: int) -> Iterator[Work]:
    shape, on = (32, channels, size, size), f"{channels} x {size} x {size}"
    yield Work(
        f"batch norm, {on}", f"nn.BatchNorm({channels})", f"nn.BatchNorm2d({channels})", shape
    )
    group = f"nn.GroupNorm(8, {channels})"
    yield Work(f"group norm, 8 of {on}", group, group, shape)


def _sequences(batch: int, length: int, width: int) -> Iterator[Work]:
    shape, of = (batch, length, width), f"{batch} x {length} x {width}"
    for title, both in (
        ("layer norm", f"nn.LayerNorm({width})"),
        ("RMS norm", f"nn.RMSNorm({width})"),
        ("linear", f"nn.Linear({width}, {4 * width})"),
    ):
        yield Work(f"{title}, {of}", both, both, shape)
    attention = f"nn.MultiheadAttention({width}, 4, causal=True)", f"Attention({width}, 4)"
    yield Work(f"attention, {of}", *attention, shape, is_alike=False)
    wide = batch, length, 4 * width
    gelu = "nn.GELU()"
    yield Work(f"GELU, {batch} x {length} x {4 * width}", gelu, gelu, wide)
    embedding = f"nn.Embedding(1000, {width})"
    yield Work(f"embedding, {of}", embedding, embedding, shape[:2], most=1000)


_CONVOLUTIONS = {
    "conv-first": _conv(3, 64, 32),
    "conv-64": _conv(64, 64, 32),
    "conv-64-128": _conv(64, 128, 32, stride=2),
    "conv-128": _conv(128, 128, 16),
    "conv-256": _conv(256, 256, 8),
    "conv-512": _conv(512, 512, 4),
    "conv-1x1": _conv(64, 128, 32, kernel=1, stride=2),
}
_POOLS = {
    "pool-max": Work(
        "max pool, 3 x 3, stride 2, 64 x 32 x 32",
        *("nn.Pool2D(3, 2, 1)", "nn.MaxPool2d(3, 2, 1)", (32, 64, 32, 32)),
    ),
    "pool-max-2": Work(
        "max pool, 2 x 2, 64 x 32 x 32",
        *("nn.Pool2D(2)", "nn.MaxPool2d(2)", (32, 64, 32, 32)),
    ),
    "pool-average": Work(
        "average pool, 2 x 2, 64 x 32 x 32",
        *("nn.Pool2D(2, mode='average')", "nn.AvgPool2d(2)", (32, 64, 32, 32)),
    ),
    "pool-last": Work(
        "average pool, 4 x 4, 512 x 4 x 4",
        *("nn.Pool2D(4, mode='average')", "nn.AvgPool2d(4)", (32, 512, 4, 4)),
    ),
}
_OTHERS = [
    *(work for size in ((64, 32), (512, 4)) for work in _images(*size)),
    *(work for size in ((12, 64, 128), (2, 512, 128), (12, 64, 512)) for work in _sequences(*size)),
    Work(
        "LSTM, 12 x 64 x 128",
        "nn.RNN('lstm', 128, 128)",
        "Lstm(128)",
        (12, 64, 128),
        is_alike=False,
    ),
]
WORKS = {**_CONVOLUTIONS, **_POOLS, **{work.title: work for work in _OTHERS}}


def input_of(work: Work) -> Any:
    """Return the input."""
    rng = np.random.default_rng(0)
    if work.most:
        return rng.integers(0, work.most, work.shape)
    return rng.standard_normal(work.shape, np.float32)


def fill(params: Sequence[Any]) -> None:
    """Give the parameters of either library the initial values of both."""
    rng = np.random.default_rng(1)
    for param in params:
        param[...] = rng.uniform(-0.1, 0.1, param.shape).astype(np.float32)


def weights_of(shape: Shape) -> Any:
    """Return the gradient of the result that starts the backward pass."""
    return np.random.default_rng(2).standard_normal(shape, np.float32)


def sample(work: Work, arrays: Iterable[Any]) -> list[list[float]]:
    """Return the first elements of the result and of gradients, for the comparison."""
    return [array.reshape(-1)[:64].tolist() for array in arrays] if work.is_alike else []
