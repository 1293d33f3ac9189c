"""The world: the group of all ranks, and the rank of this process on its host."""

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any, cast

from flashlight_py import blas, system
from flashlight_py.checks import check_integer
from flashlight_py.device import cuda
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.backends.single import SingleBackend
from flashlight_py.distributed.calls.journal import caller
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures.flight_record import new_job
from flashlight_py.distributed.groups import membership
from flashlight_py.distributed.memory.topology import DeviceRule
from flashlight_py.distributed.rendezvous.environment import ALONE, launch_description


@dataclass(frozen=True)
class World:
    """The group of all ranks, and facts about this process. By default, this process is alone."""

    group: ProcessGroup = field(default_factory=lambda: ProcessGroup(SingleBackend()))
    local_rank: int = 0
    local_size: int = 1
    why: str = "the world is this process alone"
    device_rule: DeviceRule = field(default_factory=DeviceRule)
    job: str = field(default_factory=new_job)  # name of the job, the same on all ranks
    owner: str = ""  # library that created the world and must end it, or ""
    threads: int = 0  # limit of BLAS threads; 0: none, this rank is alone on its host


def _warn_of_missing_init() -> None:
    launch = launch_description()
    if launch:
        warnings.warn_explicit(
            "distributed_init was not called, although a launcher started several processes. Each "
            "process is rank 0 of 1, and no data is exchanged. Call "
            f"flashlight_py.distributed_init() first, or set {ALONE}=1 to keep this; {launch}",
            RuntimeWarning,
            *caller(),
        )


# The world of one process, before distributed_init and after distributed_shutdown.
_ALONE = World(ProcessGroup(SingleBackend(), first_use=_warn_of_missing_init))
_world: World | None = None
membership.use_as_world(_ALONE.group)


def current_world() -> World:
    """Return the world of ``distributed_init``. Without one, return a world of this process."""
    return _ALONE if _world is None else _world


def group_or_world(group: ProcessGroup | None) -> ProcessGroup:
    return cast("ProcessGroup", membership.members_of(group))


def set_world(world: World | None) -> None:
    """Make ``world`` the current world. If it is None, this process forms a world of one rank."""
    global _world  # noqa: PLW0603 (global by design)
    _world = world
    _ALONE.group.open_fast_path()  # no warning of a missing ``distributed_init`` from now on
    membership.use_as_world(current_world().group)


_inherited: list[World | None] = []  # worlds of parent processes, kept so that they are not freed


def _forget_in_child() -> None:
    _inherited.append(_world)
    set_world(None)


system.register_at_fork(after_in_child=_forget_in_child)


def is_distributed_init() -> bool:
    """Return whether this process is in a world that ``distributed_init`` created."""
    return _world is not None


def get_world_rank() -> int:
    """Return the rank of this process in the world, from 0; 0 before ``distributed_init``."""
    return current_world().group.rank


def get_world_size() -> int:
    """Return the number of processes in the world; 1 before ``distributed_init``."""
    return current_world().group.size


def is_main_process() -> bool:
    """Return whether this process is rank 0. True before ``distributed_init``."""
    return get_world_rank() == 0


def get_local_rank() -> int:
    """Return the rank of this process among the processes of its host, from 0."""
    return current_world().local_rank


def get_local_size() -> int:
    """Return the number of processes of the world on this host."""
    return current_world().local_size


def describe() -> str:
    """Return a short text: rank, backend, and the reason why this backend was chosen.

    If ranks share a host, the text also has the number of BLAS threads and where it comes from.
    """
    world = current_world()
    group = world.group
    threads = f"\nBLAS threads: {blas.reason}" if world.threads else ""
    gpus = "" if group.gpus is None else f"\nCuPy arrays: {group.gpus.path}"
    return (
        f"rank {group.rank} of {group.size}, local rank {world.local_rank} of {world.local_size}\n"
        f"NumPy arrays: {group.backend().path} ({world.why}){threads}{gpus}"
    )


def use_local_device() -> str:
    """Make the GPU of this rank the current CuPy device of this thread, and return its name.

    The device number is ``rank % MAX_DEVICE_PER_NODE`` if ``params`` of ``distributed_init`` has
    this key, like in flashlight. Otherwise it is the local rank modulo the number of visible GPUs.
    Collectives accept CuPy arrays on this device only.

    Returns:
        A name for ``Module.to`` and ``device.to_device``, such as ``"cuda:1"``.

    Raises:
        BackendUnavailableError: If CuPy or the GPU is missing.
    """
    cupy, count = cuda()
    index = current_world().device_rule.index(count)
    cupy.cuda.Device(index).use()
    return f"cuda:{index}"


def distributed_backend(array: Any = None) -> DistributedBackend:
    """Return the backend for ``array``; None means a NumPy array.

    Raises:
        BackendUnavailableError: If no backend moves arrays of this kind.
    """
    return current_world().group.backend(array).kind


class RankFilter(logging.Filter):
    """A logging filter that passes only records of one rank, or of one rank per host.

    It adds ``rank``, ``local_rank`` and ``world_size`` to every record, for formats such as
    ``"%(rank)s of %(world_size)s: %(message)s"``. It may be created before ``distributed_init``,
    because it reads the rank for each record. Add it to handlers: if it is added to a logger,
    records of child loggers do not pass through it.

    Args:
        rank: If not None, only records of this rank of the world pass.
        local_rank: If not None, only records of this rank on each host pass.
        pass_level: Records of this level or a higher one pass on every rank, for example
            ``logging.ERROR``. None: no level has this effect.

    Raises:
        TypeError: If a rank or the level is no integer.
        ValueError: If a rank is negative.

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
                check_integer("RankFilter", name, value)
        self._rank, self._local_rank, self._pass_level = rank, local_rank, pass_level

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ranks to ``record``, and return whether ``record`` passes."""
        rank, local_rank = get_world_rank(), get_local_rank()
        record.rank, record.local_rank, record.world_size = rank, local_rank, get_world_size()
        if self._pass_level is not None and record.levelno >= self._pass_level:
            return True
        return self._rank in (None, rank) and self._local_rank in (None, local_rank)
