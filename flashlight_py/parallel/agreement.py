"""Do all ranks have the same module? Asked once, before gradients depend on it."""

from __future__ import annotations

import itertools
import json

from flashlight_py.distributed import get_world_rank, get_world_size
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.world import current_world
from flashlight_py.errors import MismatchError
from flashlight_py.nn import Module

__all__ = ["check_modules_agree"]


def check_modules_agree(module: Module) -> None:
    """Compare names, shapes and dtypes of the parameters over the ranks. Collective.

    Raises:
        MismatchError: they differ, on every rank; names the first parameter that does.
    """
    if get_world_size() == 1:
        return
    backend, mine = current_world().group.backend(), json.dumps(_describe(module))
    descriptions = [json.loads(text) for text in exchange_bytes(backend, mine.encode())]
    for number, entries in enumerate(itertools.zip_longest(*descriptions, fillvalue="nothing")):
        if len(set(entries)) > 1:
            raise MismatchError(_difference(number, entries))


def _describe(module: Module) -> list[str]:
    return [
        f"{name}: {param.dtype} {tuple(param.shape)}{'' if param.calc_grad else ', frozen'}"
        for name, param in module.named_params().items()
    ]


def _difference(number: int, entries: tuple[str, ...]) -> str:
    seen: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        seen.setdefault(entry, []).append(rank)
    who = "; ".join(f"rank(s) {', '.join(map(str, ranks))}: {e}" for e, ranks in seen.items())
    return (
        f"rank {get_world_rank()} of {get_world_size()}: the modules differ in parameter {number} "
        f"({who}). Build the same module on every rank"
    )
