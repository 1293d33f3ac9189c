"""Schedulers that start one process on each node and do not say which rank of how many it is.

How many ranks a node has is the user's to say, so these are refused with what to set. Sources: the
manuals of SkyPilot, AWS Batch (multi-node parallel jobs), dstack, torchrun (whose options PET_*
are, as Kubeflow sets them), Kubernetes (indexed Jobs) and HPE Cray PALS.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from flashlight_py.distributed.rendezvous.environment import ALONE
from flashlight_py.errors import RendezvousError

__all__ = ["announced_nodes", "check_schedulers"]


class _Scheduler(NamedTuple):
    """The variables of one scheduler; ``address`` is how a shell names the first node's.

    ``each`` says how many ranks it asks for on each node, where that is part of its contract.
    """

    name: str
    node: str
    nodes: str
    address: str
    each: str = ""

    def announces(self, environ: Mapping[str, str]) -> bool:
        """Return whether this process is one of several, or may be, as nobody says how many."""
        each = environ.get(self.each, "1")
        is_one = environ.get(self.nodes, "") == "1" and (each == "1" or not each.isdecimal())
        return self.node in environ and not is_one

    def said(self, environ: Mapping[str, str]) -> str:
        """Return what the variables say, for a message."""
        names = [name for name in (self.node, self.nodes, self.each) if name in environ]
        return f"{self.name} says {', '.join(f'{name}={environ[name]}' for name in names)}"

    def advice(self) -> str:
        """Return the lines of a shell that start one rank, or several, on each node."""
        count = f"${self.nodes}" if self.nodes else "HOW_MANY"
        return (
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


def announced_nodes(environ: Mapping[str, str]) -> str:
    """Return what a scheduler of several nodes says, and what to do; "" if there is none."""
    found = next((each for each in _SCHEDULERS if each.announces(environ)), None)
    return "" if found is None else f"{found.said(environ)}. {found.advice()}"


def check_schedulers(environ: Mapping[str, str] | None = None) -> None:
    """Refuse a world of one to a process that a scheduler has started on one of several nodes.

    Raises:
        RendezvousError: there is such a scheduler, and no rank and size; says what to set.
    """
    environ = os.environ if environ is None else environ
    said = announced_nodes(environ)
    if said and environ.get(ALONE) != "1":
        raise RendezvousError(
            "this process is one of several, and which rank of how many it is, is not set: each "
            f"would be a world of its own, and not say so. {said}. If each process is meant to be "
            f"a world of its own, set {ALONE}=1"
        )
