"""Common code for every library's all_reduce on a GPU: timing, and the correct result."""

import abc
import statistics
import time
from collections.abc import Mapping
from typing import Any

from harness.gpu import shares_gpu
from harness.role import Call, Prepared, Role
from harness.roles.verbs import elements, total

__all__ = ["CudaRole"]

# Number of launches before the host waits for the device. After about 1000 launches CUDA blocks the
# host.
LAUNCHES = 20
SERIES = 15
SERIES_SHARED = 5  # for ranks that share a GPU: a launch takes milliseconds
# The host's time for a launch does not depend on the size, so large arrays need no such
# measurement.
LARGEST_LAUNCHED = 64 << 10


class CudaRole(Role):
    """A library whose all_reduce returns before the device has finished."""

    @abc.abstractmethod
    def zeros(self, count: int, dtype: str) -> Any:
        """Return an array on this rank's GPU."""

    @abc.abstractmethod
    def launcher(self, array: Any) -> Call:
        """Return the call that starts a sum of ``array`` over the ranks, in place."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until the device has finished all work."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        """Return a call that ends when the device has finished.

        The detail is the host's seconds to launch a small array, and None for large arrays.
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
            values, expected = {float(array[0]), float(array[-1])}, {float(total(self.size))}
            if values != expected:
                raise RuntimeError(f"all_reduce, rank {self.rank}: sum {values}, not {expected}")
            array[...] = 0
            self.synchronize()

        check()
        small = task["nbytes"] <= LARGEST_LAUNCHED
        return Prepared(call, self._seconds_to_launch(launch) if small else None, check)

    def _seconds_to_launch(self, launch: Call) -> float:
        """Return the median host time of one launch without the device time."""
        seconds = []
        for _ in range(SERIES_SHARED if shares_gpu() else SERIES):
            self.barrier()
            start = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            seconds.append((time.perf_counter() - start) / LAUNCHES)
            self.synchronize()
        return statistics.median(seconds)
