"""The layers and functions that are measured, with their names in both libraries.

``FIXED`` has the shapes of ResNet18 on CIFAR-10 with batch 32, of a small GPT, and layers of other
networks. ``drawn`` draws shapes by a seed from the table ``KINDS``.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

__all__ = ["FIXED", "KINDS", "Work", "arrays_of", "drawn", "fill", "need_gradient"]
__all__ += ["sample", "weights_of"]

Shape = tuple[int, ...]
# With gradient: "normal", "image" (normal, in the faster layout of each library), and "positive"
# (uniform from 0.1 to 1). Without gradient: "data" (normal, an image of a data set), "share"
# (uniform from 0 to 1), and integers below a number.
Input = tuple[str | int, Shape]


@dataclass(frozen=True)
class Work:
    """A layer or function.

    ``ours`` and ``torch_layer`` are expressions of it with the modules ``nn`` and ``F`` of layers
    and functions. Both layers have the same parameters in the same order. ``goal``: least ratio.
    """

    title: str
    ours: str
    torch_layer: str
    inputs: Sequence[Input]
    goal: float = 0.8

    def has_images(self) -> bool:
        return self.inputs[0][0] in ("image", "data")


def _conv(
    shape: Shape, out: int, kernel: int, stride: int = 1, dilation: int = 1, groups: int = 1,
    values: str = "image", goal: float = 0.8,
) -> Work:  # fmt: skip
    padding = kernel // 2 * dilation
    arguments = f"({shape[1]}, {out}, {kernel}, {stride}, {padding}, {dilation}, {groups})"
    title = f"conv {shape[1]} to {out}, {kernel} x {kernel}, stride {stride}"
    title += f", dilation {dilation}" * (dilation > 1) + f", {groups} groups" * (groups > 1)
    layers = f"nn.Conv2D{arguments}", f"nn.Conv2d{arguments}"
    return Work(f"{title}, of {_by(shape)}", *layers, [(values, shape)], goal)


def _images(channels: int, size: int) -> Iterator[Work]:
    shape = 32, channels, size, size
    on, inputs = _by(shape[1:]), [("image", shape)]
    of_batch = f"nn.BatchNorm({channels})", f"nn.BatchNorm2d({channels})"
    yield Work(f"batch norm, {on}", *of_batch, inputs)
    yield Work(f"group norm, 8 of {on}", *(f"nn.GroupNorm(8, {channels})",) * 2, inputs)


def _sequences(*shape: int) -> Iterator[Work]:
    width = shape[-1]
    for title, both in (
        ("layer norm", f"nn.LayerNorm({width})"),
        ("RMS norm", f"nn.RMSNorm({width})"),
        ("linear", f"nn.Linear({width}, {4 * width})"),
    ):
        yield Work(f"{title}, {_by(shape)}", both, both, [("normal", shape)])
    attention = f"nn.MultiheadAttention({width}, 4, causal=True)", f"Attention({width}, 4)"
    yield Work(f"attention, {_by(shape)}", *attention, [("normal", shape)])
    wide = *shape[:-1], 4 * width
    yield Work(f"GELU, {_by(wide)}", "nn.GELU()", "nn.GELU()", [("normal", wide)])
    embedding = f"nn.Embedding(1000, {width})"
    yield Work(f"embedding, {_by(shape)}", embedding, embedding, [(1000, shape[:2])])


def _lstm(*shape: int, goal: float = 0.8) -> Work:
    width = shape[-1]
    layers = f"nn.RNN('lstm', {width}, {width})", f"Lstm({width})"
    return Work(f"LSTM, {_by(shape)}", *layers, [("normal", shape)], goal)


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


_LARGE: Input = "image", (32, 64, 32, 32)
FIXED = {
    "conv-first": _conv((32, 3, 32, 32), 64, 3, values="data", goal=1.0),
    "conv-64": _conv((32, 64, 32, 32), 64, 3),
    "conv-64-128": _conv((32, 64, 32, 32), 128, 3, 2),
    "conv-128": _conv((32, 128, 16, 16), 128, 3),
    "conv-256": _conv((32, 256, 8, 8), 256, 3),
    "conv-512": _conv((32, 512, 4, 4), 512, 3),
    "conv-1x1": _conv((32, 64, 32, 32), 128, 1, 2),
    "conv-digits": _conv((64, 1, 28, 28), 16, 5, values="data", goal=1.0),
    "conv-7x7": _conv((8, 3, 96, 96), 64, 7, 2, values="data", goal=1.0),
    "conv-wide": _conv((16, 24, 28, 28), 144, 1, goal=0.9),
    "conv-depthwise": _conv((16, 144, 14, 14), 144, 3, groups=144, goal=1.0),
    "conv-groups": _conv((16, 64, 16, 16), 64, 3, groups=8, goal=0.9),
    "conv-dilation": _conv((16, 96, 14, 14), 96, 3, dilation=2, goal=0.9),
    "pool-max": Work(
        "max pool, 3 x 3, stride 2, 64 x 32 x 32",
        *("nn.Pool2D(3, 2, 1)", "nn.MaxPool2d(3, 2, 1)", [_LARGE]),
    ),
    "pool-max-2": Work(
        "max pool, 2 x 2, 64 x 32 x 32", "nn.Pool2D(2)", "nn.MaxPool2d(2)", [_LARGE]
    ),
    "pool-average": Work(
        "average pool, 2 x 2, 64 x 32 x 32",
        *("nn.Pool2D(2, mode='average')", "nn.AvgPool2d(2)", [_LARGE]),
    ),
    "pool-last": Work(
        "average pool, 4 x 4, 512 x 4 x 4",
        *("nn.Pool2D(4, mode='average')", "nn.AvgPool2d(4)", [("image", (32, 512, 4, 4))]),
    ),
    "relu": Work("relu, 256 x 1000", "F.relu", "F.relu", [("normal", (256, 1000))], 1.0),
    "lstm": _lstm(12, 64, 128),
    "lstm-32": _lstm(32, 100, 128, goal=0.9),
    **{work.title: work for size in ((64, 32), (512, 4)) for work in _images(*size)},
    **{
        work.title: work
        for shape in ((12, 64, 128), (2, 512, 128), (12, 64, 512))
        for work in _sequences(*shape)
    },
}


@dataclass(frozen=True)
class Kind:
    """``count`` shapes of a layer or function.

    Letters in ``layer``, ``torch_layer`` and ``inputs`` are replaced by drawn numbers (see
    ``_numbers``), and ``f`` by an item of ``names``: a name in both libraries, or "ours=torch's".
    By default, ``torch_layer`` is ``layer``. An input is a shape after one of the words of
    ``Input``, or after "<" and the letter of a number. ``products``: multiplications of the forward
    pass.
    """

    count: int
    inputs: Sequence[str]
    layer: str
    torch_layer: str = ""
    names: str = ""
    products: str = "1"


_IMAGES, _ROWS = ["image n c h i"], ["normal n c"]
_CONV, _OF_CONV = "({c}, {o}, {k}, {s}, {p}, {d}, {g})", "n * o * c // g * k * k * h * i // s // s"
KINDS: dict[str, list[Kind]] = {
    "convolution": [
        Kind(13, _IMAGES, f"nn.Conv2D{_CONV}", f"nn.Conv2d{_CONV}", "", _OF_CONV),
        Kind(3, ["data n c h i"], f"nn.Conv2D{_CONV}", f"nn.Conv2d{_CONV}", "", _OF_CONV),
    ],
    "linear": [
        Kind(4, ["normal n t c"], "nn.Linear({c}, {o})", products="n * t * c * o"),
        Kind(2, _ROWS, "nn.Linear({c}, {o})", products="n * c * o"),
    ],
    "norm": [
        Kind(2, _IMAGES, "nn.BatchNorm({c})", "nn.BatchNorm2d({c})"),
        Kind(2, _IMAGES, "nn.GroupNorm({g}, {c})"),
        Kind(4, ["normal n t c"], "nn.{f}({c}, 1e-5)", names="LayerNorm RMSNorm"),
    ],
    "attention": [
        Kind(
            *(2, ["normal n t c"], "nn.MultiheadAttention({c}, {g}, causal=True)"),
            *("Attention({c}, {g})", "", "4 * n * t * c * (c + t)"),
        ),
        Kind(
            *(2, ["normal n g t w", "normal n g u w", "normal n g u w"], "F.attention"),
            *("F.scaled_dot_product_attention", "", "2 * n * g * t * u * w"),
        ),
    ],
    "pooling": [
        Kind(3, _IMAGES, "nn.Pool2D({k}, {s}, {q})", "nn.MaxPool2d({k}, {s}, {q})"),
        Kind(
            *(3, _IMAGES, "nn.Pool2D({k}, {s}, {q}, mode='average')"),
            "nn.AvgPool2d({k}, {s}, {q})",
        ),
    ],
    "embedding": [Kind(2, ["<v n t"], "nn.Embedding({v}, {c})")],
    "loss": [
        Kind(
            *(2, [*_ROWS, "<c n"], "lambda x, t: F.{f}(F.log_softmax(x, -1), t)"),
            names="categorical_cross_entropy=nll_loss",
        ),
        Kind(
            *(4, [*_ROWS, "share n c"], "F.{f}"),
            names="mean_squared_error=mse_loss mean_absolute_error=l1_loss "
            "binary_cross_entropy_with_logits",
        ),
    ],
    "elementwise": [
        Kind(
            *(4, ["normal n t c"], "F.{f}"),
            names="relu gelu silu tanh sigmoid exp sin cos abs erf elu leaky_relu softplus",
        ),
        Kind(1, ["positive n t c"], "F.{f}", names="log sqrt log1p"),
        Kind(1, ["normal n t c", "positive n t c"], "F.{f}", names="add sub mul div maximum"),
        Kind(1, ["normal n t c", "positive c"], "F.{f}", names="add sub mul div"),
        Kind(1, _ROWS, "lambda x: F.{f}(x, -1)", names="softmax log_softmax"),
    ],
    "reduction": [
        Kind(
            *(3, ["normal n t c"], "lambda x: F.{f}(x, {a})"),
            names="sum mean max=amax min=amin logsumexp cumsum",
        ),
        Kind(
            *(1, ["normal n t c"], "lambda x: F.{f}(x, {a})"),
            *("lambda x: F.{f}(x, {a}, correction=0)", "var std"),
        ),
    ],
}
MOST_ELEMENTS, MOST_PRODUCTS = 1 << 21, 1 << 27  # of a work: a pass takes up to about 50 ms


def drawn(seed: int) -> dict[str, list[Work]]:
    """Return 60 works by kind. Equal seeds give equal works."""
    random = Random(seed)
    return {
        name: [_draw(kind, random) for kind in kinds for _ in range(kind.count)]
        for name, kinds in KINDS.items()
    }


def _draw(kind: Kind, random: Random) -> Work:
    ours, _, torchs = random.choice(kind.names.split() or [""]).partition("=")
    while True:
        numbers = _numbers(random)
        inputs = [_input(text.split(), numbers) for text in kind.inputs]
        elements = max(math.prod(shape) for _, shape in inputs)
        if elements <= MOST_ELEMENTS and eval(kind.products, {}, numbers) <= MOST_PRODUCTS:
            break
    layer = kind.layer.format(**numbers, f=ours)
    torch_layer = (kind.torch_layer or kind.layer).format(**numbers, f=torchs or ours)
    shapes = " and ".join(_by(shape) for _, shape in inputs)
    note = ", no gradient of the image" if "data" in kind.inputs[0] else ""
    return Work(f"{layer.rpartition(': ')[2]} of {shapes}{note}", layer, torch_layer, inputs)


def _input(words: list[str], numbers: Mapping[str, int]) -> Input:
    values: str | int = numbers[words[0][1:]] if words[0][0] == "<" else words[0]
    return values, tuple(numbers[word] for word in words[1:])


def _numbers(random: Random) -> dict[str, int]:
    """Draw the numbers of a shape, most of them with a uniform logarithm."""

    def upto(most: int) -> int:
        return int(math.exp(random.uniform(0, math.log(most + 1))))

    g = random.choice([1, upto(64)])  # groups, or heads
    c, o = (g * upto(512 // g) for _ in range(2))  # channels, or features
    k, s, d = random.randint(1, 7), random.choice([1, 1, 2, 3]), random.choice([1, 1, 2, 3])
    p = random.choice([0, d * (k // 2)])
    h, i = random.choice([(upto(64),) * 2, (upto(64), upto(64))])  # height and width
    h, i = (max(2, size, d * (k - 1) + 1 - 2 * p) for size in (h, i))
    names = {"n": upto(64), "t": upto(256), "u": upto(256), "v": 1 + upto(4095), "w": upto(128)}
    return {
        **names, "c": c, "o": o, "g": g, "k": k, "s": s, "d": d, "p": p, "h": h, "i": i,
        "q": k // 2, "a": random.randint(0, 2),
    }  # fmt: skip


def arrays_of(work: Work) -> list[Any]:
    """Return the inputs."""
    rng = np.random.default_rng(0)

    def draw(values: str | int, shape: Shape) -> Any:
        if isinstance(values, int):
            return rng.integers(0, values, shape)
        if values in ("share", "positive"):
            low = np.float32(0.1 * (values == "positive"))
            return rng.random(shape, np.float32) * (1 - low) + low
        return rng.standard_normal(shape, np.float32)

    return [draw(values, shape) for values, shape in work.inputs]


def need_gradient(work: Work) -> list[bool]:
    """Return for each input whether it gets a gradient."""
    return [values in ("normal", "image", "positive") for values, _ in work.inputs]


def fill(params: Sequence[Any]) -> None:
    """Give the parameters of either library the initial values of both."""
    rng = np.random.default_rng(1)
    for param in params:
        param[...] = rng.uniform(-0.1, 0.1, param.shape).astype(np.float32)


def weights_of(shape: Shape) -> Any:
    """Return the gradient of the result that starts the backward pass.

    The gradient of one number is 1,000, because the gradients of a mean would be too small to
    compare.
    """
    if not shape:
        return np.asarray(1000, np.float32)
    return np.random.default_rng(2).standard_normal(shape, np.float32)


def sample(arrays: Iterable[Any]) -> list[list[float]]:
    """Return the first elements of the result and of gradients, for the comparison."""
    return [array.reshape(-1)[:64].tolist() for array in arrays]
