"""The world: the one group that holds every rank, and what this process knows of its place."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, field
from typing import Any, cast

from flashlight_py.device import cuda
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.backends.single import SingleBackend
from flashlight_py.distributed.calls.call_site import caller
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures.flight_record import new_job
from flashlight_py.distributed.groups import membership
from flashlight_py.distributed.memory.topology import DeviceRule
from flashlight_py.distributed.rendezvous.environment import ALONE, launch_description
from flashlight_py.distributed.start import blas


@dataclass(frozen=True)
class World:
    """All ranks, and this one's place on its host; by default of this process alone."""

    group: ProcessGroup = field(default_factory=lambda: ProcessGroup(SingleBackend()))
    local_rank: int = 0
    local_size: int = 1
    why: str = "the world is this process alone"
    device_rule: DeviceRule = field(default_factory=DeviceRule)
    job: str = field(default_factory=new_job)  # a name that all ranks agree on
    owner: str = ""  # the library that has begun it, and that ends it
    threads: int = 0  # its share of the host's cores, to compute with; 0: nobody to share with


def _warn_of_forgotten_init() -> None:
    said = launch_description()
    if said:
        warnings.warn_explicit(
            "distributed_init was not called, so this process is a world of its own, and so is "
            "each of the others: nothing is exchanged, and each takes itself for rank 0. Call "
            f"flashlight_py.distributed_init() first, or set {ALONE}=1 if that is meant; {said}",
            RuntimeWarning,
            *caller(),
        )


# Before distributed_init, and after distributed_shutdown, a process is a world of its own.
_ALONE = World(ProcessGroup(SingleBackend(), first_use=_warn_of_forgotten_init))
_world: World | None = None
membership.use_as_world(_ALONE.group)


def current_world() -> World:
    """Return the world as initialised, else the one of this process alone."""
    return _ALONE if _world is None else _world


def group_or_world(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, else the group of the world as it is now; see ``membership.of``."""
    return cast("ProcessGroup", membership.of(group))


def set_world(world: World | None) -> None:
    """Make ``world`` the current one; None: this process alone."""
    global _world  # noqa: PLW0603  (the one piece of process-wide state)
    _world = world
    _ALONE.group.open_fast_path()  # whoever uses the process alone after this knows
    membership.use_as_world(current_world().group)


_inherited: list[World | None] = []  # of a parent, which a child must not use, close or collect


def _forget_in_child() -> None:
    """After a fork: the child is a process of its own, and no rank of its parent's world."""
    _inherited.append(_world)
    set_world(None)


os.register_at_fork(after_in_child=_forget_in_child)


def is_distributed_init() -> bool:
    """Return whether ``distributed_init`` has succeeded and no shutdown followed."""
    return _world is not None


def get_world_rank() -> int:
    """Return this process's rank in the world, from 0; 0 before ``distributed_init``."""
    return current_world().group.rank


def get_world_size() -> int:
    """Return how many processes the world has; 1 before ``distributed_init``."""
    return current_world().group.size


def is_main_process() -> bool:
    """Return whether this is rank 0, which prints, logs and saves; True before the start."""
    return get_world_rank() == 0


def get_local_rank() -> int:
    """Return this process's number among those of its host, from 0."""
    return current_world().local_rank


def get_local_size() -> int:
    """Return how many processes of the world run on this host."""
    return current_world().local_size


def describe() -> str:
    """Return in a few lines which rank this is, what joins the ranks, and why that was chosen.

    Where ranks share a host, also how many threads NumPy's BLAS computes with, and who chose that.
    """
    world = current_world()
    group = world.group
    threads = f"\nBLAS threads: {blas.reason}" if world.threads else ""
    gpus = "" if group.gpus is None else f"\nCuPy arrays: {group.gpus.path}"
    return (
        f"rank {group.rank} of {group.size}, {world.local_rank} of {world.local_size} here\n"
        f"NumPy arrays: {group.backend().path} ({world.why}){threads}{gpus}"
    )


def use_local_device() -> str:
    """Make this rank's GPU CuPy's current device on this thread, and return its name.

    It is number ``rank % MAX_DEVICE_PER_NODE`` where that is given, as in flashlight, else the
    rank on this host modulo the number of visible GPUs. Collectives of CuPy arrays take those on
    this device.

    Returns:
        A name for ``Module.to`` and ``device.to_device``, such as ``"cuda:1"``.

    Raises:
        BackendUnavailableError: CuPy is missing, or there is no such GPU.
    """
    cupy, count = cuda()
    index = current_world().device_rule.index(count)
    cupy.cuda.Device(index).use()
    return f"cuda:{index}"


def distributed_backend(array: Any = None) -> DistributedBackend:
    """Return the backend that ``array`` goes through; None stands for a NumPy array.

    Raises:
        BackendUnavailableError: nothing here moves arrays of this kind.
    """
    return current_world().group.backend(array).kind


class RankFilter(logging.Filter):
    """Lets one rank's records pass, or those of one rank on each host, and says whose they are.

    Every record gets ``rank``, ``local_rank`` and ``world_size``, for formats such as
    ``"%(rank)s of %(world_size)s: %(message)s"``. Ranks are looked up for each record, so it can
    be made before ``distributed_init``, when every process is rank 0 of 1. Add it to handlers: a
    logger's filter does not see records of the loggers below it.

    Args:
        rank: the only rank of the world that logs, such as 0; None: every rank.
        local_rank: the only one on each host that logs, such as 0; None: every one.
        pass_level: records of this level and above pass on every rank, such as
            ``logging.ERROR``; None: none do.

    Raises:
        TypeError: a rank or the level is no int.
        ValueError: a rank is negative.

    Example:
        >>> handler = logging.StreamHandler()
        >>> handler.addFilter(fl.RankFilter(rank=0, pass_level=logging.ERROR))
        >>> handler.setFormatter(logging.Formatter("[%(rank)s of %(world_size)s] %(message)s"))
    """

    def __init__(
        self, rank: int | None = None, local_rank: int | None = None, pass_level: int | None = None
    ) -> None:
        super().__init__()
        for name, value in (("rank", rank), ("local_rank", local_rank), ("pass_level", pass_level)):
            if value is not None:
                whole_number("RankFilter", name, value)
        self._rank, self._local_rank, self._pass_level = rank, local_rank, pass_level

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether ``record`` passes; add the ranks to it."""
        rank, local_rank = get_world_rank(), get_local_rank()
        record.rank, record.local_rank, record.world_size = rank, local_rank, get_world_size()
        if self._pass_level is not None and record.levelno >= self._pass_level:
            return True
        return self._rank in (None, rank) and self._local_rank in (None, local_rank)
