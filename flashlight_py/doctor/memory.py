"""The memory that the ranks of a host share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from flashlight_py.distributed.memory_file import DIRECTORY
from flashlight_py.doctor.finding import Finding, State

__all__ = ["look"]

# Containers have 64 MB unless told otherwise. The channels of some ranks fit, gradients do not.
ENOUGH_BYTES = 256 << 20
_WHO = "only ranks in different containers of this host need it"
_REMEDY = "docker run --shm-size=8g, or mount a larger tmpfs there"


def look() -> Iterator[Finding]:
    """Tell the size of ``/dev/shm``, and whether anything can be put there.

    Ranks that see each other's processes share memory through files without names instead.
    """
    if not DIRECTORY.is_dir():
        detail = f"there is no {DIRECTORY}: {_WHO}, and use Gloo then, many times slower"
        yield Finding("shared memory", State.WARNING, detail, f"mount a tmpfs at {DIRECTORY}")
        return
    usage = shutil.disk_usage(DIRECTORY)
    detail = f"{DIRECTORY}: {usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} MiB free"
    if not os.access(DIRECTORY, os.W_OK | os.X_OK):
        detail = f"{detail}; not writable, but {_WHO}"
        yield Finding("shared memory", State.WARNING, detail, "chmod 1777 it")
    elif usage.free < ENOUGH_BYTES:
        detail = f"{detail}; little, but {_WHO}"
        yield Finding("shared memory", State.WARNING, detail, _REMEDY)
    else:
        yield Finding("shared memory", State.OK, detail)
