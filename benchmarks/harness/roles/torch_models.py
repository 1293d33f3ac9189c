"""Steps of the same models with torch: eager, and on several ranks with DistributedDataParallel."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from harness.role import Prepared, RankSetup
from harness.roles.model_works import (
    BLOCK,
    COMPARED,
    HEADS,
    LAYERS,
    LR,
    TOKENS,
    WIDTH,
    batches,
    peak_of,
)
from harness.roles.torch_process import Rank


class Attention(nn.MultiheadAttention):  # type: ignore[misc]
    """Causal self-attention, as in nanoGPT."""

    def forward(self, x: Any) -> Any:
        size, positions, width = x.shape
        qkv = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(size, positions, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(size, positions, width))


class Layer(nn.Module):  # type: ignore[misc]
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention(WIDTH, HEADS, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.norm1(x))
        return x + self.linear2(nn.functional.gelu(self.linear1(self.norm2(x))))


class GPT(nn.Module):  # type: ignore[misc]
    """The model of examples/tiny_gpt.py."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Module()
        self.blocks.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, x: Any) -> Any:
        x = self.embedding(x) + self.position.weight[: x.shape[1]]
        for layer in self.blocks.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Residual(nn.Module):  # type: ignore[misc]
    """A layer plus a shortcut, or without a shortcut."""

    def __init__(self, module: Any, shortcut: Any) -> None:
        super().__init__()
        self.module, self.shortcut = module, shortcut

    def forward(self, x: Any) -> Any:
        return self.module(x) + (x if self.shortcut is None else self.shortcut(x))


def _convolution(before: int, after: int, kernel: int, stride: int) -> list[Any]:
    layer = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    return [layer, nn.BatchNorm2d(after)]


def _block(before: int, after: int, stride: int) -> Any:
    inner = [*_convolution(before, after, 3, stride), nn.ReLU(), *_convolution(after, after, 3, 1)]
    is_same = stride == 1 and before == after
    shortcut = None if is_same else nn.Sequential(*_convolution(before, after, 1, stride))
    return nn.Sequential(Residual(nn.Sequential(*inner), shortcut), nn.ReLU())


def _resnet18() -> Any:
    blocks = []
    for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
        blocks += [_block(before, after, after // before), _block(after, after, 1)]
    ends = nn.AvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)
    return nn.Sequential(*_convolution(3, 64, 3, 1), nn.ReLU(), *blocks, *ends)


def _digits() -> Any:
    layers: list[Any] = []
    for before, after in ((1, 32), (32, 64)):
        layers += [*_convolution(before, after, 3, 1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.0), nn.Linear(64 * 2 * 2, 10))


_MODELS = {"tiny_gpt": GPT, "digits_cnn": _digits, "cifar_resnet": _resnet18}


class Torch(Rank):
    """One thread per rank; no process group if there is one rank."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        name = task["work"]
        model: Any = _MODELS[name]()
        state = {key: torch.from_numpy(value.copy()) for key, value in task["state"].items()}
        model.load_state_dict(state, strict=False)  # the state has no counts of batches
        if task["kind"] == "channels_last":
            model = model.to(memory_format=torch.channels_last)
        if self.size > 1:
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(model.parameters(), LR, fused=True)
        pairs = [tuple(map(torch.from_numpy, pair)) for pair in batches(name, self.rank, self.size)]
        if task["kind"] == "channels_last":
            pairs = [(x.to(memory_format=torch.channels_last), y) for x, y in pairs]
        coming = itertools.cycle(pairs)

        def step() -> float:
            x, y = next(coming)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y.flatten())
            loss.backward()
            optimizer.step()
            return float(loss.item())

        peak, losses = peak_of(step), [step() for _ in range(COMPARED)]
        return Prepared(step, {"losses": losses, "peak": peak})


def join(setup: RankSetup) -> Torch:
    """Connect to the other ranks, if there are any."""
    return Torch(setup)
