"""The world of actors that are members of groups of ``ray.util.collective``."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from flashlight_py.launch.engine_rank import Meeting, join, stop_listening
from flashlight_py.launch.ray_cluster import listen_here

# How often is seen what the others have written, and how long is waited for it, in seconds.
_LOOK_SECONDS, _MEETING_SECONDS = 0.02, 300.0

# The groups of this process, and whether the first of them has made the world.
_groups: list[Any] = []
_has_made_world = False


def enter(size: int, rank: int, name: str) -> Any:
    """Make a group of all ranks of the world that the actors are; where they are none, make it."""
    global _has_made_world
    from ray.experimental import internal_kv as store

    import flashlight_py as fl

    fresh = secrets.token_hex(32)
    world = fl.distributed.groups.world.current_world().job if fl.is_distributed_init() else ""
    meeting = None if rank or world else listen_here(fresh)
    try:
        mine = [world, fl.get_world_rank(), meeting, fresh]
        worlds, ranks, meetings, secret = zip(*_exchange(size, rank, name, mine), strict=True)
        if len(set(worlds)) > 1 or (world and size != fl.get_world_size()):
            raise RuntimeError(
                f"the group {name!r}: some of its actors are ranks of another world already; all "
                "groups of an actor must have the same actors"
            )
        if not world:
            join(fresh, rank, size, Meeting(*meetings[0]), secret[0])
            ranks, _has_made_world = tuple(range(size)), True
    finally:
        stop_listening(fresh)
    group = fl.new_group(ranks)
    _groups.append(group)
    store._internal_kv_del(_key(name, rank))
    return group


def leave(group: Any) -> None:
    """Close the group, and with the last one leave the world that the first has made."""
    global _has_made_world  # noqa: PLW0603 - a process is in one world
    import flashlight_py as fl

    _groups.remove(group)
    group.close()
    if _has_made_world and not _groups:
        _has_made_world = False
        fl.distributed_shutdown()


def _exchange(size: int, rank: int, name: str, mine: Sequence[Any]) -> list[Any]:
    """Return what every rank passes, the last item new each time, by Ray's store of keys.

    All have read the same when each has written down what it has read: nothing of a group that
    failed under the same name is taken for it. Who is done may try again at once, while another one
    still waits to see that: so each key holds what was written there before as well.
    """
    from ray.experimental import internal_kv as store

    def entries(of: int) -> list[Any]:
        found: list[Any] = json.loads(store._internal_kv_get(_key(name, of)) or "[]")
        return found

    before, ends = entries(rank)[:1], time.monotonic() + _MEETING_SECONDS
    values, seen = list[Any]([None] * size), [""] * size
    while True:
        store._internal_kv_put(_key(name, rank), json.dumps([[mine, seen], *before]))
        found = [[[mine, seen]] if each == rank else entries(each) for each in range(size)]
        missing = [r for r, each in enumerate(found) if seen not in [old for _, old in each]]
        if None not in values and not missing:
            return values
        if time.monotonic() > ends:
            raise TimeoutError(
                f"the group {name!r}: rank(s) {missing} of {size} did not come within "
                f"{_MEETING_SECONDS:g} s"
            )
        time.sleep(_LOOK_SECONDS)
        values = [each[0][0] if each else None for each in found]
        seen = [each[-1] if each else "" for each in values]


def _key(name: str, rank: int) -> str:
    import ray

    return f"flashlight:{ray.get_runtime_context().get_job_id()}:{name}:{rank}"
