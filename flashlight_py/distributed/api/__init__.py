"""The public verbs. Each acts on the world, or on the group that is given.

An array is a ``numpy.ndarray``, a ``cupy.ndarray``, anything with DLPack whose memory can be
shared, or a ``Variable`` (its array is meant). Before ``distributed_init`` the world is rank 0
of 1, and every verb is the identity, times the scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlight_py.distributed.api import (
    groups,
    locations,
    memory,
    messages,
    movement,
    multiple,
    objects,
    reductions,
)
from flashlight_py.distributed.api.groups import *
from flashlight_py.distributed.api.locations import *
from flashlight_py.distributed.api.memory import *
from flashlight_py.distributed.api.messages import *
from flashlight_py.distributed.api.movement import *
from flashlight_py.distributed.api.multiple import *
from flashlight_py.distributed.api.objects import *
from flashlight_py.distributed.api.reductions import *

if not TYPE_CHECKING:  # type checkers know by how it is imported
    __all__ = [
        *groups.__all__,
        *locations.__all__,
        *memory.__all__,
        *messages.__all__,
        *movement.__all__,
        *multiple.__all__,
        *objects.__all__,
        *reductions.__all__,
    ]
