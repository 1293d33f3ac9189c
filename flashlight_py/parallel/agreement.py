"""Do all ranks have the same? Asked once, before results depend on it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup, get_world_rank, get_world_size
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.world import current_world
from flashlight_py.errors import MismatchError
from flashlight_py.nn import Module
from flashlight_py.parallel.digest import digest

__all__ = ["agree", "by_rank", "check_arrays_agree", "check_modules_agree", "check_settings_agree"]


def check_modules_agree(module: Module) -> None:
    """Compare names, shapes and dtypes of the parameters over the ranks. Collective.

    Raises:
        MismatchError: they differ, on every rank; names the first parameter that does.
    """
    if get_world_size() == 1:
        return
    descriptions = _of_all_ranks(_describe(module))
    for number, entries in enumerate(itertools.zip_longest(*descriptions, fillvalue="nothing")):
        if len(set(entries)) > 1:
            raise MismatchError(
                f"rank {get_world_rank()} of {get_world_size()}: the modules differ in parameter "
                f"{number} ({by_rank(entries)}). Build the same module on every rank"
            )


def check_settings_agree(what: str, settings: Mapping[str, bool | int | str]) -> None:
    """Compare the ``settings`` of a ``what`` over the ranks, by name. Collective, blocking.

    Raises:
        MismatchError: they differ, on every rank; names all that do, with values and ranks.
    """
    if get_world_size() == 1:
        return
    everyone = _of_all_ranks({"object": what, **settings})
    names = dict.fromkeys(itertools.chain.from_iterable(everyone))
    values = {name: [str(each.get(name, "nothing")) for each in everyone] for name in names}
    differing = {name: by_rank(given) for name, given in values.items() if len(set(given)) > 1}
    if differing:
        raise MismatchError(
            f"rank {get_world_rank()} of {get_world_size()}: the ranks give a {what} different "
            f"arguments: {', '.join(f'{name} ({who})' for name, who in differing.items())}. "
            "Give the same on every rank: the rank itself decides which share is whose"
        )


def check_arrays_agree(what: str, arrays: Sequence[Array], group: ProcessGroup) -> None:
    """Compare shapes and dtypes of ``arrays`` over the ranks of ``group``. Collective, blocking.

    Raises:
        MismatchError: they differ, on every rank; names the first one that does.
    """
    mine = [f"{array.dtype} {array.shape}" for array in arrays]
    if group.size == 1 or agree(json.dumps(mine).encode(), group):
        return
    told = [json.loads(text) for text in exchange_bytes(group.backend(), json.dumps(mine).encode())]
    for number, entries in enumerate(itertools.zip_longest(*told, fillvalue="nothing")):
        if len(set(entries)) > 1:
            raise MismatchError(
                f"rank {group.rank} of {group.size}: {what} differ in number {number} "
                f"({by_rank(entries)}). Give the same shapes and dtypes on every rank"
            )


def agree(mine: bytes, group: ProcessGroup) -> bool:
    """Tell whether every rank gives the same; by a digest of 64 bits. Collective, blocking."""
    own = digest(mine)
    highest, inverse_of_lowest = group.all_reduce(np.array([own, ~own]), op="max").tolist()
    return bool(highest == ~inverse_of_lowest)


def _of_all_ranks(mine: object) -> list[Any]:
    """Return what every rank gives, in rank order; JSON must be able to hold it."""
    backend = current_world().group.backend()
    return [json.loads(text) for text in exchange_bytes(backend, json.dumps(mine).encode())]


def _describe(module: Module) -> list[str]:
    return [
        f"{name}: {param.dtype} {tuple(param.shape)}{'' if param.calc_grad else ', frozen'}"
        for name, param in module.named_params().items()
    ]


def by_rank(entries: Sequence[str]) -> str:
    """Return which rank gave which entry, equal ones together."""
    seen: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        seen.setdefault(entry, []).append(rank)
    return "; ".join(f"rank(s) {', '.join(map(str, ranks))}: {e}" for e, ranks in seen.items())
