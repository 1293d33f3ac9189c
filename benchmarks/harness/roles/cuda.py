"""What every library's all_reduce on a GPU has in common: how it is timed, and the right answer."""

import abc
import statistics
import time
from collections.abc import Mapping
from typing import Any

from harness.gpu import shares_gpu
from harness.role import Call, Prepared, Role
from harness.roles.verbs import elements, total

__all__ = ["CudaRole"]

# Launches in a row before the device is waited for. CUDA takes some 1000 before the host blocks.
LAUNCHES = 20
SERIES = 15
SERIES_SHARED = 5  # ranks that share a GPU get slices of its time: a launch takes milliseconds
# What the host does for a launch does not depend on the size, as the device's time does.
LARGEST_LAUNCHED = 64 << 10


class CudaRole(Role):
    """A library whose all_reduce returns before the device has done it."""

    @abc.abstractmethod
    def zeros(self, count: int, dtype: str) -> Any:
        """Return an array on this rank's GPU."""

    @abc.abstractmethod
    def launcher(self, array: Any) -> Call:
        """Return the call that starts a sum of ``array`` over the ranks, in place."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until the device is done with everything."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        """Return a call that ends with the device.

        The detail is the host's seconds to launch, for small arrays; None for others.
        """
        array = self.zeros(elements(task["nbytes"], 4, 1), task["dtype"])
        launch = self.launcher(array)

        def call() -> None:
            launch()
            self.synchronize()

        def check() -> None:
            array[...] = self.rank + 1
            self.synchronize()
            call()
            found, expected = {float(array[0]), float(array[-1])}, {float(total(self.size))}
            if found != expected:
                raise RuntimeError(f"all_reduce, rank {self.rank}: sum {found}, not {expected}")
            array[...] = 0
            self.synchronize()

        check()
        small = task["nbytes"] <= LARGEST_LAUNCHED
        return Prepared(call, self._seconds_to_launch(launch) if small else None, check)

    def _seconds_to_launch(self, launch: Call) -> float:
        """Return the median of what the host takes for one launch, the device apart."""
        found = []
        for _ in range(SERIES_SHARED if shares_gpu() else SERIES):
            self.barrier()
            start = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            found.append((time.perf_counter() - start) / LAUNCHES)
            self.synchronize()
        return statistics.median(found)
