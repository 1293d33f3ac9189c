"""Collectives between processes: moves arrays, knows no module and no gradient."""

from __future__ import annotations

from flashlight_py.distributed.api import (
    all_gather,
    all_reduce,
    all_reduce_multiple,
    barrier,
    broadcast,
    recv,
    reduce_scatter,
    send,
    shared_empty,
    sync_distributed,
)
from flashlight_py.distributed.constants import (
    DistributedBackend,
    DistributedConstants,
    DistributedInit,
)
from flashlight_py.distributed.group import ProcessGroup
from flashlight_py.distributed.hooks import (
    Bfloat16Compression,
    Bucket,
    Compression,
    Float16Compression,
    PowerSGDCompression,
    TopKCompression,
)
from flashlight_py.distributed.initialize import distributed_init, distributed_shutdown
from flashlight_py.distributed.rank_filter import RankFilter
from flashlight_py.distributed.reducer import CoalescingReducer, InlineReducer, Reducer
from flashlight_py.distributed.work import Work
from flashlight_py.distributed.world import (
    describe,
    distributed_backend,
    get_local_rank,
    get_local_size,
    get_world_rank,
    get_world_size,
    is_distributed_init,
    is_main_process,
    use_local_device,
)

__all__ = [
    "DistributedBackend",
    "DistributedConstants",
    "DistributedInit",
    "distributed_init",
    "distributed_shutdown",
    "is_distributed_init",
    "distributed_backend",
    "get_world_rank",
    "get_world_size",
    "get_local_rank",
    "get_local_size",
    "is_main_process",
    "RankFilter",
    "use_local_device",
    "all_reduce",
    "all_reduce_multiple",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "send",
    "recv",
    "barrier",
    "sync_distributed",
    "shared_empty",
    "describe",
    "ProcessGroup",
    "Work",
    "Reducer",
    "InlineReducer",
    "CoalescingReducer",
    "Bucket",
    "Compression",
    "Float16Compression",
    "Bfloat16Compression",
    "TopKCompression",
    "PowerSGDCompression",
]
