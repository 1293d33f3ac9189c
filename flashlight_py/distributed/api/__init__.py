"""The public verbs. Each acts on the world, or on the group that is given.

An array is a ``numpy.ndarray``, a ``cupy.ndarray``, anything with DLPack whose memory can be
shared, or a ``Variable`` (its array is meant). Before ``distributed_init`` the world is rank 0
of 1, and every verb is the identity, times the scale.
"""

from __future__ import annotations

from flashlight_py.distributed.api.groups import barrier, new_group, split, sync_distributed
from flashlight_py.distributed.api.messages import (
    batch_isend_irecv,
    irecv,
    isend,
    recv,
    send,
    sendrecv,
)
from flashlight_py.distributed.api.movement import (
    all_gather,
    all_to_all,
    broadcast,
    gather,
    scatter,
)
from flashlight_py.distributed.api.multiple import all_reduce_multiple
from flashlight_py.distributed.api.objects import (
    all_gather_object,
    broadcast_object,
    gather_object,
    scatter_object,
)
from flashlight_py.distributed.api.reductions import (
    all_reduce,
    all_reduce_location,
    reduce,
    reduce_scatter,
    shared_empty,
)
from flashlight_py.distributed.messaging import P2POp

__all__ = [
    "barrier",
    "sync_distributed",
    "new_group",
    "split",
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "all_gather_object",
    "broadcast_object",
    "gather_object",
    "scatter_object",
    "P2POp",
    "batch_isend_irecv",
    "irecv",
    "isend",
    "recv",
    "send",
    "sendrecv",
    "all_reduce",
    "all_reduce_location",
    "all_reduce_multiple",
    "reduce",
    "reduce_scatter",
    "shared_empty",
]
