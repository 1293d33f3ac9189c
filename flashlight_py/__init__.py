"""A small tensor framework in the style of flashlight, for NumPy and CuPy arrays.

It has collectives, and variables, modules and optimizers for training. The same script runs in one
process, in one process per core, or on many hosts. Begin with ``distributed_init``.

A name is imported at its first use. So the launcher starts without NumPy, and a program that only
reduces arrays does not load modules and optimizers. (For pytest: PYTEST_DONT_REWRITE.)
"""

from importlib import import_module
from typing import Any

from flashlight_py._version import __version__ as __version__

# Public names by submodule. The entry "" lists public modules. distributed.api has the verbs.
# `scripts/stubs` copies this table to __init__.pyi for type checkers.
_HOMES = {
    "_version": ["__version__"],
    "": [
        *("amp", "autograd", "checkpoint", "dataset", "device", "distributed", "errors", "launch"),
        *("meter", "nn", "optim", "parallel", "random", "tagi", "trace"),
    ],
    "autograd": ["Variable", "input", "no_grad", "param"],
    "autograd.gradcheck": ["gradcheck"],
    "random": ["set_seed"],
    "distributed": [
        *("DistributedBackend", "DistributedConstants", "DistributedInit", "distributed_init"),
        *("distributed_shutdown", "is_distributed_init", "distributed_backend"),
        *("get_world_rank", "get_world_size", "get_local_rank", "get_local_size"),
        *("is_main_process", "RankFilter", "abort_on_exception", "ProcessGroup", "Work"),
        *("Reducer", "InlineReducer", "CoalescingReducer"),
        *("Float16Compression", "Bfloat16Compression", "PowerSGDCompression"),
    ],
    "parallel": [
        *("functional", "broadcast_parameters", "all_reduce_parameters", "all_reduce_gradients"),
        *("distribute_module_grads", "leaves", "fully_shard", "join", "no_sync", "sync_meter"),
        *("DataParallel", "DistributedOptimizer", "PeriodicAveraging"),
        *("DistributedDataContainer", "DistributedSampler", "ShardedDataset"),
    ],
    "parallel.synchronize": ["synchronize"],
    "nn": ["recompute"],
    "trace": ["profile"],
    "tape": ["capture"],
    "checkpoint": ["save", "load", "Checkpoint"],
    "launch": ["spawn"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    home = _HOME_OF.get(name)
    if home == "" or name == "system":  # first, because _verbs() needs the module system
        return import_module(f"{__name__}.{name}")
    if name == "__all__":
        value: Any = [
            *(name for name, home in _HOME_OF.items() if _is_here(home or name)),
            *_verbs(),
        ]
    elif home or (not name.startswith("_") and name in _verbs()):
        value = getattr(import_module(f"{__name__}.{home or 'distributed'}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # later lookups skip __getattr__
    return value


def _is_here(module: str) -> bool:
    """Return False if ``module`` is an optional package whose folder was deleted, else True."""
    from importlib.util import find_spec  # imported here, because the import is slow

    return module not in ("amp", "tagi", "tape") or find_spec(f"{__name__}.{module}") is not None


def _verbs() -> list[str]:
    names: list[str] = import_module(f"{__name__}.distributed.api").__all__
    return names


def __dir__() -> list[str]:
    """Return the public names, for completion in a shell."""
    names: list[str] = __getattr__("__all__")
    return names
