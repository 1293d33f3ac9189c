"""Do all ranks have the same? Asked once, before results depend on it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from flashlight_py.distributed import get_world_rank, get_world_size
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.world import current_world
from flashlight_py.errors import MismatchError
from flashlight_py.nn import Module

__all__ = ["check_modules_agree", "check_settings_agree"]


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
                f"{number} ({_who(entries)}). Build the same module on every rank"
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
    differing = {name: _who(given) for name, given in values.items() if len(set(given)) > 1}
    if differing:
        raise MismatchError(
            f"rank {get_world_rank()} of {get_world_size()}: the ranks give a {what} different "
            f"arguments: {', '.join(f'{name} ({who})' for name, who in differing.items())}. "
            "Give the same on every rank: the rank itself decides which share is whose"
        )


def _of_all_ranks(mine: object) -> list[Any]:
    """Return what every rank gives, in rank order; JSON must be able to hold it."""
    backend = current_world().group.backend()
    return [json.loads(text) for text in exchange_bytes(backend, json.dumps(mine).encode())]


def _describe(module: Module) -> list[str]:
    return [
        f"{name}: {param.dtype} {tuple(param.shape)}{'' if param.calc_grad else ', frozen'}"
        for name, param in module.named_params().items()
    ]


def _who(entries: Sequence[str]) -> str:
    """Return which rank gave which entry, equal ones together."""
    seen: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        seen.setdefault(entry, []).append(rank)
    return "; ".join(f"rank(s) {', '.join(map(str, ranks))}: {e}" for e, ranks in seen.items())
