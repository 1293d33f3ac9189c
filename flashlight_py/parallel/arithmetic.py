"""Would the same numbers have the same bits on every rank? What that depends on, compared once."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

import numpy as np

from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.start import blas
from flashlight_py.errors import MismatchError
from flashlight_py.parallel.agreement import by_rank, of_all_ranks

_CORE_TYPE, _FEATURES = "BLAS core type", "CPU features that NumPy uses"
_REMEDIES = {
    _CORE_TYPE: "set OPENBLAS_CORETYPE=Haswell on every host, or another type that all have",
    _FEATURES: "set NPY_DISABLE_CPU_FEATURES on every host to those that not all have",
}


def check_arithmetic(what: str, leaves: int, members: ProcessGroup) -> None:
    """Have BLAS compute with one thread, and compare what bits depend on. Collective, blocking.

    Compared are the versions of NumPy and of its BLAS, the core type of OpenBLAS, and the CPU
    features for which NumPy has loops of their own.

    Raises:
        ValueError: BLAS computes with several threads and is no OpenBLAS, on some rank.
        MismatchError: ranks differ; on every rank, naming hosts, ranks and a remedy.
    """
    threads, core_type = _threads_and_core_type()
    mine: dict[str, Any] = {
        "host": socket.gethostname(),
        "threads": threads,
        "facts": {
            "leaves": str(leaves),
            "NumPy": np.__version__,
            "BLAS": _blas(),
            _CORE_TYPE: core_type,
            _FEATURES: _features(),
        },
    }
    of_ranks = of_all_ranks(mine, members) if members.size > 1 else [mine]
    where = f"{what}: rank {members.rank} of {members.size}"
    several = [
        f"rank {rank} on {each['host']}"
        for rank, each in enumerate(of_ranks)
        if each["threads"] != 1
    ]
    if several:
        raise ValueError(
            f"{where}: leaves={leaves} needs a BLAS with one thread, as the bits of its results "
            f"depend on their number; not so on {', '.join(several)}. NumPy's BLAS there is no "
            "OpenBLAS, which could be asked: start with OMP_NUM_THREADS=1"
        )
    for name in mine["facts"]:
        entries = [f"{each['facts'][name]} on {each['host']}" for each in of_ranks]
        if len({each["facts"][name] for each in of_ranks}) > 1:
            remedy = _REMEDIES.get(name, "use the same on every rank")
            raise MismatchError(
                f"{where}: the ranks would compute other bits from the same numbers: {name} "
                f"differs ({by_rank(entries)}). To have the same, {remedy}"
            )


def _threads_and_core_type() -> tuple[int, str]:
    threads, core_type = blas.use_one_thread()
    if threads:
        return threads, core_type
    named = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")]
    return 1 if "1" in named else 0, "not known"


def _blas() -> str:
    config: Any = np.show_config(mode="dicts")
    built_with = config.get("Build Dependencies", {}).get("blas", {})
    return f"{built_with.get('name')} {built_with.get('version')}"


def _features() -> str:
    """Return which of the instruction sets that NumPy has loops for this processor has."""
    core = "numpy._core" if int(np.__version__.partition(".")[0]) > 1 else "numpy.core"
    loops = importlib.import_module(f"{core}._multiarray_umath")
    return " ".join(name for name in loops.__cpu_dispatch__ if loops.__cpu_features__[name])
