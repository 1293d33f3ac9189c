"""A random mix of everything at once: what all ranks do is drawn alike, when each waits is not."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashlight_py as fl

Started = tuple[Any, Callable[[], Any], NDArray[Any]]  # a work, what gives its result, the expected


def numbers(rank: int, step: int, count: int) -> NDArray[Any]:
    """Whole numbers, whose sums are exact in any order."""
    return np.random.default_rng([step, rank]).integers(0, 1000, count).astype(float)


class Mix:
    """Starts step after step on one rank of ``size``."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.rank, self.size = rank, size
        self.shared, self.own = random.Random(seed), random.Random(1000 * seed + rank)
        self.pending: list[Started] = []

    def run(self, steps: int) -> None:
        kinds = [self.all_reduce, self.broadcast, self.all_gather, self.all_to_all, self.barrier]
        kinds += [self.message] * 4
        for step in range(steps):
            count = self.shared.choice([0, 1, 10, 100, 2000, 20_000])
            self.pending += self.shared.choice(kinds)(step, count)
            while len(self.pending) > self.own.randrange(1, 12):
                if not self.finish(self.own.randrange(len(self.pending)), 0.02):
                    break
        while self.pending:
            self.finish(0, None)

    def finish(self, index: int, timeout: float | None) -> bool:
        """Wait for one of those that are under way; False: it goes on."""
        started = self.pending.pop(index)
        work, result, expected = started
        try:
            work.wait(timeout)
        except fl.errors.CollectiveTimeoutError as error:
            if "it goes on" not in str(error):
                raise
            self.pending.append(started)
            return False
        np.testing.assert_array_equal(result(), expected)
        return True

    def all_reduce(self, step: int, count: int) -> list[Started]:
        x = numbers(self.rank, step, count)
        expected = sum(numbers(r, step, count) for r in range(self.size))
        return [(fl.all_reduce(x, async_op=True), lambda: x, np.asarray(expected))]

    def broadcast(self, step: int, count: int) -> list[Started]:
        x, root = numbers(self.rank, step, count), self.shared.randrange(self.size)
        work = fl.broadcast(x, root, async_op=True)
        return [(work, lambda: x, numbers(root, step, count))]

    def all_gather(self, step: int, count: int) -> list[Started]:
        work = fl.all_gather(numbers(self.rank, step, count + self.rank), async_op=True)
        parts = [numbers(r, step, count + r) for r in range(self.size)]
        return [(work, work.wait, np.concatenate(parts))]

    def all_to_all(self, step: int, count: int) -> list[Started]:
        work = fl.all_to_all(numbers(self.rank, step, count * self.size), async_op=True)
        mine = slice(count * self.rank, count * (self.rank + 1))
        parts = [numbers(r, step, count * self.size)[mine] for r in range(self.size)]
        return [(work, work.wait, np.concatenate(parts))]

    def message(self, step: int, count: int) -> list[Started]:
        """Between any two, and from a rank to itself; three tags, so many are alike."""
        src, dst = self.shared.randrange(self.size), self.shared.randrange(self.size)
        tag, x, started = self.shared.randrange(3), numbers(src, step, count), []
        if self.rank == src:
            started.append((fl.isend(x, dst, tag), lambda: x, x))
        if self.rank == dst:
            y = np.zeros(count)
            started.append((fl.irecv(y, src, tag), lambda: y, x))
        return started

    def barrier(self, step: int, count: int) -> list[Started]:
        fl.barrier()
        return []


def mix(rank: int, size: int, seed: int, steps: int) -> None:
    Mix(rank, size, seed).run(steps)
    fl.sync_distributed()
