"""Cases that torch's own suite lacks, in its form. ``self.rank`` is the rank in an existing group.

All cases also pass with gloo.
"""

import _thread
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Cases:
    rank: int
    _barrier: Callable[..., None]
    assertRaisesRegex: Any

    def test_gather_if_other_ranks_pass_no_list(self) -> None:
        size = dist.get_world_size()
        for is_async in (False, True):
            x = torch.full((3,), float(self.rank))
            parts = [torch.empty(3) for _ in range(size)] if self.rank == 0 else None
            work = dist.gather(x, parts, dst=0, async_op=is_async)
            if is_async:
                work.wait()
            if parts:
                assert [part[0].item() for part in parts] == list(range(size))

    def test_messages_of_a_thread_that_has_no_other_code(self) -> None:
        group: Any = dist.group.WORLD
        if self.rank < 2:
            x = torch.full((3,), float(self.rank))
            begin = group.recv if self.rank else group.send
            works: list[Any] = []
            calls = map(begin, [[x]], [1 - self.rank], [0])
            _thread.start_new_thread(works.extend, (calls,))
            end = time.monotonic() + 10
            while not works and time.monotonic() < end:
                time.sleep(0.001)
            works[0].wait()
            assert x.tolist() == [0.0] * 3

    def test_monitored_barrier_names_missing_ranks(self) -> None:
        group = dist.new_group([0, 1])
        dist.monitored_barrier(group, timedelta(seconds=60))  # other ranks may be absent
        if self.rank == 0:
            with self.assertRaisesRegex(RuntimeError, "[Rr]ank 1 "):  # noqa: PT027
                dist.monitored_barrier(group, timedelta(seconds=0.5))
        self._barrier(timeout=60)

    def _expected_in_pieces(self) -> tuple[list[torch.Tensor], Any]:
        """Return tensors that a collective fills by copies, and its Work."""
        size = dist.get_world_size()
        parts = [torch.zeros(2, 3).t() for _ in range(size)]
        work = dist.all_gather(parts, torch.full((3, 2), self.rank + 1.0), async_op=True)
        return parts, work

    def test_result_is_there_when_a_work_says_so(self) -> None:
        parts, work = self._expected_in_pieces()
        while not work.is_completed():
            time.sleep(0.001)
        assert [part[2, 1].item() for part in parts] == [1.0 + rank for rank in range(len(parts))]

    def test_result_of_a_work_that_is_dropped(self) -> None:
        parts, work = self._expected_in_pieces()
        del work
        self._barrier()
        end = time.monotonic() + 10
        while not all(part[2, 1].item() for part in parts) and time.monotonic() < end:
            time.sleep(0.001)
        assert [part[2, 1].item() for part in parts] == [1.0 + rank for rank in range(len(parts))]

    def test_all_to_all_of_other_counts_than_expected(self) -> None:
        if dist.get_backend() == "gloo":
            return  # the process ends here, as expected
        size = dist.get_world_size()
        counts = [0, 2, *[1] * (size - 2)] if self.rank == 0 else [1] * size  # equal totals
        x, out = torch.ones(size), torch.zeros(size)
        for is_async in (False, True):
            try:
                work = dist.all_to_all_single(out, x, counts, [1] * size, None, is_async)
                if is_async:
                    work.wait()
            except (RuntimeError, ValueError):
                continue
            assert is_async
            assert self.rank
