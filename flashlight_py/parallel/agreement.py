"""Do all ranks have the same, and compute the same? Asked once, before results depend on it."""

import hashlib
import importlib
import itertools
import json
import os
import socket
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, to_device
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import blas, caller, exchange_bytes, group_or_world
from flashlight_py.errors import MismatchError

_CORE_TYPE, _FEATURES = "BLAS core type", "CPU features that NumPy uses"
_REMEDIES = {
    _CORE_TYPE: "set OPENBLAS_CORETYPE=Haswell on every host, or another type that all have",
    _FEATURES: "set NPY_DISABLE_CPU_FEATURES on every host to those that not all have",
}


def check_modules_agree(
    params: Mapping[str, Variable],
    group: ProcessGroup,
    with_values: bool = False,
    also: Iterable[str] = (),
) -> list[int]:
    """Compare names, shapes and dtypes of parameters; return digests of the ranks' values.

    ``also`` are words about what is to be done with them, compared as well.
    """
    if group.size == 1:
        return [0]
    values = digest_of_values(params.values()) if with_values else 0
    differ, remedy = "the modules differ in parameter", "Build the same module on every rank"
    words = [*also]
    for name, param in params.items():
        frozen = "" if param.calc_grad else ", frozen"
        placed = "" if param.placement is None else param.placement.words()
        words.append(f"{name}: {param.dtype} {tuple(param.shape)}{frozen}{placed}")
    return check_entries_agree(differ, remedy, words, group, values)


def check_entries_agree(
    differ: str, remedy: str, entries: Sequence[str], group: ProcessGroup, values: int = 0
) -> list[int]:
    """Raise a MismatchError on every rank where ``entries`` differ. Collective, blocking.

    It says ``differ``, the first number that does, who has what, and ``remedy``. Else return what
    every rank passes as ``values``, in rank order: it travels along.
    """
    of_ranks = of_all_ranks([entries, values], group)
    if differing := differences([dict(enumerate(found)) for found, _ in of_ranks]):
        where = f"rank {group.rank} of {group.size}"
        raise MismatchError(f"{where}: {differ} {differing[0]}. {remedy}")
    return [value for _, value in of_ranks]


def digest_of_values(params: Iterable[Variable]) -> int:
    """Return 64 bits that identify the values of parameters; reads each once, without a copy."""
    parts = []
    for param in params:
        raw = np.ascontiguousarray(to_device(param.data, "cpu")).reshape(-1).view(np.uint8)
        end = raw.size // 8 * 8
        parts += [raw[:end].view(np.uint64).sum(dtype=np.uint64).tobytes(), raw[end:].tobytes()]
    return digest(b"".join(parts))


def warn_of_differing(what: str, digests: Sequence[int], group: ProcessGroup) -> None:
    """Warn the user who calls ``what``, on rank 0, where the ranks' parameters differ."""
    others = [str(rank) for rank, values in enumerate(digests) if values != digests[0]]
    if group.rank != 0 or not others:
        return
    warnings.warn_explicit(
        f"{what}: rank 0 of {group.size}: rank(s) {', '.join(others)} start from other parameters "
        "than rank 0, and would each train a model of their own: gradients are reduced, parameters "
        "are not. Call fl.broadcast_parameters(module) before it, and after fl.distributed_init()",
        UserWarning,
        *caller(),
    )


def check_settings_agree(
    what: str, settings: Mapping[str, bool | int | str], group: ProcessGroup | None = None
) -> None:
    """Raise a MismatchError on every rank that names what differs. Collective, blocking."""
    group = group_or_world(group)
    if group.size == 1:
        return
    if differing := differences(of_all_ranks({"object": what, **settings}, group)):
        raise MismatchError(
            f"rank {group.rank} of {group.size}: the ranks pass a {what} different "
            f"arguments: {', '.join(differing)}. Pass the same on every rank of this group "
            f"({group.journal.name}): the rank itself decides which share is whose"
        )


def check_arrays_agree(what: str, arrays: Sequence[Array], group: ProcessGroup) -> None:
    """Raise a MismatchError on every rank where shapes or dtypes differ. Collective, blocking."""
    if group.size == 1:
        return
    mine = [f"{array.dtype} {array.shape}" for array in arrays]
    if not all_have(json.dumps(mine).encode(), group)[0]:
        remedy = "Pass the same shapes and dtypes on every rank"
        check_entries_agree(f"{what} differ in number", remedy, mine, group)


def all_have(mine: bytes, group: ProcessGroup, *others: int) -> tuple[bool, list[int]]:
    """Return whether all ranks pass the same bytes, and the highest of each of ``others``.

    Collective, blocking: one small all_reduce.
    """
    own = digest(mine)
    numbers = np.array([own, ~own, *others], np.int64)
    highest, inverse_of_lowest, *found = group.all_reduce(numbers, op="max").tolist()
    return highest == ~inverse_of_lowest, found


def digest(data: bytes) -> int:
    """Return 63 bits that tell ``data`` from others."""
    found = hashlib.sha1(data, usedforsecurity=False).digest()
    return int.from_bytes(found[:8], "little") >> 1


def of_all_ranks(mine: object, group: ProcessGroup) -> list[Any]:
    """Return what every rank passes, in rank order; JSON must be able to hold it. Collective."""
    return [json.loads(text) for text in exchange_bytes(group.backend(), json.dumps(mine).encode())]


def differences(of_ranks: Sequence[Mapping[Any, Any]]) -> list[str]:
    """Return the entries that are not the same on all ranks, each with its values and ranks.

    They are in the order of rank 0; those that it lacks come last.
    """
    names = dict.fromkeys(itertools.chain.from_iterable(of_ranks))
    values = {name: [str(each.get(name, "nothing")) for each in of_ranks] for name in names}
    return [f"{n} ({by_rank(v)})" for n, v in values.items() if len(set(v)) > 1]


def by_rank(entries: Sequence[object]) -> str:
    """Return which rank has which entry, equal ones together."""
    seen: dict[object, list[int]] = {}
    for rank, entry in enumerate(entries):
        seen.setdefault(entry, []).append(rank)
    return "; ".join(f"rank(s) {', '.join(map(str, ranks))}: {e}" for e, ranks in seen.items())


def refuse_sharded(what: str, params: Iterable[Variable], may_be_cut: bool = False) -> None:
    """Raise a ValueError where one of ``params`` is sharded, for ``what``.

    ``may_be_cut``: not those of ``shard_linear``, of which ranks may well have the same part;
    whether they do ``check_modules_agree`` finds out.
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


def check_arithmetic(what: str, leaves: int, members: ProcessGroup) -> None:
    """Have BLAS compute with one thread, and compare what bits depend on. Collective, blocking.

    Another BLAS than OpenBLAS with several threads is a ValueError on every rank, ranks that differ
    a MismatchError with a remedy.
    """
    threads, core_type = blas.use_one_thread()
    if not threads:
        named = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
        threads, core_type = int("1" in named), "not known"
    config: Any = np.show_config(mode="dicts")
    blas_built_with = config.get("Build Dependencies", {}).get("blas", {})
    facts = {
        "leaves": str(leaves),
        "NumPy": np.__version__,
        "BLAS": f"{blas_built_with.get('name')} {blas_built_with.get('version')}",
        _CORE_TYPE: core_type,
        _FEATURES: _features(),
    }
    of_ranks = of_all_ranks([socket.gethostname(), threads, facts], members)
    where = f"{what}: rank {members.rank} of {members.size}"
    several = [f"rank {n} on {host}" for n, (host, count, _) in enumerate(of_ranks) if count != 1]
    if several:
        raise ValueError(
            f"{where}: leaves={leaves} needs a BLAS with one thread, as the bits of its results "
            f"depend on their number; not so on {', '.join(several)}. NumPy's BLAS there is no "
            "OpenBLAS, which could be asked: start with OMP_NUM_THREADS=1"
        )
    for name in facts:
        if len({each[name] for _, _, each in of_ranks}) > 1:
            entries = [f"{each[name]} on {host}" for host, _, each in of_ranks]
            remedy = _REMEDIES.get(name, "use the same on every rank")
            raise MismatchError(
                f"{where}: the ranks would compute other bits from the same numbers: {name} "
                f"differs ({by_rank(entries)}). To have the same, {remedy}"
            )


def _features() -> str:
    """Return which of the instruction sets that NumPy has loops for this processor has."""
    loops = importlib.import_module("numpy._core._multiarray_umath")
    return " ".join(name for name in loops.__cpu_dispatch__ if loops.__cpu_features__[name])
