"""A world of one process where the environment speaks of several: refused, or reported.

Some schedulers start one process on each node and do not say which rank of how many it is. How many
ranks a node has is the user's to say, so these are refused with what to set. Sources: the manuals
of SkyPilot, AWS Batch (multi-node parallel jobs), dstack, torchrun (whose options PET_* are, as
Kubeflow sets them), Kubernetes (indexed Jobs) and HPE Cray PALS.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from flashlight_py.distributed.rendezvous.environment import ALONE, detect
from flashlight_py.errors import RendezvousError

_log = logging.getLogger("flashlight_py")


class _Scheduler(NamedTuple):
    """The variables of one scheduler; ``address`` is how a shell names the first node's.

    ``each`` says how many ranks it asks for on each node, where that is part of its contract.
    """

    name: str
    node: str
    nodes: str
    address: str
    each: str = ""

    def speaks(self, environ: Mapping[str, str]) -> bool:
        """Return whether this process is one of several, or may be, as nobody says how many."""
        each = environ.get(self.each, "1")
        is_one = environ.get(self.nodes, "") == "1" and (each == "1" or not each.isdecimal())
        return self.node in environ and not is_one

    def advice(self, environ: Mapping[str, str]) -> str:
        """Return what the variables say, and how a shell starts one or several ranks on a node."""
        names = [name for name in (self.node, self.nodes, self.each) if name in environ]
        count = f"${self.nodes}" if self.nodes else "HOW_MANY"
        return (
            f"{self.name} says {', '.join(f'{name}={environ[name]}' for name in names)}. "
            f"For one rank in each: `export RANK=${self.node} WORLD_SIZE={count} "
            f"MASTER_ADDR={self.address} MASTER_PORT=29500`. For several: `flrun -n RANKS --nnodes "
            f"{count} --node-rank ${self.node} --rdzv A_SHARED_PATH PROGRAM`, or torchrun"
        )


_SCHEDULERS = (
    _Scheduler(
        "SkyPilot",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_NODES",
        '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
    ),
    _Scheduler(  # the address is not set on the main node itself
        "AWS Batch",
        "AWS_BATCH_JOB_NODE_INDEX",
        "AWS_BATCH_JOB_NUM_NODES",
        "${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -i)}",
    ),
    _Scheduler("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "$DSTACK_MASTER_NODE_IP"),
    _Scheduler(
        "Kubeflow (for torchrun)",
        "PET_NODE_RANK",
        "PET_NNODES",
        "$PET_MASTER_ADDR",
        "PET_NPROC_PER_NODE",
    ),
    _Scheduler("an indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", "", "NAME_OF_INDEX_0"),
    _Scheduler("PALS", "PALS_RANKID", "", "HOST_OF_RANK_0"),
)


def is_alone(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user wants each process to be a world of its own."""
    return environ.get(ALONE) == "1"


def started_as(environ: Mapping[str, str] = os.environ) -> str:
    """Return as what a launcher has started this process, if as one of several; else "".

    "" as well where the user wants each process to be a world of its own.
    """
    if is_alone(environ):
        return ""
    said = _one_of_several(environ)
    return f"this process was started as {said}" if said else _one_of_nodes(environ)


def check_size_one(what: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse ``what``, which makes a world of one, to one of several ranks of a launcher.

    Raises:
        RendezvousError: the environment says that this process is one of several.
    """
    said = _one_of_several(environ)
    if said and not is_alone(environ):
        raise RendezvousError(
            f"{what} is a world of one process, and the environment says {said}: each of them "
            "would work alone, and none would say so. Pass that rank and size, or no init_method, "
            f"which reads them; or set {ALONE}=1 if each process is meant to be a world of its own"
        )


def check_schedulers(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a world of one to a process that a scheduler has started on one of several nodes.

    Raises:
        RendezvousError: there is such a scheduler, and no rank and size; says what to set.
    """
    said = _one_of_nodes(environ)
    if said and not is_alone(environ):
        raise RendezvousError(
            "this process is one of several, and which rank of how many it is, is not set: each "
            f"would be a world of its own, and not say so. {said}. If each process is meant to be "
            f"a world of its own, set {ALONE}=1"
        )


def check_no_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a world of one, where no launcher sets a rank, to what was started with others.

    A single process in a Slurm job of several tasks only gets a warning, as srun was perhaps
    forgotten: a shell or a batch script of a job is where single processes are tried out.

    Raises:
        RendezvousError: there is a place to meet, or a scheduler of nodes, and no rank and size.
    """
    if is_alone(environ):
        return
    if "FLASHLIGHT_FILE" in environ:
        raise RendezvousError(
            "FLASHLIGHT_FILE is set, as for a rank that was started with others, but RANK and "
            "WORLD_SIZE are not: this process would work alone, and not say so. Pass them on as "
            f"well, unset FLASHLIGHT_FILE, or set {ALONE}=1"
        )
    check_schedulers(environ)
    tasks = environ.get("SLURM_NTASKS", environ.get("SLURM_NPROCS", ""))
    if tasks.isdecimal() and int(tasks) > 1:
        _log.warning(
            "this process is a world of its own, in a Slurm job of %s tasks (SLURM_NTASKS): start "
            "it by srun to use them all, or set %s=1 if one is meant",
            tasks,
            ALONE,
        )


def _one_of_several(environ: Mapping[str, str]) -> str:
    """Return which rank of how many a launcher has started us as; "" if alone, or unclear."""
    with contextlib.suppress(ValueError):  # of variables that say nothing definite
        found = detect(environ)
        if found is not None and found.size > 1:
            return f"rank {found.rank} of {found.size} ({found.said_by})"
    return ""


def _one_of_nodes(environ: Mapping[str, str]) -> str:
    """Return what a scheduler of several nodes says, and what to do; "" if there is none."""
    return next((each.advice(environ) for each in _SCHEDULERS if each.speaks(environ)), "")
