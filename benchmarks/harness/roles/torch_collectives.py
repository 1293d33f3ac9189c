"""The verbs of torch.distributed, on gloo or another backend."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness.role import Call, RankSetup, Refusal
from harness.roles import torch_process
from harness.roles.verbs import Builder, CollectiveRole, Messages, Op, elements, wait_each


def _waited(work: Any) -> None:
    work.wait()


def _sendrecv(x: Any, dst: int, out: Any, src: int, tag: int) -> Call:
    def call() -> None:
        sent = dist.isend(x, dst, tag=tag)
        dist.recv(out, src, tag=tag)
        if sent is not None:
            sent.wait()

    return call


def _batch(ops: Sequence[Op]) -> Call:
    begin = {"send": dist.isend, "recv": dist.irecv}
    prepared = [dist.P2POp(begin[kind], x, peer, tag=tag) for kind, x, peer, tag in ops]
    return lambda: wait_each(dist.batch_isend_irecv(prepared))


def _tagged(function: Callable[..., Any]) -> Callable[[Any, Any, int], Any]:
    return lambda x, peer, tag: function(x, peer, tag=tag)


class Torch(CollectiveRole):
    """CPU tensors."""

    messages = Messages(
        *(_tagged(dist.send), _tagged(dist.recv), _tagged(dist.isend), _tagged(dist.irecv)),
        *(_sendrecv, _batch),
    )

    def __init__(self, setup: RankSetup) -> None:
        torch_process.initialise(setup)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        return (Refusal, TypeError, ValueError, NotImplementedError)

    def facts(self) -> dict[str, str]:
        return torch_process.facts()

    def barrier(self) -> None:
        dist.barrier()

    def leave(self) -> None:
        dist.destroy_process_group()

    def array(self, nbytes: int, dtype: str, parts: int, kind: str) -> Any:
        element = getattr(torch, dtype)
        return torch.empty(elements(nbytes, element.itemsize, parts), dtype=element)

    @property
    def builders(self) -> Mapping[str, Builder]:
        return {
            "all_reduce": lambda x: (lambda: dist.all_reduce(x), x),
            "all_reduce, async": lambda x: (lambda: _waited(dist.all_reduce(x, async_op=True)), x),
            "reduce": lambda x: (lambda: dist.reduce(x, 0), x),
            "broadcast": lambda x: (lambda: dist.broadcast(x, 0), x),
            "all_gather": self._all_gather,
            "all_gather, list": self._all_gather_list,
            "gather": self._gather,
            "scatter": self._scatter,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "barrier": lambda x: (dist.barrier, x),
            "all_to_all, unequal": self._all_to_all_unequal,
            "broadcast_object": self._broadcast_object,
            "all_gather_object": self._all_gather_object,
        }

    def _all_gather(self, x: Any) -> tuple[Call, Any]:
        out = torch.empty(x.shape[0] * self.size, dtype=x.dtype)
        return lambda: dist.all_gather_into_tensor(out, x), out

    def _all_gather_list(self, x: Any) -> tuple[Call, Any]:
        parts = [torch.empty_like(x) for _ in range(self.size)]

        def call() -> Any:
            dist.all_gather(parts, x)
            return parts[-1]

        return call, None

    def _gather(self, x: Any) -> tuple[Call, Any]:
        if self.rank:
            return lambda: dist.gather(x), None
        out = torch.empty(x.shape[0] * self.size, dtype=x.dtype)
        parts = list(out.chunk(self.size))
        return lambda: dist.gather(x, parts), out

    def _scatter(self, x: Any) -> tuple[Call, Any]:
        parts = list(x.chunk(self.size)) if self.rank == 0 else None
        out = torch.empty(x.shape[0] // self.size, dtype=x.dtype)
        return lambda: dist.scatter(out, parts), out

    def _reduce_scatter(self, x: Any) -> tuple[Call, Any]:
        out = torch.empty(x.shape[0] // self.size, dtype=x.dtype)
        return lambda: dist.reduce_scatter_tensor(out, x), out

    def _all_to_all(self, x: Any) -> tuple[Call, Any]:
        out = torch.empty_like(x)
        return lambda: dist.all_to_all_single(out, x), out

    def _all_to_all_unequal(self, x: Any) -> tuple[Call, Any]:
        out, (gives, gets) = torch.empty_like(x), self.unequal_rows(x.shape[0])
        return lambda: dist.all_to_all_single(out, x, gets, gives), out

    def _broadcast_object(self, x: Any) -> tuple[Call, Any]:
        def call() -> Any:
            objects = [x if self.rank == 0 else None]
            dist.broadcast_object_list(objects, 0)
            return objects[0]

        return call, x

    def _all_gather_object(self, x: Any) -> tuple[Call, Any]:
        def call() -> Any:
            objects: list[Any] = [None] * self.size
            dist.all_gather_object(objects, x)
            return objects[-1]

        return call, x


def join(setup: RankSetup) -> Torch:
    """Connect to the other ranks."""
    return Torch(setup)
