"""What torch's own suite leaves out, in its form: ranks are ``self.rank`` of a group that is there.

Every one of these passes on gloo as well.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Cases:
    rank: int
    _barrier: Callable[..., None]
    assertRaisesRegex: Any

    def test_gather_when_others_have_no_list(self) -> None:
        size = dist.get_world_size()
        for is_async in (False, True):
            x = torch.full((3,), float(self.rank))
            parts = [torch.empty(3) for _ in range(size)] if self.rank == 0 else None
            work = dist.gather(x, parts, dst=0, async_op=is_async)
            if is_async:
                work.wait()
            if parts:
                assert [part[0].item() for part in parts] == list(range(size))

    def test_monitored_barrier_names_who_is_missing(self) -> None:
        group = dist.new_group([0, 1])
        dist.monitored_barrier(group, timedelta(seconds=60))  # other ranks need not be there
        if self.rank == 0:
            with self.assertRaisesRegex(RuntimeError, "[Rr]ank 1 "):  # noqa: PT027
                dist.monitored_barrier(group, timedelta(seconds=0.5))
        self._barrier(timeout=60)
