"""From a group whose ranks are joined on the CPU to one whose GPUs are joined as well."""

from __future__ import annotations

import os
from typing import Any

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl.backend import NcclBackend
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.library import NcclLibrary, load
from flashlight_py.distributed.backends.nccl.meeting import Card, agree_on_outcome, meet
from flashlight_py.distributed.start import devices
from flashlight_py.distributed.start.devices import DeviceRule
from flashlight_py.distributed.start.exchange import Steps
from flashlight_py.errors import BackendUnavailableError, DistributedError


def join_gpus(rule: DeviceRule, timeout: float, joining: float, cpu: Backend) -> NcclBackend:
    """Join the ranks of ``cpu``, each on the GPU that ``rule`` gives it. Collective, blocking.

    ``timeout`` is in seconds, for each collective, and ``joining`` for each step before them.

    Raises:
        UnavailableEverywhereError: NCCL, CuPy or a GPU of its own is missing on a rank; raised on
            every rank.
        DistributedError: NCCL failed, or a rank (named) did not join.
    """
    tools, card = _look(rule, first=cpu.rank == 0)
    unique_id = meet(Steps(cpu, seconds=joining), card)
    assert tools is not None  # else meet has raised the problem
    nccl, cupy, index = tools
    with cupy.cuda.Device(index):
        communicator = _communicator(cpu, nccl, unique_id, joining)
    communicator.timeout = timeout
    return NcclBackend(cpu, communicator, cupy, index)


def _look(rule: DeviceRule, first: bool) -> tuple[tuple[NcclLibrary, Any, int] | None, Card]:
    """Return NCCL, CuPy and the device's index, if all are there, and what the others get."""
    try:
        _require_patience()
        nccl = load()
        cupy, count = devices.cuda()
        index = rule.index(count)
        identity = nccl.unique_id().hex() if first else ""
    except DistributedError as error:
        return None, Card(problem=str(error))
    card = Card(version=nccl.version, gpu=devices.gpu_identity(cupy, index), unique_id=identity)
    return (nccl, cupy, index), card


def _require_patience() -> None:
    """Refuse a variable that would have NCCL wait without end, whatever it is asked.

    Raises:
        BackendUnavailableError: it is set.
    """
    if os.environ.get("NCCL_COMM_BLOCKING", "") == "1":
        raise BackendUnavailableError(
            "NCCL_COMM_BLOCKING=1 makes NCCL wait for ever for a rank that does not join, and "
            "overrides what this package asks of it; unset it"
        )


def _communicator(
    cpu: Backend, nccl: NcclLibrary, unique_id: bytes, joining: float
) -> Communicator:
    communicator, problem = None, None
    try:
        communicator = Communicator(nccl, unique_id, cpu.rank, cpu.size, joining)
    except DistributedError as error:
        problem = error
    try:
        agree_on_outcome(Steps(cpu, seconds=joining), problem)
    except DistributedError:
        if communicator is not None:
            communicator.close()
        raise
    assert communicator is not None  # else agree_on_outcome has raised the problem
    return communicator
