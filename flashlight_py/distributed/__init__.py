"""Collectives between processes: moves arrays, knows no module and no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlight_py.distributed import api
from flashlight_py.distributed.api import *
from flashlight_py.distributed.constants import (
    DistributedBackend as DistributedBackend,
    DistributedConstants as DistributedConstants,
    DistributedInit as DistributedInit,
)
from flashlight_py.distributed.failures.abort import abort_on_exception as abort_on_exception
from flashlight_py.distributed.groups.group import ProcessGroup as ProcessGroup
from flashlight_py.distributed.reducers import (
    Bfloat16Compression as Bfloat16Compression,
    Bucket as Bucket,
    Compression as Compression,
    Float16Compression as Float16Compression,
    PowerSGDCompression as PowerSGDCompression,
    TopKCompression as TopKCompression,
)
from flashlight_py.distributed.start.initialize import (
    distributed_init as distributed_init,
    distributed_shutdown as distributed_shutdown,
)
from flashlight_py.distributed.groups.rank_filter import RankFilter as RankFilter
from flashlight_py.distributed.reducers.reducer import (
    CoalescingReducer as CoalescingReducer,
    InlineReducer as InlineReducer,
    Reducer as Reducer,
)
from flashlight_py.distributed.work import Work as Work
from flashlight_py.distributed.groups.world import (
    describe as describe,
    distributed_backend as distributed_backend,
    get_local_rank as get_local_rank,
    get_local_size as get_local_size,
    get_world_rank as get_world_rank,
    get_world_size as get_world_size,
    is_distributed_init as is_distributed_init,
    is_main_process as is_main_process,
    use_local_device as use_local_device,
)

if not TYPE_CHECKING:  # type checkers know by how it is imported
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
        "abort_on_exception",
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
        *api.__all__,
    ]
