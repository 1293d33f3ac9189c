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
        self._done = _Done()

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._done

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
