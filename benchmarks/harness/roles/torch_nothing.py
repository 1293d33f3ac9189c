"""A backend of torch.distributed that does nothing, which shows the time of torch's own
functions."""

from typing import Any

import torch.distributed as dist

from harness.role import RankSetup
from harness.roles.torch_collectives import Torch
from harness.roles.verbs import Expected


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class Group(dist.ProcessGroup):
    """Ranks that reduce nothing; gloo connects them."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
        self._done, self._name = _Done(), ""

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._done

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> dist.Work:
        return self._done

    # torch 2.13 calls one of these methods for all_gather_into_tensor.
    all_gather_single = _allgather_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _allgather_base

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier(opts)


class Nothing(Torch):
    """Its results are wrong, because it does nothing."""

    def _compare(self, verb: str, expected: Expected | None, count: int, result: Any) -> None:
        pass


def _create(options: Any, _: Any) -> Group:
    return Group(options)


dist.Backend.register_backend("nothing", _create, extended_api=True, devices=["cpu"])


def join(setup: RankSetup) -> Nothing:
    """Connect to the other ranks."""
    return Nothing(setup)
