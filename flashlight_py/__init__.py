"""A small tensor framework in the style of flashlight for NumPy and CuPy arrays.

Variables and modules to train with, and collectives that let one script run on one process, on
every core of a machine or on many hosts. See ``distributed_init`` and ``all_reduce`` first.
"""

from __future__ import annotations

from flashlight_py import autograd, dataset, device, distributed, errors, meter, nn, optim, parallel
from flashlight_py._version import __version__
from flashlight_py.autograd import Variable, gradcheck, input, no_grad, param
from flashlight_py.distributed import (
    CoalescingReducer,
    DistributedBackend,
    DistributedConstants,
    DistributedInit,
    InlineReducer,
    ProcessGroup,
    Reducer,
    Work,
    all_gather,
    all_reduce,
    all_reduce_multiple,
    barrier,
    broadcast,
    distributed_backend,
    distributed_init,
    distributed_shutdown,
    get_local_rank,
    get_local_size,
    get_world_rank,
    get_world_size,
    is_distributed_init,
    recv,
    reduce_scatter,
    send,
    shared_empty,
    sync_distributed,
)
from flashlight_py.parallel import (
    all_reduce_gradients,
    all_reduce_parameters,
    distribute_module_grads,
    no_sync,
    sync_meter,
)
from flashlight_py.random import set_seed

__all__ = [
    "__version__",
    "autograd",
    "dataset",
    "device",
    "distributed",
    "errors",
    "meter",
    "nn",
    "optim",
    "parallel",
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
    "ProcessGroup",
    "Work",
    "Reducer",
    "InlineReducer",
    "CoalescingReducer",
    "all_reduce_parameters",
    "all_reduce_gradients",
    "distribute_module_grads",
    "no_sync",
    "sync_meter",
]
