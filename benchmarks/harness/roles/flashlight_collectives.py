"""The verbs of this package, as a user calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.role import Call, Place, Refusal
from harness.roles import flashlight
from harness.roles.verbs import Builder, CollectiveRole, elements


class Flashlight(CollectiveRole):
    """NumPy arrays; of the kind "shared" where the package offers them, which are not copied."""

    def __init__(self, place: Place) -> None:
        flashlight.initialise(place)
        self.rank, self.size = fl.get_world_rank(), fl.get_world_size()

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        return (Refusal, TypeError, fl.errors.BackendUnavailableError)

    def facts(self) -> dict[str, str]:
        return flashlight.facts()

    def barrier(self) -> None:
        fl.barrier()

    def leave(self) -> None:
        fl.distributed_shutdown()

    def array(self, nbytes: int, dtype: str, parts: int, kind: str) -> Any:
        element = flashlight.dtype_of(dtype)
        shape = (elements(nbytes, element.itemsize, parts),)
        if kind != "shared":
            return np.empty(shape, element)
        create = getattr(fl.distributed, "shared_empty", None)
        if create is None:
            raise Refusal("flashlight_py has no distributed.shared_empty")
        return create(shape, element)

    @property
    def builders(self) -> Mapping[str, Builder]:
        return {
            "all_reduce": functools.partial(_call, "all_reduce"),
            "reduce": functools.partial(_call, "reduce"),
            "broadcast": functools.partial(_call, "broadcast"),
            "all_gather": functools.partial(_call, "all_gather"),
            "gather": functools.partial(_call, "gather"),
            "scatter": self._scatter,
            "reduce_scatter": functools.partial(_call, "reduce_scatter"),
            "all_to_all": functools.partial(_call, "all_to_all"),
            "send_recv": lambda x: self.ping_pong(fl.send, fl.recv, x),
            "barrier": lambda x: (fl.barrier, x),
        }

    def _scatter(self, x: Any) -> tuple[Call, Any]:
        scatter = _verb("scatter")
        parts = np.split(x, self.size) if self.rank == 0 else None
        own = np.empty_like(x[: x.shape[0] // self.size])
        return lambda: scatter(parts), own


def _verb(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(fl, name, None)
    if found is None:
        raise Refusal(f"flashlight_py has no {name}")
    return found


def _call(name: str, x: Any) -> tuple[Call, Any]:
    verb = _verb(name)
    return lambda: verb(x), x


def join(place: Place) -> Flashlight:
    """Meet the other ranks."""
    return Flashlight(place)
