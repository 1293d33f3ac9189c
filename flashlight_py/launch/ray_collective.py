"""A backend of ``ray.util.collective`` for NumPy arrays."""

from __future__ import annotations

from typing import Any

from flashlight_py.launch.ray_world import enter, leave

NAME = "FLASHLIGHT"
_OPS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}


def register() -> None:
    """Register the backend ``"FLASHLIGHT"`` of ``ray.util.collective``, for NumPy arrays.

    Call it in the driver and in each actor, before a group is created; again it does nothing.
    Verbs raise the errors of :func:`flashlight_py.all_reduce`. The first group of an actor is its
    world, where it is no rank yet, as those of :func:`flashlight_py.launch.ray.run` are. Further
    groups have the same actors, in any order of ranks; else creating one raises RuntimeError.
    ``destroy_collective_group`` is collective.
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
        self._group = enter(world_size, rank, group_name)

    @classmethod
    def backend(cls) -> str:
        return NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        leave(self._group)

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


def _op(options: Any) -> str:
    return _OPS[options.reduceOp.name]
