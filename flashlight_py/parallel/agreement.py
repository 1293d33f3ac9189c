"""Do all ranks have the same? Asked once, before results depend on it."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, to_device
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.groups.world import group_or_world
from flashlight_py.distributed.start.exchange import exchange_bytes
from flashlight_py.errors import MismatchError
from flashlight_py.parallel.native import digest


def check_modules_agree(
    params: Mapping[str, Variable], group: ProcessGroup, values: int = 0
) -> list[int]:
    """Compare names, shapes and dtypes of parameters over the ranks. Collective, blocking.

    Returns:
        What every rank passes as ``values``, in rank order: it travels along.

    Raises:
        MismatchError: they differ, on every rank; names the first parameter that does.
    """
    if group.size == 1:
        return [values]
    return check_entries_agree(
        "the modules differ in parameter",
        "Build the same module on every rank",
        _describe(params),
        group,
        values,
    )


def check_entries_agree(
    differ: str, remedy: str, entries: Sequence[str], group: ProcessGroup, values: int = 0
) -> list[int]:
    """Compare lists of descriptions over the ranks. Collective, blocking.

    Returns:
        What every rank passes as ``values``, in rank order: it travels along.

    Raises:
        MismatchError: they differ, on every rank: says ``differ``, the first number at which they
            do, which rank has what, and ``remedy``.
    """
    of_ranks = of_all_ranks([entries, values], group)
    if differing := _first_differing([found for found, _ in of_ranks]):
        raise MismatchError(f"rank {group.rank} of {group.size}: {differ} {differing}. {remedy}")
    return [number for _, number in of_ranks]


def digest_of_values(params: Iterable[Variable]) -> int:
    """Return 64 bits that identify the values of parameters; reads each once, without a copy."""
    parts = [_sum_of_words(to_device(param.data, "cpu")) for param in params]
    return digest(json.dumps(parts).encode())


def digests_of_ranks(params: Iterable[Variable], group: ProcessGroup) -> list[int]:
    """Return ``digest_of_values`` of every rank, in rank order. Collective, blocking."""
    return [0] if group.size == 1 else of_all_ranks(digest_of_values(params), group)


def warn_of_differing(what: str, digests: Sequence[int], group: ProcessGroup) -> None:
    """Warn the user who calls ``what``, on rank 0, where the ranks' parameters differ."""
    others = [str(rank) for rank, values in enumerate(digests) if values != digests[0]]
    if group.rank != 0 or not others:
        return
    warnings.warn(
        f"{what}: rank 0 of {group.size}: rank(s) {', '.join(others)} start from other parameters "
        "than rank 0, and would each train a model of their own: gradients are reduced, parameters "
        "are not. Call fl.broadcast_parameters(module) before it, and after fl.distributed_init()",
        stacklevel=3,
    )


def _sum_of_words(array: Array) -> tuple[int, str]:
    """Return the sum of all words of 8 bytes, and the bytes that are left."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    end = raw.size // 8 * 8
    return int(raw[:end].view(np.uint64).sum(dtype=np.uint64)), raw[end:].tobytes().hex()


def check_settings_agree(
    what: str, settings: Mapping[str, bool | int | str], group: ProcessGroup | None = None
) -> None:
    """Compare the ``settings`` of a ``what`` over the ranks, by name. Collective, blocking.

    Raises:
        MismatchError: they differ, on every rank; names all that do, with values and ranks.
    """
    group = group_or_world(group)
    if group.size == 1:
        return
    everyone = of_all_ranks({"object": what, **settings}, group)
    if differing := differing_arguments(everyone):
        raise MismatchError(
            f"rank {group.rank} of {group.size}: the ranks pass a {what} different "
            f"arguments: {differing}. Pass the same on every rank: the rank itself decides which "
            "share is whose"
        )


def check_arrays_agree(what: str, arrays: Sequence[Array], group: ProcessGroup) -> None:
    """Compare shapes and dtypes of ``arrays`` over the ranks of ``group``. Collective, blocking.

    Raises:
        MismatchError: they differ, on every rank; names the first one that does.
    """
    mine = [f"{array.dtype} {array.shape}" for array in arrays]
    if group.size == 1 or agree(json.dumps(mine).encode(), group):
        return
    if differing := _first_differing(of_all_ranks(mine, group)):
        raise MismatchError(
            f"rank {group.rank} of {group.size}: {what} differ in number {differing}. "
            "Pass the same shapes and dtypes on every rank"
        )


def agree(mine: bytes, group: ProcessGroup) -> bool:
    """Return whether every rank passes the same; by a digest of 64 bits. Collective, blocking."""
    own = digest(mine)
    highest, inverse_of_lowest = group.all_reduce(np.array([own, ~own]), op="max").tolist()
    return bool(highest == ~inverse_of_lowest)


def of_all_ranks(mine: object, group: ProcessGroup) -> list[Any]:
    """Return what every rank passes, in rank order; JSON must be able to hold it. Collective."""
    return [json.loads(text) for text in exchange_bytes(group.backend(), json.dumps(mine).encode())]


def _describe(params: Mapping[str, Variable]) -> list[str]:
    return [
        f"{name}: {param.dtype} {tuple(param.shape)}{'' if param.calc_grad else ', frozen'}"
        f"{'' if param.placement is None else param.placement.words()}"
        for name, param in params.items()
    ]


def differing_arguments(of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return the arguments that are not the same on all ranks, with values and ranks; or ""."""
    names = dict.fromkeys(itertools.chain.from_iterable(of_ranks))
    values = {name: [str(each.get(name, "nothing")) for each in of_ranks] for name in names}
    return ", ".join(f"{n} ({by_rank(v)})" for n, v in values.items() if len(set(v)) > 1)


def _first_differing(of_ranks: Sequence[Sequence[str]]) -> str:
    """Return the first number at which not all ranks have the same, and who has what; or ""."""
    for number, entries in enumerate(itertools.zip_longest(*of_ranks, fillvalue="nothing")):
        if len(set(entries)) > 1:
            return f"{number} ({by_rank(entries)})"
    return ""


def by_rank(entries: Sequence[str]) -> str:
    """Return which rank has which entry, equal ones together."""
    seen: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        seen.setdefault(entry, []).append(rank)
    return "; ".join(f"rank(s) {', '.join(map(str, ranks))}: {e}" for e, ranks in seen.items())


def refuse_sharded(what: str, params: Iterable[Variable], may_be_cut: bool = False) -> None:
    """Refuse parameters of a sharded module for ``what``.

    ``may_be_cut``: not those of ``shard_linear``, of which ranks may well have the same part;
    whether they do ``check_modules_agree`` finds out.

    Raises:
        ValueError: one of ``params`` is such a parameter.
    """
    for position, param in enumerate(params):
        if param.placement is not None and not (may_be_cut and param.placement.is_cut):
            how = (
                "cut by shard_linear: other ranks have other parts of it"
                if param.placement.is_cut
                else "sharded by fl.fully_shard: its values, gradient and state are the ranks' in "
                "common and are kept equal there"
            )
            raise ValueError(
                f"{what}: parameter {position} (shape {param.shape}) is {how}; {what} is for "
                "parameters of which every rank has a copy"
            )
