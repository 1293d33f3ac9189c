"""A layer of torch.nn, forward and backward, on one thread.

The option ``layout`` of images is "contiguous" or "channels_last".
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harness.role import Prepared, RankSetup
from harness.roles.layer_works import WORKS, fill, input_of, sample, weights_of
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


class Torch(Rank):
    """One process."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        work = WORKS[task["work"]]
        module = eval(work.torch_layer, {"nn": nn, "Attention": Attention, "Lstm": Lstm})
        params = list(module.parameters())
        fill([param.detach().numpy() for param in params])
        is_last = len(work.shape) == 4 and task["layout"] == "channels_last"
        layout = torch.channels_last if is_last else torch.contiguous_format
        module = module.to(memory_format=layout)
        x = torch.from_numpy(input_of(work)).contiguous(memory_format=layout)
        x.requires_grad_(not (work.most or work.is_first))
        grad = torch.from_numpy(weights_of(module(x).shape)).contiguous(memory_format=layout)

        def step() -> Any:
            for tensor in (x, *params):
                tensor.grad = None
            y = module(x)
            y.backward(grad)
            return y

        y = step()
        grads = [tensor.grad for tensor in (x, *params) if tensor.requires_grad]
        return Prepared(step, sample(work, [y.detach(), *grads]), clock=time.process_time)


def join(setup: RankSetup) -> Torch:
    """Return the role of the only rank."""
    return Torch(setup)
