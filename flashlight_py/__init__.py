"""A small tensor framework in the style of flashlight for NumPy and CuPy arrays.

Variables and modules to train with, and collectives that let one script run on one process, on
every core of a machine or on many hosts. See ``distributed_init`` and ``all_reduce`` first.

A name is imported when it is first used: the launcher, which uses none, starts without NumPy, and
who only reduces arrays does not wait for modules and optimizers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashlight_py._version import __version__ as __version__

if TYPE_CHECKING:
    from flashlight_py import (
        autograd as autograd,
        checkpoint as checkpoint,
        dataset as dataset,
        device as device,
        distributed as distributed,
        errors as errors,
        launch as launch,
        meter as meter,
        nn as nn,
        optim as optim,
        parallel as parallel,
        tagi as tagi,
        trace as trace,
    )
    from flashlight_py.autograd import (
        Variable as Variable,
        input as input,
        no_grad as no_grad,
        param as param,
    )
    from flashlight_py.autograd.gradcheck import gradcheck as gradcheck
    from flashlight_py.checkpoint import Checkpoint as Checkpoint, load as load, save as save
    from flashlight_py.distributed import (
        Bfloat16Compression as Bfloat16Compression,
        CoalescingReducer as CoalescingReducer,
        DistributedBackend as DistributedBackend,
        DistributedConstants as DistributedConstants,
        DistributedInit as DistributedInit,
        Float16Compression as Float16Compression,
        InlineReducer as InlineReducer,
        PowerSGDCompression as PowerSGDCompression,
        ProcessGroup as ProcessGroup,
        RankFilter as RankFilter,
        Reducer as Reducer,
        TopKCompression as TopKCompression,
        Work as Work,
        abort_on_exception as abort_on_exception,
        distributed_backend as distributed_backend,
        distributed_init as distributed_init,
        distributed_shutdown as distributed_shutdown,
        get_local_rank as get_local_rank,
        get_local_size as get_local_size,
        get_world_rank as get_world_rank,
        get_world_size as get_world_size,
        is_distributed_init as is_distributed_init,
        is_main_process as is_main_process,
    )
    from flashlight_py.distributed.api import *
    from flashlight_py.launch import spawn as spawn
    from flashlight_py.nn import recompute as recompute
    from flashlight_py.parallel import (
        DataParallel as DataParallel,
        DistributedDataContainer as DistributedDataContainer,
        DistributedOptimizer as DistributedOptimizer,
        DistributedSampler as DistributedSampler,
        PeriodicAveraging as PeriodicAveraging,
        ShardedDataset as ShardedDataset,
        all_reduce_gradients as all_reduce_gradients,
        all_reduce_parameters as all_reduce_parameters,
        broadcast_parameters as broadcast_parameters,
        distribute_module_grads as distribute_module_grads,
        fully_shard as fully_shard,
        functional as functional,
        leaves as leaves,
        no_sync as no_sync,
        sync_meter as sync_meter,
    )
    from flashlight_py.parallel.join import join as join
    from flashlight_py.parallel.synchronize import synchronize as synchronize
    from flashlight_py.random import set_seed as set_seed
    from flashlight_py.tape import capture as capture
    from flashlight_py.trace import profile as profile

# All but the verbs. Type checkers know what is public by how it is imported.
_NAMES = [
    "__version__",
    "autograd",
    "checkpoint",
    "dataset",
    "device",
    "distributed",
    "errors",
    "launch",
    "functional",
    "meter",
    "nn",
    "optim",
    "parallel",
    "tagi",
    "trace",
    "Variable",
    "input",
    "no_grad",
    "param",
    "gradcheck",
    "set_seed",
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
    "abort_on_exception",
    "ProcessGroup",
    "Work",
    "Reducer",
    "InlineReducer",
    "CoalescingReducer",
    "Float16Compression",
    "Bfloat16Compression",
    "TopKCompression",
    "PowerSGDCompression",
    "broadcast_parameters",
    "all_reduce_parameters",
    "all_reduce_gradients",
    "distribute_module_grads",
    "leaves",
    "fully_shard",
    "no_sync",
    "recompute",
    "join",
    "synchronize",
    "sync_meter",
    "profile",
    "capture",
    "save",
    "load",
    "Checkpoint",
    "spawn",
    "DataParallel",
    "DistributedOptimizer",
    "PeriodicAveraging",
    "DistributedDataContainer",
    "DistributedSampler",
    "ShardedDataset",
]

_PARTS = (
    "autograd",
    "checkpoint",
    "dataset",
    "device",
    "distributed",
    "errors",
    "launch",
    "meter",
    "nn",
    "optim",
    "parallel",
    "tagi",
    "trace",
)
# Where a public name is imported from; all others are from distributed: the verbs, by its own list.
_HOMES = {
    "autograd": ["Variable", "gradcheck", "input", "no_grad", "param"],
    "checkpoint": ["Checkpoint", "load", "save"],
    "launch": ["spawn"],
    "nn": ["recompute"],
    "parallel": [
        "DataParallel",
        "DistributedDataContainer",
        "DistributedOptimizer",
        "DistributedSampler",
        "PeriodicAveraging",
        "ShardedDataset",
        "all_reduce_gradients",
        "all_reduce_parameters",
        "broadcast_parameters",
        "distribute_module_grads",
        "fully_shard",
        "functional",
        "join",
        "leaves",
        "no_sync",
        "sync_meter",
        "synchronize",
    ],
    "random": ["set_seed"],
    "tape": ["capture"],
    "trace": ["profile"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name in _PARTS:
        return import_module(f"{__name__}.{name}")
    if name == "__all__":
        value: Any = [*_NAMES, *_verbs()]
    elif name in _NAMES or (not name.startswith("_") and name in _verbs()):
        value = getattr(import_module(f"{__name__}.{_HOME_OF.get(name, 'distributed')}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next use finds it at once
    return value


def _verbs() -> list[str]:
    names: list[str] = import_module(f"{__name__}.distributed.api").__all__
    return names


def __dir__() -> list[str]:
    """Return the public names, for completion in a shell."""
    names: list[str] = __getattr__("__all__")
    return names
