"""A backend of ``ray.util.collective`` for NumPy arrays."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from flashlight_py.launch import engine

NAME = "FLASHLIGHT"
# How often is seen what the others have written, and how long is waited for it, in seconds.
_LOOK_SECONDS, _MEETING_SECONDS = 0.02, 300.0


def register() -> None:
    """Register the backend ``"FLASHLIGHT"`` of ``ray.util.collective``, for NumPy arrays.

    Call it in the driver and in each actor, before a group is created; again it does nothing.
    Verbs raise the errors of :func:`flashlight_py.all_reduce`. The first group of an actor is its
    world. Further groups have the same actors, in any order of ranks;
    else creating one raises RuntimeError. ``destroy_collective_group`` is collective.
    """
    from ray.util.collective.backend_registry import _global_registry, register_collective_backend
    from ray.util.collective.collective_group.base_collective_group import BaseGroup

    class FlashlightGroup(_Group, BaseGroup):  # type: ignore[misc]
        """A group of ``ray.util.collective``."""

    if not _global_registry.is_registered(NAME):
        register_collective_backend(NAME, FlashlightGroup)


class _Group:
    """What Ray calls: with lists of one array, in place, and with options as attributes."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)  # type: ignore[call-arg]
        self._group = _enter(world_size, rank, group_name)

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        _leave(self._group)

    def allreduce(self, xs: list[Any], options: Any) -> None:
        self._group.all_reduce(xs[0], op=_op(options))

    def barrier(self, _: Any = None) -> None:
        self._group.barrier()

    def reduce(self, xs: list[Any], options: Any) -> None:
        self._group.reduce(xs[0], root=options.root_rank, op=_op(options))

    def allgather(self, outs: list[list[Any]], xs: list[Any], _: Any = None) -> None:
        found = self._group.all_gather(xs[0][None])
        for out, part in zip(outs[0], found, strict=True):
            out[...] = part

    def broadcast(self, xs: list[Any], options: Any) -> None:
        self._group.broadcast(xs[0], root=options.root_rank)

    def reducescatter(self, xs: list[Any], parts: list[list[Any]], options: Any) -> None:
        import numpy as np

        xs[0][...] = self._group.reduce_scatter(np.stack(parts[0]), op=_op(options))[0]

    def send(self, xs: list[Any], options: Any) -> None:
        self._group.send(xs[0], options.dst_rank)

    def recv(self, xs: list[Any], options: Any) -> None:
        self._group.recv(xs[0], options.src_rank)


def _op(options: Any) -> Any:
    return {"PRODUCT": "prod"}.get(options.reduceOp.name, options.reduceOp.name.lower())


# The groups of this process, and the secret of the world that the first of them has made.
_groups: list[Any] = []
_secret = ""


def _enter(size: int, rank: int, name: str) -> Any:
    """Make the world, or a group of all of it."""
    global _secret
    import ray
    from ray.experimental import internal_kv as store

    import flashlight_py as fl

    fresh, host = secrets.token_hex(32), ray.util.get_node_ip_address()
    world = _secret if _groups else fresh if fl.is_distributed_init() else ""
    port = 0 if rank or world else engine.listen(host)
    try:
        mine = [world, fl.get_world_rank(), host, port, fresh]
        worlds, ranks, hosts, ports, secret = zip(*_exchange(size, rank, name, mine), strict=True)
        if len(set(worlds)) > 1 or (world and size != fl.get_world_size()):
            raise RuntimeError(
                f"the group {name!r}: some of its actors are ranks of another world already; all "
                "groups of an actor must have the same actors"
            )
        if not world:
            engine.join(rank, size, hosts[0], ports[0], secret[0])
            ranks, _secret = tuple(range(size)), secret[0]
    finally:
        engine.stop_listening(port)
    group = fl.new_group(ranks)
    _groups.append(group)
    store._internal_kv_del(_key(name, rank))
    return group


def _leave(group: Any) -> None:
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
