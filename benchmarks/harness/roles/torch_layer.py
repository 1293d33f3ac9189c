"""A layer of torch.nn or a function, forward and backward, on one thread.

The option ``layout`` of images is "contiguous" or "channels_last".
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harness.role import Prepared, RankSetup
from harness.roles.layer_works import Work, arrays_of, fill, need_gradient, sample, weights_of
from harness.roles.torch_process import Rank


class Attention(nn.Module):  # type: ignore[misc]
    """Causal attention with several heads, as in nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        parts = self.into(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Lstm(nn.Module):  # type: ignore[misc]
    """An LSTM layer with the batch as first dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


class Functions:
    """The functions of torch.nn.functional and of torch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name, None) or getattr(torch, name)


NAMES = {"nn": nn, "F": Functions(), "Attention": Attention, "Lstm": Lstm}


class Torch(Rank):
    """One process."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        work = Work(**task["work"])
        layer = eval(work.torch_layer, dict(NAMES))
        params = list(layer.parameters()) if isinstance(layer, nn.Module) else []
        fill([param.detach().numpy() for param in params])
        last = {"memory_format": torch.channels_last} if task["layout"] == "channels_last" else {}
        if params:
            layer = layer.to(**last)
        inputs = [torch.from_numpy(array).contiguous(**last) for array in arrays_of(work)]
        for tensor, needs_gradient in zip(inputs, need_gradient(work), strict=True):
            tensor.requires_grad_(needs_gradient)
        grad = torch.from_numpy(weights_of(layer(*inputs).shape)).contiguous(**last)
        leaves = [tensor for tensor in (*inputs, *params) if tensor.requires_grad]

        def step() -> Any:
            for tensor in leaves:
                tensor.grad = None
            y = layer(*inputs)
            y.backward(grad)
            return y

        y = step()
        results = [y.detach(), *(tensor.grad for tensor in leaves)]
        return Prepared(step, sample(results), clock=time.process_time)


def join(setup: RankSetup) -> Torch:
    """Return the role of the only rank."""
    return Torch(setup)
