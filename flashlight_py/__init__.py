"""A small tensor framework in the style of flashlight for NumPy and CuPy arrays.

Variables and modules to train with, and collectives that let one script run on one process, on
every core of a machine or on many hosts. See ``distributed_init`` and ``all_reduce`` first.

A name is imported when it is first used: the launcher, which uses none, starts without NumPy, and
who only reduces arrays does not wait for modules and optimizers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashlight_py._version import __version__

if TYPE_CHECKING:
    from flashlight_py import (
        autograd,
        checkpoint,
        dataset,
        device,
        distributed,
        errors,
        meter,
        nn,
        optim,
        parallel,
        trace,
    )
    from flashlight_py.autograd import Variable, input, no_grad, param
    from flashlight_py.autograd.gradcheck import gradcheck
    from flashlight_py.checkpoint import Checkpoint, load, save
    from flashlight_py.distributed import (
        Bfloat16Compression,
        CoalescingReducer,
        DistributedBackend,
        DistributedConstants,
        DistributedInit,
        Float16Compression,
        InlineReducer,
        P2POp,
        PowerSGDCompression,
        ProcessGroup,
        RankFilter,
        Reducer,
        TopKCompression,
        Work,
        abort_on_exception,
        all_gather,
        all_gather_object,
        all_reduce,
        all_reduce_location,
        all_reduce_multiple,
        all_to_all,
        barrier,
        batch_isend_irecv,
        broadcast,
        broadcast_object,
        distributed_backend,
        distributed_init,
        distributed_shutdown,
        gather,
        gather_object,
        get_local_rank,
        get_local_size,
        get_world_rank,
        get_world_size,
        irecv,
        is_distributed_init,
        is_main_process,
        isend,
        new_group,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        scatter_object,
        send,
        sendrecv,
        shared_empty,
        split,
        sync_distributed,
    )
    from flashlight_py.launch import spawn
    from flashlight_py.parallel import (
        DistributedDataContainer,
        DistributedOptimizer,
        DistributedSampler,
        PeriodicAveraging,
        ShardedDataset,
        all_reduce_gradients,
        all_reduce_parameters,
        broadcast_parameters,
        distribute_module_grads,
        functional,
        no_sync,
        sync_meter,
    )
    from flashlight_py.parallel.join import join
    from flashlight_py.parallel.synchronize import synchronize
    from flashlight_py.random import set_seed
    from flashlight_py.trace import profile

__all__ = [
    "__version__",
    "autograd",
    "checkpoint",
    "dataset",
    "device",
    "distributed",
    "errors",
    "functional",
    "meter",
    "nn",
    "optim",
    "parallel",
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
    "all_reduce",
    "all_reduce_location",
    "all_reduce_multiple",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "recv",
    "isend",
    "irecv",
    "sendrecv",
    "batch_isend_irecv",
    "P2POp",
    "broadcast_object",
    "all_gather_object",
    "gather_object",
    "scatter_object",
    "new_group",
    "split",
    "barrier",
    "sync_distributed",
    "shared_empty",
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
    "no_sync",
    "join",
    "synchronize",
    "sync_meter",
    "profile",
    "save",
    "load",
    "Checkpoint",
    "spawn",
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
    "meter",
    "nn",
    "optim",
    "parallel",
    "trace",
)
# Where a public name is imported from; all others are from distributed.
_HOMES = {
    "autograd": ["Variable", "gradcheck", "input", "no_grad", "param"],
    "checkpoint": ["Checkpoint", "load", "save"],
    "launch": ["spawn"],
    "parallel": [
        "DistributedDataContainer",
        "DistributedOptimizer",
        "DistributedSampler",
        "PeriodicAveraging",
        "ShardedDataset",
        "all_reduce_gradients",
        "all_reduce_parameters",
        "broadcast_parameters",
        "distribute_module_grads",
        "functional",
        "join",
        "no_sync",
        "sync_meter",
        "synchronize",
    ],
    "random": ["set_seed"],
    "trace": ["profile"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PARTS:
        return import_module(f"{__name__}.{name}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF.get(name, 'distributed')}"), name)
    globals()[name] = value  # the next use finds it at once
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion in a shell."""
    return __all__
