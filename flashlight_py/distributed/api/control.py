"""Waiting for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashlight_py.distributed.api.methods import method
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.integers import check_seconds
from flashlight_py.distributed.membership import of
from flashlight_py.distributed.running import refusing
from flashlight_py.distributed.verbs import BARRIER

if TYPE_CHECKING:
    from flashlight_py.distributed.group import ProcessGroup

__all__ = ["barrier", "sync_distributed"]


def barrier(timeout: float | None = None, group: ProcessGroup | None = None) -> None:
    """Block until every rank of the group has called it, up to ``timeout`` seconds.

    Raises:
        ValueError: ``timeout`` is not positive.
        CollectiveTimeoutError: a rank (named) did not come in time.
        DistributedError: as for :func:`all_reduce`.
    """
    members = of(group)
    plain = timeout is None and members.gpus is None
    if plain and members.native(BARRIER.code, None, None, None, None, 0, 0, False) is None:
        return
    with refusing(members, BARRIER):
        members.run(Call(BARRIER, seconds=check_seconds("barrier", timeout)))


def sync_distributed(group: ProcessGroup | None = None) -> None:
    """Block until every operation that this rank has started has ended, as flashlight names it.

    Raises:
        DistributedError: one of them failed; as for :func:`all_reduce`.
    """
    of(group).synchronize()


class Methods:
    """Of a group."""

    barrier = method(barrier)
