"""What all ranks have seen together."""

from __future__ import annotations

from typing import Any

from flashlight_py.distributed import all_reduce
from flashlight_py.meter import Meter


def sync_meter(meter: Meter) -> Any:
    """Return the value that ``meter`` would have if it had seen what all ranks' meters saw.

    Collective, blocking. Every rank calls it with a meter made alike, and gets the same value.
    The meters stay as they are, so it can be repeated at any time.

    Raises:
        TypeError: ``meter`` is no Meter.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    if not isinstance(meter, Meter):
        raise TypeError(f"sync_meter takes a flashlight_py.meter.Meter, got {type(meter).__name__}")
    return meter.value_of(all_reduce(meter.state()))
