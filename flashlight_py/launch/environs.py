"""The environment and the standard input that the launcher gives to a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

from flashlight_py.cores import thread_variables, usable_cores
from flashlight_py.launch.plan import Place

__all__ = ["LISTENER", "SECRET", "environ_of", "input_for_rank_0"]

LISTENER, SECRET = "FLASHLIGHT_LISTENER", "FLASHLIGHT_SECRET"
"""Environment variables: the descriptor at which rank 0 listens, and what ranks prove to know."""

# Where ranks meet if not told by this launcher; what an outer launch says must not reach a rank.
_MEETINGS = ("FLASHLIGHT_FILE", "MASTER_ADDR", "MASTER_PORT", LISTENER, SECRET)


def environ_of(
    environ: Mapping[str, str], place: Place, size: int, restarts: int, meeting: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a rank, made from ``environ`` of the launcher on its host.

    ``meeting`` says where the ranks find each other. Output is unbuffered, so that it comes as it
    is printed, and a crash in native code shows where it was, unless ``environ`` says otherwise.
    """
    inherited = {name: value for name, value in environ.items() if name not in _MEETINGS}
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    numbers = {
        "RANK": place.rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "FLASHLIGHT_RESTART_COUNT": restarts,
    }
    return {
        **defaults,
        **inherited,
        **thread_variables(environ, place.local_size, usable_cores()),
        **{name: str(value) for name, value in numbers.items()},
        **meeting,
    }


def input_for_rank_0() -> int | None:
    """Return our standard input; None if it is closed, or a terminal that others have in front.

    A rank is in a session of its own, so the kernel would not stop it from taking what is typed
    for somebody else.
    """
    with suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stdin.fileno()
        if not os.isatty(descriptor) or os.tcgetpgrp(descriptor) == os.getpgrp():
            return descriptor
    return None
