"""Checks that modules, arguments and floating-point arithmetic are equal on all ranks."""

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

from flashlight_py import blas
from flashlight_py.autograd import Variable
from flashlight_py.device import Array, to_device
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import caller, exchange_bytes, group_or_world
from flashlight_py.errors import MismatchError

_CORE_TYPE, _FEATURES = "BLAS core type", "CPU features that NumPy uses"
_REMEDIES = {
    _CORE_TYPE: "Set OPENBLAS_CORETYPE=Haswell, or another type that all hosts support, everywhere",
    _FEATURES: "Set NPY_DISABLE_CPU_FEATURES on every host to the features that some host lacks",
}


def check_modules_agree(
    params: Mapping[str, Variable], group: ProcessGroup, with_values: bool = False,
    also: Iterable[str] = (),
) -> list[int]:  # fmt: skip
    """Compare the modules' ``params`` and the texts ``also`` over ranks. Collective, blocking.

    Names, shapes and dtypes must be equal, or every rank raises MismatchError. Return a digest of
    the values on each rank, or zeros if ``with_values`` is False.
    """
    if group.size == 1:
        return [0]
    values = digest_of_values(params.values()) if with_values else 0
    differ = "expected the same module on every rank, got a difference in parameter"
    words = [*also]
    for name, param in params.items():
        frozen = "" if param.calc_grad else ", frozen"
        placed = "" if param.placement is None else param.placement.words()
        words.append(f"{name}: {param.dtype} {tuple(param.shape)}{frozen}{placed}")
    return check_entries_agree(differ, "Build equal modules", words, group, values)


def check_entries_agree(
    differ: str, remedy: str, entries: Sequence[str], group: ProcessGroup, values: int = 0
) -> list[int]:
    """Compare ``entries`` over the ranks, and return the number ``values`` of each rank.

    Collective, blocking. If entries differ, every rank raises MismatchError with ``differ``, the
    index of the first entry that differs, this entry on each rank, and ``remedy``.
    """
    of_ranks = gather_json([entries, values], group)
    if differing := differences([dict(enumerate(results)) for results, _ in of_ranks]):
        where = f"rank {group.rank} of {group.size}"
        raise MismatchError(f"{where}: {differ} {differing[0]}. {remedy}")
    return [value for _, value in of_ranks]


def digest_of_values(params: Iterable[Variable]) -> int:
    """Return a 63-bit digest of the parameter values; reads each array once, without a copy."""
    parts = []
    for param in params:
        raw = np.ascontiguousarray(to_device(param.data, "cpu")).reshape(-1).view(np.uint8)
        end = raw.size // 8 * 8
        parts += [raw[:end].view(np.uint64).sum(dtype=np.uint64).tobytes(), raw[end:].tobytes()]
    return digest(b"".join(parts))


def warn_if_parameters_differ(operation: str, digests: Sequence[int], group: ProcessGroup) -> None:
    """Warn on rank 0 if ``digests`` differ. The warning shows the user's line with the call."""
    others = [str(rank) for rank, values in enumerate(digests) if values != digests[0]]
    if group.rank != 0 or not others:
        return
    warnings.warn_explicit(
        f"{operation}: rank 0 of {group.size}: expected the same parameters on every rank, got "
        f"other values on rank(s) {', '.join(others)} than on rank 0. Only gradients are reduced. "
        f"Call fl.broadcast_parameters(module) before {operation}",
        UserWarning,
        *caller(),
    )


def check_settings_agree(
    operation: str, settings: Mapping[str, bool | int | str], group: ProcessGroup | None = None
) -> None:
    """Raise MismatchError on every rank if ``settings`` differ. Collective, blocking."""
    group = group_or_world(group)
    if group.size == 1:
        return
    if differing := differences(gather_json({"object": operation, **settings}, group)):
        raise MismatchError(
            f"{operation}: rank {group.rank} of {group.size}: expected the same arguments on every "
            f"rank of this group ({group.journal.name}), got {', '.join(differing)}. Pass the same "
            "arguments on every rank"
        )


def check_arrays_agree(operation: str, arrays: Sequence[Array], group: ProcessGroup) -> None:
    """Raise MismatchError on every rank if shapes or dtypes differ. Collective, blocking."""
    if group.size == 1:
        return
    kinds = [f"{array.dtype} {array.shape}" for array in arrays]
    if not equal_on_all_ranks(json.dumps(kinds).encode(), group)[0]:
        differ = "expected the same shapes and dtypes on every rank, got a difference at index"
        check_entries_agree(f"{operation}: {differ}", "Pass equal arrays", kinds, group)


def equal_on_all_ranks(data: bytes, group: ProcessGroup, *others: int) -> tuple[bool, list[int]]:
    """Return whether ``data`` is equal on all ranks. Also return the maxima of ``others``.

    Each maximum is over the ranks. Collective, blocking: one small all_reduce.
    """
    data_digest = digest(data)
    numbers = np.array([data_digest, ~data_digest, *others], np.int64)
    highest, inverse_of_lowest, *results = group.all_reduce(numbers, op="max").tolist()
    return highest == ~inverse_of_lowest, results


def digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:8], "little") >> 1


def gather_json(data: object, group: ProcessGroup) -> list[Any]:
    """Return the objects of all ranks in rank order, sent as JSON. Collective, blocking."""
    return [json.loads(text) for text in exchange_bytes(group.backend(), json.dumps(data).encode())]


def differences(of_ranks: Sequence[Mapping[Any, Any]]) -> list[str]:
    """Return a text for each entry that differs, with the values and the ranks that have them."""
    names = dict.fromkeys(itertools.chain.from_iterable(of_ranks))
    values = {name: [str(entries.get(name, "nothing")) for entries in of_ranks] for name in names}
    return [f"{n} ({by_rank(v)})" for n, v in values.items() if len(set(v)) > 1]


def by_rank(entries: Sequence[object]) -> str:
    seen: dict[object, list[int]] = {}
    for rank, entry in enumerate(entries):
        seen.setdefault(entry, []).append(rank)
    return "; ".join(f"rank(s) {', '.join(map(str, ranks))}: {e}" for e, ranks in seen.items())


def reject_sharded(operation: str, params: Iterable[Variable], may_be_cut: bool = False) -> None:
    """Raise ValueError if a parameter is sharded (by ``shard_linear``: unless ``may_be_cut``)."""
    for position, param in enumerate(params):
        if param.placement is not None and not (may_be_cut and param.placement.is_cut):
            description = (
                "a part that shard_linear has cut. Reduce its gradient among ranks with this part"
                if param.placement.is_cut
                else "a parameter of fl.fully_shard, whose ranks share values, gradient and state. "
                f"Remove the call of {operation}"
            )
            raise ValueError(
                f"{operation}: expected parameters that every rank has a copy of, got for "
                f"parameter {position} (shape {param.shape}) {description}"
            )


def check_arithmetic(operation: str, leaves: int, members: ProcessGroup) -> None:
    """Set BLAS to one thread, and compare libraries and CPU features over the ranks. Collective.

    If BLAS is not OpenBLAS and uses several threads on any rank, every rank raises ValueError. If
    facts that change the bits of results differ, every rank raises MismatchError with a remedy.
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
    of_ranks = gather_json([socket.gethostname(), threads, facts], members)
    where = f"{operation}: rank {members.rank} of {members.size}"
    several = [f"rank {n} on {host}" for n, (host, count, _) in enumerate(of_ranks) if count != 1]
    if several:
        raise ValueError(
            f"{where}: expected a BLAS with one thread for leaves={leaves}, because its number of "
            f"threads changes the bits of results, got several threads on {', '.join(several)}. "
            "Set OMP_NUM_THREADS=1 before the start: only OpenBLAS can be changed later"
        )
    for name in facts:
        if len({values[name] for _, _, values in of_ranks}) > 1:
            entries = [f"{values[name]} on {host}" for host, _, values in of_ranks]
            remedy = _REMEDIES.get(name, f"Use the same {name} on every rank")
            raise MismatchError(
                f"{where}: expected the same {name} on every rank, so that all ranks compute the "
                f"same bits, got {by_rank(entries)}. {remedy}"
            )


def _features() -> str:
    """Return the CPU features (instruction sets) that NumPy uses on this processor."""
    loops = importlib.import_module("numpy._core._multiarray_umath")
    return " ".join(name for name in loops.__cpu_dispatch__ if loops.__cpu_features__[name])
