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

# The groups of this process, and the secret of the world that the first of them has made.
_groups: list[Any] = []
_secret = ""


def enter(size: int, rank: int, name: str) -> Any:
    """Make the world, or a group of all of it."""
    global _secret
    from ray.experimental import internal_kv as store

    import flashlight_py as fl

    fresh = secrets.token_hex(32)
    world = _secret if _groups else fresh if fl.is_distributed_init() else ""
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
            ranks, _secret = tuple(range(size)), secret[0]
    finally:
        stop_listening(fresh)
    group = fl.new_group(ranks)
    _groups.append(group)
    store._internal_kv_del(_key(name, rank))
    return group


def leave(group: Any) -> None:
    """Close the group, and with the last one leave the world."""
    import flashlight_py as fl

    _groups.remove(group)
    group.close()
    if not _groups:
        fl.distributed_shutdown()


def _exchange(size: int, rank: int, name: str, mine: Sequence[Any]) -> list[Any]:
    """Return what every rank passes, the last item new each time, by Ray's store of keys.

    All have read the same when each has written down what it has read: nothing of a group that
    failed under the same name is taken for it.
    """
    from ray.experimental import internal_kv as store

    keys = [_key(name, each) for each in range(size)]
    ends, seen, found = time.monotonic() + _MEETING_SECONDS, [""] * size, list[Any]()
    while not found or any(each is None or each[1] != seen for each in found):
        if time.monotonic() > ends:
            missing = [r for r, each in enumerate(found) if each is None or each[1] != seen]
            raise TimeoutError(
                f"the group {name!r}: rank(s) {missing} of {size} did not come within "
                f"{_MEETING_SECONDS:g} s"
            )
        time.sleep(_LOOK_SECONDS if found else 0.0)
        store._internal_kv_put(keys[rank], json.dumps([mine, seen]))
        found = [text and json.loads(text) for text in map(store._internal_kv_get, keys)]
        seen = [each[0][-1] if each else "" for each in found]
    return [each[0] for each in found]


def _key(name: str, rank: int) -> str:
    import ray

    return f"flashlight:{ray.get_runtime_context().get_job_id()}:{name}:{rank}"
