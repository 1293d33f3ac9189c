"""Connection of the GPUs of a group by NCCL.

The ranks exchange NCCL's data over the CPU backend. NCCL therefore works with every kind of
rendezvous, and a missing rank is named before a call would wait for it inside NCCL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flashlight_py import errors
from flashlight_py.device import cuda
from flashlight_py.distributed.backend import Backend, exchange_bytes
from flashlight_py.distributed.backends.nccl.backend import NcclBackend
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.library import NcclLibrary, load_nccl, version_text
from flashlight_py.distributed.memory.topology import DeviceRule, gpu_identity


class NcclCard(NamedTuple):
    """A rank's report: NCCL version and GPU, or a ``problem`` that prevents the use of NCCL.

    ``unique_id`` (hexadecimal) identifies the communicator; only rank 0 sends it. For
    ``slow_reason`` see ``NcclLibrary``.
    """

    problem: str = ""
    version: int = 0
    gpu: str = ""
    unique_id: str = ""
    slow_reason: str = ""


def connect_gpus(rule: DeviceRule, timeout: float, joining: float, cpu: Backend) -> NcclBackend:
    """Connect the ranks of ``cpu``, each on the GPU that ``rule`` selects. Collective, blocking.

    ``timeout`` (seconds) bounds each collective, and ``joining`` each step of the connection.
    Raises on every rank UnavailableEverywhereError if a rank lacks NCCL, CuPy or a GPU of its own.
    Raises DistributedError if NCCL fails, or a rank (named) does not join.
    """
    tools, card = _tools(rule, first=cpu.rank == 0)
    unique_id, slow_reason = exchange_cards(cpu, card, joining)
    assert tools is not None  # otherwise exchange_cards has raised an error
    nccl, cupy, index = tools
    nccl = replace(nccl, slow_reason=slow_reason)
    with cupy.cuda.Device(index):
        communicator = _communicator(cpu, nccl, unique_id, joining)
    communicator.timeout = timeout
    return NcclBackend(cpu, communicator, cupy, index)


def _tools(rule: DeviceRule, first: bool) -> tuple[tuple[NcclLibrary, Any, int] | None, NcclCard]:
    """Return (tools, card). Tools are NCCL, CuPy and the device index; None after an error."""
    try:
        if os.environ.get("NCCL_COMM_BLOCKING", "") == "1":
            raise errors.BackendUnavailableError(
                "NCCL_COMM_BLOCKING must be unset, got 1: NCCL would ignore timeouts, and wait "
                "forever for a rank that does not join. Unset NCCL_COMM_BLOCKING"
            )
        nccl = load_nccl()
        cupy, count = cuda()
        index = rule.index(count)
        identity = nccl.unique_id().hex() if first else ""
    except errors.DistributedError as error:
        return None, NcclCard(problem=str(error))
    gpu = gpu_identity(cupy, index)
    return (nccl, cupy, index), NcclCard("", nccl.version, gpu, identity, nccl.slow_reason)


def exchange_cards(cpu: Backend, card: NcclCard, seconds: float | None = None) -> tuple[bytes, str]:
    """Exchange ``card``; return the communicator's unique id, and why calls are slow, or "".

    Raises on every rank UnavailableEverywhereError if a rank has a problem, NCCL versions differ,
    or two ranks use one GPU. Raises DistributedError like ``Work.wait``; it names a missing rank.
    """
    texts = exchange_bytes(cpu, json.dumps(card).encode(), seconds=seconds)
    cards = [NcclCard(*json.loads(text)) for text in texts]
    if problem := _first_problem(cards):
        raise errors.UnavailableEverywhereError(f"rank {cpu.rank} of {cpu.size}: {problem}")
    slow = next((f"rank {n}: {c.slow_reason}" for n, c in enumerate(cards) if c.slow_reason), "")
    return bytes.fromhex(cards[0].unique_id), slow


def _first_problem(cards: Sequence[NcclCard]) -> str:
    problems = [f"rank {rank}: {card.problem}" for rank, card in enumerate(cards) if card.problem]
    if problems:
        others = "" if len(problems) == 1 else f" ({len(problems)} ranks have a problem)"
        return f"CuPy arrays cannot be sent between these ranks. {problems[0]}{others}"
    if len({card.version for card in cards}) > 1:
        versions = ", ".join(f"{rank}: {version_text(c.version)}" for rank, c in enumerate(cards))
        return f"the ranks have different NCCL versions ({versions}). Install the same everywhere"
    owners: dict[str, int] = {}
    for rank, card in enumerate(cards):
        owner = owners.setdefault(card.gpu, rank)
        if card.gpu and owner != rank:
            return (
                f"ranks {owner} and {rank} are on the same GPU, but NCCL needs one GPU per rank. "
                "Start one rank per GPU. For tests, set a different NCCL_HOSTID for each rank (or "
                "NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer)"
            )
    return ""


def _communicator(
    cpu: Backend, nccl: NcclLibrary, unique_id: bytes, joining: float
) -> Communicator:
    """Create the communicator on every rank, or raise on every rank. Collective, blocking."""
    try:
        communicator = Communicator(nccl, unique_id, cpu.rank, cpu.size, joining)
    except errors.DistributedError as error:
        exchange_bytes(cpu, str(error).encode(), seconds=joining)
        raise
    try:
        answers = exchange_bytes(cpu, b"", seconds=joining)
        failed = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(answers) if text]
        if failed:
            raise errors.DistributedError(
                f"rank {cpu.rank} of {cpu.size}: NCCL connected this rank, but not all ranks: "
                f"{failed[0]}"
            )
    except errors.DistributedError:
        communicator.close()
        raise
    return communicator
