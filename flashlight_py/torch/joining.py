"""Creation of process groups with torch's store. torch and this package share one world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch.distributed.distributed_c10d import default_pg_timeout

from flashlight_py.distributed import ProcessGroup, broadcast_object, internal, is_distributed_init
from flashlight_py.distributed.internal import current_world, hide_folder, initialize
from flashlight_py.interfaces import own_addresses
from flashlight_py.torch.process_group import FlashlightGroup
from flashlight_py.torch.store import TorchStore

OWNER = "torch.distributed"
hide_folder(f"{Path(torch.__file__).parent}/")
hide_folder(typing_extensions.__file__)  # typing_extensions calls deprecated functions of torch


def join_process_group(options: Any, params: Any) -> FlashlightGroup:
    """Join the ranks of a process group. Collective, blocking.

    ``options`` come from torch: store, rank, size, timeout and the ranks in the world (empty for
    the default group). ``params`` is the ``pg_options`` of the user, a dict of
    ``distributed_init``'s parameters. If this process is in a world, this world becomes the default
    group. Otherwise the default group becomes the world.

    Raises:
        ValueError: If the existing world has another rank or size, or if ``params`` are invalid.
        RendezvousError, BackendUnavailableError: As in ``distributed_init``.
    """
    rank, size = options.group_rank, options.group_size
    usual = min(options.timeout.total_seconds(), internal.MOST_SECONDS)
    options_of_user = dict(params) if isinstance(params, Mapping) else {}
    settings = internal.Settings.from_params({"TIMEOUT": usual, **options_of_user})
    ranks = list(options.global_ranks_in_group)
    store, ours = options.store, True

    def meeting() -> TorchStore:
        return TorchStore(store, rank, size, settings.joining_seconds)

    if not ranks and is_distributed_init() and current_world().owner == OWNER:
        initialize.leave()  # torch 2.6 destroys groups without a call of shutdown()
    if not ranks and is_distributed_init():
        group, ours = current_world().group, False
        if (group.rank, group.size) != (rank, size):
            raise ValueError(
                f"init_process_group: expected rank {group.rank} of {group.size} as in "
                f"distributed_init, got rank {rank} of {size}. Pass the same to both"
            )
        if options.timeout != default_pg_timeout:
            group.limit(settings.timeout)
    elif not ranks:
        initialize.enter(replace(initialize.create_world(meeting, settings), owner=OWNER), settings)
        group = current_world().group
    elif is_distributed_init() and current_world().group.size == dist.get_world_size():
        members = meeting()
        group = current_world().group.subgroup(ranks, members, settings.timeout)
        members.close()
    else:
        group = initialize.create_world(meeting, settings).group
    end = _end(group, not ranks, ours)
    return FlashlightGroup(group, store, settings.timeout, end, join_process_group)


def _end(group: ProcessGroup, is_world: bool, ours: bool) -> Callable[[], None]:
    """Return a function that ends ``group`` if torch created it (``ours``), else does nothing."""
    if ours and not is_world:
        return group.close
    return lambda: initialize.leave() if ours and current_world().group is group else None


def rendezvous() -> Iterator[tuple[Any, int, int]]:
    """Yield a store, rank and size of the world. Creates the world if necessary."""
    if not is_distributed_init():
        initialize.distributed_init()
    world = current_world()
    rank, size = world.group.rank, world.group.size
    store_options = {"world_size": size, "wait_for_workers": False}
    address_and_port, own_store = None, None
    if rank == 0:
        address = "127.0.0.1" if world.local_size == size else own_addresses()[0]
        own_store = dist.TCPStore(address, 0, is_master=True, **store_options)
        address_and_port = address, own_store.port
    host, port = broadcast_object(address_and_port)
    store = own_store or dist.TCPStore(host, port, is_master=False, **store_options)
    world.group.barrier()  # all ranks connect before rank 0, which hosts the store, can exit
    yield store, rank, size
