"""Joining the GPUs of a group by NCCL.

The ranks first exchange NCCL's data over the CPU backend: every rendezvous serves NCCL, and a
missing rank is named before a call would wait for it inside NCCL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flashlight_py.device import cuda
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.exchange import exchange_bytes
from flashlight_py.distributed.backends.nccl.backend import NcclBackend
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.library import NcclLibrary, load, version_text
from flashlight_py.distributed.memory.topology import DeviceRule, gpu_identity
from flashlight_py.errors import (
    BackendUnavailableError,
    DistributedError,
    UnavailableEverywhereError,
)


class NcclCard(NamedTuple):
    """A rank's report of itself: a ``problem`` if it cannot, else its NCCL version and its GPU.

    ``unique_id`` (hexadecimal) is rank 0's for the communicator, empty from the others;
    ``slow_because`` is that of ``NcclLibrary``.
    """

    problem: str = ""
    version: int = 0
    gpu: str = ""
    unique_id: str = ""
    slow_because: str = ""


def join_gpus(rule: DeviceRule, timeout: float, joining: float, cpu: Backend) -> NcclBackend:
    """Join the ranks of ``cpu``, each on the GPU that ``rule`` gives it. Collective, blocking.

    ``timeout`` is in seconds, for each collective, and ``joining`` for each step before them.

    Raises:
        UnavailableEverywhereError: NCCL, CuPy or a GPU of its own is missing on a rank; raised on
            every rank.
        DistributedError: NCCL failed, or a rank (named) did not join.
    """
    tools, card = _look(rule, first=cpu.rank == 0)
    unique_id, slow_because = meet(cpu, card, joining)
    assert tools is not None  # else meet has raised the problem
    nccl, cupy, index = tools
    nccl = replace(nccl, slow_because=slow_because)
    with cupy.cuda.Device(index):
        communicator = _communicator(cpu, nccl, unique_id, joining)
    communicator.timeout = timeout
    return NcclBackend(cpu, communicator, cupy, index)


def _look(rule: DeviceRule, first: bool) -> tuple[tuple[NcclLibrary, Any, int] | None, NcclCard]:
    """Return NCCL, CuPy and the device's index, if all are there, and what the others get."""
    try:
        if os.environ.get("NCCL_COMM_BLOCKING", "") == "1":
            raise BackendUnavailableError(
                "NCCL_COMM_BLOCKING=1 makes NCCL wait for ever for a rank that does not join, and "
                "overrides what this package asks of it; unset it"
            )
        nccl = load()
        cupy, count = cuda()
        index = rule.index(count)
        identity = nccl.unique_id().hex() if first else ""
    except DistributedError as error:
        return None, NcclCard(problem=str(error))
    gpu = gpu_identity(cupy, index)
    return (nccl, cupy, index), NcclCard("", nccl.version, gpu, identity, nccl.slow_because)


def meet(cpu: Backend, mine: NcclCard, seconds: float | None = None) -> tuple[bytes, str]:
    """Exchange ``mine``; return the communicator's unique id, and why its calls are slow, if so.

    Raises:
        UnavailableEverywhereError: some rank cannot, versions differ, or two ranks have one GPU;
            on every rank.
        DistributedError: as ``Work.wait``; names the rank that did not join.
    """
    texts = exchange_bytes(cpu, json.dumps(mine).encode(), seconds=seconds)
    cards = [NcclCard(*json.loads(text)) for text in texts]
    if problem := _first_problem(cards):
        raise UnavailableEverywhereError(f"rank {cpu.rank} of {cpu.size}: {problem}")
    slow = next((f"rank {n}: {c.slow_because}" for n, c in enumerate(cards) if c.slow_because), "")
    return bytes.fromhex(cards[0].unique_id), slow


def _first_problem(cards: Sequence[NcclCard]) -> str:
    problems = [f"rank {rank}: {card.problem}" for rank, card in enumerate(cards) if card.problem]
    if problems:
        others = "" if len(problems) == 1 else f" ({len(problems)} ranks cannot)"
        return f"CuPy arrays cannot travel between these ranks. {problems[0]}{others}"
    if len({card.version for card in cards}) > 1:
        found = ", ".join(f"{rank}: {version_text(c.version)}" for rank, c in enumerate(cards))
        return f"the ranks have different versions of NCCL ({found}); install the same everywhere"
    owners: dict[str, int] = {}
    for rank, card in enumerate(cards):
        owner = owners.setdefault(card.gpu, rank)
        if card.gpu and owner != rank:
            return (
                f"ranks {owner} and {rank} are on the same GPU, and NCCL takes one rank per GPU. "
                "Start as many ranks as there are GPUs, or, to try things out, set another "
                "NCCL_HOSTID for each rank (or from NCCL 2.30 on, NCCL_MULTI_RANK_GPU_ENABLE=1)"
            )
    return ""


def _communicator(
    cpu: Backend, nccl: NcclLibrary, unique_id: bytes, joining: float
) -> Communicator:
    """Join on every rank, or raise on every rank. Collective, blocking."""
    try:
        communicator = Communicator(nccl, unique_id, cpu.rank, cpu.size, joining)
    except DistributedError as error:
        exchange_bytes(cpu, str(error).encode(), seconds=joining)
        raise
    try:
        answers = exchange_bytes(cpu, b"", seconds=joining)
        failed = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(answers) if text]
        if failed:
            raise DistributedError(
                f"rank {cpu.rank} of {cpu.size}: NCCL joined this rank, but not every one: "
                f"{failed[0]}"
            )
    except DistributedError:
        communicator.close()
        raise
    return communicator
