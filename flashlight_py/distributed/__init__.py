"""Communication between processes. This package does not depend on layers or gradients."""

from flashlight_py.distributed import api
from flashlight_py.names import export

# Source module of each public name. `scripts/stubs` writes the same table for type checkers.
_HOMES = {
    "constants": ["DistributedBackend", "DistributedConstants", "DistributedInit"],
    "start.initialize": ["distributed_init", "distributed_shutdown"],
    "start.world": [
        *("is_distributed_init", "distributed_backend", "get_world_rank", "get_world_size"),
        *("get_local_rank", "get_local_size", "is_main_process", "use_local_device", "describe"),
        "RankFilter",
    ],
    "failures.abort": ["abort_on_exception"],
    "api.group": ["ProcessGroup"],
    "work": ["Work"],
    "reducers.reducer": ["Reducer", "InlineReducer", "CoalescingReducer"],
    "reducers.hook": [
        *("Bucket", "Compression", "Float16Compression", "Bfloat16Compression"),
        "PowerSGDCompression",
    ],
    "api": api.__all__,
}
export(globals(), _HOMES)
